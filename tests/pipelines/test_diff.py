"""What `headrace diff` finds between two compiled pipelines."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import kfp_server_api as api
import pytest
import yaml
from click.testing import CliRunner, Result

from pipelines import diff
from pipelines.diff import Change
from pipelines.kubeflow.kfp_api import parse_pipeline
from tests.pipelines import fake_kfp, fakes
from tests.pipelines.fake_kfp import FakeApi, compile_once

Spec = dict[str, Any]
_BLESSED = "condition-2"
_CONDITION = "inputs.parameter_values['pipelinechannel--evaluate-Output'] == true"


@functools.lru_cache(maxsize=1)
def _text() -> str:
    return compile_once(fakes.config_of(), image="headrace:1")


def _spec() -> Spec:
    return parse_pipeline(_text()) or {}


def _task(spec: Spec, name: str) -> Spec:
    return fake_kfp.tasks_of(spec, name)[name]


def _container(spec: Spec, step: str = "train") -> Spec:
    return spec["deploymentSpec"]["executors"][f"exec-{step}"]["container"]


def _parameter(spec: Spec, step: str, name: str) -> Spec:
    return _task(spec, step)["inputs"]["parameters"][name]["runtimeValue"]


def _set_config(spec: Spec, step: str, **settings: Any) -> None:
    parameter = _parameter(spec, step, "config")
    parameter["constant"] = json.dumps(json.loads(parameter["constant"]) | settings)


def _move_monitor_out(spec: Spec) -> None:
    task = fake_kfp.tasks_of(spec, "monitor").pop("monitor")
    del task["dependentTasks"], task["inputs"]["artifacts"]
    fake_kfp.tasks_of(spec, "train")["monitor"] = task


def _rename_component(spec: Spec) -> None:
    spec["components"]["comp-x"] = spec["components"].pop("comp-train")
    spec["components"]["comp-x"]["executorLabel"] = "exec-x"
    spec["deploymentSpec"]["executors"]["exec-x"] = spec["deploymentSpec"]["executors"].pop("exec-train")
    _task(spec, "train")["componentRef"]["name"] = "comp-x"
    tasks = fake_kfp.tasks_of(spec, "push")
    tasks["push"] = dict(reversed(tasks["push"].items()))


def _rename_key(spec: Spec) -> None:
    tasks = fake_kfp.tasks_of(spec, "train")
    tasks["train-2"] = tasks.pop("train")  # its taskInfo calls it as before
    for task in tasks.values():
        task["dependentTasks"] = [{"train": "train-2"}.get(key, key) for key in task.get("dependentTasks", ())]
        for source in (*task["inputs"].get("artifacts", {}).values(), *task["inputs"]["parameters"].values()):
            for producer in source.values():
                if isinstance(producer, dict) and producer.get("producerTask") == "train":
                    producer["producerTask"] = "train-2"


def _other_condition(spec: Spec) -> None:
    source = _task(spec, _BLESSED)["inputs"]["parameters"]["pipelinechannel--evaluate-Output"]
    source["taskOutputParameter"]["producerTask"] = "train"


def _retry(spec: Spec) -> None:
    _task(spec, "train")["retryPolicy"] |= {"maxRetryCount": 7}


CHANGES: list[tuple[Callable[[Spec], Any], list[Change]]] = [
    (_rename_component, []),
    (_rename_key, []),
    (
        lambda spec: _set_config(spec, "validate", num_quantiles=50),
        [Change("settings", "validate.num_quantiles", "1000", "50", ("validate",))],
    ),
    (
        lambda spec: _set_config(spec, "evaluate", thresholds=[{"metric": "auc", "min": 0.7}]),
        [
            Change("settings", "evaluate.thresholds.0.above_baseline", "null", None, ("evaluate",)),
            Change("settings", "evaluate.thresholds.0.max", "null", None, ("evaluate",)),
            Change("settings", "evaluate.thresholds.0.min", "0.5", "0.7", ("evaluate",)),
            Change("settings", "evaluate.thresholds.0.slices", "false", None, ("evaluate",)),
        ],
    ),
    (
        lambda spec: _parameter(spec, "train", "code_digest").update(constant="0" * 64),
        [Change("code", "", ANY, json.dumps("0" * 64), ("train",))],
    ),
    (
        lambda spec: _container(spec)["command"].append("more"),
        [Change("code", "wrapper", ANY, ANY, ("train",))],
    ),
    (
        lambda spec: _container(spec).update(image="headrace:2"),
        [Change("images", "", '"headrace:1"', '"headrace:2"', ("train",))],
    ),
    (
        lambda spec: _container(spec)["resources"].update(resourceMemoryLimit="8G"),
        [Change("resources", "resources.resourceMemoryLimit", None, '"8G"', ("train",))],
    ),
    (
        lambda spec: _container(spec).update(env=[{"name": "A", "value": "1"}]),
        [
            Change("resources", "env.0.name", None, '"A"', ("train",)),
            Change("resources", "env.0.value", None, '"1"', ("train",)),
        ],
    ),
    (
        lambda spec: _task(spec, "train").update(cachingOptions={}),
        [Change("caching", "enableCache", "true", None, ("train",))],
    ),
    (
        lambda spec: _task(spec, _BLESSED)["triggerPolicy"].update(condition=_CONDITION.replace("true", "false")),
        [
            Change(
                "control flow",
                "triggerPolicy.condition",
                json.dumps(_CONDITION),
                json.dumps(_CONDITION.replace("true", "false")),
                ("blessed",),
            )
        ],
    ),
    (
        _other_condition,
        [
            Change(
                "control flow",
                "inputs.pipelinechannel--evaluate-Output",
                '"evaluate.Output"',
                '"train.Output"',
                ("blessed",),
            )
        ],
    ),
    (
        _retry,
        [
            Change("control flow", "retryPolicy.maxRetryCount", "2", "7", ("train",)),
        ],
    ),
    (
        _move_monitor_out,
        [
            Change("control flow", "dependentTasks", '["push", "verify"]', "[]", ("monitor",)),
            Change("control flow", "group", '"run/blessed"', '"run"', ("monitor",)),
            Change("control flow", "inputs.proof", '"verify.proof"', None, ("monitor",)),
            Change("control flow", "inputs.pushed", '"push.pushed"', None, ("monitor",)),
            Change("control flow", "inputs.statistics", '"validate.statistics"', None, ("monitor",)),
        ],
    ),
    (
        lambda spec: spec["components"]["comp-train"]["outputDefinitions"]["artifacts"].pop("metrics"),
        [
            Change(
                "interfaces",
                f"outputDefinitions.artifacts.metrics.artifactType.{name}",
                json.dumps(old),
                None,
                ("train",),
            )
            for name, old in (("schemaTitle", "system.Metrics"), ("schemaVersion", "0.0.1"))
        ],
    ),
    (
        lambda spec: fake_kfp.tasks_of(spec, "monitor").pop("monitor"),
        [Change("steps", "monitor", "true", None, ("monitor",))],
    ),
    (
        lambda spec: fake_kfp.tasks_of(spec, "train").update(notify={"componentRef": {"name": "comp-ingest"}}),
        [Change("steps", "notify", None, "true", ("notify",))],
    ),
    (
        lambda spec: spec["root"]["inputDefinitions"]["parameters"]["data_path"].update(defaultValue="e.csv"),
        [Change("pipeline", "parameters.parameters.data_path.defaultValue", '"data.csv"', '"e.csv"', ("",))],
    ),
    (
        lambda spec: spec.update(sdkVersion="kfp-2.18.0"),
        [Change("pipeline", "sdkVersion", '"kfp-2.17.3"', '"kfp-2.18.0"', ("",))],
    ),
]


@pytest.mark.parametrize(("change", "expected"), CHANGES, ids=range(len(CHANGES)))
def test_each_kind_of_change(change: Callable[[Spec], Any], expected: list[Change]) -> None:
    new = _spec()
    change(new)
    assert diff.differences(_spec(), new) == expected


def test_settings_of_kubernetes_are_resources_of_the_step() -> None:
    executors = {"exec-train": {"nodeSelector": {"labels": {"gpu": "a100"}}}}
    platform = {
        "platforms": {"kubernetes": {"deploymentSpec": {"executors": executors}, "pipelineConfig": {"ttl": 60}}}
    }
    found = diff.differences(_spec(), {"pipeline_spec": _spec(), "platform_spec": platform})
    assert found == [
        Change("resources", "kubernetes.nodeSelector.labels.gpu", None, '"a100"', ("train",)),
        Change("pipeline", "kubernetes.pipelineConfig.ttl", None, "60", ("",)),
    ]


def test_a_setting_that_several_steps_read_is_told_once() -> None:
    new = parse_pipeline(compile_once(fakes.config_of(train={"epochs": 3}, seed=7), image="headrace:1"))
    found = {change.name: change for change in diff.differences(_spec(), new)}
    epochs, seed = found["train.epochs"], found["seed"]
    assert (epochs.old, epochs.new) == ("10", "3")
    assert {"train", "optimize", "push"} <= set(epochs.steps)
    assert {"ingest", "push"} <= set(seed.steps)
    assert all(change.kind == "settings" for change in found.values())


def test_how_it_is_shown() -> None:
    changes = [
        Change("settings", "train.epochs", "10", "3", ("push", "train")),
        Change("code", "", '"a"', '"b"', ("train",)),
        Change("code", "", '"c"', '"d"', ("push",)),
        Change("pipeline", "description", json.dumps("x" * 200), None, ("",)),
    ]
    assert diff.shown(changes).splitlines() == [
        "settings",
        "  train.epochs: 10 -> 3  (push, train)",
        "code",
        "  changed  (train, push)",
        "pipeline",
        "  description: changed",
    ]


def _diff(*arguments: str) -> Result:
    return CliRunner().invoke(diff.main, arguments)


def test_a_config_against_a_file(kfp_server: FakeApi) -> None:
    Path("old.yaml").write_text(_text())
    same = _diff("old.yaml", "tiny.yaml", "--image", "headrace:1")
    assert (same.exit_code, same.output) == (0, "")
    other = _diff("old.yaml", "tiny.yaml", "validate.num_quantiles=50", "--image", "headrace:1")
    assert other.exit_code == 5
    assert other.output.splitlines()[:2] == ["settings", "  validate.num_quantiles: 1000 -> 50  (push, validate)"]


def test_json(kfp_server: FakeApi) -> None:
    Path("old.yaml").write_text(_text())
    result = _diff("old.yaml", "tiny.yaml", "validate.num_quantiles=50", "--image", "headrace:1", "--json")
    assert result.exit_code == 5
    assert json.loads(result.output) == [
        {
            "kind": "settings",
            "name": "validate.num_quantiles",
            "steps": ["push", "validate"],
            "old": 1000,
            "new": 50,
        }
    ]


def test_against_the_server(kfp_server: FakeApi) -> None:
    Path("old.yaml").write_text(_text())
    kfp_server.pipelines = [api.V2beta1Pipeline(pipeline_id="p-1", display_name="taxi")]
    kfp_server.versions = [
        api.V2beta1PipelineVersion("p-1", f"id-{name}", display_name=name, pipeline_spec=spec)
        for name, spec in (("v2", _spec() | {"sdkVersion": "kfp-2.18.0"}), ("v1", _spec()))
    ]
    kfp_server.runs = [fake_kfp.run("RUNNING", pipeline=_spec())]
    host = ("--host", kfp_server.url)
    assert _diff("old.yaml", "pipeline:taxi@v1", *host).exit_code == 0
    newest = _diff("old.yaml", "pipeline:taxi", *host)
    assert newest.exit_code == 5
    assert '  sdkVersion: "kfp-2.17.3" -> "kfp-2.18.0"' in newest.output
    assert kfp_server.queries("/apis/v2beta1/pipelines/p-1/versions")[-1]["sort_by"] == "created_at desc"
    assert _diff("run:r-1", "old.yaml", *host).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "exit_code", "text"),
    [
        (("tiny.yaml", "nowhere.yaml"), 2, "nowhere.yaml cannot be read"),
        (("tiny.yaml", "wrong.yaml"), 2, "Did you mean 'train'"),
        (("tiny.yaml", "tiny.yaml", "train.epoch=3"), 2, "epochs"),
        (("tiny.yaml", "pipeline:taxi"), 2, "pipeline:taxi is on a server: give its --host"),
        (("tiny.yaml", "pipeline:taxi", "--host"), 1, "has no pipeline 'taxi'"),
        (("tiny.yaml", "pipeline:other@v3", "--host"), 1, "Pipeline 'other' has no version 'v3'"),
    ],
)
def test_what_is_not_there(kfp_server: FakeApi, arguments: tuple[str, ...], exit_code: int, text: str) -> None:
    Path("wrong.yaml").write_text(yaml.safe_dump(fakes.settings(trian={})))
    kfp_server.pipelines = [api.V2beta1Pipeline(pipeline_id="p-1", display_name="other")]
    result = _diff(*arguments, *([kfp_server.url] if arguments[-1] == "--host" else []))
    assert result.exit_code == exit_code
    assert text in result.stderr
