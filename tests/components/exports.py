"""Exports that were tampered with, for the tests of what reads them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import keras

from components import artifacts, formats, model_files
from components.preprocessing import Preprocessing
from tests.conftest import StepRun


def copy_of(artifact: Path, path: Path, change: Callable[[Path], object]) -> Path:
    """An artifact like `artifact` with a change made to its files, and a manifest that agrees with them."""
    shutil.copytree(artifact, path)
    change(path)
    old = artifacts.read_manifest(path)
    files = {
        str(file.relative_to(path)): {"size_bytes": file.stat().st_size, "sha256": artifacts.digest_file(file)}
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name != artifacts.MANIFEST
    }
    manifest = replace(old, files=files, digest=artifacts.digest_of(files))
    (path / artifacts.MANIFEST).write_text(json.dumps(manifest.__dict__))
    return path


def keep_forms(exported: Path, *names: str) -> None:
    """Let the list of forms have these alone."""
    formats.write_formats([form for form in formats.read_formats(exported) if form.name in names], exported)


def other_network(taxi: StepRun) -> keras.Model:
    """The trained model with other weights."""
    model = model_files.load_model(taxi.path("model"))
    model.set_weights([weight + 0.5 for weight in model.get_weights()])
    return model


def other_core(taxi: StepRun) -> formats.Core:
    """What converters take of it."""
    return formats.Core(Preprocessing.load(taxi.path("transform")), other_network(taxi))
