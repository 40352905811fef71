"""The manifest of an ingest on Kubernetes: a SparkApplication of the Spark operator (`sparkoperator.k8s.io/v1beta2`).

Field names are those of the operator's API, release 2.4.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from components import object_store
from components.config import Count, DataConfig, Section, SparkConfig
from components.errors import ConfigError

_CLEAN_UP_AFTER_SECONDS = 24 * 3600
_VOLUME = "runs"
# The user of Spark's own images.
_SPARK_USER = 185


class SparkPodConfig(Section):
    """A pod of the driver or of an executor."""

    cores: Count = 1
    memory: str = Field("2g", description="Of the JVM, in Spark's units.")
    memory_overhead: str = Field("3g", description="Beside the JVM: what Python, Arrow and TensorFlow take.")


class SparkManifestConfig(Section):
    """The ingest of a config as a job of the Spark operator."""

    config: str = Field(description="The YAML file of the experiment, on this machine.")
    namespace: str = Field(description="Where the job runs.")
    image: str = Field(description="Has Spark, this project and ingest.py: docs/spark.md.")
    claim: str = Field(description="PersistentVolumeClaim, ReadWriteMany, that driver and executors mount.")
    mount_path: str = Field(
        "/runs", description="Where they mount it; the examples come to <mount_path>/<name>/examples."
    )
    service_account: str = Field("spark-operator-spark", description="Of the driver, which starts the executors.")
    spark_version: str = Field("4.0.0", description="That of the image.")
    application_file: str = Field("local:///opt/headrace/ingest.py", description="In the image: calls this project.")
    executors: Count = 2
    driver: SparkPodConfig = SparkPodConfig()
    executor: SparkPodConfig = SparkPodConfig(cores=2)


def spark_application(settings: SparkManifestConfig, name: str, data: DataConfig) -> dict[str, Any]:
    """The SparkApplication that makes the examples of an experiment.

    Args:
        settings: Image, volume, pods.
        name: Of the experiment; names of Kubernetes have dashes where it has other signs.
        data: Its section `data`.

    Raises:
        ConfigError: `data.path` would name another place in the pods.
    """
    if data.path is not None and not (object_store.is_remote(data.path) or data.path.startswith("/")):
        raise ConfigError(
            f"data.path: {data.path} is relative to this folder, which pods do not have. Give a path below "
            f"{settings.mount_path}, or s3://, gs:// or https://."
        )
    # The operator says which master, and sets what its own fields say.
    in_pods = data.model_copy(update={"engine": "spark", "spark": SparkConfig()})
    examples = f"{settings.mount_path.rstrip('/')}/{name}/examples"
    return {
        "apiVersion": "sparkoperator.k8s.io/v1beta2",
        "kind": "SparkApplication",
        "metadata": {
            "name": f"{_dns_name(name)}-ingest",
            "namespace": settings.namespace,
            "labels": {"app.kubernetes.io/managed-by": "headrace"},
        },
        "spec": {
            "type": "Python",
            "pythonVersion": "3",
            "mode": "cluster",
            "sparkVersion": settings.spark_version,
            "image": settings.image,
            "mainApplicationFile": settings.application_file,
            "arguments": ["--config", in_pods.model_dump_json(), "--examples", examples],
            "sparkConf": {key: _text(value) for key, value in data.spark.conf.items()},
            # Spark tries tasks again; what fails after that, fails each time.
            "restartPolicy": {"type": "Never"},
            "timeToLiveSeconds": _CLEAN_UP_AFTER_SECONDS,
            "volumes": [{"name": _VOLUME, "persistentVolumeClaim": {"claimName": settings.claim}}],
            "driver": {"serviceAccount": settings.service_account, **_pod(settings.driver, settings.mount_path)},
            "executor": {"instances": settings.executors, **_pod(settings.executor, settings.mount_path)},
        },
    }


def _pod(pod: SparkPodConfig, mount_path: str) -> dict[str, Any]:
    return {
        "cores": pod.cores,
        "memory": pod.memory,
        "memoryOverhead": pod.memory_overhead,
        "env": [{"name": "TF_CPP_MIN_LOG_LEVEL", "value": "2"}],
        "volumeMounts": [{"name": _VOLUME, "mountPath": mount_path}],
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _SPARK_USER,
            "runAsGroup": _SPARK_USER,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _dns_name(name: str) -> str:
    return "".join(sign if sign.isascii() and sign.isalnum() else "-" for sign in name.lower()).strip("-")
