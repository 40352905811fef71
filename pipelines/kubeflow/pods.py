"""What `KubeflowConfig` says of pods and runs, said to kfp and kfp-kubernetes."""

from __future__ import annotations

from typing import Any

from kfp import dsl, kubernetes

from pipelines.kubeflow.config import KubeflowConfig, WorkspaceConfig

_SHARED_MEMORY = "/dev/shm"


def pipeline_config(config: KubeflowConfig) -> dsl.PipelineConfig:
    """Deadlines, and the volume that all tasks of a run share."""
    return dsl.PipelineConfig(
        workspace=config.workspace and _workspace(config.workspace),
        ttl_seconds_after_finished=config.ttl_seconds_after_finished,
        ttl_seconds_after_success=config.ttl_seconds_after_success,
        ttl_seconds_after_failure=config.ttl_seconds_after_failure,
        active_deadline_seconds=config.active_deadline_seconds,
    )


def configure(task: Any, config: KubeflowConfig, name: str) -> None:
    """Set the pod of a task.

    Args:
        task: A `kfp.dsl.PipelineTask`.
        config: What is said of pods.
        name: The task's name in `kubeflow.steps`.
    """
    pod = config.pod(name)
    for resource in ("cpu_request", "cpu_limit", "memory_request", "memory_limit"):
        if (amount := getattr(pod, resource)) is not None:
            getattr(task, f"set_{resource}")(amount)
    if pod.accelerator_type is not None:
        task.set_accelerator_type(pod.accelerator_type)
        task.set_accelerator_limit(pod.accelerator_limit or 1)
    if pod.retries:
        # Every step may be done twice: it writes its artifact all at once, `push` finds the version that holds its model
        # already, and `deploy` leaves traffic alone that is divided as it should be.
        task.set_retry(pod.retries, backoff_duration=f"{pod.retry_wait_seconds}s", backoff_factor=2.0)
    if pod.timeout_seconds is not None:
        kubernetes.set_timeout(task, pod.timeout_seconds)
    if pod.shared_memory is not None:
        kubernetes.empty_dir_mount(task, "shared-memory", _SHARED_MEMORY, medium="Memory", size_limit=pod.shared_memory)
    for variable, value in pod.env.items():
        task.set_env_variable(variable, value)
    for variable, source in pod.secret_env.items():
        kubernetes.use_secret_as_env(task, source.secret, {source.key: variable})
    for path, secret in pod.secret_volumes.items():
        kubernetes.use_secret_as_volume(task, secret, path)
    for path, claim in pod.volumes.items():
        kubernetes.mount_pvc(task, claim, path)
    for key, value in pod.node_selector.items():
        kubernetes.add_node_selector(task, key, value)
    for toleration in pod.tolerations:
        kubernetes.add_toleration(task, **toleration.model_dump(exclude_none=True))
    for key, value in pod.labels.items():
        kubernetes.add_pod_label(task, key, value)
    for key, value in pod.annotations.items():
        kubernetes.add_pod_annotation(task, key, value)
    if pod.image_pull_policy is not None:
        kubernetes.set_image_pull_policy(task, pod.image_pull_policy)
    if config.image_pull_secrets:
        kubernetes.set_image_pull_secrets(task, list(config.image_pull_secrets))


def _workspace(config: WorkspaceConfig) -> dsl.WorkspaceConfig:
    patch: dict[str, Any] = {}
    if config.storage_class is not None:
        patch["storageClassName"] = config.storage_class
    if config.access_modes:
        patch["accessModes"] = list(config.access_modes)
    return dsl.WorkspaceConfig(size=config.size, kubernetes=dsl.KubernetesWorkspaceConfig(pvcSpecPatch=patch))
