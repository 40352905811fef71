"""TFJob, TrainJob and ClusterTrainingRuntime: what is in them, and that their definitions take them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from kubeflow.training.api_client import ApiClient as TrainingApiClient
from kubeflow_trainer_api import models as trainer_models

from components.config import TrainingJobConfig
from components.launch.manifests import (
    KINDS,
    TaskSettings,
    TrainingManifestConfig,
    admin_objects,
    training_runtime,
)
from components.train import cluster as clusters
from tests.components.launch.clusters import NAME, manifest_of
from tests.serving.manifests import checks

needs_crds = pytest.mark.skipif(checks.crds_folder() is None, reason="needs the CRDs; HEADRACE_CRDS says where")

# As Kubeflow Pipelines passes it on: everything through JSON, where 300 may have become 300.0.
TASK_CONFIG = {
    "resources": {"limits": {"nvidia.com/gpu": "1", "memory": "16Gi"}, "requests": {"cpu": "4"}},
    "env": [{"name": "TF_CPP_MIN_LOG_LEVEL", "value": "2"}],
    "volumes": [{"name": "kfp-workspace", "persistentVolumeClaim": {"claimName": "taxi-kfp-workspace"}}],
    "volume_mounts": [{"name": "kfp-workspace", "mountPath": "/kfp-workspace"}],
    "node_selector": {"pool": "a100"},
    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300.0}],
    "affinity": {
        "nodeAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {
                    "weight": 10.0,
                    "preference": {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]},
                }
            ]
        }
    },
}
OWNER = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "taxi-abcde", "uid": "8c5f"}
SETTINGS = {"deadline_seconds": 3600, "queue": "gpus"}


def tf_job(**settings: Any) -> dict[str, Any]:
    return full(TrainingJobConfig(kind="tfjob", **settings))


def train_job(**settings: Any) -> dict[str, Any]:
    return full(TrainingJobConfig(kind="trainjob", **settings))


def full(config: TrainingJobConfig) -> dict[str, Any]:
    """A job with all that can be passed on."""
    secrets = ({"name": "registry"},)
    return manifest_of(config, task=TaskSettings.of(TASK_CONFIG), image_pull_secrets=secrets, owner=OWNER)


def runtime() -> dict[str, Any]:
    return training_runtime("tensorflow-distributed", "ghcr.io/acme/headrace:1")


MANIFESTS: dict[str, Callable[[], dict[str, Any]]] = {
    "tfjob": lambda: tf_job(**SETTINGS),
    "tfjob_bare": lambda: manifest_of(TrainingJobConfig(kind="tfjob")),
    "trainjob": lambda: train_job(**SETTINGS),
    "trainjob_bare": lambda: manifest_of(TrainingJobConfig(kind="trainjob")),
    "runtime": runtime,
}
# Mistakes that were made by others, or nearly by us.
MISTAKES: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "tfjob": ("restart", lambda job: job["spec"]["tfReplicaSpecs"]["Worker"].update(restart="OnFailure")),
    "trainjob": ("podSpecOverrides", lambda job: job["spec"].update(podSpecOverrides=[])),
    "runtime": ("numNode", lambda job: job["spec"]["mlPolicy"].update(numNode=2)),
}


@needs_crds
@pytest.mark.parametrize("name", MANIFESTS)
def test_the_definitions_take_the_manifests(name: str) -> None:
    assert checks.crd_problems(MANIFESTS[name]()) == []


@needs_crds
@pytest.mark.parametrize("name", MISTAKES)
def test_the_definitions_refuse_a_mistake(name: str) -> None:
    field, make_mistake = MISTAKES[name]
    manifest = MANIFESTS[name]()
    make_mistake(manifest)
    (problem,) = checks.crd_problems(manifest)
    assert field in problem


def lost_in_typed_models(manifest: dict[str, Any]) -> list[str]:
    """Fields that the projects' own typed models drop, for they do not know them."""
    if manifest["kind"] == "TFJob":
        api = TrainingApiClient()
        response = SimpleNamespace(data=json.dumps(manifest))
        kept = api.sanitize_for_serialization(api.deserialize(response, "KubeflowOrgV1TFJob"))
    else:
        kept = getattr(trainer_models, f"TrainerV1alpha1{manifest['kind']}").from_dict(manifest).to_dict()
    return sorted(_paths(manifest) - _paths(kept))


def _paths(value: Any, path: str = "") -> set[str]:
    if isinstance(value, dict):
        return {path}.union(*(_paths(inner, f"{path}.{key}") for key, inner in value.items()))
    if isinstance(value, list):
        return {path}.union(*(_paths(item, f"{path}[{index}]") for index, item in enumerate(value)))
    return {path}


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_projects_typed_models_know_every_field(name: str) -> None:
    assert lost_in_typed_models(MANIFESTS[name]()) == []


@pytest.mark.parametrize("name", MISTAKES)
def test_the_projects_typed_models_do_not_know_a_mistake(name: str) -> None:
    field, make_mistake = MISTAKES[name]
    manifest = MANIFESTS[name]()
    make_mistake(manifest)
    assert any(field in path for path in lost_in_typed_models(manifest))


def pod_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """The pod that workers are made from, as far as the manifest says."""
    if manifest["kind"] == "TFJob":
        return manifest["spec"]["tfReplicaSpecs"]["Worker"]["template"]["spec"]
    spec = manifest["spec"]
    template = spec["template"] if "template" in spec else spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]
    return template["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("name", ["tfjob", "runtime"])
def test_kubernetes_takes_the_pods(name: str) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "worker"}, "spec": pod_of(MANIFESTS[name]())}
    assert checks.schema_problems(pod) == []
    pod["spec"]["containers"][0]["terminationMessage"] = "x"
    assert checks.schema_problems(pod) != []


