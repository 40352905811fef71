"""The pipeline run by kfp.local for real, over tiny steps: `components` of the working directory goes first."""

import io
import shutil
import sys
from pathlib import Path

import pytest
from kfp.local import config as kfp_local_config
from rich.console import Console

import components
from components import artifacts
from components.errors import ArtifactError, DataError, HeadraceError
from pipelines.config import PipelineConfig
from pipelines.steps import STEPS, Step
from pipelines.training import read_failure, run_local

STEP = """
import dataclasses
import sys
from pathlib import Path

from components import artifacts


@dataclasses.dataclass(frozen=True)
class Result:
    settings: dict
    interpreter: str
    read: list


def {name}(*, {parameters}, config):
    inputs = {{{inputs}}}
    assert not {output}.exists() and not {output}.is_symlink()
    with artifacts.writing({output}, step="{name}", inputs=inputs, config=config) as output:
        (output.path / "shards").mkdir()
        (output.path / "shards" / "data.txt").write_text("{name} of " + ", ".join(inputs))
        read = [artifacts.open_artifact(path, step=artifacts.read_manifest(path).step).step for path in inputs.values()]
        output.result = Result(config.model_dump(mode="json"), sys.executable, read)
    return output.result
"""
GATE = """
import dataclasses

from components import artifacts


@dataclasses.dataclass(frozen=True)
class Result:
    blessed: bool
    reasons: list
    metrics: dict


def evaluate(*, examples, transform, model, evaluation, config):
    inputs = {"examples": examples, "transform": transform, "model": model}
    with artifacts.writing(evaluation, step="evaluate", inputs=inputs, config=config) as output:
        blessed = config.thresholds[0].min < 0.9
        output.result = Result(blessed, [] if blessed else ["auc 0.9 is below 0.95"], {"auc": 0.9})
    return output.result
"""
FAILING = """
from components.errors import DataError


def ingest(*, examples, config):
    try:
        {}["fare"]
    except KeyError as error:
        raise {error} from error
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory whose `components` are tiny steps over the real artifacts, configuration and wrappers."""
    package = tmp_path / "components"
    package.mkdir()
    steps = {step.name for step in STEPS}
    for file in Path(components.__path__[0]).glob("*.py"):
        if file.stem not in steps:
            shutil.copy(file, package)
    for step in STEPS:
        (package / f"{step.name}.py").write_text(GATE if step.name == "evaluate" else _tiny(step))
    (tmp_path / "data.csv").write_text("a,b\n1,2\n")
    (tmp_path / "later.csv").write_text("a,b\n1,2\n3,4\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _tiny(step: Step) -> str:
    return STEP.format(
        name=step.name,
        parameters=", ".join([*step.inputs, step.output]),
        inputs=", ".join(f'"{name}": {name}' for name in step.inputs),
        output=step.output,
    )


def _config(minimum: float = 0.8) -> PipelineConfig:
    return PipelineConfig.model_validate(
        {
            "name": "tiny_run",
            "data": {"path": "data.csv", "limit": 3},
            "evaluate": {"thresholds": [{"metric": "auc", "min": minimum}]},
            "train": {"epochs": 3},
        }
    )


def _fail_with(project: Path, error: str) -> None:
    (project / "components" / "ingest.py").write_text(FAILING.replace("{error}", error))


def test_a_blessed_run_leaves_every_artifact_where_the_runner_in_one_process_does(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shown = io.StringIO()
    result = run_local(_config(), Path("runs"), data_path="later.csv", console=Console(file=shown, width=100))

    assert result.exit_code == 0
    assert [(step.name, step.state) for step in result.steps] == [(step.name, "done") for step in STEPS]
    root = project / "runs" / "tiny_run" / "kfp"
    assert result.run_dir == root
    for step in STEPS:
        artifacts.open_artifact(root / step.output, step=step.name)
    assert {path.name for path in root.iterdir()} == {".lock", "log.txt", *(step.output for step in STEPS)}

    by_name = {step.name: step.result for step in result.steps}
    assert by_name["export"]["read"] == ["ingest", "validate", "transform", "train", "optimize", "compress"]
    assert by_name["train"]["interpreter"] == sys.executable
    assert (by_name["train"]["settings"]["epochs"], type(by_name["train"]["settings"]["epochs"])) == (3, int)
    assert by_name["ingest"]["settings"] == _config().step_config("data").model_dump() | {"path": "later.csv"}
    assert all(step.seconds > 0 for step in result.steps)
    assert "train" in shown.getvalue()
    assert capfd.readouterr().out == ""
    assert kfp_local_config.LocalExecutionConfig.instance is None


def test_a_model_that_is_not_blessed_goes_no_further(project: Path) -> None:
    stale = project / "runs" / "tiny_run" / "kfp" / "pushed"
    stale.mkdir(parents=True)

    result = run_local(_config(minimum=0.95), project / "runs", console=Console(file=io.StringIO()))

    assert result.exit_code == 3
    states = {step.name: step.state for step in result.steps}
    assert states == {step.name: "skipped" if step.gated else "done" for step in STEPS}
    assert result.steps[-1].reasons == ("auc 0.9 is below 0.95",)
    assert not stale.exists()
    assert not (result.run_dir / "compressed").exists()


def test_the_message_of_a_failing_step_reaches_the_user(project: Path) -> None:
    message = "data.csv has no column 'fare'.\n  Columns: a, b.\nSet data.label to one of them."
    _fail_with(project, f"DataError({message!r})")

    with pytest.raises(DataError) as raised:
        run_local(_config(), project / "runs", console=Console(file=io.StringIO()))

    assert str(raised.value) == message
    root = project / "runs" / "tiny_run" / "kfp"
    assert "Traceback (most recent call last)" in (root / "log.txt").read_text()
    assert {path.name for path in root.iterdir()} == {".lock", "log.txt"}


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ('TypeError("want 3")', "Step 'ingest' failed: TypeError: want 3\nThe traceback is in"),
        ("SystemExit(9)", "Step 'ingest' ended without an error of its own; it may have been killed"),
    ],
)
def test_another_failure_names_the_step_and_the_log(project: Path, error: str, text: str) -> None:
    _fail_with(project, error)
    with pytest.raises(HeadraceError) as raised:
        run_local(_config(), project / "runs", console=Console(file=io.StringIO()))
    assert text in str(raised.value)
    assert str(project / "runs" / "tiny_run" / "kfp" / "log.txt") in str(raised.value)


