"""All served models by name, and the threads that look for their new versions."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from serving.errors import Code, ServingError, invalid_argument
from serving.served_model import Loader, Model, ModelConfig, ServedModel, State, Version, not_found
from serving.versions import find_versions, fingerprint

logger = logging.getLogger(__name__)

# Python runs a signal's handler in the main thread, which a signal that the system gave to another thread does not wake.
_SIGNAL_POLL_SECONDS = 0.5


class ModelManager:
    """All served models by name. Public methods may be called from any thread.

    Args:
        configs: what to serve; their labels are taken as they are, those of a `reload` are checked.
        load: opens a version directory; raises ServingError when it cannot.
        poll_wait_seconds: time between two looks at the disk; 0 looks only at the start and after a reload.
        max_num_load_retries: how often a version that does not load is tried again.
        load_retry_interval_seconds: time between two tries.
        num_load_threads: how many versions may load at the same time, over all models; each takes its memory.
        allow_version_labels_for_unavailable_models: whether a reload may give a label that is not in use to a version
            that is not available.

    Attributes:
        models: name -> model, also of those that a reload took away, whose versions are in state END.
    """

    def __init__(
        self,
        configs: Sequence[ModelConfig],
        load: Loader,
        poll_wait_seconds: float,
        *,
        max_num_load_retries: int = 0,
        load_retry_interval_seconds: float = 60.0,
        num_load_threads: int = 1,
        allow_version_labels_for_unavailable_models: bool = False,
    ) -> None:
        self.models: dict[str, ServedModel] = {}
        self._configs = configs
        self._load = load
        self._poll_wait_seconds = poll_wait_seconds
        self._max_num_load_retries = max_num_load_retries
        self._load_retry_interval_seconds = load_retry_interval_seconds
        self._allow_unavailable = allow_version_labels_for_unavailable_models
        self._labels: Mapping[str, Mapping[str, int]] = {}
        self._watchers: dict[str, _Watcher] = {}
        self._is_stopped = False
        self._lock = threading.Lock()  # of the fields above
        self._reloading = threading.Lock()  # held while a config comes into force; one at a time
        self._loading = threading.Semaphore(num_load_threads)  # held while a version loads

    def configured(self) -> list[ServedModel]:
        """The models that the config in force lists."""
        with self._lock:
            return [watcher.model for watcher in self._watchers.values()]

    def check(self) -> None:
        """See that each model has versions on disk, without loading any.

        Raises:
            ServingError: NOT_FOUND, naming the path and what is missing there.
        """
        for config in self._configs:
            _require_versions(config)

    def start(self) -> None:
        """Load what is there, then keep looking for new versions.

        Raises:
            ServingError: a model has no version that can be served.
        """
        self.check()
        labels = {config.name: config.labels for config in self._configs}
        try:
            self._apply(self._configs, labels)
        except BaseException:
            self.stop()
            raise

    def reload(self, configs: Sequence[ModelConfig]) -> None:
        """Serve these models from now on and no others; returns when the models that are new have been loaded.

        A config that is refused changes nothing. tensorflow_serving/model_servers/server_core.cc, ReloadConfig.

        Raises:
            ServingError: FAILED_PRECONDITION for a label of a version that is not available, NOT_FOUND for a new model
                without versions on disk, UNKNOWN when a new model does not load (the config is in force all the same).
        """
        with self._reloading:
            labels = self._checked_labels(configs)
            for config in configs:
                known = self.models.get(config.name) if config.name in self._watchers else None
                if known is None or known.config.base_path != config.base_path:
                    _require_versions(config)
            self._apply(configs, labels)

    def _checked_labels(self, configs: Sequence[ModelConfig]) -> dict[str, Mapping[str, int]]:
        for config in configs:
            in_use = self._labels.get(config.name, {})
            versions = self.models[config.name].statuses() if config.name in self.models else []
            available = {version.number for version in versions if version.state is State.AVAILABLE}
            for label, number in config.labels.items():
                may_wait = self._allow_unavailable and in_use.get(label, number) == number
                if number not in available and not may_wait:
                    raise ServingError(
                        Code.FAILED_PRECONDITION,
                        f"Request to assign label to version {number} of model {config.name}, "
                        "which is not currently available for inference",
                    )
        return {config.name: config.labels for config in configs}

    def _apply(self, configs: Sequence[ModelConfig], labels: Mapping[str, Mapping[str, int]]) -> None:
        with self._lock:
            if self._is_stopped:
                raise ServingError(Code.UNAVAILABLE, "the server is stopping")
            old = self._watchers
            added = {config.name: self._watcher(config) for config in configs if config.name not in old}
            kept = {config.name: old[config.name] for config in configs if config.name in old}
            self._watchers = kept | added
            self.models = self.models | {name: watcher.model for name, watcher in added.items()}
            self._labels = labels
            for watcher in added.values():
                watcher.start()
        for config in configs:
            if config.name in kept:
                kept[config.name].update(config)
        for name in old.keys() - kept.keys():
            old[name].stop()
        for watcher in added.values():
            while not watcher.first_look.wait(_SIGNAL_POLL_SECONDS):
                pass
        _require_available([watcher.model for watcher in added.values()])

    def _watcher(self, config: ModelConfig) -> _Watcher:
        return _Watcher(
            config,
            self._load,
            self._loading,
            self._poll_wait_seconds,
            self._max_num_load_retries,
            self._load_retry_interval_seconds,
        )

    def stop(self) -> None:
        """Stop looking for versions and let go of all of them; one that a request holds goes when that ends."""
        with self._lock:
            self._is_stopped = True
            watchers = list(self._watchers.values())
        for watcher in watchers:
            watcher.stop()

    def lease(self, name: str, number: int | None, label: str | None) -> contextlib.AbstractContextManager[Version]:
        """Hold the version that a request names; see ServedModel.lease.

        Raises:
            ServingError: INVALID_ARGUMENT without a name or for an unknown label, NOT_FOUND when nothing is served.
        """
        if not name:
            raise invalid_argument("ModelSpec has no name specified.")
        if label is not None:
            number = self.labels(name).get(label)
            if number is None:
                raise invalid_argument(f"Unrecognized servable version label: {label}")
        model = self.models.get(name)
        if model is None:
            raise not_found(name, number)
        return model.lease(number)

    def labels(self, name: str) -> Mapping[str, int]:
        """Label -> version, of the config and of the traffic file, which counts more; none for an unknown model."""
        model = self.models.get(name)
        of_traffic = model.traffic_labels if model is not None else {}
        return {**self._labels.get(name, {}), **of_traffic}

    def statuses(self, name: str, number: int | None) -> list[Version]:
        """What GetModelStatus reports: all versions of a model, or the one asked for.

        Raises:
            ServingError: INVALID_ARGUMENT without a name, NOT_FOUND for an unknown model or version.
        """
        if not name:
            raise invalid_argument("Missing ModelSpec: it has no name")
        model = self.models.get(name)
        versions = model.statuses() if model else []
        if number is not None:
            versions = [version for version in versions if version.number == number]
        if not versions:
            what = "any versions" if number is None else f"version {number}"
            raise ServingError(Code.NOT_FOUND, f"Could not find {what} of model {name}")
        return versions


class _Watcher:
    """The thread that keeps one model as its config and the disk say; a thread each, for retries take minutes.

    Attributes:
        model: the model, touched by `refresh` in this thread only.
        first_look: set when all that was there at the start has been loaded or given up.
    """

    def __init__(
        self,
        config: ModelConfig,
        load: Loader,
        loading: threading.Semaphore,
        poll_wait_seconds: float,
        max_num_load_retries: int,
        load_retry_interval_seconds: float,
    ) -> None:
        self.model = ServedModel(config, self._load_with_retries)
        self.first_look = threading.Event()
        self._config = config
        self._load = load
        self._loading = loading
        self._poll_wait_seconds = poll_wait_seconds if poll_wait_seconds > 0 else None
        self._max_num_load_retries = max_num_load_retries
        self._load_retry_interval_seconds = load_retry_interval_seconds
        self._stopping = threading.Event()
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"version-poller-{config.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def update(self, config: ModelConfig) -> None:
        """Follow another config, at once."""
        self._config = config
        self._woken.set()

    def stop(self) -> None:
        """End the thread, then let go of the versions."""
        self._stopping.set()
        self._woken.set()
        self._thread.join()
        self.model.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.model.config = self._config
            try:
                self.model.refresh()
            except Exception:
                logger.exception("model %s: looking for new versions failed", self.model.config.name)
            self.first_look.set()
            self._woken.wait(self._poll_wait_seconds)
            self._woken.clear()
        self.first_look.set()

    def _load_with_retries(self, path: Path) -> Model:
        before = (sorted(self.model.found), fingerprint(path))  # what the look was that asks for this
        for retries_left in range(self._max_num_load_retries, 0, -1):
            try:
                return self._load_one(path)
            except Exception as error:
                logger.warning(
                    "model %s: %s does not load, %d more tries, the next in %g s: %s",
                    self.model.config.name,
                    path,
                    retries_left,
                    self._load_retry_interval_seconds,
                    error,
                )
                if self._is_overtaken(path, before):
                    raise
        return self._load_one(path)

    def _is_overtaken(self, path: Path, before: Any) -> bool:
        """Wait for the next try of a version; True at once when the disk, the config or the end asks for another look."""
        end = time.monotonic() + self._load_retry_interval_seconds
        while (now := self._on_disk(path)) is not None and now == before:
            seconds = end - time.monotonic()
            if seconds <= 0:
                return False
            if self._woken.wait(min(seconds, self._poll_wait_seconds or seconds)):
                return True
        return True

    def _on_disk(self, path: Path) -> Any:
        """What would change if there was something new to load; None when the version itself is gone."""
        try:
            found = find_versions(self.model.config.base_path)
            return (sorted(found), fingerprint(path)) if path in found.values() else None
        except OSError:
            return None

    def _load_one(self, path: Path) -> Model:
        with self._loading:
            return self._load(path)


def _require_versions(config: ModelConfig) -> None:
    mend = (
        "It must hold a directory with a number for a name (such as 1) that holds saved_model.pb and variables/, "
        "or model.tflite, or model.onnx."
    )
    try:
        found = find_versions(config.base_path)
    except OSError as error:
        message = f"model {config.name}: the base path {config.base_path} cannot be listed: {error.strerror}. {mend}"
        raise ServingError(Code.NOT_FOUND, message) from error
    if not config.policy(found):
        names = sorted(entry.name for entry in config.base_path.iterdir())[:10]
        message = (
            f"model {config.name}: the base path {config.base_path} holds no version to serve, only {names}. {mend}"
        )
        raise ServingError(Code.NOT_FOUND, message)


def _require_available(models: Sequence[ServedModel]) -> None:
    failures = []
    for model in models:
        versions = model.statuses()
        if not any(version.state is State.AVAILABLE for version in versions):
            reasons = "; ".join(f"version {version.number}: {version.error}" for version in versions)
            failures.append(
                f"model {model.config.name}: no version of {model.config.base_path} could be loaded: {reasons}"
            )
    if failures:
        raise ServingError(
            Code.UNKNOWN, f"{len(failures)} model(s) did not become available: {{{'}, {'.join(failures)}}}"
        )
