"""All served models by name, and the thread that looks for their new versions."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence

from serving.errors import Code, ServingError, invalid_argument
from serving.served_model import Loader, ModelConfig, ServedModel, State, Version, not_found
from serving.versions import find_versions

logger = logging.getLogger(__name__)


class ModelManager:
    """All served models by name, and the thread that looks for new versions.

    Args:
        configs: what to serve.
        load: opens a version directory; raises ServingError when it cannot.
        poll_wait_seconds: time between two looks at the disk.
    """

    def __init__(self, configs: Sequence[ModelConfig], load: Loader, poll_wait_seconds: float) -> None:
        self.models = {config.name: ServedModel(config, load) for config in configs}
        self._poll_wait_seconds = poll_wait_seconds
        self._stopping = threading.Event()
        self._poller = threading.Thread(target=self._poll, name="version-poller", daemon=True)

    def check(self) -> None:
        """See that each model has versions on disk, without loading any.

        Raises:
            ServingError: NOT_FOUND, naming the path and what is missing there.
        """
        for model in self.models.values():
            _require_versions(model.config)

    def start(self) -> None:
        """Load what is there, then keep looking for new versions.

        Raises:
            ServingError: a model has no version that can be served.
        """
        self.check()
        for model in self.models.values():
            model.refresh()
            _require_available(model)
        self._poller.start()

    def _poll(self) -> None:
        while not self._stopping.wait(self._poll_wait_seconds):
            for model in self.models.values():
                try:
                    model.refresh()
                except Exception:
                    logger.exception("model %s: looking for new versions failed", model.config.name)

    def stop(self) -> None:
        """Stop looking for versions and let go of all of them; one that a request holds goes when that ends."""
        self._stopping.set()
        if self._poller.is_alive():
            self._poller.join()
        for model in self.models.values():
            model.close()

    def lease(self, name: str, number: int | None, label: str | None) -> contextlib.AbstractContextManager[Version]:
        """Hold the version that a request names; see ServedModel.lease.

        Raises:
            ServingError: INVALID_ARGUMENT without a name or for an unknown label, NOT_FOUND when nothing is served.
        """
        if not name:
            raise invalid_argument("ModelSpec has no name specified.")
        model = self.models.get(name)
        if label is not None:
            if model is None or label not in model.config.labels:
                raise invalid_argument(f"Unrecognized servable version label: {label}")
            number = model.config.labels[label]
        if model is None:
            raise not_found(name, number)
        return model.lease(number)

    def statuses(self, name: str, number: int | None) -> list[Version]:
        """What GetModelStatus reports: all versions of a model, or the one asked for.

        Raises:
            ServingError: INVALID_ARGUMENT without a name, NOT_FOUND for an unknown model or version.
        """
        if not name:
            raise invalid_argument("Missing ModelSpec: it has no name")
        versions = self.models[name].statuses() if name in self.models else []
        if number is not None:
            versions = [version for version in versions if version.number == number]
        if not versions:
            what = "any versions" if number is None else f"version {number}"
            raise ServingError(Code.NOT_FOUND, f"Could not find {what} of model {name}")
        return versions


def _require_versions(config: ModelConfig) -> None:
    mend = "It must hold a directory with a number for a name (such as 1) that holds saved_model.pb and variables/."
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


def _require_available(model: ServedModel) -> None:
    versions = model.statuses()
    if not any(version.state is State.AVAILABLE for version in versions):
        reasons = "; ".join(f"version {version.number}: {version.error}" for version in versions)
        raise ServingError(
            Code.FAILED_PRECONDITION,
            f"model {model.config.name}: no version of {model.config.base_path} could be loaded: {reasons}",
        )
