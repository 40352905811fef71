"""Where it stands who gets the requests for a model: `traffic.json` among its versions, or a folder of manifests."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from serving.errors import Code, ServingError, invalid_argument
from serving.manifests.documents import CONFIG_FILE
from serving.traffic import Traffic, read_traffic, write_traffic
from serving.versions import find_versions

if TYPE_CHECKING:
    from serving.manifests.config import ServingManifestConfig


class Place(Protocol):
    """Where it stands who gets the requests for a model.

    Attributes:
        folder: the folder; `rollout.json` lies in it, too.
        model: the model's name on the servers.
    """

    folder: Path
    model: str

    def versions(self) -> list[int] | None:
        """The versions that there are, ascending; None when that is not known here.

        Raises:
            ServingError: NOT_FOUND when there are none.
        """

    def traffic(self) -> Traffic | None:
        """How the requests are divided; None while the servers' version policy decides.

        Raises:
            ServingError: what stands there is wrong.
        """

    def divide(self, traffic: Traffic) -> None:
        """Divide them anew, all at once.

        Raises:
            ServingError: INVALID_ARGUMENT when they cannot be divided so, and nothing has changed.
            OSError: it cannot be written.
        """

    def apply(self) -> None:
        """Bring it to servers that do not look by themselves.

        Raises:
            ServingError: UNAVAILABLE when that failed.
        """

    def describe(self, traffic: Traffic) -> str:
        """Who gets the requests, in words."""


def open_place(folder: Path, model: str = "", overlay: str | None = None) -> Place:
    """A folder of versions, or of manifests.

    Args:
        folder: the folder.
        model: see VersionFolder.
        overlay: see ManifestFolder.

    Raises:
        ServingError: it is neither, or damaged; INVALID_ARGUMENT for what it has no use for.
    """
    if (folder / CONFIG_FILE).exists():
        if model:
            raise invalid_argument(f"the manifests in {folder} say what the model is called: leave --model out")
        return ManifestFolder(folder, overlay=overlay)
    if overlay is not None:
        raise invalid_argument(
            f"{folder} holds no manifests to apply: servers look into a folder of versions themselves"
        )
    return VersionFolder(folder, model)


class VersionFolder:
    """The folder with the version directories, which embedded servers look into.

    Args:
        folder: the folder.
        model: the model's name on the servers; by default the folder's.

    Raises:
        ServingError: NOT_FOUND without a version in it.
    """

    def __init__(self, folder: Path, model: str = "") -> None:
        self.folder = folder
        self.model = model or folder.absolute().name
        self.versions()

    def versions(self) -> list[int]:
        """See Place."""
        return _versions_in(self.folder)

    def traffic(self) -> Traffic | None:
        """See Place."""
        return read_traffic(self.folder)

    def divide(self, traffic: Traffic) -> None:
        """See Place."""
        write_traffic(self.folder, traffic)

    def apply(self) -> None:
        """See Place."""

    def describe(self, traffic: Traffic) -> str:
        """See Place."""
        return _in_shares(traffic)


class ManifestFolder:
    """A folder that `headrace manifests` wrote: its config gets other versions, and the files follow.

    Args:
        folder: the folder.
        base_path: the folder with the version directories, if this machine has it; default: the one in the config, if
            that is file:// and there.
        overlay: what `apply` brings to the servers: of a kustomization, dev or production, else the whole; None: nothing.

    Raises:
        ServingError: as `serving.manifests.folder.read`.
    """

    def __init__(self, folder: Path, *, base_path: Path | None = None, overlay: str | None = None) -> None:
        self.folder = folder
        self._overlay = overlay
        config, target = self._read()
        # KServe's runtime serves the model under the name of the InferenceService.
        self.model = config.resource_name if target == "kserve" else config.model_name
        self._base_path = base_path
        if base_path is None and config.scheme == "file":
            self._base_path = Path("/", config.location[1])

    def _read(self) -> tuple[ServingManifestConfig, str]:
        from serving.manifests import folder

        return folder.read(self.folder)

    def versions(self) -> list[int] | None:
        """See Place."""
        if self._base_path is None or not self._base_path.is_dir():
            return None
        return _versions_in(self._base_path)

    def traffic(self) -> Traffic | None:
        """See Place."""
        config, _ = self._read()
        if config.stable_version is None:
            return None
        if config.canary_on_trial is None:
            return Traffic(config.stable_version)
        version, canary = config.canary_on_trial
        return Traffic(config.stable_version, version, canary.percent / 100)

    def divide(self, traffic: Traffic) -> None:
        """See Place."""
        from serving.manifests import folder
        from serving.manifests.config import with_versions
        from serving.manifests.render import render

        if self._overlay is not None:
            self._find_program()
        percent = round(100 * traffic.canary_share)
        if traffic.canary is not None and not (1 <= percent <= 99 and percent / 100 == traffic.canary_share):
            raise invalid_argument(
                f"manifests divide requests in whole percents, 1 to 99, but got {100 * traffic.canary_share:g}"
            )
        config, target = self._read()
        try:
            changed = with_versions(
                config, stable_version=traffic.stable, canary_version=traffic.canary, canary_percent=percent
            )
            files = render(changed, target)
        except ValueError as error:
            raise invalid_argument(f"{self.folder}: {folder.reason_of(error)}") from error
        folder.write(files, self.folder)

    def apply(self) -> None:
        """See Place."""
        for command in self._commands() if self._overlay is not None else ():
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise ServingError(
                    Code.UNAVAILABLE,
                    f"{shlex.join(command)} ended with exit code {done.returncode}: {done.stderr.strip()}. "
                    f"{self.folder} says already what is to serve; mend that, then run {self._command_line()}",
                )

    def _commands(self) -> list[list[str]]:
        from serving.manifests import folder

        return folder.apply_commands(*self._read(), self.folder, self._overlay or folder.OVERLAYS[0])

    def _command_line(self) -> str:
        return " && ".join(map(shlex.join, self._commands()))

    def _find_program(self) -> None:
        program = self._commands()[0][0]
        if shutil.which(program) is None:
            raise ServingError(
                Code.FAILED_PRECONDITION,
                f"{program} is not on the PATH: install it, or change the files alone, without applying them",
            )

    def describe(self, traffic: Traffic) -> str:
        """See Place."""
        config, target = self._read()
        found = _in_shares(traffic)
        method = config.canary.method if config.canary is not None else "labels"
        if traffic.canary is not None and target != "kserve" and method == "labels":
            found = (
                f"version {traffic.canary} is served beside {traffic.stable}, as /labels/canary and /labels/stable: clients "
                f"choose, and those that name neither get the higher one, {max(traffic.stable, traffic.canary)}"
            )
        return found if self._overlay is not None else f"{found}\nto bring it there: {self._command_line()}"


def _versions_in(folder: Path) -> list[int]:
    try:
        versions = sorted(find_versions(folder))
    except OSError as error:
        raise ServingError(Code.NOT_FOUND, f"{folder} cannot be listed: {error.strerror}") from error
    if not versions:
        raise ServingError(Code.NOT_FOUND, f"{folder} holds no version directory; push a model first")
    return versions


def _in_shares(traffic: Traffic) -> str:
    if traffic.canary is None:
        return f"version {traffic.stable} gets all requests"
    return f"version {traffic.canary} gets {traffic.canary_share:.0%} of the requests, {traffic.stable} the rest"
