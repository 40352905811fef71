"""State outside the artifacts that a step's output follows from: the data, the champion, the endpoint, the request log.

It belongs to a step's fingerprint. Nothing here imports TensorFlow, so that a run in which nothing changed stays quick.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from components import object_store
from components.config import DataConfig
from components.errors import ConfigError, DataError
from components.spans import Input, find_inputs

if TYPE_CHECKING:
    from serving.traffic import Traffic

PUSH_RECORD = "assets.extra/headrace.json"


def state(step: str, config: BaseModel, inputs: Mapping[str, Path]) -> dict[str, Any]:
    """The outside state that `step` depends on, as JSON-able values; empty for most steps."""
    settings: Any = config
    if step in ("encode", "ingest"):
        return {"data": _data_digest(settings)}
    if step == "validate":
        last = last_statistics(settings.drift_from, inputs["examples"].parent if inputs else None)
        found = {"schema": digest_data(settings.schema_path, "validate.schema_path")}
        return found if last is None else {**found, "last_span": digest_data(str(last), "validate.drift_from")}
    if step == "transform":
        return {
            f"vocabulary of {name}": digest_data(path, f"transform.features.{name}.vocabulary_path")
            for name, path in settings.vocabulary_paths.items()
        }
    if step == "evaluate":
        with object_store.base_path(settings.champion_path) as base:
            digest = _model_digest(inputs["model"])
            champion = find_champion(base, other_than=digest, manifests=settings.manifests)
            return {"champion": champion and champion_digest(champion)}
    if step == "monitor":
        return {
            "request_log": _log_digest(settings.request_log),
            "labels": digest_data(settings.labels, "monitor.labels"),
        }
    return {}


def last_statistics(drift_from: str | None, run_dir: Path | None) -> Path | None:
    """The statistics.json of the last span that `validate.drift_from` names.

    Args:
        drift_from: The setting.
        run_dir: The folder of this run, beside which `latest` looks for others; None: there is no such folder.

    Returns:
        The file; `None` if there is no such setting, or no other run yet.

    Raises:
        ConfigError: the path leads to none, or there is no folder to look in.
    """
    if drift_from is None:
        return None
    if drift_from == "latest":
        if run_dir is None:
            raise ConfigError("validate.drift_from: latest is for runs on one machine. Name the file, on a volume.")
        others = run_dir.absolute().parent.glob("*/statistics/statistics.json")
        whole = [file for file in others if (file.parent / "manifest.json").is_file()]
        older = [file for file in whole if file.parents[1] != run_dir.absolute()]
        return max(older, key=lambda file: (file.stat().st_mtime_ns, str(file)), default=None)
    for file in (
        Path(drift_from, "statistics", "statistics.json"),
        Path(drift_from, "statistics.json"),
        Path(drift_from),
    ):
        if file.is_file():
            return file
    raise ConfigError(
        f"validate.drift_from: {drift_from} has no statistics.json. Give the folder of a run that validated its data."
    )


def why_unknown(step: str, config: BaseModel) -> str | None:
    """Why nobody can tell whether a step's outside state has changed, so that it runs each time; `None` if one can."""
    settings: Any = config
    if step == "ingest" and ":" in settings.source and _data_digest(settings) is None:
        return f"source {settings.source} reads no file of data.path, so it is asked again"
    return None


def data_inputs(config: DataConfig) -> list[Input]:
    """What `data.path` stands for now: the newest span, or those asked for, or the files of each split.

    Raises:
        DataError: there is no such span, or the splits share a file.
    """
    return find_inputs(config, object_store.StoreListing() if object_store.is_remote(config.path) else _DiskListing())


class _DiskListing:
    """What lies where on this machine."""

    def names(self, folder: str) -> list[str]:
        try:
            return os.listdir(folder) if Path(folder).is_dir() else []
        except OSError as error:
            raise unreadable(folder, error, "data.path") from error

    def files(self, path: str) -> list[str]:
        try:
            return [str(file) for file in data_files(path)]
        except OSError as error:
            raise unreadable(path, error, "data.path") from error


def _data_digest(config: DataConfig) -> str | None:
    inputs = data_inputs(config)
    digests = [_digest_at(config.model_copy(update={"path": each.path})) for each in inputs]
    if None in digests:
        return None
    if [each.path for each in inputs] == [config.path]:
        return digests[0]
    told = [[each.record(), digest] for each, digest in zip(inputs, digests, strict=True)]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _digest_at(config: DataConfig) -> str | None:
    is_remote = object_store.is_remote(config.path)
    return object_store.data_digest(config) if is_remote else digest_data(config.path, "data.path")