@pytest.mark.parametrize("name", ["tfjob", "trainjob"])
def test_what_the_step_was_told_is_passed_on(name: str) -> None:
    manifest = MANIFESTS[name]()
    pod, spec = pod_of(manifest), manifest["spec"]
    (container,) = pod["containers"]
    trainer = spec.get("trainer", container)
    assert container["name"] == KINDS[name].container
    assert pod["volumes"] == TASK_CONFIG["volumes"] and container["volumeMounts"] == TASK_CONFIG["volume_mounts"]
    assert pod["nodeSelector"] == {"pool": "a100"} and pod["imagePullSecrets"] == [{"name": "registry"}]
    # Kubernetes refuses 300.0 where it wants a whole number.
    assert json.dumps(pod["tolerations"][0]["tolerationSeconds"]) == "300"
    (preference,) = pod["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert json.dumps(preference["weight"]) == "10"
    assert trainer.get("resourcesPerNode", trainer.get("resources")) == TASK_CONFIG["resources"]
    assert TASK_CONFIG["env"][0] in trainer["env"]
    assert trainer["image"] == "ghcr.io/acme/headrace:1" and trainer["command"][:3] == [
        "python",
        "-m",
        "components.train.launch",
    ]
    assert spec.get("activeDeadlineSeconds", spec.get("runPolicy", {}).get("activeDeadlineSeconds")) == 3600
    assert manifest["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert manifest["metadata"]["labels"]["pipeline/runid"] == "run-1"
    assert manifest["metadata"]["ownerReferences"] == [OWNER]


def test_nothing_is_passed_on_where_nothing_was_told() -> None:
    spec = manifest_of(TrainingJobConfig(kind="trainjob"))["spec"]
    assert sorted(spec) == ["runtimeRef", "trainer"]
    assert sorted(spec["trainer"]) == ["command", "env", "image", "numNodes"]
    pod = pod_of(manifest_of(TrainingJobConfig(kind="tfjob")))
    assert not {"volumes", "nodeSelector", "tolerations", "affinity", "imagePullSecrets"} & {*pod}


def test_a_tfjob_starts_a_pod_again_by_its_exit_code() -> None:
    spec = tf_job()["spec"]
    assert spec["tfReplicaSpecs"]["Worker"]["restartPolicy"] == "ExitCode"
    assert spec["tfReplicaSpecs"]["Worker"]["replicas"] == 2
    assert {*spec["tfReplicaSpecs"]} == {"Worker"}, "the trainer takes no other types"
    annotations = spec["tfReplicaSpecs"]["Worker"]["template"]["metadata"]["annotations"]
    assert annotations == {"sidecar.istio.io/inject": "false"}


def test_a_pod_of_the_runtime_knows_its_place() -> None:
    """What Kubernetes fills in from the fields that the runtime names, read by the trainer's entry point."""
    job = train_job()
    labels = {"jobset.sigs.k8s.io/jobset-name": job["metadata"]["name"]}
    annotations = {"batch.kubernetes.io/job-completion-index": "1"}
    fields = {f"metadata.labels['{key}']": value for key, value in labels.items()}
    fields |= {f"metadata.annotations['{key}']": value for key, value in annotations.items()}
    environ = {each["name"]: each["value"] for each in job["spec"]["trainer"]["env"]}
    for each in pod_of(runtime())["containers"][0]["env"]:
        environ[each["name"]] = fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
    found = clusters.from_environ(environ)
    assert found is not None and found.index == 1
    assert found.addresses == tuple(f"{NAME}-node-0-{index}.{NAME}:2222" for index in range(2))
    replicated_job = runtime()["spec"]["template"]["spec"]["replicatedJobs"][0]
    assert replicated_job["name"] == "node"  # what the addresses are made from
    assert pod_of(runtime())["containers"][0]["ports"] == [{"containerPort": clusters.PORT}]


def test_the_runtime_does_not_start_again_what_would_fail_again() -> None:
    spec = runtime()["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    fail_job, ignore = spec["podFailurePolicy"]["rules"]
    assert fail_job == {
        "action": "FailJob",
        "onExitCodes": {"containerName": "node", "operator": "In", "values": [1, 2]},
    }
    assert ignore["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "a pod failure policy takes no other"
    assert runtime()["metadata"]["labels"]["trainer.kubeflow.org/framework"] == "tensorflow"


def test_names_of_pods_are_not_too_long() -> None:
    # A pod's host name has 63 characters at most.
    assert len(f"{NAME}-node-0-9999") < 63 and len(f"{NAME}-worker-9999") < 63


def test_what_an_administrator_applies() -> None:
    config = TrainingManifestConfig(namespace="team-a", image="headrace:1", service_account="default-editor")
    files = admin_objects(config)
    role, binding = files["rbac.yaml"]
    for each in (role, binding):
        assert checks.schema_problems(each) == []
    allowed = {(resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}
    assert ("tfjobs", "delete") in allowed and ("pods/log", "get") in allowed and ("pods", "delete") not in allowed
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "default-editor", "namespace": "team-a"}]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    mistake = copy.deepcopy(role)
    mistake["rules"][0]["verb"] = ["get"]
    assert checks.schema_problems(mistake) != []
