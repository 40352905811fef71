"""A rollout on a server that runs: its clients, its page of metrics and its traffic file."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from tensorflow_serving.apis import prediction_service_pb2_grpc

from serving import protos
from serving.client import RestClient
from serving.errors import Code, ServingError
from serving.rollout import readings
from serving.rollout.judge import Decision, Thresholds
from serving.rollout.rollout import Observers, Rollout
from serving.server import ModelServer
from serving.settings import RestSettings
from serving.tensors import encode_values
from serving.traffic import Traffic, write_traffic
from tests.serving import models

GOOD, RENAMED, BROKEN = 2, 3, 4
# The limit of the latency is so wide that a busy machine does not decide.
THRESHOLDS = Thresholds(min_calls=30, max_latency_ratio=1000)


@pytest.fixture(scope="module")
def base_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("live") / "m"
    for number in (1, GOOD):
        models.copy_half_plus_two(path / str(number))
    models.save_identity(path / str(RENAMED), {"renamed": "float32"})
    (path / str(BROKEN)).mkdir()
    (path / str(BROKEN) / "saved_model.pb").write_bytes(b"no model")
    write_traffic(path, Traffic(1))
    return path


@pytest.fixture(scope="module")
def server(base_path: Path) -> Iterator[ModelServer]:
    settings = RestSettings(metrics_path=readings.DEFAULT_PATH)
    with ModelServer("m", base_path, poll_wait_seconds=0.05, rest_settings=settings) as running:
        yield running


class Load:
    """Requests from a thread as long as the context lasts, a third of them to the stable version by its label."""

    def __init__(self, server: ModelServer) -> None:
        self._client = RestClient(f"http://127.0.0.1:{server.rest_port}")
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.stable_calls = 0
        self.stable_failures: list[ServingError] = []

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()
        self._client.close()

    def _run(self) -> None:
        x = np.array([1.0], np.float32)
        while not self._end.is_set():
            for label in (None, None, "stable"):
                try:
                    self._client.predict("m", {"x": x}, version_label=label)
                except ServingError as error:
                    if label:
                        self.stable_failures.append(error)
                self.stable_calls += label is not None


def url(server: ModelServer) -> str:
    return f"http://127.0.0.1:{server.rest_port}"


@pytest.mark.parametrize(
    ("version", "decision", "reason"),
    [
        (RENAMED, Decision.ROLL_BACK, "of the canary's"),
        (BROKEN, Decision.ROLL_BACK, f"could not load version {BROKEN}"),
        (GOOD, Decision.PROMOTE, "0.00% of the canary's"),
    ],
    ids=["renamed", "broken", "good"],
)
def test_what_becomes_of_a_canary(
    base_path: Path, server: ModelServer, version: int, decision: Decision, reason: str
) -> None:
    write_traffic(base_path, Traffic(1))
    rollout = Rollout(base_path)
    with Load(server) as load:
        rollout.deploy(version, 0.5, [url(server)])
        observers = Observers([url(server)], thresholds=THRESHOLDS)
        assert rollout.watch(observers, every_seconds=0.1, timeout_seconds=60) is decision
    assert rollout.traffic() == Traffic(version if decision is Decision.PROMOTE else 1)
    assert reason in rollout.history()[-1]["reasons"][0]
    assert load.stable_calls and not load.stable_failures


def test_a_request_that_calls_no_signature_is_a_failure_of_its_version(base_path: Path, server: ModelServer) -> None:
    write_traffic(base_path, Traffic(1, RENAMED))
    page = readings.scrape
    with RestClient(url(server)) as client:
        client.wait_until_ready("m", version=RENAMED)
    before = readings.read_counters({"": page(url(server))}, "m")
    with RestClient(url(server)) as client, pytest.raises(ServingError) as refused:
        client.predict("m", {"x": np.array([1.0], np.float32)}, version=RENAMED)
    assert refused.value.code is Code.INVALID_ARGUMENT
    request = protos.PredictRequest()
    request.model_spec.name = "m"
    request.model_spec.version.value = RENAMED
    encode_values(np.array([1.0], np.float32), request.inputs["x"])
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel, pytest.raises(grpc.RpcError):
        prediction_service_pb2_grpc.PredictionServiceStub(channel).Predict(request, timeout=20)
    counted = readings.since(readings.read_counters({"": page(url(server))}, "m"), before)
    assert readings.calls_of(RENAMED, counted).errors == readings.calls_of(RENAMED, counted).calls == 2
