"""The metrics: the text format, what is counted, and the page of a running server."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import text_format
from prometheus_client.parser import text_string_to_metric_families
from tensorflow_serving.apis import prediction_service_pb2_grpc

from serving import protos
from serving.__main__ import _make_server, main
from serving.access.auth import BearerTokens
from serving.access.limits import ConcurrencyLimit, Gate, RateLimit
from serving.batching.scheduler import BatchRun
from serving.calls import Call, CallContext
from serving.errors import Code, ServingError
from serving.monitoring.metrics import Metrics
from serving.monitoring.monitoring_config import read_monitoring_config
from serving.monitoring.prometheus import Counter, Histogram, Reading, page
from serving.served_model import State, Version
from serving.server import ModelServer
from serving.settings import RestSettings
from serving.tensors import encode_values
from tests.serving import models


def samples(text: bytes) -> dict[str, dict[tuple[str, ...], float]]:
    """Sample name -> values of its labels, in the order of the page -> value, as Prometheus' own parser reads it."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            # The parser adds the end _total where a counter's name lacks it.
            name = sample.name if f"{sample.name}{{".encode() in text else sample.name.removesuffix("_total")
            series = found.setdefault(name, {})
            assert tuple(sample.labels.values()) not in series
            series[tuple(sample.labels.values())] = sample.value
    return found


# The text format


def test_a_page_looks_as_in_tf_serving() -> None:
    """The cases of tensorflow_serving/util/prometheus_exporter_test.cc, but for the full digits of the sum."""
    counter = Counter(":test:path:total", ("name",))
    counter.add(('"abc\\"',), 2)
    histogram = Histogram(":test:path:histogram", ("status",), [2.0**n for n in range(10)], bisect=bisect_right)
    for value in (2, 20, 200):
        histogram.observe(("good",), value)
    counts = {1: 0, 2: 0, 4: 1, 8: 1, 16: 1, 32: 2, 64: 2, 128: 2, 256: 3, 512: 3, "+Inf": 3}
    assert page([counter, histogram]).decode().splitlines() == [
        "# TYPE :test:path:total counter",
        ':test:path:total{name="\\"abc\\\\\\""} 2',
        "# TYPE :test:path:histogram histogram",
        *[f':test:path:histogram_bucket{{status="good",le="{bound}"}} {count}' for bound, count in counts.items()],
        ':test:path:histogram_sum{status="good"} 222',
        ':test:path:histogram_count{status="good"} 3',
    ]


def test_label_values_survive() -> None:
    value = 'a "b" \\n\nc\\ é'
    assert samples(
        page([Counter("c_total", ("x",)), Reading("g", "gauge", ("x",), "h", lambda: [((value,), 1.5)])])
    ) == {"g": {(value,): 1.5}}


def test_a_value_on_a_bound_is_in_the_bucket_that_ends_there() -> None:
    histogram = Histogram("h", (), (0.1, 0.5))
    for value in (0.1, 0.5, 0.6):
        histogram.observe((), value)
    found = samples(page([histogram]))
    assert found["h_bucket"] == {("0.1",): 1, ("0.5",): 2, ("+Inf",): 3}
    assert found["h_sum"] == {(): pytest.approx(1.2)}


def test_nothing_is_lost_between_threads() -> None:
    counter, histogram = Counter("c_total", ("x",)), Histogram("h", ("x",), (1.0,))

    def count() -> None:
        for _ in range(2000):
            counter.add(("a",))
            histogram.observe(("a",), 0.5)

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        samples(page([counter, histogram]))
    found = samples(page([counter, histogram]))
    assert found["c_total"] == {("a",): 16_000}
    assert found["h_count"] == {("a",): 16_000}
    assert found["h_sum"] == {("a",): 8_000}


# What is counted


@dataclass
class FakeModel:
    versions: list[Version]

    def statuses(self) -> list[Version]:
        return self.versions


@dataclass
class FakeManager:
    models: dict[str, FakeModel] = field(default_factory=dict)


def make_version(number: int = 1, state: State = State.AVAILABLE, **fields: Any) -> Version:
    model: Any = SimpleNamespace(signatures={"serving_default": None})
    return Version("m", number, Path(f"/models/m/{number}"), state, model=model, **fields)


def make_metrics(*versions: Version) -> Metrics:
    manager: Any = FakeManager({"m": FakeModel(list(versions))})
    return Metrics(manager)


