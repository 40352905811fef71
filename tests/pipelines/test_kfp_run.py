"""The pipeline run by kfp.local for real, over tiny steps: `components` of the working directory goes first."""

import builtins
import io
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from kfp import local
from kfp.local import config as kfp_local_config
from rich.console import Console

import components
from components import artifacts
from components.errors import ArtifactError, DataError, HeadraceError
from pipelines import training
from pipelines.config import PipelineConfig
from pipelines.replay import from_folder
from pipelines.steps import Step, step_named
from pipelines.training import read_failure, run_local
from tests.pipelines.fakes import UNTUNED as STEPS

STEP = """
import dataclasses
import sys
from pathlib import Path

from components import artifacts


def {name}(*, {parameters}, config, **more):
    inputs = {{{inputs}}}
    assert not {output}.exists() and not {output}.is_symlink()
    with artifacts.writing({output}, step="{name}", inputs=inputs, config=config) as output:
        (output.path / "shards").mkdir()
        (output.path / "shards" / "data.txt").write_text("{name} of " + ", ".join(inputs))
        (output.path / "report.html").write_text("<html>")
        read = [artifacts.open_artifact(path, step=artifacts.read_manifest(path).step).step for path in inputs.values()]
        settings = config.model_dump(mode="json")
        result = dict(settings=settings, interpreter=sys.executable, read=read, more=sorted(map(str, more.values())))
        result |= {result}
        output.result = dataclasses.make_dataclass("Result", result)(**result)
    return output.result
"""
# What the pages read of a result.
RESULTS = {
    "evaluate": {
        "blessed": "config.thresholds[0].min < 0.9",
        "reasons": "['passed: auc'] if config.thresholds[0].min < 0.9 else ['failed: auc 0.9 is below 0.95']",
        "metrics": "{'test': {'auc': 0.9}}",
        "slices": "[{'feature': 'a', 'value': '[x]', 'num_examples': 7, 'metrics': {'auc': 0.25}}]",
        "primary_metric": "'auc'",
        "confusion_matrix": "{'classes': ['no', 'yes'], 'rows': [[3, 1], [0, 4]]}",
        "roc_curve": "[(1.5, 0.0, 0.0), (0.5, 0.25, 1.0), (0.0, 1.0, 1.0)]",
    },
    "optimize": {"stages": "[]"},
    "compress": {"formats": "[]"},
    "verify": {
        "metric": "'auc'",
        "keras": "{'num_examples': 8, 'value': 0.9, 'calibration_error': 0.01}",
        "formats": "[]",
        "server": "{}",
    },
    "deploy": {"canary": "None", "stable": "1"},
    "monitor": {"alarms": "[]", "status": "'ok'", "num_examples": "8"},
}
CONVERT = """
import dataclasses

from components import artifacts


@dataclasses.dataclass(frozen=True)
class Result:
    kind: str


def convert(*, examples, transform, model, optimized, converted, kind, config):
    inputs = {"model": model}
    if kind == "coreml":
        raise ValueError("no such operation")
    with artifacts.writing(converted, step="convert", inputs=inputs, config=config) as output:
        (output.path / kind).write_text(kind)
        output.result = Result(kind)
    return output.result
"""
ENCODE = """
import dataclasses

from components import artifacts


@dataclasses.dataclass(frozen=True)
class Result:
    share: str


def encode(*, encoded, number, num_shares, config):
    with artifacts.writing(encoded, step="encode", inputs={}, config=config) as output:
        output.result = Result(f"{number} of {num_shares} of {config.path}")
    return output.result
"""
FAILING = """
from components.errors import DataError


def ingest(*, examples, config, encoded):
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
        (package / f"{step.name}.py").write_text(_tiny(step))
    (package / "convert.py").write_text(CONVERT)
    (package / "encode.py").write_text(ENCODE)
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
        result="{" + ", ".join(f"'{name}': {value}" for name, value in RESULTS.get(step.name, {}).items()) + "}",
    )


def _config(minimum: float = 0.8, **sections: Any) -> PipelineConfig:
    return PipelineConfig.model_validate(
        {
            "name": "tiny_run",
            "data": {"path": "data.csv", "limit": 3, "task": "binary"},
            "evaluate": {"thresholds": [{"metric": "auc", "min": minimum}]},
            "train": {"epochs": 3},
            **sections,
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
    assert result.steps[-1].reasons == ("failed: auc 0.9 is below 0.95",)
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
    assert {path.name for path in root.iterdir()} == {".lock", "log.txt", "config.yaml"}


def test_what_a_failed_run_has_made_is_kept_for_a_replay(project: Path) -> None:
    (project / "components" / "train.py").write_text("def train(**arguments):\n    raise MemoryError\n")
    root = project / "runs" / "tiny_run" / "kfp"
    (root / "model").mkdir(parents=True)  # of a run before
    with pytest.raises(HeadraceError, match="Step 'train' failed: MemoryError"):
        run_local(_config(), project / "runs", console=Console(file=io.StringIO()))
    kept = {"examples", "statistics", "transform"}
    assert {path.name for path in root.iterdir()} == {".lock", "log.txt", "config.yaml", *kept}
    recorded = from_folder(root, step_named("train"))
    assert recorded.inputs == {name: str(root / name) for name in ("examples", "transform")}
    assert recorded.settings == _config().step_config("train")


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


def test_an_artifact_that_kfp_says_is_there_but_is_not_stops_the_run(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = training._take_over

    def lose_one(run_dir: Path, *arguments: Any) -> Any:
        shutil.rmtree(run_dir / "monitor" / "monitoring")
        return real(run_dir, *arguments)

    monkeypatch.setattr(training, "_take_over", lose_one)
    with pytest.raises(ArtifactError, match=r"monitor/monitoring does not exist"):
        run_local(_config(), project / "runs", console=Console(file=io.StringIO()))
    assert "monitor' finished with status SUCCESS" in (project / "runs/tiny_run/kfp/log.txt").read_text()
    assert not (project / "runs/tiny_run/kfp/examples").exists()


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Fills with what kfp was given by each task: its artifacts with their metadata, and the texts of pages."""
    real, found = training._take_over, {}

    def look(run_dir: Path, *arguments: Any) -> Any:
        for file in run_dir.glob("*/executor_output.json"):
            artifacts_of = json.loads(file.read_text()).get("artifacts", {})
            found[file.parent.name] = {name: each["artifacts"][0] for name, each in artifacts_of.items()}
        for name in ("evaluate/report", "verify/report", "monitor/report", "summary/report", "summary/summary"):
            found[name] = (run_dir / name).read_text() if (run_dir / name).is_file() else None
        return real(run_dir, *arguments)

    monkeypatch.setattr(training, "_take_over", look)
    return found


