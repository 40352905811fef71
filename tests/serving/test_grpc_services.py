"""gRPC besides TF Serving's services: health, reflection, sockets, channel arguments, the form of the answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from serving.protos import PREDICTION_SERVICE, PredictRequest, PredictResponse
from serving.rpc.grpc_server import HEALTH_NAMES, GrpcServer
from serving.server import ModelServer
from serving.settings import GrpcSettings
from serving.tensors import encode_values
from tests.serving import models

STATUS = health_pb2.HealthCheckResponse.ServingStatus


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("grpc")
    models.copy_half_plus_two(path / "m" / "1")
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ModelServer]:
    """Listens on a socket only, which its REST side does without."""
    settings = GrpcSettings(
        socket_path=str(folder / "grpc.sock"), health_service=True, reflection_service=True, tensor_content=True
    )
    with ModelServer("m", folder / "m", grpc_port=None, rest_port=None, grpc_settings=settings) as running:
        yield running


@pytest.fixture(scope="module")
def channel(server: ModelServer, folder: Path) -> Iterator[grpc.Channel]:
    assert (server.grpc_port, server.rest_port) == (None, None)
    with grpc.insecure_channel(f"unix:{folder / 'grpc.sock'}") as opened:
        yield opened


def check(channel: grpc.Channel, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10).status


def request() -> Any:
    message = PredictRequest()
    message.model_spec.name = "m"
    encode_values(np.array([[2.0], [4.0]], np.float32), message.inputs["x"])
    return message


@pytest.mark.parametrize("name", HEALTH_NAMES)
def test_health(channel: grpc.Channel, name: str) -> None:
    assert check(channel, name) == STATUS.SERVING


def test_health_of_an_unknown_service(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        check(channel, "nope")
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_watcher_learns_that_the_server_drains() -> None:
    server = GrpcServer([], "127.0.0.1:0", GrpcSettings(health_service=True, max_threads=1))
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        watches = [
            health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=""), timeout=10)
            for _ in range(3)
        ]
        for watch in watches:
            assert next(watch).status == STATUS.SERVING
        assert check(channel, "") == STATUS.SERVING, "watchers hold no thread"
        stopped = server.stop(5)
        for watch in watches:
            assert next(watch).status == STATUS.NOT_SERVING
            watch.cancel()
        stopped.wait(5)


def test_health_and_reflection_are_off_by_default() -> None:
    server = GrpcServer([], "127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        with pytest.raises(grpc.RpcError) as raised:
            check(channel, "")
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
    server.stop(None).wait(5)


def test_a_client_without_any_proto_calls_predict(channel: grpc.Channel) -> None:
    database = ProtoReflectionDescriptorDatabase(channel)
    assert set(database.get_services()) == {
        "tensorflow.serving.PredictionService",
        "tensorflow.serving.ModelService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    symbol = f"{PREDICTION_SERVICE}.Predict"
    assert database.FindFileContainingSymbol(symbol).name == "tensorflow_serving/apis/prediction_service.proto"
    for unknown in ("tensorflow.serving.ModelService.Nope", "tensorflow.serving.Nope.Predict", "nope"):
        with pytest.raises(KeyError):
            database.FindFileContainingSymbol(unknown)
    method = DescriptorPool(database).FindServiceByName(PREDICTION_SERVICE).FindMethodByName("Predict")
    answer = channel.unary_unary(
        f"/{PREDICTION_SERVICE}/Predict",
        request_serializer=GetMessageClass(method.input_type).SerializeToString,
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )(GetMessageClass(method.input_type).FromString(request().SerializeToString()), timeout=10)
    assert np.frombuffer(answer.outputs["y"].tensor_content, "<f4").tolist() == [3.0, 4.0]
    assert not answer.outputs["y"].float_val


def test_answers_hold_float_val_by_default_and_channel_arguments_are_passed_on(folder: Path) -> None:
    arguments = (("grpc.max_receive_message_length", 100), ("grpc.lb_policy_name", "grpclb"))
    settings = GrpcSettings(channel_arguments=arguments)
    with (
        ModelServer("m", folder / "m", rest_port=None, grpc_settings=settings) as server,
        grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel,
    ):
        predict = channel.unary_unary(
            f"/{PREDICTION_SERVICE}/Predict", PredictRequest.SerializeToString, PredictResponse.FromString
        )
        assert list(predict(request(), timeout=10).outputs["y"].float_val) == [3.0, 4.0]
        large = request()
        large.inputs["x"].float_val.extend([1.0] * 100)
        with pytest.raises(grpc.RpcError) as raised:
            predict(large, timeout=10)
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
