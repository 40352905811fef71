"""What `pipelines.compile` writes. To write the golden files anew: `python -m tests.pipelines.test_compile`."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from google.protobuf import json_format

from pipelines.compile import compile_pipeline, main
from pipelines.config import PipelineConfig, load_config
from pipelines.training import build_pipeline

PROJECT = Path(__file__).parents[2]
CONFIGS = sorted((PROJECT / "configs").glob("*.yaml"))
TINY = {
    "name": "tiny",
    "data": {"path": "data.csv", "task": "binary"},
    "evaluate": {"thresholds": [{"metric": "auc", "min": 0.5}]},
}


def golden_text(config: Path) -> str:
    """The pipeline of a configuration without what changes with the code of the steps."""
    return re.sub(
        r"\b[0-9a-f]{64}\b", "<digest of the code>", compile_pipeline(load_config(config), image="headrace:golden")
    )


def golden_file(config: Path) -> Path:
    """Where the golden pipeline of a configuration is kept."""
    return PROJECT / "tests" / "golden" / f"{config.stem}.pipeline.yaml"


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_the_pipeline_of_each_config_is_the_golden_one(config: Path) -> None:
    message = "if it should change: python -m tests.pipelines.test_compile"
    assert golden_text(config) == golden_file(config).read_text(), message


def test_the_text_holds_the_whole_pipeline() -> None:
    config = PipelineConfig.model_validate(TINY)
    spec = json_format.MessageToDict(build_pipeline(config).pipeline_spec)
    assert yaml.safe_load(compile_pipeline(config)) == spec


def test_the_same_config_gives_the_same_bytes_in_another_process_and_folder(tmp_path: Path) -> None:
    code = (
        "import json, sys\n"
        "from pipelines.compile import compile_pipeline as c\n"
        "from pipelines.config import PipelineConfig\n"
        "sys.stdout.write(c(PipelineConfig.model_validate(json.loads(sys.argv[1]))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(TINY)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(PROJECT), "PYTHONHASHSEED": "99", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    text = compile_pipeline(PipelineConfig.model_validate(TINY))
    assert done.stdout == text
    assert str(PROJECT) not in text
    assert sys.prefix not in text


def test_code_and_configuration_can_be_read_in_it() -> None:
    text = compile_pipeline(PipelineConfig.model_validate(TINY))
    assert '\n                   "epochs": 10,\n' in text
    assert "\n              from components.kfp_components import run_step\n" in text


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY))
    return path


def _run(*arguments: str) -> Any:
    return CliRunner().invoke(main, arguments)


def test_the_command_writes_the_file(config_file: Path) -> None:
    result = _run(str(config_file), "train.epochs=3", "--output", "out/p.yaml", "--image", "registry/headrace:2")
    assert result.exit_code == 0, result.output
    assert "Wrote out/p.yaml" in result.output
    expected = PipelineConfig.model_validate(TINY | {"train": {"epochs": 3}})
    assert Path("out/p.yaml").read_text() == compile_pipeline(expected, image="registry/headrace:2")
    assert [path.name for path in Path("out").iterdir()] == ["p.yaml"]


def test_a_wrong_configuration_leaves_the_file_as_it_was(config_file: Path) -> None:
    Path("pipeline.yaml").write_text("before")
    result = _run(str(config_file), "train.epoch=3")
    assert result.exit_code == 2
    assert "epochs" in result.stderr
    assert Path("pipeline.yaml").read_text() == "before"


def test_a_folder_that_cannot_be_written_is_named(config_file: Path) -> None:
    Path("file").write_text("")
    result = _run(str(config_file), "--output", "file/p.yaml")
    assert result.exit_code == 1
    assert "file" in result.stderr


@pytest.mark.parametrize("module", ["pipelines.compile", "pipelines.submit"])
def test_help_loads_nothing_heavy(module: str) -> None:
    code = (
        f"import sys, {module} as m\n"
        "try:\n    m.main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('kfp', 'tensorflow', 'keras', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "section.key=value" in done.stdout


if __name__ == "__main__":
    for each in CONFIGS:
        golden_file(each).write_text(golden_text(each))
        print(golden_file(each))
