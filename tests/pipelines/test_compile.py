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

from components.errors import ConfigError
from pipelines.compile import compile_pipeline, main
from pipelines.config import PipelineConfig, load_config
from pipelines.training import build_pipeline

PROJECT = Path(__file__).parents[2]
CONFIGS = [*sorted((PROJECT / "configs").glob("*.yaml")), Path(__file__).with_name("on_kubeflow.yaml")]
TINY = {
    "name": "tiny",
    "data": {"path": "data.csv", "task": "binary"},
    "evaluate": {"thresholds": [{"metric": "auc", "min": 0.5}]},
}


def golden_text(config: Path) -> str:
    """The pipeline of a configuration without what changes with the code of the steps."""
    loaded = load_config(config)
    text = compile_pipeline(loaded, image=loaded.kubeflow.image or "headrace:golden")
    return re.sub(r"constant: [0-9a-f]{64}\b", "constant: <digest of the code>", text)


def golden_file(config: Path) -> Path:
    """Where the golden pipeline of a configuration is kept."""
    return PROJECT / "tests" / "golden" / f"{config.stem}.pipeline.yaml"


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_the_pipeline_of_each_config_is_the_golden_one(config: Path) -> None:
    message = "if it should change: python -m tests.pipelines.test_compile"
    assert golden_text(config) == golden_file(config).read_text(), message


@pytest.mark.parametrize("kubeflow", [{}, {"active_deadline_seconds": 60}], ids=["plain", "with a platform"])
def test_the_text_holds_the_whole_pipeline(kubeflow: dict[str, Any]) -> None:
    config = PipelineConfig.model_validate(TINY | {"kubeflow": kubeflow})
    pipeline = build_pipeline(config)
    messages = [pipeline.pipeline_spec, *([pipeline.platform_spec] if kubeflow else [])]
    assert list(yaml.safe_load_all(compile_pipeline(config))) == list(map(json_format.MessageToDict, messages))


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
    assert re.search(r'\n +"epochs": 10,\n', text)
    assert "\n              from components.kfp_components import run_step\n" in text


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            {"data": {"path": "x" * 10_000}},
            "The pipeline's run-time parameters are 10,016 characters long, most of it 'data_path'; Kubeflow takes 10,000.",
        ),
        (
            {"data": {"classes": [f"class {i:06}" for i in range(9000)]}},
            r"Step '(ingest|fingerprint)' would be given 1[\d,]+ bytes, 135,001 of them its setting 'classes'; Linux takes",
        ),
    ],
    ids=["parameter", "argument"],
)
def test_what_kubeflow_would_refuse_is_refused_before(config: dict[str, Any], text: str) -> None:
    tree = {name: TINY.get(name, {}) | section for name, section in config.items()}  # type: ignore[operator]
    with pytest.raises(ConfigError, match=text):
        compile_pipeline(PipelineConfig.model_validate(TINY | tree))


def test_a_notification_whose_secret_no_pod_would_have_is_refused() -> None:
    mail = {"host": "h", "sender": "s", "recipients": ["r"], "user": "$SMTP_USER", "password": "$SMTP_PASSWORD"}
    secrets = {name: {"secret": "smtp", "key": name.lower()} for name in ("SMTP_USER", "SMTP_PASSWORD")}
    for given, missing in (([], "SMTP_USER"), (["SMTP_USER"], "SMTP_PASSWORD")):
        pods = {"summary": {"secret_env": {name: secrets[name] for name in given}}}
        config = PipelineConfig.model_validate(TINY | {"notify": {"email": mail}, "kubeflow": {"steps": pods}})
        with pytest.raises(ConfigError, match=rf"notify reads \${missing}, which .*secret_env: {{{missing}: {{secret"):
            compile_pipeline(config)
    pods = {"summary": {"secret_env": secrets}}
    compile_pipeline(PipelineConfig.model_validate(TINY | {"notify": {"email": mail}, "kubeflow": {"steps": pods}}))


def test_a_pipeline_that_etcd_would_refuse_is_refused_before(monkeypatch: pytest.MonkeyPatch) -> None:
    config = PipelineConfig.model_validate(TINY | {"train": {"frozen": ["x" * 20_000]}})
    documents = [yaml.safe_load(compile_pipeline(config)), {}]
    size = sum(len(json.dumps(each, separators=(",", ":"), ensure_ascii=False).encode()) for each in documents)
    monkeypatch.setattr("pipelines.compile.MOST_PIPELINE_BYTES", size)
    compile_pipeline(config)
    monkeypatch.setattr("pipelines.compile.MOST_PIPELINE_BYTES", size - 1)
    with pytest.raises(
        ConfigError, match=f"{size:,} bytes long; .* The largest step is .*, 20,\\d* of them its setting"
    ):
        compile_pipeline(config)


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
