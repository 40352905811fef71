"""TF Serving's `--monitoring_config_file`: whether and where Prometheus finds the metrics.

The message is that of tensorflow_serving/config/monitoring_config.proto, which the wheel of tensorflow-serving-api lacks.

Example:
    prometheus_config { enable: true path: "/monitoring/prometheus/metrics" }
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

from serving.errors import invalid_argument

DEFAULT_PATH = "/monitoring/prometheus/metrics"  # tensorflow_serving/util/prometheus_exporter.cc


def read_monitoring_config(path: Path) -> str:
    """Where a config puts the metrics.

    Args:
        path: a MonitoringConfig in protobuf's text format.

    Returns:
        The path of the URL; empty when the config does not enable them.

    Raises:
        ServingError: INVALID_ARGUMENT, naming the file, and the line where its syntax is wrong.
        OSError: it cannot be read.
    """
    try:
        config = text_format.Parse(path.read_bytes(), _message_class()()).prometheus_config
    except text_format.ParseError as error:
        raise invalid_argument(f"{path} is no MonitoringConfig in protobuf's text format: {error}") from error
    if not config.enable:
        return ""
    if config.path and (not config.path.startswith("/") or config.path.lower().startswith("/v1/")):
        raise invalid_argument(
            f"{path}: path begins with / and not with /v1/, where the models are, not {config.path!r}"
        )
    return config.path or DEFAULT_PATH


def _message_class() -> Any:
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="monitoring_config.proto", package="tensorflow.serving")
    prometheus = file.message_type.add(name="PrometheusConfig")
    prometheus.field.add(name="enable", number=1, type=field.TYPE_BOOL, label=field.LABEL_OPTIONAL)
    prometheus.field.add(name="path", number=2, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    file.message_type.add(name="MonitoringConfig").field.add(
        name="prometheus_config",
        number=1,
        type=field.TYPE_MESSAGE,
        type_name=".tensorflow.serving.PrometheusConfig",
        label=field.LABEL_OPTIONAL,
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.serving.MonitoringConfig"))
