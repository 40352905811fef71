"""The manifests of distributed training: TFJob (Training Operator v1), TrainJob and its runtime (Kubeflow Trainer v2).

Field names are those of the resources' definitions: TFJob of release 1.9, TrainJob and ClusterTrainingRuntime of 2.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from pydantic import Field

from components.config import Section, TrainingJobConfig
from components.train.cluster import PORT

# Which training of which run a job is; only the step that asked for it may adopt or delete it.
WORK = "headrace/work"
# As Kubeflow Pipelines labels what belongs to a run.
RUN = "pipeline/runid"
_MANAGED_BY = {"app.kubernetes.io/managed-by": "headrace"}
# Workers talk to each other on a port of their own protocol; a mesh's sidecar would cut them off and outlive them.
_NO_SIDECAR = {"sidecar.istio.io/inject": "false"}
_CLEAN_UP_AFTER_SECONDS = 24 * 3600
_QUEUE = "kueue.x-k8s.io/queue-name"
# Of all workers' pods together, and one that fails takes the others with it; the launcher gives up before.
_MOST_POD_FAILURES = 50
_RESTART_IN_VAIN = [1, 2]


@dataclass(frozen=True)
class Kind:
    """A kind of training job, and how it marks its pods.

    Attributes:
        group: API group.
        version: Of the API.
        plural: Its name in URLs.
        name: Its name in manifests.
        container: The container that trains.
        job_label: Label of a pod with the name of its job.
        index_label: Label of a pod with the index of the worker.
        succeeded: Type of the condition that says so.
    """

    group: str
    version: str
    plural: str
    name: str
    container: str
    job_label: str
    index_label: str
    succeeded: str

    @property
    def api_version(self) -> str:
        """As in manifests."""
        return f"{self.group}/{self.version}"


KINDS = {
    "tfjob": Kind(
        group="kubeflow.org",
        version="v1",
        plural="tfjobs",
        name="TFJob",
        container="tensorflow",
        job_label="training.kubeflow.org/job-name",
        index_label="training.kubeflow.org/replica-index",
        succeeded="Succeeded",
    ),
    "trainjob": Kind(
        group="trainer.kubeflow.org",
        version="v1alpha1",
        plural="trainjobs",
        name="TrainJob",
        container="node",
        job_label="jobset.sigs.k8s.io/jobset-name",
        index_label="batch.kubernetes.io/job-completion-index",
        succeeded="Complete",
    ),
}


@dataclass(frozen=True)
class TaskSettings:
    """What Kubeflow Pipelines was told about the step's pod and passes on: the fields of `kfp.dsl.TaskConfig`."""

    resources: dict[str, Any] = field(default_factory=dict)
    env: list[dict[str, Any]] = field(default_factory=list)
    volumes: list[dict[str, Any]] = field(default_factory=list)
    volume_mounts: list[dict[str, Any]] = field(default_factory=list)
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: list[dict[str, Any]] = field(default_factory=list)
    affinity: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, task_config: Mapping[str, Any]) -> TaskSettings:
        """From the fields of a `TaskConfig`, which may be `None`; whole numbers, which came as 300.0, are whole again."""
        given = {each.name: task_config.get(each.name) for each in fields(cls)}
        return cls(**{name: _whole_numbers(value) for name, value in given.items() if value})


def _whole_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _whole_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_whole_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@dataclass(frozen=True)
class Work:
    """What a job is to do.

    Attributes:
        name: Of the job.
        namespace: Of the job and its pods.
        digest: See `WORK`.
        run: Of the pipeline.
        image: What the workers run in.
        command: What each of them runs.
        num_workers: How many.
        task: What is passed on from the step.
        image_pull_secrets: As in the spec of a pod.
        owner: Owner reference of what the job goes with, such as the pipeline's run.
    """

    name: str
    namespace: str
    digest: str
    run: str
    image: str
    command: tuple[str, ...]
    num_workers: int
    task: TaskSettings = field(default_factory=TaskSettings)
    image_pull_secrets: tuple[dict[str, str], ...] = ()
    owner: Mapping[str, Any] | None = None


def training_job(config: TrainingJobConfig, work: Work) -> dict[str, Any]:
    """The TFJob or TrainJob that does some work.

    Args:
        config: Which kind, and its settings.
        work: What it is to do.
    """
    kind = KINDS[config.kind]
    labels = _MANAGED_BY | {RUN: work.run} | ({_QUEUE: config.queue} if config.queue else {})
    metadata: dict[str, Any] = {"name": work.name, "namespace": work.namespace, "labels": labels}
    metadata["annotations"] = {WORK: work.digest}
    if work.owner is not None:
        metadata["ownerReferences"] = [dict(work.owner)]
    spec = _tf_job(config, kind, work) if config.kind == "tfjob" else _train_job(config, kind, work)
    return {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata, "spec": spec}


def _tf_job(config: TrainingJobConfig, kind: Kind, work: Work) -> dict[str, Any]:
    deadline = {"activeDeadlineSeconds": config.deadline_seconds} if config.deadline_seconds else {}
    container = {
        "image": work.image,
        "command": list(work.command),
        **_given(env=work.task.env, resources=work.task.resources, volumeMounts=work.task.volume_mounts),
        "ports": [{"name": "tfjob-port", "containerPort": PORT}],
    }
    pod = _pod(kind, container) | _of_pod(work)
    template = {"metadata": {"labels": _MANAGED_BY, "annotations": _NO_SIDECAR}, "spec": pod}
    worker = {"replicas": work.num_workers, "restartPolicy": "ExitCode", "template": template}
    return {
        # Pods that have ended stay, for their logs.
        "runPolicy": {"cleanPodPolicy": "Running", "ttlSecondsAfterFinished": _CLEAN_UP_AFTER_SECONDS, **deadline},
        "tfReplicaSpecs": {"Worker": worker},
    }