def make_call(version: Version, context: CallContext, seconds: float = 0.02, **changes: Any) -> Call:
    fields: dict[str, Any] = {
        "signature_name": "serving_default",
        "inputs": {"inputs": np.zeros(3)},
        "outputs": {},
        "error": None,
    }
    return Call(version=version, context=context, seconds=seconds, **{**fields, **changes})


def test_requests_are_counted_under_the_name_they_gave() -> None:
    metrics = make_metrics()
    metrics.answered(CallContext(model_name="m", method="predict"), Code.OK, 0.0001)
    metrics.answered(CallContext(model_name="m"), Code.OK, 0.0001)
    metrics.answered(CallContext(model_name="m", method="Predict", api="grpc"), Code.OK, 0.01)
    metrics.answered(CallContext(model_name="nobody"), Code.NOT_FOUND, 0.01)
    metrics.answered(CallContext(), Code.INVALID_ARGUMENT, 0.01)
    found = samples(metrics.page())
    assert found[":tensorflow:serving:request_count"] == {
        ("", "INVALID_ARGUMENT"): 1,
        ("m", "OK"): 3,
        ("nobody", "NOT_FOUND"): 1,
    }
    assert found[":tensorflow:serving:request_latency_count"] == {
        ("m", "", "REST"): 1,
        ("m", "Predict", "GRPC"): 1,
        ("m", "predict", "REST"): 1,
    }
    assert found[":tensorflow:serving:request_latency_sum"]["m", "Predict", "GRPC"] == pytest.approx(10_000)
    buckets = found[":tensorflow:serving:request_latency_bucket"]
    bounds = [labels[3] for labels in buckets if labels[1] == "predict"]
    assert bounds == [f"{10 * 1.8**n:g}" for n in range(33)] + ["+Inf"]
    assert [buckets["m", "predict", "REST", bound] for bound in ("58.32", "104.976", "+Inf")] == [0, 1, 1]


def test_made_up_names_do_not_fill_the_memory() -> None:
    metrics = make_metrics()
    for number in range(1000):
        metrics.answered(CallContext(model_name=f"crawler{number}"), Code.NOT_FOUND, 0.0)
    for name in ("x" * 1000, "line\nfeed", "no utf-8: \udcff"):
        metrics.answered(CallContext(model_name=name), Code.NOT_FOUND, 0.0)
    metrics.answered(CallContext(model_name="m"), Code.OK, 0.0)
    found = samples(metrics.page())[":tensorflow:serving:request_count"]
    assert len(found) == 102
    assert found["...", "NOT_FOUND"] == 903
    assert found["crawler7", "NOT_FOUND"] == found["m", "OK"] == 1


def test_calls_are_counted_by_version_and_signature() -> None:
    version = make_version(3)
    metrics = make_metrics(version)
    rest, over_grpc = CallContext(method="predict"), CallContext(method="Predict", api="grpc")
    metrics.called(make_call(version, rest, 0.02))
    metrics.called(make_call(version, over_grpc, 0.002))
    metrics.called(make_call(version, rest, error=ServingError(Code.INVALID_ARGUMENT, "no")))
    metrics.called(make_call(version, rest, signature_name="made up", error=ServingError(Code.FAILED_PRECONDITION, "")))
    found = samples(metrics.page())
    assert found["headrace_signature_calls_total"] == {
        ("m", "3", "...", "rest", "FAILED_PRECONDITION"): 1,
        ("m", "3", "serving_default", "grpc", "OK"): 1,
        ("m", "3", "serving_default", "rest", "INVALID_ARGUMENT"): 1,
        ("m", "3", "serving_default", "rest", "OK"): 1,
    }
    assert found["headrace_signature_seconds_sum"] == {
        ("m", "3", "serving_default", "grpc"): 0.002,
        ("m", "3", "serving_default", "rest"): 0.02,
    }
    assert found["headrace_signature_seconds_bucket"]["m", "3", "serving_default", "rest", "0.025"] == 1
    assert found["headrace_signature_seconds_bucket"]["m", "3", "serving_default", "rest", "0.01"] == 0
    assert found[":tensorflow:serving:runtime_latency_sum"] == {("m", "Predict", "TF1"): pytest.approx(22_000)}


def test_an_answer_after_the_deadline_is_a_failure() -> None:
    version = make_version()
    metrics = make_metrics(version)
    late = CallContext(deadline=time.monotonic() - 1, model_name="m", method="predict")
    metrics.called(make_call(version, late))
    metrics.answered(late, Code.OK, 31.0)
    metrics.answered(late, Code.NOT_FOUND, 31.0)
    found = samples(metrics.page())
    assert list(found["headrace_signature_calls_total"]) == [("m", "1", "serving_default", "rest", "DEADLINE_EXCEEDED")]
    assert found[":tensorflow:serving:request_count"] == {("m", "DEADLINE_EXCEEDED"): 1, ("m", "NOT_FOUND"): 1}
    assert "headrace_signature_seconds_count" not in found
    assert ":tensorflow:serving:request_latency_count" not in found


