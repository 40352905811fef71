"""Keras callbacks that a configuration names: made, kept from writing where they should not, and resumed."""

from __future__ import annotations

import base64
import datetime
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from components import plugins, progress
from components.config import CallbackConfig
from components.errors import ConfigError

# Arguments that say where a callback writes, and the classes that write.
_PATHS = ("filepath", "filename", "log_dir")
_WRITERS = (keras.callbacks.ModelCheckpoint, keras.callbacks.TensorBoard, keras.callbacks.CSVLogger)

# What a callback is told anew: its model; the sign of `min_delta`, which Keras turns once it knows the metric; whether
# CSVLogger goes on with a file.
_NO_STATE = ("params", "_model", "model", "min_delta", "append", "append_header")


class PrintMetrics(keras.callbacks.Callback):
    """Prints `2026-12-01T04:05:06.789+00:00 validation_auc=0.93` and the like after each epoch.

    So Katib's collector of the standard output reads metrics, and needs the time to stop a trial early.
    """

    chief_only = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
        for name, value in (logs or {}).items():
            if name.startswith("val_"):
                print(f"{now} validation_{name.removeprefix('val_')}={value:.8g}", flush=True)


def make_callbacks(
    configs: Sequence[CallbackConfig], directory: Path, *, is_chief: bool
) -> list[keras.callbacks.Callback]:
    """The callbacks of `train.callbacks`.

    Args:
        configs: Names and arguments.
        directory: What relative paths among the arguments are relative to.
        is_chief: Whether this worker writes files; callbacks that only write are left out elsewhere. One of the user's
            own that writes says so with an attribute `chief_only = True`.

    Raises:
        ConfigError: a callback does not exist, is none, or refuses its arguments.
    """
    made = [_make(config, directory) for config in configs]
    return [c for c in made if is_chief or not (isinstance(c, _WRITERS) or getattr(c, "chief_only", False))]


def state_of(callbacks: Sequence[keras.callbacks.Callback]) -> list[dict[str, Any]]:
    """What each callback has counted so far, JSON-able: its attributes that are numbers, text, arrays or lists of such."""
    return [
        {"class": type(c).__name__, "state": {name: _pack(v) for name, v in vars(c).items() if _is_state(name, v)}}
        for c in callbacks
    ]


def restore_state(callbacks: Sequence[keras.callbacks.Callback], states: Sequence[dict[str, Any]]) -> None:
    """Put back what `state_of` gave, into the callbacks of the same classes; one that was not there starts anew."""
    left = list(states)
    for callback in callbacks:
        name = type(callback).__name__
        found = next((each for each in left if each["class"] == name), None)
        if found is None:
            progress.report(f"callback {name} was not in the run that goes on: it starts anew")
            continue
        left.remove(found)
        for attribute, value in found["state"].items():
            setattr(callback, attribute, _unpack(value))


def _make(config: CallbackConfig, directory: Path) -> keras.callbacks.Callback:
    make = plugins.resolve(config.name, plugins.CALLBACKS, "train.callbacks")
    setting = f"train.callbacks: args of '{config.name}'"
    plugins.check_arguments(make, config.args, setting)
    paths = {name: str(directory / config.args[name]) for name in _PATHS if name in config.args}
    for path in paths.values():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    try:
        callback = make(**{**config.args, **paths})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{setting}: {error}") from error
    if not isinstance(callback, keras.callbacks.Callback):
        raise ConfigError(
            f"train.callbacks: '{config.name}' gives a {type(callback).__name__}, expected a keras.callbacks.Callback."
        )
    return callback


def _is_state(name: str, value: Any) -> bool:
    if name in _NO_STATE:
        return False
    if isinstance(value, list | tuple):
        return all(_is_state("", item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_state("", item) for key, item in value.items())
    return value is None or isinstance(value, bool | int | float | str | np.ndarray | np.generic)


def _pack(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        buffer = io.BytesIO()
        np.save(buffer, np.asarray(value), allow_pickle=False)
        return {"__npy__": base64.b64encode(buffer.getvalue()).decode(), "scalar": isinstance(value, np.generic)}
    if isinstance(value, tuple):
        return {"__tuple__": [_pack(item) for item in value]}
    if isinstance(value, list):
        return [_pack(item) for item in value]
    if isinstance(value, dict):
        return {key: _pack(item) for key, item in value.items()}
    return value


def _unpack(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "__npy__" in value:
        array = np.load(io.BytesIO(base64.b64decode(value["__npy__"])), allow_pickle=False)
        return array[()] if value["scalar"] else array
    if "__tuple__" in value:
        return tuple(_unpack(item) for item in value["__tuple__"])
    return {key: _unpack(item) for key, item in value.items()}
