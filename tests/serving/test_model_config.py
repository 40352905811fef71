"""The model config: what its text means, and a server that follows a file or a reload request."""

from __future__ import annotations

import json
import threading
from http.client import HTTPConnection
from pathlib import Path

import grpc
import numpy as np
import pytest
from google.protobuf import text_format

from serving.client import GrpcClient
from serving.errors import Code, ServingError
from serving.model_config import ReloadConfigRequest, ReloadConfigResponse, read_config
from serving.protos import PredictRequest, PredictResponse
from serving.server import ModelServer
from serving.tensors import encode_values
from tests.serving import models
from tests.serving.waiting import wait_for


def entry(name: str, base_path: Path | str, more: str = "", platform: str = 'model_platform: "tensorflow"') -> str:
    return f'config {{ name: "{name}" base_path: "{base_path}" {platform} {more} }}'


def config_of(*entries: str) -> str:
    return f"model_config_list {{ {' '.join(entries)} }}"


@pytest.mark.parametrize(
    ("policy", "served"),
    [
        ("", {3}),
        ("model_version_policy { latest { num_versions: 2 } }", {2, 3}),
        ("model_version_policy { latest { num_versions: 0 } }", {3}),
        ("model_version_policy { all {} }", {1, 2, 3}),
        ("model_version_policy { specific { versions: 1 versions: 3 versions: 9 } }", {1, 3}),
    ],
)
def test_config_file(tmp_path: Path, policy: str, served: set[int]) -> None:
    file = tmp_path / "models.config"
    labels = 'version_labels { key: "stable" value: 1 } version_labels { key: "canary" value: 3 }'
    file.write_text(
        config_of(entry("a", "/models/a", policy + labels), entry("b", "/b", platform="model_type: TENSORFLOW"))
    )
    a, b = read_config(file)
    assert (a.name, a.base_path, a.labels) == ("a", Path("/models/a"), {"stable": 1, "canary": 3})
    assert a.policy([1, 2, 3]) == served
    assert (b.name, b.base_path, b.labels) == ("b", Path("/b"), {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it has no model_config_list { ... }; leave that empty to serve no model"),
        ("custom_model_config {}", "it has no model_config_list { ... }"),
        ("model_config_list {\n  confg {} }", '2:3 : Message type "tensorflow.serving.ModelConfigList" has no field'),
        (config_of(entry("", "/a")), "a model in model_config_list has no name"),
        (config_of(entry("a", "/a"), entry("a", "/b")), "Illegal to list model a multiple times in config list"),
        (config_of(entry("a", "a")), "Expected model a to have an absolute path or URI; got base_path()=a"),
        (config_of(entry("a", "gs://bucket/a")), "base_path gs://bucket/a is a URI; give a local folder"),
        (config_of(entry("a", "/a", platform="")), 'unsupported platform ""; write model_platform: "tensorflow"'),
        (config_of(entry("a", "/a", platform='model_platform: "x"')), 'Model a requests unsupported platform "x"'),
    ],
)
def test_config_file_that_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "models.config"
    file.write_text(text)
    with pytest.raises(ServingError) as raised:
        read_config(file)
    assert raised.value.code is Code.INVALID_ARGUMENT
    assert message in raised.value.message
    assert str(file) in raised.value.message


def reload(channel: grpc.Channel, config: str) -> ReloadConfigResponse:
    request = ReloadConfigRequest()
    text_format.Parse(config, request.config)
    call = channel.unary_unary(
        "/tensorflow.serving.ModelService/HandleReloadConfigRequest",
        ReloadConfigRequest.SerializeToString,
        ReloadConfigResponse.FromString,
    )
    return call(request, timeout=30)


def predict_by_label(channel: grpc.Channel, label: str, x: float) -> tuple[int, float]:
    request = PredictRequest()
    request.model_spec.name, request.model_spec.version_label = "m", label
    encode_values(np.array([x], np.float32), request.inputs["x"])
    call = channel.unary_unary(
        "/tensorflow.serving.PredictionService/Predict",
        PredictRequest.SerializeToString,
        PredictResponse.FromString,
    )
    response = call(request, timeout=30)
    return response.model_spec.version.value, response.outputs["y"].float_val[0]


def predict_over_rest(server: ModelServer, label: str, x: float) -> tuple[int, dict[str, object]]:
    connection = HTTPConnection("127.0.0.1", server.rest_port, timeout=10)
    connection.request("POST", f"/v1/models/m/labels/{label}:predict", json.dumps({"inputs": [x]}))
    response = connection.getresponse()
    body = json.loads(response.read())
    connection.close()
    return response.status, body


