"""Artifacts: directories that are complete or absent, and the fingerprints that say what they were made from.

A step writes into a directory with a temporary name. When the step is done, the manifest is written last and the
directory is renamed. A reader that finds no manifest, or files that differ from it, refuses the directory.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import errno
import functools
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from components import external, plugins
from components.errors import ArtifactError, ConfigError, HeadraceError
from components.section import effective_settings

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
# Folders of an artifact for what differs from run to run (event files, what callbacks write, drawn latencies, times
# of trials): no part of its identity.
VOLATILE = ("tensorboard", "callbacks", "pictures", "trials")
_OUR_PACKAGES = ("components", "models", "serving")
_VERSIONED = ("tensorflow", "keras")
_VERSIONED_BY_STEP = {
    "encode": ("duckdb", "pyarrow"),
    "ingest": ("duckdb", "pyarrow"),
    "tune": ("optuna",),
    "compress": ("ai-edge-litert",),
    "export": ("tf2onnx", "onnx"),
    "verify": ("ai-edge-litert", "onnxruntime"),
}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_IN_THE_WAY = (errno.EEXIST, errno.ENOTDIR)


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What an artifact is made from and made of.

    Attributes:
        step: Name of the step that wrote it.
        fingerprint: Digest of `made_from`: equal fingerprints mean equal artifacts.
        made_from: Digests of the inputs, the configuration, the source, the library versions and the outside state.
        files: Relative path -> `{"size_bytes", "sha256"}`.
        digest: Digest of `files`, by which steps further on know this artifact.
        result: What the step returned, as JSON-able values.
        ancestors: What the inputs, and all that they were made from, were made from: name -> what `origin` gives.
        format_version: Version of this layout.
    """

    step: str
    fingerprint: str
    made_from: dict[str, Any]
    files: dict[str, dict[str, Any]]
    digest: str
    result: dict[str, Any]
    ancestors: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    format_version: int = FORMAT_VERSION


class Output:
    """A directory being written: `path` to write in, `result` to set before the end."""

    def __init__(self, path: Path, scratch: Path, fingerprint: str, made_from: dict[str, Any]) -> None:
        self.path = path
        self.scratch = scratch
        self.fingerprint = fingerprint
        self.made_from = made_from
        self.result: Any = None

    def origin(self, step: str, *, digest: str, result: dict[str, Any]) -> dict[str, Any]:
        """What `origin` will give of it, while it is not yet written."""
        return origin(Manifest(step, self.fingerprint, self.made_from, {}, digest, result))


@contextlib.contextmanager
def writing(path: Path, *, step: str, inputs: Mapping[str, Path], config: BaseModel) -> Iterator[Output]:
    """Write the artifact of a step: whole at the end of the block, untouched if the block raises.

    Args:
        path: Where the artifact will stand; one that is there already is replaced.
        step: Name of the step.
        inputs: The artifacts that the step reads, by name.
        config: The step's configuration.

    Yields:
        The output: write under `.path` and set `.result` to the step's frozen result. `.scratch` is a folder for
        checkpoints: it outlives a killed run of the same fingerprint and is removed when the artifact is whole.

    Raises:
        ArtifactError: the disk is full or may not be written.
    """
    made_from = make_fingerprint_parts(step=step, inputs=inputs, config=config)
    fingerprint = digest_of(made_from)
    scratch_root = path.parent / f".{path.name}.scratch"
    scratch = scratch_root / fingerprint[:16]
    with disk_errors_explained(path):
        _remove_left_overs(path)
    with replacing_directory(path) as directory:
        output = Output(directory, scratch, fingerprint, made_from)
        yield output
        if output.result is None:
            raise TypeError(f"step '{step}' set no result on its output")
        _write_manifest(output, step, ancestors_of(inputs))
    shutil.rmtree(scratch_root, ignore_errors=True)


def read_manifest(path: Path) -> Manifest:
    """The manifest of a whole artifact.

    Raises:
        ArtifactError: there is no artifact, it is incomplete, or it was written by another version of this layout.
    """
    file = path / MANIFEST
    try:
        fields = json.loads(file.read_text())
    except FileNotFoundError as error:
        state = "is incomplete (it has no manifest)" if path.is_dir() else "does not exist"
        raise ArtifactError(f"Artifact {path} {state}. Run the step that makes it again.") from error
    except ValueError as error:
        raise ArtifactError(f"Artifact {path} has a damaged manifest: {error}. Delete it and run again.") from error
    if fields.get("format_version") != FORMAT_VERSION:
        raise ArtifactError(
            f"Artifact {path} has layout version {fields.get('format_version')}, this code reads {FORMAT_VERSION}. "
            "Delete it and run again."
        )
    return Manifest(**fields)


