"""From `kubeflow.training_job` to the wrapper that Kubeflow runs, and what Kubeflow's executor gives it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from kfp.dsl.executor import Executor
from pydantic import ValidationError

from components import artifacts, kfp_components
from components.config import SECTIONS
from components.launch import step as launch_step
from components.launch.manifests import KINDS
from pipelines.config import PipelineConfig
from pipelines.training import build_pipeline
from tests.components.launch.clusters import client, operated
from tests.components.launch.test_manifests import TASK_CONFIG
from tests.components.launch.test_step import CONFIG, JOB, POD, Step, cluster, step

__all__ = ["cluster", "step"]  # fixtures

TRAIN = {"strategy": "multi_worker", "num_workers": 4}
KUBEFLOW = {
    "training_job": {"kind": "trainjob", "queue": "gpus"},
    "workspace": {"access_modes": ["ReadWriteMany"]},
    "steps": {"train": {"memory_limit": "32Gi", "node_selector": {"pool": "a100"}, "volumes": {"/data": "claim"}}},
}


def config_of(train: dict[str, Any] = TRAIN, **kubeflow: Any) -> PipelineConfig:
    tree = {
        "name": "tiny",
        "data": {"path": "data.csv"},
        "evaluate": {"thresholds": [{"metric": "accuracy", "min": 0}]},
    }
    return PipelineConfig.model_validate(tree | {"train": train, "kubeflow": KUBEFLOW | kubeflow})


def compiled(config: PipelineConfig) -> dict[str, Any]:
    spec: dict[str, Any] = json_format.MessageToDict(build_pipeline(config).pipeline_spec)
    return spec


def test_the_step_is_told_of_the_job_and_passes_its_pod_on() -> None:
    config = config_of()
    spec = compiled(config)
    task = spec["components"]["comp-exit-handler-1"]["dag"]["tasks"]["train-on-cluster"]
    assert task["taskInfo"]["name"] == "train", "the name by which a run is followed"
    constants = {name: each["runtimeValue"]["constant"] for name, each in task["inputs"]["parameters"].items()}
    assert json.loads(constants["job"]) == config.kubeflow.training_job.model_dump(mode="json")
    assert SECTIONS["train"].model_validate_json(constants["config"]) == config.step_config("train")
    # By this text Kubeflow knows that the pod needs the volume.
    assert constants["workspace"] == "{{$.workspace_path}}"
    component = spec["components"]["comp-train-on-cluster"]
    assert component["inputDefinitions"]["parameters"]["task_config"]["parameterType"] == "TASK_CONFIG"
    passed_on = {each["field"]: each.get("applyToTask", False) for each in component["taskConfigPassthroughs"]}
    assert passed_on == {
        "RESOURCES": False,
        "KUBERNETES_NODE_SELECTOR": False,
        "KUBERNETES_TOLERATIONS": False,
        "KUBERNETES_AFFINITY": False,
        "ENV": True,
        "KUBERNETES_VOLUMES": True,
    }


def test_without_a_job_the_step_trains_itself() -> None:
    for config in (config_of(training_job=None), config_of().model_copy(update={"kubeflow": on_this_machine()})):
        spec = compiled(config)
        assert "train" in spec["components"]["comp-exit-handler-1"]["dag"]["tasks"]
        assert "task_config" not in spec["components"]["comp-train"]["inputDefinitions"]["parameters"]


def on_this_machine() -> Any:
    """What `kfp.local` is given, which has no cluster."""
    return config_of().kubeflow.on_this_machine()


@pytest.mark.parametrize(
    ("train", "kubeflow", "message"),
    [
        ({}, {}, "training_job needs train.strategy: multi_worker and train.num_workers, at least 2"),
        ({"strategy": "multi_worker"}, {}, "train.num_workers, at least 2"),
        ({**TRAIN, "num_workers": 1}, {}, "train.num_workers, at least 2"),
        (TRAIN, {"workspace": None}, "training_job needs a volume for its workers: set workspace"),
        (TRAIN, {"defaults": {"shared_memory": "1Gi"}}, "shared_memory does not reach the workers"),
        (TRAIN, {"training_job": "pytorchjob"}, "'tfjob' or 'trainjob'"),
        (TRAIN, {"training_job": {"kind": "tfjob", "runtime": "mine"}}, "nothing reads runtime with kind: tfjob"),
    ],
)
def test_what_cannot_work_is_refused(train: dict[str, Any], kubeflow: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message.replace(".", r"\.")):
        config_of(train, **kubeflow)


def test_the_kind_alone_is_enough() -> None:
    assert config_of(training_job="tfjob").kubeflow.training_job == JOB


def artifact(name: str, path: Path, schema: str) -> dict[str, Any]:
    """An artifact as Kubeflow describes it to its executor."""
    one = {"name": name, "type": {"schemaTitle": f"system.{schema}"}, "uri": str(path), "metadata": {}}
    return {"artifacts": [one]}


def test_kubeflows_executor_runs_the_wrapper(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_step, "connect", lambda: client(step.cluster.url))
    monkeypatch.setenv("KFP_POD_NAME", POD)
    # Kubeflow's driver writes the fields of TaskConfig in Kubernetes' own spelling.
    task_config = {
        **{name: TASK_CONFIG[name] for name in ("resources", "env", "tolerations", "volumes")},
        "nodeSelector": TASK_CONFIG["node_selector"],
        "volumeMounts": [{"name": "kfp-workspace", "mountPath": str(step.workspace)}],
    }
    parameters = {
        "config": CONFIG.model_dump_json(),
        "code_digest": "",
        "records": str(step.workspace / "records"),
        "job": JOB.model_dump_json(),
        "workspace": str(step.workspace),
        "task_config": task_config,
    }
    inputs = {
        "examples": artifact("examples", step.inputs["examples"], "Dataset"),
        "transform": artifact("transform", step.inputs["transform"], "Artifact"),
    }
    outputs = {
        "model": artifact("model", step.folder / "model", "Model"),
        "metrics": artifact("metrics", step.folder / "metrics", "Metrics"),
    }
    executor_input = {
        "inputs": {"parameterValues": parameters, "artifacts": inputs},
        "outputs": {"artifacts": outputs, "outputFile": str(step.folder / "output.json")},
    }
    with operated(step.cluster, step.train):
        Executor(executor_input, kfp_components.train_on_cluster).execute()
    output = json.loads((step.folder / "output.json").read_text())["artifacts"]
    digest = artifacts.open_artifact(step.folder / "model", step="train").digest
    assert output["model"]["artifacts"][0]["metadata"]["digest"] == digest
    assert output["metrics"]["artifacts"][0]["metadata"]["validation.auc"] == 0.5
    (name,) = step.jobs()
    template = step.job(KINDS[JOB.kind], name)["spec"]["tfReplicaSpecs"]["Worker"]["template"]["spec"]
    assert template["containers"][0]["resources"] == TASK_CONFIG["resources"]
    assert template["nodeSelector"] == TASK_CONFIG["node_selector"]
    assert json.dumps(template["tolerations"][0]["tolerationSeconds"]) == "300"