def test_kubeflow_is_given_metrics_curves_and_pages_and_forms_of_tasks_of_their_own(
    project: Path, outputs: dict[str, Any]
) -> None:
    config = _config(kubeflow={"parallel_export": True, "ingest_pods": 2}, export={"formats": ["tflite", "onnx"]})
    result = run_local(config, project / "runs", console=Console(file=io.StringIO()))
    [given] = result.result_of("export")["more"]
    assert re.findall(r"iteration-(\d)/convert/converted", given) == ["0", "1"]
    [given] = result.result_of("ingest")["more"]
    assert re.findall(r"iteration-(\d)/encode/encoded", given) == ["0", "1"]
    evaluated = outputs["evaluate"]
    assert evaluated["metrics"]["metadata"]["metrics.test.auc"] == 0.9
    shown = evaluated["classification"]["metadata"]
    assert [row["row"] for row in shown["confusionMatrix"]["rows"]] == [[3, 1], [0, 4]]
    assert [each["displayName"] for each in shown["confusionMatrix"]["annotationSpecs"]] == ["no", "yes"]
    assert shown["confidenceMetrics"][1] == {"confidenceThreshold": 0.5, "recall": 1.0, "falsePositiveRate": 0.25}
    digest = artifacts.read_manifest(result.run_dir / "evaluation").digest
    assert evaluated["evaluation"]["metadata"] == {"digest": digest}
    assert "a=[x]" in outputs["evaluate/report"]
    assert "expected calibration error" in outputs["verify/report"]
    assert outputs["monitor/report"] == "<html>"
    assert outputs["summary/summary"].startswith("# tiny_run succeeded\n\nTest split: auc 0.9000  \nRun: ")
    assert "| monitor | done |" in outputs["summary/summary"]
    assert "Monitoring: ok, 8 requested examples" in outputs["summary/report"]


