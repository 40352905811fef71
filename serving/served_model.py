"""One served model: loading, choosing, reference counting and unloading of its versions.

Knows nothing of HTTP, gRPC or TensorFlow; a version's model is whatever the loader returns.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from serving.backends import memory
from serving.errors import Code, ServingError
from serving.traffic import Traffic, read_traffic
from serving.versions import VersionPolicy, find_versions, fingerprint

logger = logging.getLogger(__name__)

DEFAULT_SIGNATURE = "serving_default"
EXPLAIN_SIGNATURE = "explain"  # what `:explain` calls, when the model has it


class State(IntEnum):
    """Life of a version; the numbers are those of GetModelStatus (tensorflow_serving/apis/get_model_status.proto)."""

    UNKNOWN = 0
    START = 10
    LOADING = 20
    AVAILABLE = 30
    UNLOADING = 40
    END = 50


class Signatures(Protocol):
    """A model whose signatures can be called."""

    signatures: Any

    def run(self, signature_name: str, inputs: Mapping[str, np.ndarray], outputs: Any = ()) -> dict[str, np.ndarray]:
        """Call a signature by name."""


class Model(Signatures, Protocol):
    """What the server needs of a loaded model (saved_model.SavedModel has it)."""

    def run(
        self, signature_name: str, inputs: Mapping[str, np.ndarray], outputs: Any = (), context: Any = None
    ) -> dict[str, np.ndarray]:
        """Call a signature by name; `context` is the request's CallContext, for a model that lets requests wait."""

    def close(self) -> None:
        """Release the model."""


Loader = Callable[[Path], Model]


@dataclass
class Version:
    """One version of a model.

    Attributes:
        model_name: the model it belongs to.
        number: the name of its directory.
        path: that directory.
        state: where it is in its life.
        error: why it could not be loaded.
        model: the loaded model, while there is one.
        leases: the requests that use it at this moment.
    """

    model_name: str
    number: int
    path: Path
    state: State = State.START
    error: ServingError | None = None
    model: Model | None = None
    leases: int = 0

    @property
    def loaded(self) -> Model:
        """The model of a version that is held by a lease."""
        if self.model is None:
            raise ServingError(Code.INTERNAL, f"version {self.number} of {self.model_name} is not loaded")
        return self.model


@dataclass(frozen=True)
class ModelConfig:
    """What to serve under one name.

    Attributes:
        name: the name in requests.
        base_path: the directory that holds the version directories.
        policy: which of the versions found there are served.
        labels: label -> version, for requests that name a label.
    """

    name: str
    base_path: Path
    policy: VersionPolicy
    labels: Mapping[str, int]


