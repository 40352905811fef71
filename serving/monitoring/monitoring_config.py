"""TF Serving's `--monitoring_config_file`: whether and where Prometheus finds the metrics.

The message is that of tensorflow_serving/config/monitoring_config.proto, which the wheel of tensorflow-serving-api lacks.

Example:
    prometheus_config { enable: true path: "/monitoring/prometheus/metrics" }
"""

from __future__ import annotations

from pathlib import Path

from google.protobuf import text_format

from serving.errors import invalid_argument
from serving.message_class import message_class

DEFAULT_PATH = "/monitoring/prometheus/metrics"  # tensorflow_serving/util/prometheus_exporter.cc
_Prometheus = message_class("tensorflow.serving.PrometheusConfig", {"enable": "bool", "path": "string"})
_Message = message_class("tensorflow.serving.MonitoringConfig", {"prometheus_config": _Prometheus.DESCRIPTOR.full_name})


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
        config = text_format.Parse(path.read_bytes(), _Message()).prometheus_config
    except text_format.ParseError as error:
        raise invalid_argument(f"{path} is no MonitoringConfig in protobuf's text format: {error}") from error
    if not config.enable:
        return ""
    if config.path and (not config.path.startswith("/") or config.path.lower().startswith("/v1/")):
        raise invalid_argument(
            f"{path}: path begins with / and not with /v1/, where the models are, not {config.path!r}"
        )
    return config.path or DEFAULT_PATH