def origin(manifest: Manifest) -> dict[str, Any]:
    """What an artifact was made from and what its step returned, for those that are made from it; without its files."""
    made_from = manifest.made_from | {"source": digest_of(manifest.made_from["source"])}
    facts = {name: getattr(manifest, name) for name in ("step", "digest", "fingerprint", "result")}
    return facts | made_from


def ancestors_of(inputs: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """The `origin` of each input and of all that they were made from, by name."""
    manifests = {name: read_manifest(path) for name, path in sorted(inputs.items())}
    found: dict[str, dict[str, Any]] = {}
    for manifest in manifests.values():
        found |= manifest.ancestors
    return found | {name: origin(manifest) for name, manifest in manifests.items()}


def open_artifact(path: Path, *, step: str) -> Manifest:
    """The manifest of an artifact that is about to be read, every file compared with it.

    Raises:
        ArtifactError: as `read_manifest`; or another step made it; or a file is missing or differs.
    """
    manifest = read_manifest(path)
    if manifest.step != step:
        raise ArtifactError(f"Artifact {path} was made by step '{manifest.step}', expected one of '{step}'.")
    check_files(path, manifest)
    return manifest


def check_files(path: Path, manifest: Manifest, *, sizes_only: bool = False) -> None:
    """Compare the files of an artifact with its manifest.

    Raises:
        ArtifactError: a file is missing or differs.
    """
    for name, expected in manifest.files.items():
        file = path / name
        if not file.is_file() or file.stat().st_size != expected["size_bytes"]:
            raise ArtifactError(f"Artifact {path}: {name} is missing or has another size. Delete it and run again.")
        if not sizes_only and digest_file(file) != expected["sha256"]:
            raise ArtifactError(f"Artifact {path}: {name} is not what was written. Delete it and run again.")


def make_fingerprint_parts(*, step: str, inputs: Mapping[str, Path], config: BaseModel) -> dict[str, Any]:
    """Everything the output of a step follows from, in named parts, so that a difference can be told."""
    settings = effective_settings(config)
    return {
        "inputs": {name: read_manifest(path).digest for name, path in sorted(inputs.items())},
        "config": settings,
        "source": source_digests(step_modules(step, settings)),
        "versions": {
            package: importlib.metadata.version(package) for package in (*_VERSIONED, *_VERSIONED_BY_STEP.get(step, ()))
        },
        "outside": external.state(step, config, inputs),
    }


def digest_of(value: Any) -> str:
    """SHA-256 of a JSON-able value, the same for every order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def digest_file(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(file)


def source_digests(modules: Iterable[str]) -> dict[str, str]:
    """SHA-256 of each module of `modules` and of every module that they import, at any depth, installed packages apart.

    Raises:
        ConfigError: a module is no valid Python.
    """
    found: dict[str, str] = {}
    installed: dict[str, bool] = {}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        package = name.partition(".")[0]
        if package not in installed:
            installed[package] = _is_installed(package)
        if name in found or installed[package] or (file := _source_file(name)) is None:
            continue
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        digest, imported = _digest_and_imports(file, package, file.stat().st_mtime_ns)
        found[name] = digest
        waiting += imported
    return dict(sorted(found.items()))


def step_modules(step: str, settings: Mapping[str, Any]) -> list[str]:
    """The modules whose source a step runs: its own, and those that its config names."""
    modules = [f"components.{step}"]
    if step in ("encode", "ingest"):
        modules.append(plugins.target(settings["source"], plugins.SOURCES, "data.source"))
    if step in ("train", "tune"):
        trained = settings if step == "train" else settings["train"]
        modules.append(plugins.target(trained["model"]["name"], plugins.MODELS, "model.name"))
        names = [callback["name"] for callback in trained["callbacks"]]
        modules += [plugins.target(name, plugins.CALLBACKS, "train.callbacks") for name in names]
    return [name.partition(":")[0] for name in modules]


def _is_installed(package: str) -> bool:
    """Whether a top-level module is of the standard library or of an installed package, whose version says what it is."""
    if package in _OUR_PACKAGES or package in sys.stdlib_module_names:
        return package not in _OUR_PACKAGES
    plugins.make_importable()
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return True
    if spec is None:
        return True
    # A folder without __init__.py has no origin.
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    # By the folder's name, as a virtual environment may see the packages of the system, too; dist-packages is Debian's.
    return any(not {"site-packages", "dist-packages"}.isdisjoint(Path(place).parts) for place in places)


def _source_file(module: str) -> Path | None:
    """The file of a module, found without importing its package, which may import TensorFlow."""
    plugins.make_importable()
    name, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(name)
        for part in rest:
            name = f"{name}.{part}"
            spec = spec and importlib.machinery.PathFinder.find_spec(name, spec.submodule_search_locations or ())
    except (ImportError, ValueError, KeyError):
        return None
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


@functools.lru_cache(maxsize=1024)
def _digest_and_imports(file: Path, package: str, _mtime_ns: int) -> tuple[str, list[str]]:
    text = file.read_bytes()
    imported: list[str] = []
    try:
        tree = ast.parse(text, str(file))
    except SyntaxError as error:
        raise ConfigError(f"{file}:{error.lineno}: {error.msg}. Mend the module, or name another.") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.level == 0 or package):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            imported += [source, *(f"{source}.{alias.name}" for alias in node.names)]
    return hashlib.sha256(text).hexdigest(), imported


def _remove_left_overs(path: Path) -> None:
    for pattern in (f".{path.name}.tmp-*", f".{path.name}.old-*"):
        for left_over in path.parent.glob(pattern):
            shutil.rmtree(left_over)


def _write_manifest(output: Output, step: str, ancestors: dict[str, dict[str, Any]]) -> None:
    files = {
        str(file.relative_to(output.path)): {"size_bytes": file.stat().st_size, "sha256": digest_file(file)}
        for file in sorted(output.path.rglob("*"))
        if file.is_file() and file.relative_to(output.path).parts[0] not in VOLATILE
    }
    manifest = Manifest(
        step=step,
        fingerprint=output.fingerprint,
        made_from=output.made_from,
        files=files,
        digest=digest_of(files),
        result=dataclasses.asdict(output.result),
        ancestors=ancestors,
    )
    _write_durably(output.path / MANIFEST, json.dumps(dataclasses.asdict(manifest), indent=1, sort_keys=True))


@contextlib.contextmanager
def replacing_directory(path: Path) -> Iterator[Path]:
    """Where to write a directory that stands at `path` at the end of the block; after an error nothing has changed.

    Yields:
        An empty directory beside `path`.

    Raises:
        ArtifactError: the disk is full or may not be written.
    """
    temporary = path.parent / f".{path.name}.tmp-{os.getpid()}"
    try:
        with disk_errors_explained(path):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            yield temporary
            replace_directory(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def replace_directory(new: Path, path: Path) -> None:
    """Put the directory `new` at `path`; whoever looks sees the old one, none, or the whole new one."""
    old = path.parent / f".{path.name}.old-{os.getpid()}"
    if path.exists():
        path.rename(old)
    new.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _write_durably(file: Path, text: str) -> None:
    with file.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


@contextlib.contextmanager
def disk_errors_explained(path: Path) -> Iterator[None]:
    """Turn what `explain_disk_error` knows into its error, for a block that writes `path`."""
    try:
        yield
    except Exception as error:
        if (mendable := explain_disk_error(error, path)) is not None:
            raise mendable from error
        raise


def explain_disk_error(error: BaseException, path: Path | None = None) -> HeadraceError | None:
    """What a full or forbidden disk behind `error` means for the user, `None` if it is something else.

    Args:
        error: What was raised; the errors of TensorFlow and of `shutil.copytree` say it in their text only.
        path: What was being written, if it is known.
    """
    if isinstance(error, HeadraceError):
        return None
    where = getattr(error, "filename", None) or path
    if number := _disk_error_number(error, _FULL):
        place = f" while writing {path or where}" if path or where else ""
        return ArtifactError(
            f"No space left on the disk{place} ({os.strerror(number)}). Nothing half-written was kept: make room and run "
            "again."
        )
    if not isinstance(error, OSError) and not type(error).__module__.startswith("tensorflow"):
        return None
    if number := _disk_error_number(error, _FORBIDDEN):
        return ArtifactError(
            f"No permission to use {where}: {os.strerror(number)}. Change its owner or choose another folder."
        )
    if _disk_error_number(error, _IN_THE_WAY) and where and (file := _file_in_the_way(Path(where))):
        return ArtifactError(f"{file} is a file, but a folder is needed there. Move it, or choose another folder.")
    return None


def _file_in_the_way(path: Path) -> Path | None:
    return next((place for place in (path, *path.parents) if place.is_file()), None)


def _disk_error_number(error: BaseException, numbers: tuple[int, ...]) -> int | None:
    own = getattr(error, "errno", None)
    told = [number for number in numbers if number == own or (own is None and os.strerror(number) in str(error))]
    return told[0] if told else None


def _digest(file: Any) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()
