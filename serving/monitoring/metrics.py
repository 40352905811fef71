"""What the server counts: TF Serving's metrics under its names, and per version and signature under ours.

Names, labels and buckets of TF Serving's: tensorflow_serving/servables/tensorflow/util.cc and saved_model_warmup_util.cc,
tensorflow_serving/batching/batching_session.cc, and tensorflow/cc/saved_model/loader.cc; how they look on the page:
tensorflow_serving/util/prometheus_exporter.cc. Mended are a line feed in a model name, which broke the page, sums, which
had six digits, and names that no model has, which were kept without end.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from serving.calls import Call, CallContext
from serving.errors import Code, ServingError
from serving.manager import ModelManager
from serving.monitoring.prometheus import Counter, Family, Histogram, Labels, Reading, Series, page, process_families
from serving.served_model import State, Version

if TYPE_CHECKING:
    from serving.access.limits import ConcurrencyLimit, Gate
    from serving.batching.scheduler import BatchListener, BatchRun, BatchScheduler
    from serving.request_log.log import RequestLog

_F = TypeVar("_F", bound=Family)

_LATENCY_MICROSECONDS = tuple(10 * 1.8**n for n in range(33))
_QUEUING_MICROSECONDS = tuple(100 * 1.2**n for n in range(52))
_NUM_EXAMPLES = tuple(2.0**n for n in range(15))
_ROWS = tuple(2.0**n for n in range(11))
_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_ENTRYPOINTS = {"rest": "REST", "grpc": "GRPC"}
_EXAMPLE_METHODS = ("classify", "regress", "Classify", "Regress")
_RUNTIME_APIS = {method: method.title() for method in ("predict", "Predict", *_EXAMPLE_METHODS)}
# Clients make up model and signature names; these bound what they can put on the page.
_MAX_UNKNOWN_NAMES = 100
_MAX_UNKNOWN_NAME_LENGTH = 128
_OTHER = "..."
_MAX_GONE_VERSIONS = 20  # of a model: the series of those that were unloaded before are forgotten


class Metrics:
    """The metrics of one server. All methods may be called from any thread.

    Args:
        manager: the models it serves.
    """

    def __init__(self, manager: ModelManager) -> None:
        self._manager = manager
        self._lock = threading.Lock()  # of all counters and histograms
        self._unknown_names: set[str] = set()
        self._families: list[Family] = []
        self._counters: dict[str, Counter] = {}
        self._load_seconds: dict[str, float] = {}
        # What a successful request counts in, so that it looks up one key and not one for each family.
        self._request_series: dict[tuple[str, str, str], tuple[Series, Series]] = {}
        self._call_series: dict[tuple[str, int, str, str, str], tuple[Series, Series, Series | None]] = {}

        self._load_attempts = self._counter(":tensorflow:cc:saved_model:load_attempt_count", ("model_path", "status"))
        self._load_latency = self._counter(":tensorflow:cc:saved_model:load_latency", ("model_path",))
        batching = ":tensorflow:serving:batching_session"
        self._queuing_latency = self._histogram(
            f"{batching}:queuing_latency", ("thread_pool_name",), _QUEUING_MICROSECONDS
        )
        self._batches = self._counter(f"{batching}:wrapped_run_count", ())
        self._warmup_latency = self._histogram(
            ":tensorflow:serving:model_warmup_latency", ("model_path", "status"), _LATENCY_MICROSECONDS
        )
        self._requests = self._counter(":tensorflow:serving:request_count", ("model_name", "status"))
        self._example_total = self._counter(":tensorflow:serving:request_example_count_total", ("model",))
        self._examples = self._histogram(":tensorflow:serving:request_example_counts", ("model",), _NUM_EXAMPLES)
        self._request_latency = self._histogram(
            ":tensorflow:serving:request_latency", ("model_name", "API", "entrypoint"), _LATENCY_MICROSECONDS
        )
        self._runtime_latency = self._histogram(
            ":tensorflow:serving:runtime_latency", ("model_name", "API", "runtime"), _LATENCY_MICROSECONDS
        )

        version, signature = ("model", "version"), ("model", "version", "signature", "api")
        self._calls = self._counter(
            "headrace_signature_calls_total", (*signature, "code"), "Calls of a signature, by status code."
        )
        self._seconds = self._histogram(
            "headrace_signature_seconds",
            signature,
            _SECONDS,
            "Seconds of the successful calls of a signature, with the wait for a batch.",
        )
        self._batch_rows = self._histogram(
            "headrace_batch_rows", (), _ROWS, "Rows of the requests in a batch, those added left out."
        )
        self._padding = self._counter("headrace_batch_padding_rows_total", (), "Rows added to fill batches up.")
        self.add(
            Reading(
                "headrace_version_state",
                "gauge",
                (*version, "state", "code"),
                "1 for the state of a version; code says why one did not load.",
                lambda: [((*_of(found), found.state.name, _code(found.error)), 1) for found in self._versions()],
            )
        )
        self.add(
            Reading(
                "headrace_version_requests_in_flight",
                "gauge",
                version,
                "Requests that use a version at this moment.",
                lambda: [(_of(found), found.leases) for found in self._versions()],
            )
        )
        self.add(
            Reading(
                "headrace_version_load_seconds",
                "gauge",
                version,
                "Seconds that a version took to load, without its warm-up.",
                lambda: [
                    (_of(found), self._load_seconds[str(found.path)])
                    for found in self._versions()
                    if str(found.path) in self._load_seconds
                ],
            )
        )
        build = (_installed("headrace"), _installed("tensorflow"), platform.python_version())
        self.add(
            Reading(
                "headrace_build_info",
                "gauge",
                ("version", "tensorflow", "python"),
                "1; the labels say what runs.",
                lambda: [(build, 1)],
            )
        )
        for family in process_families():
            self.add(family)

    def add(self, family: _F) -> _F:
        """Put a family on the page, below the others."""
        self._families.append(family)
        return family

    def watch_request_log(self, log: RequestLog) -> None:
        """Put what a request log has written and dropped on the page."""
        written, dropped = "headrace_request_log_written_total", "headrace_request_log_dropped_total"
        self.add(Reading(written, "counter", (), "Requests in the log.", lambda: [((), log.written)]))
        self.add(
            Reading(dropped, "counter", (), "Requests that the log had to leave out.", lambda: [((), log.dropped)])
        )

    def watch_batches(self, scheduler: BatchScheduler) -> None:
        """Put how many requests wait for a batch on the page."""
        help = "Requests that wait for a batch."
        self.add(Reading("headrace_batch_queue_tasks", "gauge", (), help, lambda: [((), scheduler.num_enqueued_tasks)]))

    def watch_limits(self, gate: Gate | None, concurrency_limit: ConcurrencyLimit | None) -> None:
        """Put what was refused before it was read on the page; nothing without limits."""

        def refused() -> Iterator[tuple[Labels, float]]:
            if gate is not None:
                yield from (((code.name,), count) for code, count in gate.refused.items())
            if concurrency_limit is not None:
                yield (Code.UNAVAILABLE.name,), concurrency_limit.refused

        name, help = "headrace_requests_refused_total", "Requests that a token, rate or concurrency limit refused."
        self.add(Reading(name, "counter", ("code",), help, refused))

    def _counter(self, name: str, labels: Sequence[str], help: str = "") -> Counter:
        self._counters[name] = Counter(name, labels, help, self._lock)
        return self.add(self._counters[name])

    def _histogram(self, name: str, labels: Sequence[str], bounds: Sequence[float], help: str = "") -> Histogram:
        bisect = bisect_left if help else bisect_right  # TF Serving's have no help
        return self.add(Histogram(name, labels, bounds, help, bisect, self._lock))

    def page(self) -> bytes:
        """What Prometheus gets."""
        self._forget_old_versions()
        return page(self._families)

    def _forget_old_versions(self) -> None:
        old = [
            version
            for model in self._manager.models.values()
            for version in [version for version in model.statuses() if _is_gone(version)][_MAX_GONE_VERSIONS:]
        ]
        if not old:
            return
        versions, paths = {_of(version) for version in old}, {str(version.path) for version in old}
        for family in (self._calls, self._seconds):
            family.discard(lambda labels: labels[:2] in versions)
        for family in (self._load_attempts, self._load_latency, self._warmup_latency):
            family.discard(lambda labels: labels[0] in paths)
        self._call_series.clear()

    def value(self, name: str) -> int:
        """The metric that a ReloadConfigRequest names, as TF Serving reads it (model_servers/model_service_impl.cc).

        Args:
            name: such as `/tensorflow/serving/request_count`.

        Returns:
            That of the first series; 0 for a histogram, and for a name that does not exist.
        """
        counter = self._counters.get(name.replace("/", ":"))
        return int(counter.first_value()) if counter else 0

    @contextlib.contextmanager
    def loading(self, path: Path) -> Iterator[None]:
        """Count and time the loading of a version directory."""
        started = time.perf_counter()
        status = "fail"
        try:
            yield
            status = "success"
        finally:
            seconds = time.perf_counter() - started
            self._load_attempts.add((str(path), status))
            self._load_latency.add((str(path),), round(seconds * 1e6))
            if status == "success":
                self._load_seconds[str(path)] = seconds

    def warmed_up(self, path: Path, seconds: float) -> None:
        """Note how long the warm-up requests of a version directory took."""
        self._warmup_latency.observe((str(path), "OK"), seconds * 1e6)

    def answered(self, context: CallContext, code: Code, seconds: float) -> None:
        """Count a request that has been answered, whatever it named."""
        if code is not Code.OK or context.is_late():
            self._requests.add((self._bounded(context.model_name), _status(code)))
            return
        key = context.model_name, context.method, context.api
        series = self._request_series.get(key)
        if series is None:
            name = self._bounded(context.model_name)
            with self._lock:
                series = (
                    self._requests.series((name, "OK")),
                    self._request_latency.series((name, context.method, _ENTRYPOINTS[context.api])),
                )
            if name != _OTHER:
                self._request_series[key] = series
        count, latency = series
        with self._lock:
            count[0] += 1
            self._request_latency.record(latency, seconds * 1e6)

    def called(self, call: Call) -> None:
        """Count a call of a signature; a Listener."""
        version, context, name = call.version, call.context, call.signature_name
        if call.error is not None or context.is_late():
            known = name in version.loaded.signatures
            labels = (version.model_name, version.number, name if known else _OTHER, context.api)
            self._calls.add((*labels, _status(call.error.code if call.error else Code.OK)))
            return
        key = version.model_name, version.number, name, context.api, context.method
        series = self._call_series.get(key)
        if series is None:
            series = self._call_series[key] = self._series_of_calls(*key)
        count, seconds, runtime = series
        with self._lock:
            count[0] += 1
            self._seconds.record(seconds, call.seconds)
            if runtime is not None:
                self._runtime_latency.record(runtime, call.seconds * 1e6)
        if context.method in _EXAMPLE_METHODS:
            num_examples = len(call.inputs["inputs"])
            self._examples.observe((version.model_name,), num_examples)
            self._example_total.add((version.model_name,), num_examples)

    def _series_of_calls(
        self, model: str, version: int, signature: str, api: str, method: str
    ) -> tuple[Series, Series, Series | None]:
        labels = (model, version, signature, api)
        runtime = _RUNTIME_APIS.get(method)
        with self._lock:
            return (
                self._calls.series((*labels, "OK")),
                self._seconds.series(labels),
                self._runtime_latency.series((model, runtime, "TF1")) if runtime else None,
            )

    def batch_listener(self, thread_pool_name: str) -> BatchListener:
        """What counts the batches of a scheduler."""

        def ran(batch: BatchRun) -> None:
            self._batches.add(())
            self._batch_rows.observe((), sum(batch.input_batch_size))
            self._padding.add((), batch.padding_size)
            for seconds in batch.queuing_latency_seconds:
                self._queuing_latency.observe((thread_pool_name,), seconds * 1e6)

        return ran

    def _bounded(self, model_name: str) -> str:
        if model_name in self._manager.models or model_name in self._unknown_names:
            return model_name
        if len(self._unknown_names) >= _MAX_UNKNOWN_NAMES or len(model_name) > _MAX_UNKNOWN_NAME_LENGTH:
            return _OTHER
        if not model_name.isprintable():  # a lone surrogate, which stands for a byte that is no UTF-8, is not
            return _OTHER
        self._unknown_names.add(model_name)
        return model_name

    def _versions(self) -> list[Version]:
        return [
            version for model in self._manager.models.values() for version in model.statuses() if not _is_gone(version)
        ]


def _status(code: Code) -> str:
    """The code as the client saw it; what is OK and not counted as such came after the deadline."""
    return "DEADLINE_EXCEEDED" if code is Code.OK else code.name


def _is_gone(version: Version) -> bool:
    return version.state is State.END and version.error is None


def _of(version: Version) -> tuple[str, int]:
    return version.model_name, version.number


def _code(error: ServingError | None) -> str:
    return error.code.name if error else "OK"


def _installed(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
