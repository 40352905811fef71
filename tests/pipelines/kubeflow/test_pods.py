"""What the configuration says of pods and runs, as kfp's own messages have it in the golden pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from google.protobuf import json_format
from kfp.kubernetes.kubernetes_executor_config_pb2 import KubernetesExecutorConfig
from kfp.pipeline_spec import pipeline_spec_pb2

GOLDEN = Path(__file__).parents[2] / "golden" / "on_kubeflow.pipeline.yaml"


@pytest.fixture(scope="module")
def pipeline() -> pipeline_spec_pb2.PipelineSpec:
    document, _ = yaml.safe_load_all(GOLDEN.read_text())
    return json_format.ParseDict(document, pipeline_spec_pb2.PipelineSpec())


@pytest.fixture(scope="module")
def platform() -> Any:
    _, document = yaml.safe_load_all(GOLDEN.read_text())
    return json_format.ParseDict(document, pipeline_spec_pb2.PlatformSpec()).platforms["kubernetes"]


def _pod(platform: Any, task: str) -> KubernetesExecutorConfig:
    executor = platform.deployment_spec.executors[f"exec-{task}"]
    return json_format.ParseDict(json_format.MessageToDict(executor), KubernetesExecutorConfig())


def _container(pipeline: Any, task: str) -> Any:
    return json_format.ParseDict(
        json_format.MessageToDict(pipeline.deployment_spec["executors"][f"exec-{task}"]["container"]),
        pipeline_spec_pb2.PipelineDeploymentConfig.PipelineContainerSpec(),
    )


def test_resources_and_accelerators(pipeline: Any) -> None:
    train, push = (_container(pipeline, name).resources for name in ("train", "push"))
    assert (train.resource_cpu_request, train.resource_cpu_limit) == ("1", "8")
    assert (train.resource_memory_request, train.resource_memory_limit) == ("2Gi", "16Gi")
    assert (train.accelerator.resource_type, train.accelerator.resource_count) == ("nvidia.com/gpu", "2")
    assert (push.resource_cpu_limit, push.resource_memory_limit) == ("", "4Gi")
    assert not push.HasField("accelerator")


def test_environment_and_secrets(pipeline: Any, platform: Any) -> None:
    assert {each.name: each.value for each in _container(pipeline, "train").env} == {"NCCL_DEBUG": "WARN"}
    [secret] = _pod(platform, "summary").secret_as_env
    [key] = secret.key_to_env
    assert (secret.secret_name, key.secret_key, key.env_var) == ("slack", "url", "SLACK_URL")
    [mounted] = _pod(platform, "push").secret_as_volume
    assert (mounted.secret_name, mounted.mount_path) == ("registry-token", "/etc/registry")
    assert not _pod(platform, "train").secret_as_env


def test_volumes_and_shared_memory(platform: Any) -> None:
    assert {each.constant: each.mount_path for each in _pod(platform, "push").pvc_mount} == {
        "taxi-data": "/data",
        "served-models": "/models",
    }
    [memory] = _pod(platform, "train").empty_dir_mounts
    assert (memory.mount_path, memory.medium, memory.size_limit) == ("/dev/shm", "Memory", "4Gi")


def test_where_pods_run_and_what_they_are_called(platform: Any) -> None:
    train, push = _pod(platform, "train"), _pod(platform, "push")
    assert dict(train.node_selector.labels) == {"gpu": "a100"}
    [toleration] = train.tolerations
    assert (toleration.key, toleration.operator, toleration.effect) == ("gpu", "Exists", "NoSchedule")
    assert not push.tolerations
    for pod in (train, push):
        assert dict(pod.pod_metadata.labels) == {"team": "fares"}
        assert dict(pod.pod_metadata.annotations) == {"sidecar.istio.io/inject": "false"}
        assert pod.image_pull_policy == "IfNotPresent"
        assert [each.secret_name for each in pod.image_pull_secret] == ["registry"]
    assert (train.active_deadline_seconds, push.active_deadline_seconds) == (7200, 0)


def test_the_run_has_deadlines_a_root_and_a_shared_volume(pipeline: Any, platform: Any) -> None:
    config = platform.pipelineConfig
    assert (config.resource_ttl_on_completion, config.resource_ttl_on_failure) == (86_400, 604_800)
    assert config.active_deadline_seconds == 43_200
    assert config.workspace.size == "2Gi"
    patch = json_format.MessageToDict(config.workspace.kubernetes.pvc_spec_patch)
    assert patch == {"storageClassName": "nfs", "accessModes": ["ReadWriteMany"]}
    assert pipeline.default_pipeline_root == "s3://acme/pipelines"


def test_steps_are_tried_again_after_a_while_and_the_exit_handler_is_not(pipeline: Any) -> None:
    tasks = {
        name: task
        for component in (pipeline.root, *pipeline.components.values())
        for name, task in component.dag.tasks.items()
    }
    policies = {name: task.retry_policy for name, task in tasks.items() if task.HasField("retry_policy")}
    assert policies["train"].max_retry_count == 1
    assert policies["push"].max_retry_count == 2
    assert policies["push"].backoff_duration.seconds == 30
    assert policies["push"].backoff_factor == 2
    assert "summary" not in policies


def test_every_step_notes_its_end_on_the_shared_volume_and_runs_in_the_image(pipeline: Any) -> None:
    for component in (pipeline.root, *pipeline.components.values()):
        for task in component.dag.tasks.values():
            if "records" in task.inputs.parameters:
                value = task.inputs.parameters["records"].runtime_value.constant.string_value
                assert value == "{{$.workspace_path}}/records"
    images = {_container(pipeline, name.removeprefix("exec-")).image for name in pipeline.deployment_spec["executors"]}
    assert images == {f"ghcr.io/acme/headrace@sha256:{'a' * 64}"}
