"""A step of an earlier run, run again here: from a Kubeflow run and from a folder."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from components import artifacts
from components.config import ValidateConfig
from components.errors import HeadraceError
from pipelines import local, replay
from pipelines.kubeflow.kfp_api import parse_pipeline
from pipelines.replay import Recorded
from pipelines.steps import step_named
from tests.pipelines import fake_kfp, fakes
from tests.pipelines.fake_kfp import FakeApi, compile_once

KEY = "v2/artifacts/tiny/r-1/ingest/examples"
ROWS = "a,label\n" + "".join(f"{number},{'yes' if number % 3 else 'no'}\n" for number in range(60))
TOO_FEW = {"min_class_examples": 1000}


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the step `ingest` makes of a small CSV file."""
    folder = tmp_path_factory.mktemp("replay")
    (folder / "data.csv").write_text(ROWS)
    config = fakes.config_of(data={"path": str(folder / "data.csv"), "task": "binary"})
    step_named("ingest").load()(examples=folder / "examples", config=config.step_config("data"))
    return folder / "examples"


@pytest.fixture
def failed_run(kfp_server: FakeApi, examples: Path, tmp_path: Path) -> FakeApi:
    """A run whose step `validate` failed in its second attempt, as did the first; its examples are in a bucket."""
    kfp_server.store = tmp_path / "store"
    shutil.copytree(examples, kfp_server.store / "mlpipeline" / KEY)
    config = fakes.config_of(validate=TOO_FEW)
    pipeline = parse_pipeline(compile_once(config))
    container = pipeline["deploymentSpec"]["executors"]["exec-validate"]["container"]
    container["env"] = [{"name": "HEADRACE_TEST", "value": "from the pipeline"}]
    kfp_server.runs = [fake_kfp.run("FAILED", pipeline=pipeline)]
    given = {
        "parameterValues": fake_kfp.constants_of(pipeline, "validate"),
        "artifacts": {"examples": {"artifacts": [{"uri": f"minio://mlpipeline/{KEY}"}]}},
    }
    kfp_server.nodes = [
        fake_kfp.node("validate", "Failed", "Error (exit code 137)", number=1),
        fake_kfp.node("validate", "Failed", "Error (exit code 1)", number=2, executor_input={"inputs": given}),
    ]
    return kfp_server