def test_examples_are_counted_of_classify_and_regress() -> None:
    version = make_version()
    metrics = make_metrics(version)
    for method in ("classify", "Regress", "Predict"):
        metrics.called(make_call(version, CallContext(method=method)))
    metrics.called(make_call(version, CallContext(method="classify"), inputs={"inputs": np.zeros(4)}))
    found = samples(metrics.page())
    assert found[":tensorflow:serving:request_example_count_total"] == {("m",): 10}
    buckets = found[":tensorflow:serving:request_example_counts_bucket"]
    assert [buckets["m", bound] for bound in ("2", "4", "8", "16384", "+Inf")] == [0, 2, 3, 3, 3]
    assert {labels[1] for labels in found[":tensorflow:serving:runtime_latency_count"]} == {
        "Classify",
        "Predict",
        "Regress",
    }


def test_states_of_versions() -> None:
    broken = make_version(2, State.END, error=ServingError(Code.INTERNAL, "x"))
    metrics = make_metrics(broken, make_version(1, leases=4), make_version(0, State.END))
    found = samples(metrics.page())
    assert found["headrace_version_state"] == {("m", "2", "END", "INTERNAL"): 1, ("m", "1", "AVAILABLE", "OK"): 1}
    assert found["headrace_version_requests_in_flight"] == {("m", "2"): 0, ("m", "1"): 4}


def test_versions_that_are_long_gone_leave_the_page() -> None:
    versions = [make_version(number) for number in range(30, 0, -1)]
    metrics = make_metrics(*versions)
    for version in versions:
        metrics.called(make_call(version, CallContext(method="predict")))
        with metrics.loading(version.path):
            pass
    for version in versions[1:]:
        version.state = State.END
    found = samples(metrics.page())
    numbers = [int(labels[1]) for labels in found["headrace_signature_calls_total"]]
    assert sorted(numbers) == list(range(10, 31))
    assert len(found[":tensorflow:cc:saved_model:load_attempt_count"]) == 21
    versions[-1].state = State.AVAILABLE  # it is back, and counts from zero
    metrics.called(make_call(versions[-1], CallContext(method="predict")))
    calls = samples(metrics.page())["headrace_signature_calls_total"]
    assert calls["m", "1", "serving_default", "rest", "OK"] == 1


def test_loads_are_counted_and_timed() -> None:
    version = make_version()
    metrics = make_metrics(version)
    with pytest.raises(OSError, match="disk"), metrics.loading(version.path):
        raise OSError("disk")
    assert "headrace_version_load_seconds" not in samples(metrics.page())
    with metrics.loading(version.path):
        pass
    metrics.warmed_up(version.path, 0.5)
    found = samples(metrics.page())
    assert found[":tensorflow:cc:saved_model:load_attempt_count"] == {
        ("/models/m/1", "fail"): 1,
        ("/models/m/1", "success"): 1,
    }
    assert found[":tensorflow:serving:model_warmup_latency_sum"] == {("/models/m/1", "OK"): 500_000}
    assert 0 < found["headrace_version_load_seconds"]["m", "1"] < 1
    assert metrics.value("/tensorflow/cc/saved_model/load_attempt_count") == 1


def test_batches_are_counted() -> None:
    metrics = make_metrics()
    ran = metrics.batch_listener("threads")
    ran(BatchRun("serving_default", (3, 1), 8, 4, (0.001, 0.002)))
    ran(BatchRun("serving_default", (8,), 8, 0, (0.0,)))
    found = samples(metrics.page())
    assert found[":tensorflow:serving:batching_session:wrapped_run_count"] == {(): 2}
    assert found[":tensorflow:serving:batching_session:queuing_latency_sum"] == {("threads",): pytest.approx(3000)}
    assert found[":tensorflow:serving:batching_session:queuing_latency_count"] == {("threads",): 3}
    buckets = found["headrace_batch_rows_bucket"]
    assert [buckets[bound,] for bound in ("2", "4", "8", "+Inf")] == [0, 1, 2, 2]
    assert found["headrace_batch_padding_rows_total"] == {(): 4}


