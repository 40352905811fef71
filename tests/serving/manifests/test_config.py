"""ServingManifestConfig: what it derives, and what it refuses and how."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from serving.manifests.config import canary_replicas, with_versions
from tests.serving.manifests.configs import make_config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_name": "a/b"}, "'a/b' is no name that works in a URL and a path"),
        ({"model_name": "1st"}, "model_name '1st' gives no name for Kubernetes objects"),
        ({"model_name": "m" * 41}, "up to 40 lower-case letters"),
        ({"name": "Taxi"}, "String should match pattern"),
        ({"model_uri": "http://x/y"}, "expected pvc://claim/path, s3://bucket/path, gs://bucket/path or file:///path"),
        ({"model_uri": "file://relative"}, "received 'file://relative'"),
        ({"model_uri": "pvc://claim/../other"}, "a plain path without '..'"),
        ({"image": "tensorflow/serving"}, "'tensorflow/serving' is not pinned"),
        ({"image": "tensorflow/serving:latest"}, "add a tag other than latest, or a digest"),
        ({"replicas": {"min": 5}}, "replicas.max is 4, below replicas.min, which is 5"),
        ({"canary": {"version": 4}}, "a canary needs a stable_version beside it"),
        ({"stable_version": 4, "canary": {"version": 4}}, "canary.version and stable_version are both 4"),
        ({"stable_version": 3, "canary": {"version": 4, "method": "gateway"}}, "needs gateway.name"),
        ({"canary": {"method": "gateway"}}, "needs gateway.name"),
        (
            {"stable_version": 3, "canary": {"version": 4, "method": "replicas"}},
            "canary.percent 10 cannot be had by replicas: 1 beside 2 is 33 percent. Set replicas.min to 9",
        ),
        (
            {"gateway": {"name": "g", "hostnames": ["a"], "grpc_hostnames": ["a"]}},
            "none in both; received ['a'] and ['a']",
        ),
        ({"gateway": {"name": "g", "grpc_hostnames": ["a"]}}, "keeps REST and gRPC apart by host name"),
        ({"batching": {"allowed_batch_sizes": [32, 8]}}, "must ascend and end with max_batch_size, 32"),
        ({"batching": {"allowed_batch_sizes": [8]}}, "received [8]"),
        ({"storage": {"poll_seconds": 5}}, "nothing is copied from pvc://"),
        ({"storage": {"copy_image": "rclone"}}, "'rclone' is not pinned"),
        ({"replica": {}}, "Extra inputs are not permitted"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        make_config(**changes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "image", ["tensorflow/serving:2.20.0", "registry:5000/a/b@sha256:" + "0" * 64, "a:1@sha256:" + "0" * 64]
)
def test_pinned_images_pass(image: str) -> None:
    assert make_config(image=image).server_image == image


def test_what_is_derived() -> None:
    assert make_config(model_name="Chicago_Taxi.v2").resource_name == "chicago-taxi-v2"
    assert make_config(model_name="1st", name="first").resource_name == "first"
    assert make_config().server_image == "tensorflow/serving:2.20.0"
    assert make_config("gpu").server_image == "tensorflow/serving:2.20.0-gpu"
    assert make_config("gpu").num_threads == 4
    assert make_config(server="embedded").server_image.startswith("headrace:0")
    assert make_config("gs").location == ("bucket", "chicago_taxi")


@pytest.mark.parametrize(
    ("stable", "percent", "expected"), [(9, 10, 1), (3, 25, 1), (2, 50, 2), (1, 1, 1), (10, 33, 5)]
)
def test_canary_replicas(stable: int, percent: int, expected: int) -> None:
    assert canary_replicas(stable, percent) == expected


def test_with_versions() -> None:
    config = make_config("gateway")
    more = with_versions(config, stable_version=3, canary_version=4, canary_percent=50)
    assert more.canary is not None
    assert (more.canary.percent, more.canary.method) == (50, "gateway")
    done = with_versions(more, stable_version=4)
    assert (done.stable_version, done.canary_on_trial) == (4, None)
    assert with_versions(done, stable_version=4, canary_version=5, canary_percent=0) == done
    again = with_versions(done, stable_version=4, canary_version=5, canary_percent=5)
    assert again.canary is not None and again.canary.method == "gateway"
    assert with_versions(make_config("pinned"), stable_version=4).canary is None
    with pytest.raises(ValidationError, match="are both 4"):
        with_versions(config, stable_version=4, canary_version=4, canary_percent=5)