class ServedModel:
    """The versions of one model. Public methods may be called from any thread; `refresh` from one at a time.

    Attributes:
        config: what to serve.
        found: number -> directory, as the last look at the disk had it.
    """

    def __init__(self, config: ModelConfig, load: Loader) -> None:
        self.config = config
        self.found: Mapping[int, Path] = {}
        self._load = load
        self._lock = threading.Lock()
        self._versions: dict[int, Version] = {}
        self._newest: Version | None = None
        self._broken: dict[Path, Any] = {}  # a version's directory that did not load -> the files it had then
        self._complaint = ""
        self._traffic: Traffic | None = None
        self._traffic_complaint = ""

    @property
    def traffic_labels(self) -> Mapping[str, int]:
        """Label -> version, as the traffic file says; none without one."""
        return self._traffic.labels if self._traffic is not None else {}

    def refresh(self) -> None:
        """Look at the disk: load what is new, then let go of what the policy no longer wants.

        Never raises for what it finds there. What is served stays served until its successor is ready; a version that
        fails to load is reported in the log and in `statuses`, and tried again when its files change.
        """
        self.found = found = self._find()
        if not found:
            return
        self._read_traffic()
        wanted = self._wanted(found)
        for number in sorted(wanted, key=lambda number: (found[number] in self._broken, number)):
            if self._needs_loading(number, found[number]):
                self._bring_up(number, found[number])
        if any(version.number in wanted for version in self._available()):
            for version in self._available():
                if version.number not in wanted:
                    self._retire(version)

    def _find(self) -> dict[int, Path]:
        try:
            found = find_versions(self.config.base_path)
            complaint = "" if found else "holds no version directory (a number) with a model in it"
        except OSError as error:
            found, complaint = {}, f"cannot be listed: {error}"
        if complaint and complaint != self._complaint:
            logger.warning(
                "model %s: the base path %s %s; serving goes on as it was",
                self.config.name,
                self.config.base_path,
                complaint,
            )
        self._complaint = complaint
        return found

    def _read_traffic(self) -> None:
        """Follow the traffic file; a broken one is told, and the last good one holds."""
        complaint = ""
        try:
            self._traffic = read_traffic(self.config.base_path)
        except (ServingError, OSError) as error:
            complaint = str(error)
        if complaint and complaint != self._traffic_complaint:
            logger.error("model %s: the traffic stays as it was: %s", self.config.name, complaint)
        self._traffic_complaint = complaint

    def _wanted(self, found: Mapping[int, Path]) -> set[int]:
        if self._traffic is None:
            return self.config.policy(found)
        return set(self._traffic.labels.values()) & found.keys()

    def _needs_loading(self, number: int, path: Path) -> bool:
        if path in self._broken:
            return self._broken[path] != fingerprint(path)
        known = self._versions.get(number)
        return known is None or known.state is State.END or known.path != path

    def _bring_up(self, number: int, path: Path) -> None:
        version = Version(self.config.name, number, path, State.LOADING)
        before = fingerprint(path)
        # Of another base path, before a reload: it serves until this one is ready.
        replaced = next((each for each in self._available() if each.number == number), None)
        if replaced is None:
            with self._lock:
                self._versions[number] = version
        try:
            version.model = self._load(path)
        except Exception as error:
            version.error = _as_serving_error(error)
        if version.error is None and fingerprint(path) != before:
            version.error = ServingError(Code.UNAVAILABLE, f"the files of {path} changed while they were read")
        if version.error is not None:
            self._broken[path] = before
            logger.error("model %s: version %d does not load: %s", self.config.name, number, version.error)
            self._unload(version)
            return
        self._broken.pop(path, None)
        memory.settle()
        with self._lock:
            version.state = State.AVAILABLE
            self._versions[number] = version
            self._choose_newest()
        logger.info("model %s: version %d is available", self.config.name, number)
        if replaced is not None:
            self._retire(replaced)

    def _available(self) -> list[Version]:
        with self._lock:
            return [version for version in self._versions.values() if version.state is State.AVAILABLE]

    def _choose_newest(self) -> None:
        available = [version for version in self._versions.values() if version.state is State.AVAILABLE]
        self._newest = max(available, key=lambda version: version.number, default=None)

    def _retire(self, version: Version) -> None:
        with self._lock:
            version.state = State.UNLOADING
            self._choose_newest()
            idle = version.leases == 0
        if idle:
            self._unload(version)

    def _unload(self, version: Version) -> None:
        if version.model is not None:
            version.model.close()
            version.model = None
            logger.info("model %s: version %d is unloaded", self.config.name, version.number)
        memory.give_back()
        version.state = State.END

    def _default(self) -> Version | None:
        if self._traffic is None:
            return self._newest
        for number in (self._traffic.choose(), self._traffic.stable):
            version = self._versions.get(number)
            if version is not None and version.state is State.AVAILABLE:
                return version
        return self._newest

    @contextlib.contextmanager
    def lease(self, number: int | None) -> Iterator[Version]:
        """Hold a version while a request uses it; it is not unloaded before.

        Args:
            number: the version wanted, or None for what the traffic file says, else the newest available.

        Raises:
            ServingError: NOT_FOUND when it is not available.
        """
        with self._lock:
            version = self._default() if number is None else self._versions.get(number)
            if version is None or version.state is not State.AVAILABLE:
                raise not_found(self.config.name, number)
            version.leases += 1
        try:
            yield version
        finally:
            with self._lock:
                version.leases -= 1
                last = version.leases == 0 and version.state is State.UNLOADING
            if last:
                self._unload(version)

    def statuses(self) -> list[Version]:
        """All versions this server has seen, newest first."""
        with self._lock:
            return sorted(self._versions.values(), key=lambda version: -version.number)

    def close(self) -> None:
        """Let go of all versions."""
        for version in self._available():
            self._retire(version)


def not_found(name: str, number: int | None) -> ServingError:
    """The error for a model or version that is not served."""
    wanted = f"Latest({name})" if number is None else f"Specific({name}, {number})"
    return ServingError(Code.NOT_FOUND, f"Servable not found for request: {wanted}")


def _as_serving_error(error: Exception) -> ServingError:
    """The error alone: with its traceback it would keep what was loaded so far."""
    if isinstance(error, ServingError):
        return ServingError(error.code, error.message)
    return ServingError(Code.INTERNAL, f"{type(error).__name__}: {error}")