def test_the_end_of_a_run_is_told_even_if_a_step_fails(
    project: Path, hook: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _config(notify={"webhook": hook.url, "slack": "$NO_SUCH_VARIABLE"})
    _fail_with(project, "DataError('data.csv has no column.')")
    with pytest.raises(DataError, match="has no column"):
        run_local(config, project / "runs", console=Console(file=io.StringIO()))
    [(_, told)] = hook.received
    assert (told["name"], told["state"], told["step"]) == ("tiny_run", "failed", "ingest")
    assert told["reasons"] == ["data.csv has no column."]
    assert (
        "Warning: notify.slack failed: the environment variable NO_SUCH_VARIABLE is not set" in capsys.readouterr().err
    )


def test_the_end_of_a_run_without_a_blessing_is_told(project: Path, hook: Any) -> None:
    config = _config(minimum=0.95, notify={"webhook": hook.url})
    assert run_local(config, project / "runs", console=Console(file=io.StringIO())).exit_code == 3
    [(_, told)] = hook.received
    assert (told["state"], told["step"], told["metrics"]) == ("not_blessed", None, {"auc": 0.9})
    assert told["reasons"] == ["failed: auc 0.9 is below 0.95"]


def test_a_form_that_cannot_be_converted_is_named(project: Path, hook: Any) -> None:
    config = _config(kubeflow={"parallel_export": True}, export={"formats": ["coreml"]}, notify={"webhook": hook.url})
    with pytest.raises(HeadraceError, match="Step 'convert' failed: ValueError: no such operation"):
        run_local(config, project / "runs", console=Console(file=io.StringIO()))
    [(_, told)] = hook.received
    assert (told["state"], told["step"], told["reasons"]) == ("failed", "convert-coreml", ["no such operation"])


def test_what_kfp_makes_of_print_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "print", original := lambda *values, **options: None)
    with training._kfp_local(local.SubprocessRunner(use_venv=False), str(tmp_path)):
        builtins.print = lambda *values, **options: None
    assert builtins.print is original


def test_python3_in_a_path_is_refused_as_kfp_would_rewrite_it(tmp_path: Path) -> None:
    with pytest.raises(HeadraceError, match="cannot run with 'python3' in a path"):
        run_local(_config(), tmp_path / "python3-project")
    assert not list(tmp_path.iterdir())


def test_a_traceback_that_kfp_has_indented_far_is_understood(tmp_path: Path) -> None:
    log, far = tmp_path / "log.txt", " " * 24
    log.write_text(
        f"{far}12:00:00.000 - INFO - Executing task 'train'\n"
        f"{far}    Traceback (most recent call last):\n"
        f'{far}      File "x.py", line 1, in train\n'
        f"{far}    ValueError: want 3\n{far}      of them\n"
        f"{far}    \n\n{far}12:00:01.000 - ERROR - Task 'train' finished with status FAILURE\n"
    )
    expected = f"Step 'train' failed: ValueError: want 3\n  of them\nThe traceback is in {log}."
    assert str(read_failure(log, "train")) == expected
