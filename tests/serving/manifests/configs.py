"""Configs of the manifests, for the tests."""

from __future__ import annotations

from typing import Any

from serving.manifests.config import ServingManifestConfig

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "pinned": {"stable_version": 3, "replicas": {"min": 1, "max": 1}},
    "labels": {"stable_version": 3, "canary": {"version": 4}, "batching": {"allowed_batch_sizes": [8, 32]}},
    "replicas": {
        "stable_version": 3,
        "canary": {"version": 4, "method": "replicas", "percent": 25},
        "replicas": {"min": 3, "max": 9},
        "ingress_namespaces": ["istio-system", "monitoring"],
    },
    "gateway": {
        "stable_version": 3,
        "canary": {"version": 4, "method": "gateway", "percent": 5},
        "gateway": {
            "name": "public",
            "namespace": "gateways",
            "hostnames": ["taxi.example.com"],
            "grpc_hostnames": ["grpc.taxi.example.com"],
        },
    },
    "s3": {
        "model_uri": "s3://bucket/models/chicago_taxi",
        "storage": {"credentials_secret": "s3-keys", "environment": {"RCLONE_S3_PROVIDER": "Minio"}},
    },
    "gs": {
        "model_uri": "gs://bucket/chicago_taxi/",
        "storage": {
            "service_account_annotations": {"iam.gke.io/gcp-service-account": "reader@p.iam.gserviceaccount.com"}
        },
    },
    "kind": {"model_uri": "file:///mnt/models/chicago_taxi"},
    "embedded": {"server": "embedded", "image": "registry.example/headrace:0.1.0", "stable_version": 3},
    "gpu": {"resources": {"gpus": 1, "cpu": 3.5, "memory": "8Gi"}},
}


def make_config(name: str = "plain", /, **changes: Any) -> ServingManifestConfig:
    """One of `SETTINGS`, with changes."""
    settings = {"model_name": "chicago_taxi", "model_uri": "pvc://models/serving_models/chicago_taxi"}
    return ServingManifestConfig(**(settings | SETTINGS[name] | changes))