def _replay(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(replay.main, arguments, **options)


def test_a_failed_step_fails_here_as_it_did_there(failed_run: FakeApi) -> None:
    result = _replay("r-1", "validate", "--host", failed_run.url)
    assert result.exit_code == 1
    assert "There, step 'validate' failed: Error (exit code 1)" in result.output
    assert "Image: headrace:" in result.output
    assert "Not as there" not in result.output
    assert "Traceback" in result.stderr
    assert "components/validate.py" in result.stderr
    assert "\nError: The data is not fit to train on" in result.stderr
    assert "min_class_examples" in result.stderr
    folder = Path("replay/r-1/validate")
    artifacts.open_artifact(folder / "examples", step="ingest")
    assert json.loads((folder / "config.json").read_text())["min_class_examples"] == 1000
    assert not (folder / "statistics").exists()


def test_a_second_replay_fetches_nothing_again(failed_run: FakeApi) -> None:
    for _ in range(2):
        assert _replay("r-1", "validate", "--host", failed_run.url, "--to", "home").exit_code == 1
    fetched = [path for _, path, *_ in failed_run.received if path.startswith("/artifacts/")]
    assert len(fetched) == len(set(fetched)) > 1


def test_a_step_that_runs_well_here_says_so(failed_run: FakeApi) -> None:
    given = failed_run.nodes[1]["inputs"]["parameters"][0]
    given["value"] = re.sub(r"(min_class_examples\W+)1000", r"\g<1>1", given["value"])
    result = _replay("r-1", "validate", "--host", failed_run.url, "--to", "home")
    assert result.exit_code == 0, result.stderr
    assert "Step 'validate' ran well here; its output: home/statistics" in result.output
    assert artifacts.open_artifact(Path("home/statistics"), step="validate").result["label"] == "label"


def test_what_differs_from_the_run_is_told(failed_run: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    file = failed_run.store / "mlpipeline" / KEY / "manifest.json"  # type: ignore[operator]
    manifest = json.loads(file.read_text())
    manifest["made_from"]["source"]["components.errors"] = "another"
    manifest["made_from"]["versions"] |= {"tensorflow": "2.99.0", "no-such-package": "1.0"}
    file.write_text(json.dumps(manifest))
    digest = fake_kfp.constants_of(failed_run.runs[0].pipeline_spec, "validate")["code_digest"]
    given = failed_run.nodes[1]["inputs"]["parameters"][0]
    given["value"] = given["value"].replace(digest, "0" * 64)
    result = _replay("r-1", "validate", "--host", failed_run.url)
    told = [line.removeprefix("Not as there: ") for line in result.output.splitlines() if line.startswith("Not as")]
    assert told == [
        "source of components.errors changed",
        "version of no-such-package: '1.0' -> None",
        f"version of tensorflow: '2.99.0' -> {manifest_version('tensorflow')!r}",
        f"the source of step validate: digest 000000000000 there, {digest[:12]} here",
    ]


def manifest_version(package: str) -> str:
    """The installed version of a package."""
    from importlib.metadata import version

    return version(package)


def test_without_the_workflow_inputs_can_be_given(failed_run: FakeApi, examples: Path) -> None:
    failed_run.nodes = []
    result = _replay("r-1", "validate", "--host", failed_run.url)
    assert result.exit_code == 1
    assert "Where the run has examples for step 'validate' is not known" in result.stderr
    assert "Give --input examples=URI" in result.stderr

    result = _replay("r-1", "validate", "--host", failed_run.url, "--input", f"examples={examples}")
    assert "min_class_examples" in result.stderr
    assert f"Input examples: {examples}\n" in result.output


def test_a_step_of_a_local_run(kfp_server: FakeApi) -> None:
    Path("data.csv").write_text(ROWS)
    Path("tiny.yaml").write_text(yaml.safe_dump(fakes.settings(validate=TOO_FEW)))
    assert CliRunner().invoke(local.main, ["tiny.yaml"]).exit_code == 1
    before = sorted(Path("runs/tiny").iterdir())
    result = _replay("runs/tiny", "validate")
    assert result.exit_code == 1
    assert "There, step 'validate' failed: " in result.output
    assert "min_class_examples" in result.output
    assert "Input examples: runs/tiny/examples" in result.output
    assert "Traceback" in result.stderr
    assert sorted(Path("runs/tiny").iterdir()) == before
    assert kfp_server.received == []


@pytest.mark.parametrize(
    ("arguments", "exit_code", "text"),
    [
        (("r-1", "validate"), 2, "There is no folder r-1. For the run of that id on Kubeflow Pipelines give --host"),
        ((".", "validate"), 2, "is no folder of a run: it has no config.yaml"),
        (("r-1", "valdate"), 2, "'valdate' is not one of"),
        (("r-1", "deploy"), 2, "only says who gets requests"),
        (("r-1", "validate", "--input", "model=x"), 2, "step 'validate' has no input model"),
        (("r-1", "transform"), 2, "Run r-1 has no step 'transform'"),
    ],
)
def test_what_cannot_be_replayed(kfp_server: FakeApi, arguments: tuple[str, ...], exit_code: int, text: str) -> None:
    pipeline = parse_pipeline(compile_once(fakes.config_of()))
    del fake_kfp.tasks_of(pipeline, "transform")["transform"]
    kfp_server.runs = [fake_kfp.run("FAILED", pipeline=pipeline)]
    host = ["--host", kfp_server.url] if len(arguments) > 2 or arguments[1] == "transform" else []
    result = _replay(*arguments, *host)
    assert result.exit_code == exit_code
    assert text in " ".join(result.stderr.split())


def test_settings_of_other_code_are_refused(failed_run: FakeApi) -> None:
    given = failed_run.nodes[1]["inputs"]["parameters"][0]
    given["value"] = given["value"].replace("min_class_examples", "min_class_rows")
    result = _replay("r-1", "validate", "--host", failed_run.url)
    assert result.exit_code == 2
    assert "do not fit this code" in result.stderr
    assert "min_class_rows" in result.stderr


def test_settings_that_were_searched_for_are_those_of_the_step(
    kfp_server: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = {"train.optimizer.learning_rate": [0.1, 0.25]}
    config = fakes.config_of(tune={"trials": 2, "space": space})
    run_dir = Path("runs/tiny")
    for name, result in (("examples", {}), ("transform", {}), ("tuned", {"settings": {next(iter(space)): 0.25}})):
        step = fakes.FakeStep("tune", (), name, "tune", work=lambda *given, result=result: result)
        step.load()(config=config.step_config("tune"), **{name: run_dir / name})
    local.write_config(config, run_dir)
    seen: list[Any] = []
    monkeypatch.setattr(replay, "run_here", lambda recorded, step, inputs, *_, **__: seen.append((recorded, inputs)))
    assert _replay("runs/tiny", "train").exit_code == 0
    ((recorded, inputs),) = seen
    assert recorded.settings.optimizer.learning_rate == 0.25
    assert set(inputs) == {"examples", "transform"}


def _fake_step(name: str, work: fakes.Work) -> fakes.FakeStep:
    return fakes.FakeStep(name, (), "made", name, work=work)


def test_the_step_has_the_environment_of_the_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_TEST", "mine")
    seen: list[str] = []

    def work(output: Any, inputs: Any, config: Any) -> dict[str, Any]:
        seen.append(os.environ["HEADRACE_TEST"])
        return fakes.write_words(output, inputs, config)

    recorded = Recorded(fakes.config_of().step_config("validate"), {}, environment={"HEADRACE_TEST": "the run's"})
    replay.run_here(recorded, _fake_step("validate", work), {}, tmp_path)
    assert seen == ["the run's"]
    assert os.environ["HEADRACE_TEST"] == "mine"


def test_push_pushes_into_the_working_folder_alone(tmp_path: Path) -> None:
    seen: list[Any] = []

    def work(output: Any, inputs: Any, config: Any) -> dict[str, Any]:
        seen.append((config.destination, config.registry, config.keep_versions))
        return fakes.write_words(output, inputs, config)

    config = fakes.config_of(registry={"url": "http://hub"}, push={"destination": "s3://b/models", "keep_versions": 7})
    recorded = Recorded(config.step_config("push"), {})
    assert recorded.settings.registry is not None
    replay.run_here(recorded, _fake_step("push", work), {}, tmp_path)
    assert seen == [(str(tmp_path / "served"), None, 7)]


def _fail(output: Any, inputs: Any, config: Any) -> dict[str, Any]:
    marker = config.num_quantiles + 1
    raise KeyError(f"fare {marker}")


def test_what_is_no_error_for_the_user_names_the_step(tmp_path: Path) -> None:
    with pytest.raises(HeadraceError, match="Step 'validate' failed here: KeyError: 'fare 1001'"):
        replay.run_here(Recorded(ValidateConfig(), {}), _fake_step("validate", _fail), {}, tmp_path)


def test_the_debugger_starts_where_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("p 'marker is', marker\nq\n"))
    with pytest.raises(HeadraceError):
        replay.run_here(Recorded(ValidateConfig(), {}), _fake_step("validate", _fail), {}, tmp_path, debugger=True)
    assert "('marker is', 1001)" in capsys.readouterr().out


def test_secrets_of_the_pipeline_that_are_not_set_are_told(failed_run: FakeApi) -> None:
    secrets = [{"secretName": "s3", "keyToEnv": [{"secretKey": "key", "envVar": "HEADRACE_SECRET"}]}]
    executors = {"exec-validate": {"secretAsEnv": secrets}}
    spec = failed_run.runs[0].pipeline_spec
    platforms = {"kubernetes": {"deploymentSpec": {"executors": executors}}}
    failed_run.runs[0].pipeline_spec = {"pipeline_spec": spec, "platform_spec": {"platforms": platforms}}
    result = _replay("r-1", "validate", "--host", failed_run.url)
    assert "the environment variable HEADRACE_SECRET, a Kubernetes secret there, is not set here" in result.output