def test_an_artifact_that_kfp_says_is_there_but_is_not_stops_the_run(project: Path) -> None:
    (project / "components" / "monitor.py").write_text("def monitor(**arguments):\n    pass\n")
    with pytest.raises(ArtifactError, match=r"monitor/monitoring does not exist"):
        run_local(_config(), project / "runs", console=Console(file=io.StringIO()))
    assert "monitor' finished with status SUCCESS" in (project / "runs/tiny_run/kfp/log.txt").read_text()
    assert not (project / "runs/tiny_run/kfp/examples").exists()


def test_python3_in_a_path_is_refused_as_kfp_would_rewrite_it(tmp_path: Path) -> None:
    with pytest.raises(HeadraceError, match="cannot run with 'python3' in a path"):
        run_local(_config(), tmp_path / "python3-project")
    assert not list(tmp_path.iterdir())


def test_the_exit_code_of_an_error_survives(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text(
        "12:00:00.000 - INFO - Executing task 'train'\n"
        "    Traceback (most recent call last):\n"
        '      File "x.py", line 1, in train\n'
        "    components.errors.ConfigError: model.name: there is no 'resnett'.\n"
        "    \n\n12:00:01.000 - ERROR - Task 'train' finished with status FAILURE\n"
    )
    error = read_failure(log, "train")
    assert (type(error).__name__, error.exit_code) == ("ConfigError", 2)
    assert str(error) == "model.name: there is no 'resnett'."