def digest_data(path: str | None, setting: str) -> str | None:
    """Digest of the bytes of a file, of every file below a folder, or of the files of a glob; `None` if there is none.

    Raises:
        DataError: one of them cannot be read; `setting` says where in the config the path stands.
    """
    if path is None:
        return None
    digest = hashlib.sha256()
    place: Path | str = path
    try:
        root = path if Path(path).is_dir() else Path(path).parent
        files = data_files(path)
        for place in files:
            # With its folders: the label of an image is the folder that it lies in.
            digest.update(f"{os.path.relpath(place, root)}\0{place.stat().st_size}\0".encode())
            with place.open("rb") as stream:
                while block := stream.read(1 << 20):
                    digest.update(block)
    except OSError as error:
        raise unreadable(place, error, setting) from error
    return digest.hexdigest() if files else None


def _log_digest(path: str | None) -> str | None:
    """Digest of the names, sizes and times of a log's files: a log may be huge, and is only ever added to."""
    from serving.request_log.files import log_files

    if path is None:
        return None
    digest = hashlib.sha256()
    for file in log_files(path):
        with contextlib.suppress(FileNotFoundError):  # the server rotates it
            status = file.stat()
            digest.update(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def unreadable(place: Path | str, error: OSError, setting: str) -> DataError:
    """The error for a file or folder of `setting` that the system does not let us read."""
    mend = "Change its owner or mode" if error.errno in (errno.EACCES, errno.EPERM) else "Copy it again"
    where = error.filename or place
    return DataError(f"{setting}: {where} cannot be read: {error.strerror}. {mend}, or give another path.")


def data_files(path: str) -> list[Path]:
    """The files that a path, folder or glob names, sorted.

    Raises:
        OSError: a folder may not be read; it is not passed over, since its files would be missing without a word.
    """
    root = Path(path)
    if root.is_dir():
        walked = os.walk(root, onerror=_raise)
        return sorted(file for folder, _, names in walked for name in names if (file := Path(folder, name)).is_file())
    if root.is_file():
        return [root]
    pattern = root.relative_to(root.anchor) if root.anchor else root
    return sorted(file for file in Path(root.anchor or ".").glob(str(pattern)) if file.is_file())


def _raise(error: OSError) -> None:
    raise error


def versions(base_path: Path) -> list[int]:
    """The numbers of the complete model versions under a TF Serving base path, oldest first."""
    if not base_path.is_dir():
        return []
    return sorted(int(d.name) for d in base_path.iterdir() if d.name.isdigit() and (d / "saved_model.pb").is_file())


def traffic_of(base_path: Path, manifests: str | None = None) -> Traffic | None:
    """How the requests for a pushed model are divided, or None while the server's version policy decides.

    Args:
        base_path: The folder of its versions.
        manifests: The folder of manifests that say so, as in `deploy.manifests`; None: traffic.json among the versions.

    Raises:
        DataError: the file that says so is broken.
    """
    from serving.errors import ServingError
    from serving.rollout.places import ManifestFolder
    from serving.traffic import read_traffic

    try:
        return read_traffic(base_path) if manifests is None else ManifestFolder(Path(manifests)).traffic()
    except ServingError as error:
        raise DataError(f"{error.message}. Mend it, or take it away.") from error


def find_champion(base_path: Path, *, other_than: str, manifests: str | None = None) -> Path | None:
    """The version that gets the traffic, else the newest pushed one; never the model `other_than` itself."""
    numbers = versions(base_path)
    traffic = traffic_of(base_path, manifests)
    if traffic is not None and traffic.stable in numbers:
        numbers.append(traffic.stable)
    for number in reversed(numbers):
        if champion_digest(base_path / str(number)) != other_than:
            return base_path / str(number)
    return None


def why_gone(step: str, result: Mapping[str, Any]) -> str | None:
    """Why a whole artifact no longer holds: what its step did outside the artifacts has been undone. `None` if it holds."""
    if step == "push" and not object_store.has_file(result["version_path"], "saved_model.pb"):
        return f"the pushed model {result['version_path']} is gone"
    return None


def champion_digest(version_path: Path) -> str:
    """Digest of the trained model that a pushed version was exported from; of its graph if someone else put it there."""
    record = version_path / PUSH_RECORD
    if record.is_file():
        return str(json.loads(record.read_text())["model_digest"])
    return hashlib.sha256((version_path / "saved_model.pb").read_bytes()).hexdigest()


def _model_digest(model: Path) -> str:
    return str(json.loads((model / "manifest.json").read_text())["digest"])
