"""The embedded TF Serving-compatible server: models, REST and gRPC put together."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from serving.access.limits import ConcurrencyLimit, Gate
from serving.batching.parameters import PARAMETERS_FILE, BatchingParameters, read_parameters
from serving.batching.scheduler import BatchingModel, BatchListener, BatchScheduler
from serving.calls import Listener, Models
from serving.manager import ModelManager
from serving.monitoring.metrics import Metrics
from serving.monitoring.shadow import Shadow
from serving.request_log.log import Format, RequestLog, Rotation
from serving.rest.http_server import HttpServer
from serving.rest.rest_api import Page, RestApi
from serving.served_model import Model, ModelConfig
from serving.settings import GrpcSettings, LoadSettings, RestSettings
from serving.versions import VersionPolicy, latest

if TYPE_CHECKING:
    from serving.monitoring.tracing import Tracing
    from serving.rpc.grpc_server import GrpcServer

_MAX_WAITING_THREADS = 256


class ModelServer:
    """Serves models over REST and gRPC from this process.

    Args:
        name: the model's name in requests.
        base_path: the directory with the version directories (`base_path/1/saved_model.pb`).
        model_config_file: lists the models instead, as ModelServerConfig in text form; see model_config.
        model_config_file_poll_wait_seconds: time between two looks at that file; 0 reads it once.
        grpc_port: 0 lets the system choose; None opens none.
        rest_port: 0 lets the system choose; None opens none.
        host: the address to listen on; "" means every one.
        version_policy: which of the versions on disk are served; by default the newest.
        version_labels: label -> version, for requests that name a label.
        poll_wait_seconds: time between two looks for new versions; 0 looks once.
        max_num_load_retries: how often a version that does not load is tried again.
        load_retry_interval_seconds: time between two tries.
        allow_version_labels_for_unavailable_models: whether a model config may give a label that is not in use to a
            version that is not available.
        check_method_names: whether Classify and Regress refuse signatures that were saved for another method.
        rest_timeout_seconds: after this a REST request is answered with 504; None waits for ever.
        request_log_file: where to log requests and their answers, if anywhere.
        request_log_sampling_rate: the share of the requests that is logged, 0 to 1.
        request_log_format: `tfrecord` or `parquet`; by default as the file is named.
        request_log_rotation: when its next file begins, and how many are kept.
        shadow_label: calls are repeated on the version with this label, and the answers compared; see shadow.
        shadow_sampling_rate: the share of the calls that is repeated, 0 to 1.
        batching: how calls are put together into batches; None makes each call alone.
        per_model_batching: whether that is said by a file `batching_params.pbtxt` in a version's directory instead; a
            version without one is not batched. Of `batching` only the threads are used then.
        batch_listeners: told of each batch.
        tracing: makes spans of requests; None makes none. It is closed with the server.
        gate: what a request must pass before its body is read; None lets all in.
        concurrency_limit: refuses requests while too many are under way; None refuses none.
        load_settings: how versions are loaded.
        grpc_settings: how gRPC is served.
        rest_settings: how REST is served.

    Attributes:
        grpc_port: the port bound, once started; None for none.
        rest_port: the port bound, once started; None for none.

    Example:
        >>> with ModelServer("taxi", Path("pushed/taxi")) as server:
        ...     RestClient(f"http://127.0.0.1:{server.rest_port}").predict("taxi", {"x": x})
    """

    def __init__(
        self,
        name: str = "",
        base_path: Path | None = None,
        *,
        model_config_file: Path | None = None,
        model_config_file_poll_wait_seconds: float = 0.0,
        grpc_port: int | None = 0,
        rest_port: int | None = 0,
        host: str = "127.0.0.1",
        version_policy: VersionPolicy | None = None,
        version_labels: Mapping[str, int] | None = None,
        poll_wait_seconds: float = 1.0,
        max_num_load_retries: int = 0,
        load_retry_interval_seconds: float = 60.0,
        allow_version_labels_for_unavailable_models: bool = False,
        check_method_names: bool = False,
        rest_timeout_seconds: float | None = 30.0,
        request_log_file: Path | None = None,
        request_log_sampling_rate: float = 1.0,
        request_log_format: Format | None = None,
        request_log_rotation: Rotation = Rotation(),  # noqa: B008
        shadow_label: str = "",
        shadow_sampling_rate: float = 1.0,
        batching: BatchingParameters | None = None,
        per_model_batching: bool = False,
        batch_listeners: Sequence[BatchListener] = (),
        tracing: Tracing | None = None,
        gate: Gate | None = None,
        concurrency_limit: ConcurrencyLimit | None = None,
        load_settings: LoadSettings = LoadSettings(),  # noqa: B008  frozen
        grpc_settings: GrpcSettings = GrpcSettings(),  # noqa: B008
        rest_settings: RestSettings = RestSettings(),  # noqa: B008
    ) -> None:
        if (base_path is None) == (model_config_file is None):
            raise ValueError("give either the name and the base_path of a model, or a model_config_file")
        self.grpc_port = grpc_port
        self.rest_port = rest_port
        self._host = host
        self._rest_timeout_seconds = rest_timeout_seconds
        self._request_log_file = request_log_file
        self._request_log_sampling_rate = request_log_sampling_rate
        self._request_log_format = request_log_format
        self._request_log_rotation = request_log_rotation
        self._request_log: RequestLog | None = None
        self._shadow_label = shadow_label
        self._shadow_sampling_rate = shadow_sampling_rate
        self._shadow: Shadow | None = None
        self._batching = batching
        self._per_model_batching = per_model_batching
        self._batch_listeners = batch_listeners
        self._tracing = tracing
        self._batch_scheduler: BatchScheduler | None = None
        self._check_method_names = check_method_names
        self._gate = gate
        self._concurrency_limit = concurrency_limit
        self._load_settings = load_settings
        self._grpc_settings = grpc_settings
        self._rest_settings = rest_settings
        self._rest: HttpServer | None = None
        self._is_draining = False
        configs = []
        if base_path is not None:
            configs = [ModelConfig(name, Path(base_path), version_policy or latest(1), dict(version_labels or {}))]
        self.manager = ModelManager(
            configs,
            self._load,
            poll_wait_seconds,
            num_load_threads=load_settings.num_threads,
            max_num_load_retries=max_num_load_retries,
            load_retry_interval_seconds=load_retry_interval_seconds,
            allow_version_labels_for_unavailable_models=allow_version_labels_for_unavailable_models,
        )
        self.metrics = Metrics(self.manager)
        self.metrics.watch_limits(gate, concurrency_limit)
        self._model_config_file = model_config_file
        self._model_config_file_poll_wait_seconds = model_config_file_poll_wait_seconds
        self._stop_following: Callable[[], None] | None = None

    def start(self) -> None:
        """Load the models, then open both ports.

        Raises:
            ServingError: a model has no version that can be served, or the model config is wrong.
            OSError: a port or the request log cannot be had.
        """
        self.manager.check()
        with contextlib.ExitStack() as undo:
            listeners: list[Listener] = [self.metrics.called]
            if self._request_log_file is not None:
                self._request_log = RequestLog(
                    self._request_log_file,
                    self._request_log_sampling_rate,
                    format=self._request_log_format,
                    rotation=self._request_log_rotation,
                )
                undo.callback(self._request_log.close)
                listeners.append(self._request_log.add)
                self.metrics.watch_request_log(self._request_log)
            if self._tracing is not None:
                undo.callback(self._tracing.close)
                listeners.append(self._tracing.called)
            pages: dict[str, Page] = {}
            if self._shadow_label:
                self._shadow = Shadow(self.manager, self._shadow_label, self._shadow_sampling_rate)
                undo.callback(self._shadow.close)
                listeners.append(self._shadow)
                pages["/shadow"] = self._shadow.answer
            models = Models(self.manager, listeners)
            if self.rest_port is not None:
                self._rest = self._http_server(models, pages, self.rest_port)
                undo.callback(self._rest.abandon)
            self._grpc = self._grpc_server(models)
            undo.callback(self._grpc.stop, None)
            if self._batching is not None:
                name = self._batching.thread_pool_name
                batch_listeners = [self.metrics.batch_listener(name), *self._batch_listeners]
                self._batch_scheduler = BatchScheduler(self._batching.num_batch_threads, name, batch_listeners)
                undo.callback(self._batch_scheduler.close)
                self.metrics.watch_batches(self._batch_scheduler)
            undo.callback(self.manager.stop)
            self.manager.start()
            if self._model_config_file is not None:
                self._follow(self._model_config_file)
            undo.pop_all()
        self.grpc_port = self._grpc.port
        self._grpc.start()
        if self._rest is not None:
            self.rest_port = self._rest.port
            self._rest.start()

    def _load(self, path: Path) -> Model:
        parameters = self._batching
        if parameters is not None and self._per_model_batching:
            file = path / PARAMETERS_FILE
            parameters = read_parameters(file) if file.is_file() else None
        model = load_version(path, self._load_settings, self.metrics)
        if parameters is None or self._batch_scheduler is None:
            return model
        return BatchingModel(model, parameters, self._batch_scheduler)

    def _http_server(self, models: Models, pages: Mapping[str, Page], port: int) -> HttpServer:
        settings = self._rest_settings
        api = RestApi(
            models,
            lambda: self._is_draining,
            pages,
            gate=self._gate,
            cors=settings.cors,
            strict_json=settings.strict_json,
            check_method_names=self._check_method_names,
            metrics=self.metrics,
            metrics_path=settings.metrics_path,
        )
        scheme = "http" if settings.tls is None else "https"
        return HttpServer(
            api.handle if self._tracing is None else self._tracing.rest(api.handle, scheme),
            self._host,
            port,
            self._rest_timeout_seconds,
            settings,
            admit=None if self._gate is None else api.admit,
            concurrency_limit=self._concurrency_limit,
        )

    def _grpc_server(self, models: Models) -> GrpcServer:
        from serving.rpc.grpc_api import GrpcApi, make_handlers
        from serving.rpc.grpc_server import GrpcServer

        settings, limit = self._grpc_settings, self._concurrency_limit
        if self._batching is not None and settings.max_threads is None:
            settings = replace(settings, max_threads=_threads_to_fill_batches(self._batching))
        api = GrpcApi(
            models,
            tensor_content=settings.tensor_content,
            check_method_names=self._check_method_names,
            metrics=self.metrics,
        )
        address = None if self.grpc_port is None else f"{self._host or '[::]'}:{self.grpc_port}"
        interceptors = [] if self._tracing is None else [self._tracing.interceptor()]
        return GrpcServer(make_handlers(api, limit), address, settings, self._gate, limit, interceptors)

    def _follow(self, model_config_file: Path) -> None:
        from serving.model_config import ConfigFile

        config_file = ConfigFile(model_config_file, self.manager, self._model_config_file_poll_wait_seconds)
        config_file.start()
        self._stop_following = config_file.stop

    def stop(self, grace_seconds: float = 10.0) -> None:
        """Drain: report not ready, take no new connections, finish what is under way, then let go of everything.

        Args:
            grace_seconds: requests that take longer than this are cut off.
        """
        self._is_draining = True
        if self._batch_scheduler is not None:
            self._batch_scheduler.drain()
        grpc_stopped = self._grpc.stop(grace_seconds)
        if self._rest is not None:
            self._rest.stop(grace_seconds)
        grpc_stopped.wait()
        if self._stop_following is not None:
            self._stop_following()
        if self._shadow is not None:
            self._shadow.close()
        self.manager.stop()
        if self._batch_scheduler is not None:
            self._batch_scheduler.close()
        if self._request_log is not None:
            self._request_log.close()
        if self._tracing is not None:
            self._tracing.close()

    def __enter__(self) -> ModelServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _threads_to_fill_batches(parameters: BatchingParameters) -> int:
    """A gRPC call holds a thread while it waits; TF Serving advises two for each row of a batch. They cost memory only
    when there are so many clients, but not more than can be of use in one process."""
    return 4 * (os.cpu_count() or 1) + min(2 * parameters.max_batch_size, _MAX_WAITING_THREADS)


def load_version(
    path: Path,
    settings: LoadSettings = LoadSettings(),  # noqa: B008  frozen
    metrics: Metrics | None = None,
) -> Any:
    """Load a version directory and replay its warm-up requests.

    Args:
        path: the directory.
        settings: how to do it.
        metrics: told how long it took, if given.

    Raises:
        ServingError: it does not load, or its warm-up requests fail.
    """
    from serving.backends.load import load_model
    from serving.warmup import replay

    with metrics.loading(path) if metrics else contextlib.nullcontext():
        model = load_model(path, settings)
    try:
        started = time.perf_counter()
        if settings.warmup and replay(model, path, settings.warmup_iterations) and metrics:
            metrics.warmed_up(path, time.perf_counter() - started)
    except BaseException:
        model.close()
        raise
    return model