def test_canary_rollout_over_grpc(tmp_path: Path) -> None:
    """Labels move with a reload while a request is under way on the version that goes."""
    models.save_sleeper(tmp_path / "1", scale=10)
    models.save_sleeper(tmp_path / "2", scale=20)
    one = "model_version_policy { specific { versions: 1 } }"
    both = "model_version_policy { specific { versions: 1 versions: 2 } }"
    two = "model_version_policy { specific { versions: 2 } }"
    stable_1, stable_2 = (f'version_labels {{ key: "stable" value: {number} }}' for number in (1, 2))
    canary = 'version_labels { key: "canary" value: 2 }'
    file = tmp_path / "models.config"
    file.write_text(config_of(entry("m", tmp_path, one)))
    with (
        ModelServer(model_config_file=file) as server,
        GrpcClient(f"127.0.0.1:{server.grpc_port}") as client,
        grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel,
    ):
        with pytest.raises(grpc.RpcError) as raised:
            reload(channel, config_of(entry("m", tmp_path, both + stable_1 + canary)))
        assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert [item.version for item in client.status("m")] == [1], "a refused config changes nothing"

        with pytest.raises(grpc.RpcError, match="Only ModelConfigList is currently supported"):
            reload(channel, "")
        response = reload(channel, config_of(entry("m", tmp_path, both + stable_1)))
        assert (response.HasField("status"), response.status.error_code) == (True, 0)
        wait_for(lambda: [item.state for item in client.status("m")] == ["AVAILABLE", "AVAILABLE"])
        reload(channel, config_of(entry("m", tmp_path, both + stable_1 + canary)))
        assert predict_by_label(channel, "stable", 0.001) == (1, np.float32(0.001) * 10)
        assert predict_over_rest(server, "canary", 0.5) == (200, {"outputs": [10.0]})

        answers: list[tuple[int, float]] = []
        slow = threading.Thread(target=lambda: answers.append(predict_by_label(channel, "stable", 1.5)))
        slow.start()
        wait_for(lambda: server.manager.statuses("m", 1)[0].leases == 1)
        reload(channel, config_of(entry("m", tmp_path, two + stable_2)))
        assert predict_over_rest(server, "stable", 0.0) == (200, {"outputs": [0.0]})
        assert predict_by_label(channel, "stable", 0.0)[0] == 2
        wait_for(lambda: [item.state for item in client.status("m")] == ["AVAILABLE", "UNLOADING"])
        slow.join()
        assert answers == [(1, 15.0)]
        wait_for(lambda: [item.state for item in client.status("m")] == ["AVAILABLE", "END"])
        unknown = {"error": "Unrecognized servable version label: canary"}
        assert predict_over_rest(server, "canary", 0.0) == (400, unknown)


def replace(file: Path, text: str) -> None:
    written = file.with_name("written")
    written.write_text(text)
    written.rename(file)


def test_file_is_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "b"):
        models.copy_half_plus_two(tmp_path / name / "1")
    file = tmp_path / "models.config"
    file.write_text(config_of(entry("a", tmp_path / "a")))
    with (
        ModelServer(model_config_file=file, model_config_file_poll_wait_seconds=0.05) as server,
        GrpcClient(f"127.0.0.1:{server.grpc_port}") as client,
    ):
        replace(file, "half a con")
        wait_for(lambda: "is not followed: INVALID_ARGUMENT" in caplog.text)
        x = np.array([[2.0]], np.float32)
        assert client.predict("a", {"x": x})["y"].tolist() == [[3.0]]
        replace(file, config_of(entry("b", tmp_path / "b")))
        wait_for(lambda: client.status("a")[0].state == "END")
        wait_for(lambda: [version.state.name for version in server.manager.models["b"].statuses()] == ["AVAILABLE"])
        assert client.predict("b", {"x": x})["y"].tolist() == [[3.0]]
        with pytest.raises(ServingError, match=r"Servable not found for request: Latest\(a\)"):
            client.predict("a", {"x": x})
    assert caplog.text.count("is not followed") == 1


def test_label_at_the_start_needs_leave(tmp_path: Path) -> None:
    """TF Serving looks at the labels before it loads."""
    models.copy_half_plus_two(tmp_path / "1")
    file = tmp_path / "models.config"
    file.write_text(config_of(entry("m", tmp_path, 'version_labels { key: "stable" value: 1 }')))
    with pytest.raises(ServingError, match="Request to assign label to version 1 of model m, which is not currently"):
        ModelServer(model_config_file=file).start()
    assert not any(thread.name.startswith("version-poller") for thread in threading.enumerate())
    with ModelServer(model_config_file=file, allow_version_labels_for_unavailable_models=True) as server:
        assert predict_over_rest(server, "stable", 2) == (200, {"outputs": [3.0]})


def test_one_model_or_a_config_file(tmp_path: Path) -> None:
    for arguments in ({}, {"base_path": tmp_path, "model_config_file": tmp_path / "models.config"}):
        with pytest.raises(ValueError, match="either the name and the base_path of a model, or a model_config_file"):
            ModelServer("m", **arguments)  # type: ignore[arg-type]