def _train_job(config: TrainingJobConfig, kind: Kind, work: Work) -> dict[str, Any]:
    deadline = {"activeDeadlineSeconds": config.deadline_seconds} if config.deadline_seconds else {}
    trainer = {
        "image": work.image,
        "command": list(work.command),
        "numNodes": work.num_workers,
        "env": [*work.task.env, {"name": "TF_NUM_WORKERS", "value": str(work.num_workers)}],
        **_given(resourcesPerNode=work.task.resources),
    }
    mounts = _given(volumeMounts=work.task.volume_mounts)
    pod = _of_pod(work) | ({"containers": [{"name": kind.container, **mounts}]} if mounts else {})
    job = {"name": kind.container, "template": {"spec": {"template": {"spec": pod}}}}
    patch = {"manager": "headrace/train", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}
    return {
        "runtimeRef": {"name": config.runtime},
        **deadline,
        "trainer": trainer,
        **({"runtimePatches": [patch]} if pod else {}),
    }


def _pod(kind: Kind, container: Mapping[str, Any]) -> dict[str, Any]:
    """The pod of a worker, as both kinds have it."""
    return {
        # A worker never calls the Kubernetes API.
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [
            {
                "name": kind.container,
                **container,
                # So that the pod's status says what the worker said last.
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            }
        ],
    }


def _of_pod(work: Work) -> dict[str, Any]:
    """What the step's pod was told, in the spec of the workers' pods."""
    return _given(
        volumes=work.task.volumes,
        nodeSelector=work.task.node_selector,
        tolerations=work.task.tolerations,
        affinity=work.task.affinity,
        imagePullSecrets=list(work.image_pull_secrets),
    )


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value}


class TrainingManifestConfig(Section):
    """What an administrator applies once, before the first distributed training."""

    namespace: str = Field(description="Where the pipelines run.")
    service_account: str = Field(
        "pipeline-runner",
        description="Who runs the steps there: pipeline-runner, or default-editor in a profile's namespace.",
    )
    image: str = Field(description="Of the workers; the train step of a pipeline names its own instead.")
    runtime: str = Field("tensorflow-distributed", description="Name of the ClusterTrainingRuntime.")


def admin_objects(config: TrainingManifestConfig) -> dict[str, list[dict[str, Any]]]:
    """The files for an administrator: the ClusterTrainingRuntime, and the rights of the train step.

    Args:
        config: Names.

    Returns:
        File name -> the objects in it.
    """
    return {"runtime.yaml": [training_runtime(config.runtime, config.image)], "rbac.yaml": _rbac(config)}


def training_runtime(name: str, image: str) -> dict[str, Any]:
    """TensorFlow for Kubeflow Trainer, which ships no such runtime.

    A job's pods learn their place from their own labels; `components.train.cluster` makes the cluster from it.

    Args:
        name: Of the runtime.
        image: Of the workers, where the TrainJob names none.
    """
    kind = KINDS["trainjob"]
    container = {
        "image": image,
        "ports": [{"containerPort": PORT}],
        "env": [
            _from_field("JOBSET_NAME", f"metadata.labels['{kind.job_label}']"),
            _from_field("TF_TASK_INDEX", f"metadata.annotations['{kind.index_label}']"),
        ],
    }
    # Never, for only then Kubernetes looks at exit codes.
    pod = {"restartPolicy": "Never", **_pod(kind, container)}
    failures = [
        {
            "action": "FailJob",
            "onExitCodes": {"containerName": kind.container, "operator": "In", "values": _RESTART_IN_VAIN},
        },
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    job_spec = {
        "backoffLimit": _MOST_POD_FAILURES,
        # Done when the chief is, as a TFJob is; others may still be on their way out.
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
        "podFailurePolicy": {"rules": failures},
        "template": {"metadata": {"labels": _MANAGED_BY, "annotations": _NO_SIDECAR}, "spec": pod},
    }
    replicated_job = {
        "name": kind.container,
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": job_spec,
        },
    }
    return {
        "apiVersion": kind.api_version,
        "kind": "ClusterTrainingRuntime",
        "metadata": {"name": name, "labels": _MANAGED_BY | {"trainer.kubeflow.org/framework": "tensorflow"}},
        "spec": {
            "mlPolicy": {"numNodes": 2},
            "template": {"spec": {"replicatedJobs": [replicated_job]}},
        },
    }


def _from_field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _rbac(config: TrainingManifestConfig) -> list[dict[str, Any]]:
    """What `components.launch` asks the Kubernetes API for, and no more."""
    metadata = {"name": "headrace-train", "namespace": config.namespace, "labels": _MANAGED_BY}
    on_jobs = ["create", "delete", "get", "list", "watch"]
    rules = [{"apiGroups": [kind.group], "resources": [kind.plural], "verbs": on_jobs} for kind in KINDS.values()]
    rules.append({"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]})
    rules.append({"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]})
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": metadata, "rules": rules}
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": metadata,
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": metadata["name"]},
        "subjects": [{"kind": "ServiceAccount", "name": config.service_account, "namespace": config.namespace}],
    }
    return [role, binding]
