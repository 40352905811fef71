"""A folder of manifests: written as a whole, read back, and brought to where it serves."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml
from pydantic import ValidationError

from serving import atomic
from serving.errors import Code, ServingError
from serving.manifests import kubernetes, kustomize
from serving.manifests.config import ServingManifestConfig
from serving.manifests.documents import CONFIG_FILE, HEADER
from serving.manifests.render import render
from serving.traffic import ROLLOUT_FILE

OVERLAYS = ("production", "dev")
_STAGED, _READY, _GONE = ".staged-", ".ready", ".gone"
# A file that only the manifests of this target have.
_MARKS = {"kubernetes": "base/kustomization.yaml", "kserve": "inferenceservice.yaml", "compose": "compose.yaml"}


def write(files: Mapping[str, str], folder: Path) -> None:
    """Make `folder` hold exactly these files: all of them, or those of before.

    They are made ready in a hidden folder first, whose renaming decides; then each is put in place, for a container that
    mounts the folder goes on with it and not with one that takes its place. If the process is killed meanwhile, the next
    call, or `read`, does the rest.

    Args:
        files: path in the folder -> text, which begins with `documents.HEADER`.
        folder: what an earlier call wrote there goes.

    Raises:
        ServingError: FAILED_PRECONDITION when it holds files that are not ours.
        OSError: it cannot be written.
    """
    is_new = not folder.exists()
    _finish(folder)
    for left_over in folder.glob(f"{_STAGED}*"):
        shutil.rmtree(left_over)
    old = _our_files(folder)
    staged = folder / f"{_STAGED}{os.getpid()}"
    try:
        for name, text in files.items():
            if old.get(name) != text:
                (staged / name).parent.mkdir(parents=True, exist_ok=True)
                atomic.write_text(staged / name, text)
        staged.mkdir(exist_ok=True)
        atomic.write_text(staged / _GONE, json.dumps([name for name in old if name not in files]))
        staged.rename(folder / _READY)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
        if is_new:
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()
    _finish(folder)


def _finish(folder: Path) -> None:
    """Put in place what is ready; it may be done again, and by two at a time."""
    ready = folder / _READY
    if not ready.is_dir():
        return
    record = ready / _GONE
    gone: list[str] = []
    with contextlib.suppress(FileNotFoundError):
        gone = json.loads(record.read_text())
    for name in gone:
        file = folder / name
        file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others are in it
            for parent in file.relative_to(folder).parents[:-1]:
                (folder / parent).rmdir()
    for file in _files_in(ready):
        if file != record:
            target = folder / file.relative_to(ready)
            target.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                file.replace(target)
    shutil.rmtree(ready, ignore_errors=True)


def _files_in(folder: Path) -> Iterator[Path]:
    return (file for file in sorted(folder.rglob("*")) if file.is_file())


def _our_files(folder: Path) -> dict[str, str]:
    """Path in the folder -> text.

    Raises:
        ServingError: FAILED_PRECONDITION when there are others.
    """
    found = {}
    for file in _files_in(folder):
        name = file.relative_to(folder).as_posix()
        if name == ROLLOUT_FILE or any(part.startswith(".") for part in name.split("/")):  # these stay as they are
            continue
        content = file.read_bytes()
        if not content.startswith(HEADER.encode()):
            raise ServingError(
                Code.FAILED_PRECONDITION,
                f"{folder} holds files that are not made by this command, such as {name}, and is replaced as a whole; "
                "take another folder, or move them: an overlay of yours can name ours from outside",
            )
        found[name] = content.decode()
    return found


def read(folder: Path) -> tuple[ServingManifestConfig, str]:
    """What a folder was written from: the config and the target.

    Raises:
        ServingError: NOT_FOUND without a config, INVALID_ARGUMENT when it is wrong, FAILED_PRECONDITION when the files are
            not what it gives.
        OSError: it cannot be read.
    """
    _finish(folder)
    files = _our_files(folder)
    again = "write the folder anew with `headrace manifests`"
    if CONFIG_FILE not in files:
        raise ServingError(Code.NOT_FOUND, f"{folder} is no folder of manifests: it has no {CONFIG_FILE}; {again}")
    try:
        config = ServingManifestConfig.model_validate(yaml.safe_load(files[CONFIG_FILE]))
        (target,) = (target for target, mark in _MARKS.items() if mark in files)
    except (ValueError, yaml.YAMLError) as error:
        message = f"{folder / CONFIG_FILE} is damaged: {reason_of(error)}; {again}"
        raise ServingError(Code.INVALID_ARGUMENT, message) from error
    expected = render(config, target)
    for name in sorted({*expected, *files}):
        if expected.get(name) != files.get(name):
            raise ServingError(
                Code.FAILED_PRECONDITION,
                f"{folder / name} is not what {CONFIG_FILE} gives: it was changed by hand, or made by another version of "
                f"headrace, and more than the versions of the model would change; {again}",
            )
    return config, target


def reason_of(error: Exception) -> str:
    """What is wrong with a config, in a line."""
    if not isinstance(error, ValidationError):
        return str(error)
    texts = ((".".join(map(str, each["loc"])), each["msg"].removeprefix("Value error, ")) for each in error.errors())
    return "; ".join(f"{place}: {text}" if place else text for place, text in texts)


def apply_commands(config: ServingManifestConfig, target: str, folder: Path, overlay: str) -> list[list[str]]:
    """The programs, with their arguments, that bring a folder to where it serves, one after the other.

    Args:
        config: what the folder was written from.
        target: the same.
        folder: the folder.
        overlay: of a kustomization, one of `OVERLAYS`.
    """
    if target == "compose":
        return [["docker", "compose", "-f", str(folder / _MARKS[target]), "up", "--detach"]]
    if target == "kserve":
        return [["kubectl", "apply", "-f", str(folder / _MARKS[target])]]
    commands = [["kubectl", "apply", "-k", str(folder / "overlays" / overlay)]]
    has_own_pods = config.canary is not None and config.canary.method != "labels"
    if has_own_pods and config.canary_on_trial is None:
        # `apply` takes nothing away, and the pods of a canary that was taken back would go on behind the same Service.
        where = ["--ignore-not-found", "--namespace", kustomize.namespace_of(config, overlay)]
        commands.append(["kubectl", "delete", *kubernetes.canary_objects(config), *where])
    return commands
