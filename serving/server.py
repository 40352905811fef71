"""The embedded TF Serving-compatible server: models, REST and gRPC put together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from serving.calls import Listener, Models
from serving.http_server import HttpServer
from serving.manager import ModelManager
from serving.request_log import RequestLog
from serving.rest_api import Page, RestApi
from serving.served_model import ModelConfig
from serving.shadow import Shadow
from serving.versions import VersionPolicy, latest


class ModelServer:
    """Serves models over REST and gRPC from this process.

    Args:
        name: the model's name in requests.
        base_path: the directory with the version directories (`base_path/1/saved_model.pb`).
        model_config_file: lists the models instead, as ModelServerConfig in text form; see model_config.
        model_config_file_poll_wait_seconds: time between two looks at that file; 0 reads it once.
        grpc_port: 0 lets the system choose.
        rest_port: 0 lets the system choose.
        host: the address to listen on; "" means every one.
        version_policy: which of the versions on disk are served; by default the newest.
        version_labels: label -> version, for requests that name a label.
        poll_wait_seconds: time between two looks for new versions; 0 looks once.
        max_num_load_retries: how often a version that does not load is tried again.
        load_retry_interval_seconds: time between two tries.
        allow_version_labels_for_unavailable_models: whether a model config may give a label that is not in use to a
            version that is not available.
        rest_timeout_seconds: after this a REST request is answered with 504; None waits for ever.
        request_log_file: where to append the predict requests, if anywhere.
        request_log_sampling_rate: the share of the requests that is logged, 0 to 1.
        shadow_label: calls are repeated on the version with this label, and the answers compared; see shadow.
        shadow_sampling_rate: the share of the calls that is repeated, 0 to 1.

    Attributes:
        grpc_port: the port bound, once started.
        rest_port: the port bound, once started.

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
        grpc_port: int = 0,
        rest_port: int = 0,
        host: str = "127.0.0.1",
        version_policy: VersionPolicy | None = None,
        version_labels: Mapping[str, int] | None = None,
        poll_wait_seconds: float = 1.0,
        max_num_load_retries: int = 0,
        load_retry_interval_seconds: float = 60.0,
        allow_version_labels_for_unavailable_models: bool = False,
        rest_timeout_seconds: float | None = 30.0,
        request_log_file: Path | None = None,
        request_log_sampling_rate: float = 1.0,
        shadow_label: str = "",
        shadow_sampling_rate: float = 1.0,
    ) -> None:
        if (base_path is None) == (model_config_file is None):
            raise ValueError("give either the name and the base_path of a model, or a model_config_file")
        self.grpc_port = grpc_port
        self.rest_port = rest_port
        self._host = host
        self._rest_timeout_seconds = rest_timeout_seconds
        self._request_log_file = request_log_file
        self._request_log_sampling_rate = request_log_sampling_rate
        self._request_log: RequestLog | None = None
        self._shadow_label = shadow_label
        self._shadow_sampling_rate = shadow_sampling_rate
        self._shadow: Shadow | None = None
        self._is_ready = False
        configs = []
        if base_path is not None:
            configs = [ModelConfig(name, Path(base_path), version_policy or latest(1), dict(version_labels or {}))]
        self.manager = ModelManager(
            configs,
            load_version,
            poll_wait_seconds,
            max_num_load_retries=max_num_load_retries,
            load_retry_interval_seconds=load_retry_interval_seconds,
            allow_version_labels_for_unavailable_models=allow_version_labels_for_unavailable_models,
        )
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
            listeners: list[Listener] = []
            if self._request_log_file is not None:
                self._request_log = RequestLog(self._request_log_file, self._request_log_sampling_rate)
                undo.callback(self._request_log.close)
                listeners.append(self._request_log.add)
            pages: dict[str, Page] = {}
            if self._shadow_label:
                self._shadow = Shadow(self.manager, self._shadow_label, self._shadow_sampling_rate)
                undo.callback(self._shadow.close)
                listeners.append(self._shadow)
                pages["/shadow"] = self._shadow.answer
            models = Models(self.manager, listeners)
            rest_api = RestApi(models, lambda: self._is_ready, pages)
            self._rest = HttpServer(rest_api.handle, self._host, self.rest_port, self._rest_timeout_seconds)
            undo.callback(self._rest.abandon)

            from serving.grpc_api import GrpcApi, make_server  # imports TensorFlow: after all that can fail quickly

            grpc_address = f"{self._host or '[::]'}:{self.grpc_port}"
            self._grpc, grpc_port = make_server(GrpcApi(models), grpc_address)
            undo.callback(self._grpc.stop, None)
            undo.callback(self.manager.stop)
            self.manager.start()
            if self._model_config_file is not None:
                self._follow(self._model_config_file)
            undo.pop_all()
        self.grpc_port, self.rest_port = grpc_port, self._rest.port
        self._grpc.start()
        self._rest.start()
        self._is_ready = True

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
        self._is_ready = False
        grpc_stopped = self._grpc.stop(grace_seconds)
        self._rest.stop(grace_seconds)
        grpc_stopped.wait()
        if self._stop_following is not None:
            self._stop_following()
        if self._shadow is not None:
            self._shadow.close()
        self.manager.stop()
        if self._request_log is not None:
            self._request_log.close()

    def __enter__(self) -> ModelServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def load_version(path: Path) -> Any:
    """Load a version directory and replay its warm-up requests.

    Raises:
        ServingError: it does not load, or its warm-up requests fail.
    """
    from serving.saved_model import SavedModel
    from serving.warmup import replay

    model = SavedModel(path)
    try:
        replay(model, path)
    except BaseException:
        model.close()
        raise
    return model
