"""A rollout on a server that runs: its clients, its page of metrics and its traffic file."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
import yaml
from tensorflow_serving.apis import prediction_service_pb2_grpc

from serving import protos
from serving.client import RestClient
from serving.errors import Code, ServingError
from serving.rollout import readings
from serving.rollout.judge import Decision, Thresholds
from serving.rollout.places import VersionFolder
from serving.rollout.prometheus import Prometheus, Series
from serving.rollout.readings import ServerPages, Trial
from serving.rollout.rollout import Observers, Rollout
from serving.server import ModelServer
from serving.settings import RestSettings
from serving.tensors import encode_values
from serving.traffic import Traffic, write_traffic
from tests.serving import models

GOOD, RENAMED, BROKEN, SLOW = 2, 3, 4, 5
# What the requests ask for; the slow version takes as many seconds to answer.
X = np.array([0.5], np.float32)


@pytest.fixture(scope="module")
def base_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("live") / "m"
    for number in (1, GOOD):
        models.copy_half_plus_two(path / str(number))
    models.save_identity(path / str(RENAMED), {"renamed": "float32"})
    models.save_sleeper(path / str(SLOW), scale=0.5)
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
        while not self._end.is_set():
            for label in (None, None, "stable"):
                try:
                    self._client.predict("m", {"x": X}, version_label=label)
                except ServingError as error:
                    if label:
                        self.stable_failures.append(error)
                self.stable_calls += label is not None


def url(server: ModelServer) -> str:
    return f"http://127.0.0.1:{server.rest_port}"


# Where the latency is not the question its limit is so wide that a busy machine does not decide.
@pytest.mark.parametrize(
    ("version", "max_latency_ratio", "decision", "reason"),
    [
        (RENAMED, 1000, Decision.ROLL_BACK, "of the canary's"),
        (BROKEN, 1000, Decision.ROLL_BACK, f"could not load version {BROKEN}"),
        (SLOW, 1.5, Decision.ROLL_BACK, "the 95% quantile of the canary's latency is"),
        (GOOD, 1000, Decision.PROMOTE, "0.00% of the canary's"),
    ],
    ids=["renamed", "broken", "slow", "good"],
)
def test_what_becomes_of_a_canary(
    base_path: Path, server: ModelServer, version: int, max_latency_ratio: float, decision: Decision, reason: str
) -> None:
    write_traffic(base_path, Traffic(1))
    rollout, source = Rollout(VersionFolder(base_path)), ServerPages([url(server)])
    with Load(server) as load:
        rollout.deploy(version, 0.5, source)
        observers = Observers(source, thresholds=Thresholds(min_calls=30, max_latency_ratio=max_latency_ratio))
        assert rollout.watch(observers, every_seconds=0.1, timeout_seconds=60) is decision
    assert rollout.place.traffic() == Traffic(version if decision is Decision.PROMOTE else 1)
    assert reason in rollout.history()[-1]["reasons"][0]
    assert load.stable_calls and not load.stable_failures


@pytest.fixture
def prometheus(server: ModelServer, tmp_path: Path) -> Iterator[Prometheus]:
    """The real one, scraping the server each half second."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    target = {"targets": [f"127.0.0.1:{server.rest_port}"], "labels": {"track": "both"}}
    scraping = {"job_name": "m", "metrics_path": readings.DEFAULT_PATH, "static_configs": [target]}
    config = {"global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"}, "scrape_configs": [scraping]}
    (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(config))
    options = {"config.file": "prometheus.yaml", "storage.tsdb.path": "data", "web.listen-address": f"127.0.0.1:{port}"}
    command = ["prometheus", *(f"--{name}={value}" for name, value in options.items())]
    source = Prometheus(f"http://127.0.0.1:{port}")
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(200):
                with contextlib.suppress(ServingError):
                    if source._query('up{job="m"} == 1'):
                        break
                time.sleep(0.1)
            yield source
        finally:
            process.terminate()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus")
def test_a_real_prometheus_tells_the_same(base_path: Path, server: ModelServer, prometheus: Prometheus) -> None:
    rollout = Rollout(VersionFolder(base_path))
    thresholds = Thresholds(min_calls=30, max_latency_ratio=1000)
    for version, decision in ((RENAMED, Decision.ROLL_BACK), (BROKEN, Decision.ROLL_BACK), (GOOD, Decision.PROMOTE)):
        write_traffic(base_path, Traffic(1))
        with Load(server):
            rollout.deploy(version, 0.5, prometheus)
            observers = Observers(prometheus, thresholds=thresholds)
            assert rollout.watch(observers, every_seconds=0.5, timeout_seconds=60) is decision
    assert "127.0.0.1" in "".join(reason for event in rollout.history() for reason in event["reasons"])
    trial = Trial("m", Traffic(1, GOOD, 0.5), time.time() - 60, {})
    of_both = 'track="both"'
    found = dataclasses.replace(prometheus, series=Series(of_both, of_both)).observe(trial)
    assert found.canary.calls == pytest.approx(found.stable.calls, rel=0.1)  # a moment later
    assert found.stable.calls > found.stable.errors > 0 and found.stable.quantile_seconds(0.5) < 30


def test_a_request_that_calls_no_signature_is_a_failure_of_its_version(base_path: Path, server: ModelServer) -> None:
    write_traffic(base_path, Traffic(1, RENAMED))
    page = readings.scrape
    with RestClient(url(server)) as client:
        client.wait_until_ready("m", version=RENAMED)
    before = readings.read_counters({"": page(url(server))}, "m")
    with RestClient(url(server)) as client, pytest.raises(ServingError) as refused:
        client.predict("m", {"x": X}, version=RENAMED)
    assert refused.value.code is Code.INVALID_ARGUMENT
    request = protos.PredictRequest()
    request.model_spec.name = "m"
    request.model_spec.version.value = RENAMED
    encode_values(X, request.inputs["x"])
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel, pytest.raises(grpc.RpcError):
        prediction_service_pb2_grpc.PredictionServiceStub(channel).Predict(request, timeout=20)
    counted = readings.since(readings.read_counters({"": page(url(server))}, "m"), before)
    assert readings.calls_of(RENAMED, counted).errors == readings.calls_of(RENAMED, counted).calls == 2
