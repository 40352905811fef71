"""The InferenceService, in both ways of a canary."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from serving.manifests.render import render
from tests.serving.manifests import checks
from tests.serving.manifests.configs import SETTINGS, make_config

needs_crds = pytest.mark.skipif(checks.crds_folder() is None, reason="needs KServe's CRDs; HEADRACE_CRDS says where")


def documents(name: str, **changes: Any) -> dict[str, dict[str, Any]]:
    """The objects by kind, from the file."""
    text = render(make_config(name, **changes), "kserve")["inferenceservice.yaml"]
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def predictor(version: int, config_map: str, **changes: Any) -> dict[str, Any]:
    """What a predictor of a pinned version holds, in Knative mode."""
    return {
        "serviceAccountName": "chicago-taxi",
        "automountServiceAccountToken": False,
        "annotations": {
            "prometheus.io/scrape": "true",
            "prometheus.io/port": "8080",
            "prometheus.io/path": "/monitoring/prometheus/metrics",
        },
        "minReplicas": 2,
        "maxReplicas": 4,
        "storageUris": [
            {"uri": f"pvc://models/serving_models/chicago_taxi/{version}", "mountPath": f"/mnt/models/{version}"}
        ],
        "model": {
            "modelFormat": {"name": "tensorflow", "version": "2"},
            "runtime": "kserve-tensorflow-serving",
            "runtimeVersion": "2.20.0",
            "protocolVersion": "v1",
            "args": [
                "--grpc_channel_arguments=grpc.max_connection_age_ms=60000",
                "--rest_api_timeout_in_ms=30000",
                "--monitoring_config_file=/etc/serving/server/monitoring.config",
                "--enable_batching=true",
                "--batching_parameters_file=/etc/serving/server/batching.config",
                "--tensorflow_intra_op_parallelism=1",
                "--tensorflow_inter_op_parallelism=1",
            ],
            "resources": {"requests": {"cpu": "1000m", "memory": "2Gi"}, "limits": {"memory": "2Gi"}},
            "readinessProbe": {
                "httpGet": {"path": "/v1/models/chicago-taxi/metadata", "port": 8080},
                "periodSeconds": 5,
                "timeoutSeconds": 3,
            },
            "volumeMounts": [{"name": "server-config", "mountPath": "/etc/serving/server", "readOnly": True}],
        },
        "volumes": [{"name": "server-config", "configMap": {"name": config_map}}],
    } | changes


def test_canary_of_knative() -> None:
    found = documents("labels", kserve_mode="knative")
    service = found["InferenceService"]
    assert service["metadata"]["annotations"] == {"serving.kserve.io/deploymentMode": "Knative"}
    config_map = found["ConfigMap"]["metadata"]["name"]
    assert service["spec"] == {"predictor": {"canaryTrafficPercent": 10, **predictor(4, config_map)}}


def test_canary_of_standard() -> None:
    found = documents("labels", canary={"version": 4, "percent": 40})
    service = found["InferenceService"]
    assert service["metadata"]["annotations"] == {"serving.kserve.io/deploymentMode": "Standard"}
    assert list(service["spec"]) == ["predictor", "canary"]
    (entry,) = service["spec"]["canary"]
    assert entry["trafficPercent"] == 40
    in_standard = {"scaleMetric": "cpu", "scaleTarget": 70, "terminationGracePeriodSeconds": 45}
    lifecycle = {"lifecycle": {"preStop": {"sleep": {"seconds": 40}}}}
    config_map = found["ConfigMap"]["metadata"]["name"]
    for version, got in ((3, service["spec"]["predictor"]), (4, entry["predictor"])):
        expected = predictor(version, config_map, **in_standard)
        expected["model"] |= lifecycle
        if version == 4:
            expected |= {"name": "canary", "minReplicas": 1}
            expected["model"]["name"] = "kserve-container"
        assert got == expected


def test_image_and_storage() -> None:
    found = documents("s3", image="registry.example/serving@sha256:" + "0" * 64)
    got = found["InferenceService"]["spec"]["predictor"]
    assert got["model"]["image"].startswith("registry.example/")
    assert "runtimeVersion" not in got["model"]
    assert got["model"]["storageUri"] == "s3://bucket/models/chicago_taxi"
    assert "storageUris" not in got
    assert found["ServiceAccount"]["secrets"] == [{"name": "s3-keys"}]
    assert documents("gpu")["InferenceService"]["spec"]["predictor"]["model"]["runtimeVersion"] == "2.20.0-gpu"


@pytest.mark.parametrize(
    ("name", "message"), [("embedded", "KServe's runtime is TF Serving"), ("kind", "KServe copies no folder of a node")]
)
def test_what_kserve_cannot_serve(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render(make_config(name), "kserve")


@needs_crds
@pytest.mark.parametrize("mode", ["standard", "knative"])
@pytest.mark.parametrize("name", [name for name in SETTINGS if name not in ("embedded", "kind")])
def test_objects_are_valid(name: str, mode: str) -> None:
    for each in documents(name, kserve_mode=mode).values():
        assert checks.schema_problems(each) == []


@needs_crds
def test_the_check_refuses_what_is_broken() -> None:
    service = documents("labels")["InferenceService"]
    service["spec"]["canary"][0]["trafficPercent"] = 101
    del service["spec"]["canary"][0]["predictor"]["model"]["name"]
    service["spec"]["predictor"]["model"]["runtimeVersoin"] = "2.20.0"
    found = "\n".join(checks.schema_problems(service))
    assert "101 is greater than the maximum of 100" in found
    assert "'name' is a required property" in found
    assert "'runtimeVersoin' was unexpected" in found