def test_refusals_are_counted(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("secret")
    gate = Gate(BearerTokens(tmp_path / "tokens"), RateLimit(1, 1, lambda: 0.0))
    limit = ConcurrencyLimit(0)
    metrics = make_metrics()
    metrics.watch_limits(gate, limit)
    for authorization in ("Bearer secret", "Bearer secret", "Bearer other", None):
        with contextlib.suppress(ServingError):
            gate.check(authorization)
    with pytest.raises(ServingError):
        limit.enter()
    assert samples(metrics.page())["headrace_requests_refused_total"] == {
        ("UNAUTHENTICATED",): 2,
        ("RESOURCE_EXHAUSTED",): 1,
        ("UNAVAILABLE",): 1,
    }


def test_the_process_is_described() -> None:
    found = samples(make_metrics().page())
    assert found["process_cpu_seconds_total"][()] == pytest.approx(time.process_time(), abs=1)
    assert found["process_start_time_seconds"][()] == pytest.approx(time.time() - 1800, abs=1801)
    assert found["process_resident_memory_bytes"][()] > 10e6
    assert 2 < found["process_open_fds"][()] < found["process_max_fds"][()]
    [(_, tensorflow, _)] = found["headrace_build_info"]
    assert tensorflow.startswith("2.")


# The config file


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ('prometheus_config { enable: true path: "/metrics" }', "/metrics"),
        ("prometheus_config: { enable: true }", "/monitoring/prometheus/metrics"),
        ('prometheus_config { path: "/metrics" }', ""),
        ("", ""),
    ],
)
def test_config(text: str, path: str, tmp_path: Path) -> None:
    (tmp_path / "config").write_text(text)
    assert read_monitoring_config(tmp_path / "config") == path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prometheus_config {\n enabled: true }", '2:2 : .* has no field named "enabled"'),
        ('prometheus_config { enable: true path: "metrics" }', "begins with /"),
        ('prometheus_config { enable: true path: "/V1/metrics" }', "not with /v1/"),
    ],
)
def test_wrong_config(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config").write_text(text)
    with pytest.raises(ServingError, match=f"{tmp_path}/config.*{message}"):
        read_monitoring_config(tmp_path / "config")


# The running server

PATH = "/monitoring/prometheus/metrics"


@pytest.fixture(scope="module")
def base_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("half_plus_two")
    models.copy_half_plus_two(path / "3")
    return path


@pytest.fixture(scope="module")
def server(base_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    log = tmp_path_factory.mktemp("log") / "requests"
    with ModelServer("m", base_path, request_log_file=log, rest_settings=RestSettings(metrics_path=PATH)) as running:
        yield running


def fetch(server: ModelServer, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, str, bytes]:
    connection = HTTPConnection("127.0.0.1", server.rest_port, timeout=20)  # type: ignore[arg-type]
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    answer = response.status, response.headers.get("Content-Type", ""), response.read()
    connection.close()
    return answer


def scrape(server: ModelServer) -> dict[str, dict[tuple[str, ...], float]]:
    status, content_type, text = fetch(server, "GET", PATH)
    assert (status, content_type) == (200, "text/plain")
    return samples(text)


def increase(after: Mapping[Any, float], before: Mapping[Any, float]) -> dict[Any, float]:
    found = {labels: value - before.get(labels, 0) for labels, value in after.items()}
    return {labels: value for labels, value in found.items() if value}


def test_rest_requests_are_counted(server: ModelServer) -> None:
    before = scrape(server)
    predict = json.dumps({"instances": [1.0, 2.0]}).encode()
    for method, path, body, status in [
        ("POST", "/v1/models/m:predict", predict, 200),
        ("POST", "/v1/models/m/versions/3:predict", predict, 200),
        ("POST", "/v1/models/m:predict", b"{", 400),
        ("POST", "/v1/models/m:predict", b'{"instances": [1], "signature_name": "none"}', 400),
        ("POST", "/v1/models/nobody:predict", predict, 404),
        ("GET", "/v1/models/m", b"", 200),
        ("GET", "/v1/models/m/metadata", b"", 200),
        ("DELETE", "/v1/models/m", b"", 400),
        ("OPTIONS", "/v1/models/m", b"", 400),
        ("GET", "/elsewhere", b"", 404),
    ]:
        assert fetch(server, method, path, body)[0] == status
    after = scrape(server)

    def grown(name: str) -> dict[Any, float]:
        return increase(after.get(name, {}), before.get(name, {}))

    assert grown(":tensorflow:serving:request_count") == {
        ("", "INVALID_ARGUMENT"): 1,
        ("", "FAILED_PRECONDITION"): 1,
        ("m", "INVALID_ARGUMENT"): 2,
        ("m", "OK"): 4,
        ("nobody", "NOT_FOUND"): 1,
    }
    assert grown(":tensorflow:serving:request_latency_count") == {("m", "", "REST"): 2, ("m", "predict", "REST"): 2}
    assert grown(":tensorflow:serving:runtime_latency_count") == {("m", "Predict", "TF1"): 2}
    assert grown("headrace_signature_calls_total") == {
        ("m", "3", "serving_default", "rest", "OK"): 2,
        ("m", "3", "...", "rest", "INVALID_ARGUMENT"): 1,  # the unknown signature; what is no JSON concerns no version
    }
    assert after["headrace_version_state"] == {("m", "3", "AVAILABLE", "OK"): 1}
    assert after["headrace_version_load_seconds"]["m", "3"] > 0
    assert after["headrace_request_log_dropped_total"] == {(): 0}
    model_path = str(server.manager.models["m"].statuses()[0].path)
    assert after[":tensorflow:cc:saved_model:load_attempt_count"] == {(model_path, "success"): 1}


def test_grpc_requests_are_counted(server: ModelServer) -> None:
    before = scrape(server)
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        for name, signature in (("m", ""), ("m", "none"), ("nobody", "")):
            request = protos.PredictRequest()
            request.model_spec.name, request.model_spec.signature_name = name, signature
            encode_values(np.ones((2, 1), np.float32), request.inputs["x"])
            with contextlib.suppress(grpc.RpcError):
                stub.Predict(request, timeout=20)
        metadata = protos.GetModelMetadataRequest(metadata_field=["signature_def"])
        metadata.model_spec.name = "m"
        stub.GetModelMetadata(metadata, timeout=20)  # TF Serving does not count it
    after = scrape(server)
    assert increase(
        after[":tensorflow:serving:request_count"], before.get(":tensorflow:serving:request_count", {})
    ) == {
        ("m", "FAILED_PRECONDITION"): 1,
        ("m", "OK"): 1,
        ("nobody", "NOT_FOUND"): 1,
    }
    assert after[":tensorflow:serving:request_latency_count"]["m", "Predict", "GRPC"] == 1
    calls = increase(after["headrace_signature_calls_total"], before.get("headrace_signature_calls_total", {}))
    assert calls == {
        ("m", "3", "...", "grpc", "FAILED_PRECONDITION"): 1,
        ("m", "3", "serving_default", "grpc", "OK"): 1,
    }


def test_the_page_is_for_every_method_but_no_query(server: ModelServer) -> None:
    assert fetch(server, "POST", PATH)[0] == fetch(server, "HEAD", PATH)[0] == 200
    status, content_type, text = fetch(server, "GET", f"{PATH}?x=1")
    assert (status, content_type, text.decode()) == (
        400,
        "text/plain",
        f"Unexpected path: {PATH}?x=1. Should be {PATH}",
    )
    assert fetch(server, "GET", f"{PATH}/")[0] == 404


def test_the_flag_makes_the_page(base_path: Path, tmp_path: Path) -> None:
    (tmp_path / "config").write_text('prometheus_config { enable: true path: "/numbers" }')
    flags = [f"--model_base_path={base_path}", "--port=auto", "--rest_api_port=auto"]
    for flag, status in ((f"--monitoring_config_file={tmp_path}/config", 200), ("--monitoring_config_file=", 404)):
        with _make_server(main.make_context("serving", [*flags, flag]).params) as server:
            assert fetch(server, "GET", "/numbers")[0] == status


def test_a_reload_answers_how_metrics_grew(server: ModelServer, base_path: Path) -> None:
    request = protos.ReloadConfigRequest(
        metric_names=["/tensorflow/cc/saved_model/load_attempt_count", "/tensorflow/serving/request_count", "none"]
    )
    config = f'name: "%s" base_path: "{base_path}" model_platform: "tensorflow"'
    text = "model_config_list {{ config {{ {} }} config {{ {} }} }}".format(config % "m", config % "again")
    text_format.Parse(text, request.config)
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        call = channel.unary_unary(
            "/tensorflow.serving.ModelService/HandleReloadConfigRequest",
            protos.ReloadConfigRequest.SerializeToString,
            protos.ReloadConfigResponse.FromString,
        )
        response = call(request, timeout=20)
    assert {metric.name: metric.int64_value_increase for metric in response.metric} == {
        "/tensorflow/cc/saved_model/load_attempt_count": 1,
        "/tensorflow/serving/request_count": 0,
        "none": 0,
    }
