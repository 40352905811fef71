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
from pipelines.config import PipelineConfig
from pipelines.steps import STEPS
from pipelines.training import build_pipeline, default_image

HEAVY = ("tensorflow", "keras", "numpy")


def _config(**sections: Any) -> PipelineConfig:
    tree = {"name": "tiny_run", "data": {"path": "data.csv"}, "evaluate": {"thresholds": [{"metric": "auc", "min": 0}]}}
    return PipelineConfig.model_validate(tree | sections)


def _compiled(config: PipelineConfig, **options: Any) -> dict[str, Any]:
    spec: dict[str, Any] = json_format.MessageToDict(build_pipeline(config, **options).pipeline_spec)
    return spec


def _tasks(spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    gated = spec["components"]["comp-condition-1"]["dag"]["tasks"]
    return {name: task for name, task in (spec["root"]["dag"]["tasks"] | gated).items() if name != "condition-1"}


def _constant(spec: dict[str, Any], step: str, parameter: str) -> str:
    value: str = _tasks(spec)[step]["inputs"]["parameters"][parameter]["runtimeValue"]["constant"]
    return value


def test_every_step_is_a_task_and_the_gated_ones_are_behind_the_gate() -> None:
    spec = _compiled(_config())
    before = spec["root"]["dag"]["tasks"]
    behind = spec["components"]["comp-condition-1"]["dag"]["tasks"]
    assert set(before) == {step.name for step in STEPS if not step.gated} | {"condition-1"}
    assert set(behind) == {step.name for step in STEPS if step.gated}


def test_the_gate_is_what_evaluate_returns() -> None:
    spec = _compiled(_config())
    gate = spec["root"]["dag"]["tasks"]["condition-1"]
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
    executors = _compiled(_config(), image="ghcr.io/acme/headrace:9")["deploymentSpec"]["executors"]
    assert {each["container"]["image"] for each in executors.values()} == {"ghcr.io/acme/headrace:9"}
    assert "pip" not in json.dumps([each["container"]["command"] for each in executors.values()])
    assert len(executors) == len(STEPS)


def test_the_default_image_has_the_version_of_the_project() -> None:
    image = _compiled(_config())["deploymentSpec"]["executors"]["exec-train"]["container"]["image"]
    assert image == default_image()
    assert image.startswith("headrace:")


@pytest.mark.parametrize(("path", "default"), [("data.csv", "data.csv"), (None, "")])
def test_the_one_run_time_parameter_is_the_place_of_the_data(path: str | None, default: str) -> None:
    spec = _compiled(_config(data={"path": path}))
    parameters = spec["root"]["inputDefinitions"]["parameters"]
    assert parameters == {"data_path": {"defaultValue": default, "isOptional": True, "parameterType": "STRING"}}
    assert _tasks(spec)["ingest"]["inputs"]["parameters"]["data_path"] == {"componentInputParameter": "data_path"}


def test_steps_that_look_outside_their_inputs_are_never_cached() -> None:
    cached = {
        name: task["cachingOptions"].get("enableCache", False) for name, task in _tasks(_compiled(_config())).items()
    }
    assert {name for name, is_cached in cached.items() if not is_cached} == {
        "ingest",
        "evaluate",
        "push",
        "deploy",
        "monitor",
    }


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


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_a_wrapper_hands_on_every_artifact_and_its_own_section(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = kfp_components._WRAPPERS[step.name]
    calls = []

    def run_step(*arguments: Any, **paths: Any) -> Any:
        calls.append((arguments[:2], paths))
        return type("Result", (), {"blessed": True})()

    monkeypatch.setattr(kfp_components, "run_step", run_step)
    monkeypatch.setattr(kfp_components, "log_numbers", lambda metrics, result: None)
    wrapper(**{name: name for name in inspect.signature(wrapper).parameters})
    artifact_names = [*step.inputs, step.output]
    assert calls == [((step.name, step.section), {name: name for name in artifact_names})]


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
