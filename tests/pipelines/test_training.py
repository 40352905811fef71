"""The compiled pipeline says what STEPS and the configuration say."""

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from components import artifacts, kfp_components
from components.config import SECTIONS
from pipelines import steps
from pipelines.config import PipelineConfig
from pipelines.training import build_pipeline, default_image
from tests.pipelines.fakes import UNTUNED as STEPS

HEAVY = ("tensorflow", "keras", "numpy")


def _config(**sections: Any) -> PipelineConfig:
    tree = {"name": "tiny_run", "data": {"path": "data.csv"}, "evaluate": {"thresholds": [{"metric": "auc", "min": 0}]}}
    return PipelineConfig.model_validate(tree | sections)


def _compiled(config: PipelineConfig, **options: Any) -> dict[str, Any]:
    spec: dict[str, Any] = json_format.MessageToDict(build_pipeline(config, **options).pipeline_spec)
    return spec


def _tasks(spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every task that is a component, by name, however deep it is."""
    dags = [
        component["dag"]["tasks"] for component in (spec["root"], *spec["components"].values()) if "dag" in component
    ]
    return {name: task for dag in dags for name, task in dag.items() if f"exec-{name}" in _executors(spec)}


def _executors(spec: dict[str, Any]) -> dict[str, Any]:
    executors: dict[str, Any] = spec["deploymentSpec"]["executors"]
    return executors


def _constant(spec: dict[str, Any], step: str, parameter: str) -> str:
    value: str = _tasks(spec)[step]["inputs"]["parameters"][parameter]["runtimeValue"]["constant"]
    return value


def test_every_step_is_a_task_and_the_gated_ones_are_behind_the_gate() -> None:
    spec = _compiled(_config())
    before = spec["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    behind = spec["components"]["comp-condition-2"]["dag"]["tasks"]
    assert set(before) == {step.name for step in STEPS if not step.gated} | {"fingerprint", "condition-2"}
    assert set(behind) == {step.name for step in STEPS if step.gated}
    assert set(spec["root"]["dag"]["tasks"]) == {"exit-handler-1", "summary"}


def test_the_summary_comes_whatever_becomes_of_the_steps_and_is_told_of_it() -> None:
    summary = _compiled(_config())["root"]["dag"]["tasks"]["summary"]
    assert summary["triggerPolicy"] == {"strategy": "ALL_UPSTREAM_TASKS_COMPLETED"}
    assert summary["dependentTasks"] == ["exit-handler-1"]
    assert summary["inputs"]["parameters"]["status"] == {"taskFinalStatus": {"producerTask": "exit-handler-1"}}


def test_the_gate_is_what_evaluate_returns() -> None:
    spec = _compiled(_config())
    gate = spec["components"]["comp-exit-handler-1"]["dag"]["tasks"]["condition-2"]
    (channel,) = gate["inputs"]["parameters"]
    assert gate["inputs"]["parameters"][channel]["taskOutputParameter"] == {
        "producerTask": "evaluate",
        "outputParameterKey": "Output",
    }
    assert gate["triggerPolicy"]["condition"] == f"inputs.parameter_values['{channel}'] == true"


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_inputs_come_from_the_steps_that_make_them(step: Any) -> None:
    spec = _compiled(_config())
    makers = {maker.output: maker for maker in STEPS}
    sources = {
        name: source.get("componentInputArtifact")
        or "pipelinechannel--{producerTask}-{outputArtifactKey}".format(**source["taskOutputArtifact"])
        for name, source in _tasks(spec)[step.name]["inputs"].get("artifacts", {}).items()
    }
    assert sources == {name: f"pipelinechannel--{makers[name].name}-{name}" for name in step.inputs}


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_the_config_of_a_step_goes_through_as_it_is(step: Any) -> None:
    config = _config(seed=7, train={"epochs": 3}, transform={"features": {"a": {"op": "hash", "num_bins": 5}}})
    text = _constant(_compiled(config), step.name, "config")
    assert SECTIONS[step.section].model_validate_json(text) == config.step_config(step.section)
    assert json.loads(text) == config.step_config(step.section).model_dump(mode="json")


def test_integers_stay_integers() -> None:
    epochs = json.loads(_constant(_compiled(_config(train={"epochs": 3})), "train", "config"))["epochs"]
    assert (epochs, type(epochs)) == (3, int)


def test_nothing_is_installed_at_run_time_and_every_step_runs_in_the_image() -> None:
    executors = _executors(_compiled(_config(), image="ghcr.io/acme/headrace:9"))
    assert {each["container"]["image"] for each in executors.values()} == {"ghcr.io/acme/headrace:9"}
    assert "pip install" not in json.dumps([each["container"]["command"] for each in executors.values()])
    assert set(executors) == {f"exec-{name}" for name in (*(step.name for step in STEPS), "fingerprint", "summary")}


@pytest.mark.parametrize(
    ("kubeflow", "given", "expected"),
    [({}, None, default_image()), ({"image": "a/b:1"}, None, "a/b:1"), ({"image": "a/b:1"}, "c/d:2", "c/d:2")],
)
def test_the_image_is_the_one_given_or_configured_or_of_this_version(kubeflow: Any, given: Any, expected: str) -> None:
    spec = _compiled(_config(kubeflow=kubeflow), image=given)
    assert _executors(spec)["exec-train"]["container"]["image"] == expected
    assert default_image().startswith("headrace:")


@pytest.mark.parametrize(("path", "default"), [("data.csv", "data.csv"), (None, "")])
def test_the_one_run_time_parameter_is_the_place_of_the_data(path: str | None, default: str) -> None:
    spec = _compiled(_config(data={"path": path}))
    parameters = spec["root"]["inputDefinitions"]["parameters"]
    assert parameters == {"data_path": {"defaultValue": default, "isOptional": True, "parameterType": "STRING"}}
    for name in ("ingest", "fingerprint"):
        given = _tasks(spec)[name]["inputs"]["parameters"]["data_path"]
        assert given == {"componentInputParameter": "pipelinechannel--data_path"}


def _not_cached(spec: dict[str, Any]) -> set[str]:
    return {name for name, task in _tasks(spec).items() if not task["cachingOptions"].get("enableCache", False)}


def test_steps_that_look_outside_their_inputs_are_never_cached() -> None:
    outside = {"evaluate", "push", "deploy", "monitor", "summary", "fingerprint"}
    assert _not_cached(_compiled(_config())) == outside


def test_nothing_is_cached_if_it_is_not_to_be() -> None:
    spec = _compiled(_config(kubeflow={"cache": False}))
    assert _not_cached(spec) == set(_tasks(spec)) == {*(step.name for step in STEPS), "summary"}
    assert _constant(spec, "ingest", "outside") == ""


@pytest.mark.parametrize("schema_path", [None, "schema.yaml"])
def test_the_cache_is_asked_for_the_data_and_the_schema_as_they_are(schema_path: str | None) -> None:
    tasks = _tasks(_compiled(_config(validate={"schema_path": schema_path})))
    producers = {
        name: tasks[name]["inputs"]["parameters"]["outside"].get("taskOutputParameter", {}).get("producerTask")
        for name in ("ingest", "validate")
    }
    assert producers == {"ingest": "fingerprint", "validate": "fingerprint-2" if schema_path else None}


def test_each_share_of_the_data_may_be_encoded_in_a_pod_of_its_own() -> None:
    config = _config(kubeflow={"ingest_pods": 3, "steps": {"encode": {"memory_limit": "2Gi"}}})
    spec = _compiled(config)
    tasks = _tasks(spec)
    (name,) = (
        name for name in spec["components"]["comp-exit-handler-1"]["dag"]["tasks"] if name.startswith("for-loop")
    )
    loop = spec["components"]["comp-exit-handler-1"]["dag"]["tasks"][name]
    assert json.loads(loop["parameterIterator"]["items"]["raw"]) == ["0", "1", "2"]
    given = tasks["encode"]["inputs"]["parameters"]
    assert given["num_shares"] == {"runtimeValue": {"constant": "3"}}
    assert json.loads(given["config"]["runtimeValue"]["constant"]) == config.data.model_dump(mode="json")
    for argument in ("data_path", "outside"):
        assert "componentInputParameter" in given[argument], "what ingest gets"
    collected = tasks["ingest"]["inputs"]["artifacts"]["encoded"]
    assert collected["taskOutputArtifact"] == {
        "outputArtifactKey": "pipelinechannel--encode-encoded",
        "producerTask": name,
    }
    assert spec["deploymentSpec"]["executors"]["exec-encode"]["container"]["resources"]["resourceMemoryLimit"] == "2Gi"
    assert "encode" not in _tasks(_compiled(_config()))


def test_each_form_may_be_converted_in_a_pod_of_its_own() -> None:
    spec = _compiled(_config(kubeflow={"parallel_export": True}, export={"formats": ["onnx", "tflite"]}))
    (name,) = (name for name in spec["components"]["comp-condition-2"]["dag"]["tasks"] if name.startswith("for-loop"))
    loop = spec["components"]["comp-condition-2"]["dag"]["tasks"][name]
    assert json.loads(loop["parameterIterator"]["items"]["raw"]) == ["onnx", "tflite"]
    collected = _tasks(spec)["export"]["inputs"]["artifacts"]["converted"]
    assert collected["taskOutputArtifact"] == {
        "outputArtifactKey": "pipelinechannel--convert-converted",
        "producerTask": name,
    }
    assert "convert" not in _tasks(_compiled(_config(kubeflow={"parallel_export": True}, export={"formats": []})))


TYPES = {
    "examples": "Dataset",
    "model": "Model",
    "optimized": "Model",
    "compressed": "Model",
    "exported": "Model",
    "metrics": "Metrics",
    "classification": "ClassificationMetrics",
    "report": "HTML",
    "summary": "Markdown",
}


def test_artifacts_have_the_type_by_which_kubeflow_shows_them() -> None:
    spec = _compiled(_config())
    found = {
        name: artifact["artifactType"]["schemaTitle"].removeprefix("system.")
        for task in _tasks(spec)
        for name, artifact in spec["components"][f"comp-{task}"]
        .get("outputDefinitions", {})
        .get("artifacts", {})
        .items()
    }
    assert {name: kind for name, kind in found.items() if kind != "Artifact"} == TYPES
    assert {step.output for step in STEPS} < set(found)


def test_changed_code_changes_what_the_cache_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config()
    before = _constant(_compiled(config), "train", "code_digest")
    assert before == _constant(_compiled(config), "train", "code_digest")
    real = artifacts.source_digests
    monkeypatch.setattr(artifacts, "source_digests", lambda modules: real(modules) | {"components.train": "changed"})
    assert _constant(_compiled(config), "train", "code_digest") != before


def test_the_code_of_a_model_of_ones_own_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    config = _config(model={"name": "nets_of_mine:build"})
    digests = set()
    for text in ("def build():\n    pass\n", "def build():\n    return 1\n"):
        (tmp_path / "nets_of_mine.py").write_text(text)
        digests.add(_constant(_compiled(config), "train", "code_digest"))
    assert len(digests) == 2


@pytest.mark.parametrize("step", steps.STEPS, ids=lambda step: step.name)
def test_a_wrapper_hands_on_every_artifact_and_its_own_section(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = kfp_components._WRAPPERS[step.name]
    calls = []

    def run_step(*arguments: Any, **paths: Any) -> Any:
        calls.append((arguments[:4], list(paths.items())))
        return type("Result", (), {"blessed": True})()

    monkeypatch.setattr(kfp_components, "run_step", run_step)
    for helper in ("log_numbers", "log_classification", "write_page"):
        monkeypatch.setattr(kfp_components, helper, lambda *arguments: None)
    monkeypatch.setattr("shutil.copy", lambda *arguments: None)
    artifact = type("Artifact", (), {"path": "somewhere"})
    given = {name: artifact() for name in inspect.signature(wrapper).parameters}
    wrapper(**given)
    [(arguments, paths)] = calls
    assert arguments == (step.name, step.section, given["config"], given["records"])
    expected = {name: given[name] for name in (*step.inputs, step.output)}
    assert {name: path for name, path in paths if name not in ("converted", "encoded", "trials", "best")} == expected
    assert dict(paths).get("best") == (given["tuned"] if step.is_tuned else None)
    assert paths[-1][0] == step.output, "run_step takes the last one for the output"


def test_compiling_loads_nothing_heavy() -> None:
    code = (
        "import sys, pipelines.training as t, pipelines.config as c\n"
        "config = c.PipelineConfig.model_validate({'name': 'a', 'data': {}, 'evaluate':"
        " {'thresholds': [{'metric': 'auc', 'min': 0}]}})\n"
        "t.build_pipeline(config)\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


TUNE = {"trials": 3, "sampler": "random", "pruner": "none", "space": {"train.epochs": [1, 2]}}


def test_what_a_search_has_found_goes_to_the_steps_that_are_cut_from_it() -> None:
    tasks = _tasks(_compiled(_config(tune=TUNE)))
    reading = {name for name, task in tasks.items() if "tuned" in task["inputs"].get("artifacts", {})}
    assert reading == {"train", "optimize", "push"}
    assert "tune" not in _tasks(_compiled(_config(tune=TUNE | {"trials": 0})))


def test_trials_may_each_have_a_pod_of_their_own() -> None:
    spec = _compiled(_config(tune=TUNE | {"on_kubeflow": "parallel_for", "parallel": 2}))
    main = spec["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    (loop,) = (task for task in main.values() if "parameterIterator" in task)
    assert loop["parameterIterator"]["items"]["raw"] == '["0", "1", "2"]'
    assert loop["iteratorPolicy"] == {"parallelismLimit": 2}
    assert set(spec["components"][loop["componentRef"]["name"]]["dag"]["tasks"]) == {"trial"}
    collected = main["tune"]["inputs"]["artifacts"]["trials"]["taskOutputArtifact"]
    assert main[collected["producerTask"]] == loop
