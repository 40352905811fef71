"""Names in a config that stand for code: built-in names and `package.module:attribute`.

A name is resolved where the code is used, so that reading and checking a config imports nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from components.errors import ConfigError, did_you_mean

MODELS = {
    "dcn": "models.dcn:build",
    "ft_transformer": "models.ft_transformer:build",
    "resnet": "models.resnet:build",
    "tabular": "models.tabular:build",
    "transformer": "models.transformer:build",
    "vit": "models.vit:build",
}

CALLBACKS = {
    "CSVLogger": "keras.callbacks:CSVLogger",
    "EarlyStopping": "keras.callbacks:EarlyStopping",
    "ModelCheckpoint": "keras.callbacks:ModelCheckpoint",
    "ReduceLROnPlateau": "keras.callbacks:ReduceLROnPlateau",
    "RemoteMonitor": "keras.callbacks:RemoteMonitor",
    "SwapEMAWeights": "keras.callbacks:SwapEMAWeights",
    "TensorBoard": "keras.callbacks:TensorBoard",
}

SOURCES = {
    "csv": "components.ingest.sources:csv",
    "fashion_mnist": "components.ingest.samples:fashion_mnist",
    "image_folder": "components.ingest.sources:image_folder",
    "image_manifest": "components.ingest.sources:image_manifest",
    "jsonl": "components.ingest.sources:jsonl",
    "numpy": "components.ingest.sources:numpy_arrays",
    "nyc_flights": "components.ingest.samples:nyc_flights",
    "parquet": "components.ingest.sources:parquet",
    "reuters_r8": "components.ingest.samples:reuters_r8",
    "sql": "components.ingest.sources:sql",
    "text": "components.ingest.sources:text",
    "tfrecord": "components.ingest.sources:tfrecord",
}

_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def target(name: str, table: dict[str, str], setting: str) -> str:
    """The `module:attribute` behind a name of `table`, or behind an import path.

    Raises:
        ConfigError: `name` is neither; `setting` says where in the config it stands.
    """
    if ":" in name:
        if not _IMPORT_PATH.fullmatch(name):
            raise ConfigError(f"{setting}: '{name}' is not an import path. Write package.module:attribute.")
        return name
    if name not in table:
        raise ConfigError(
            f"{setting}: there is no '{name}'.{did_you_mean(name, table)} Your own: package.module:attribute."
        )
    return table[name]


def resolve(name: str, table: dict[str, str], setting: str) -> Any:
    """Import what a name stands for.

    Raises:
        ConfigError: the name, its module or the attribute does not exist, or a module of the user's cannot be imported.
    """
    module_name, _, attribute = target(name, table, setting).partition(":")
    make_importable()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            if not is_own(name):
                raise
            raise _unimportable(name, setting, error) from error
        raise ConfigError(
            f"{setting}: no module '{error.name}' for '{name}'. Install its package, or start from the folder it is in."
        ) from error
    # A script without a main guard may even exit.
    except (Exception, SystemExit) as error:
        if not is_own(name):
            raise
        raise _unimportable(name, setting, error) from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        public = [key for key in vars(module) if not key.startswith("_")]
        raise ConfigError(
            f"{setting}: module '{module_name}' has no '{attribute}'.{did_you_mean(attribute, public)}"
        ) from error


def is_own(name: str) -> bool:
    """Whether a name stands for code of the user's, an import path, whose errors are no defect of ours."""
    return ":" in name


def describe(error: BaseException) -> str:
    """An error of the user's code with its place: `ValueError: no such table (own.py, line 3)`."""
    kind, reason = type(error).__name__, str(error)
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{kind}: {error.msg} ({error.filename}, line {error.lineno})"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    libraries = (os.path.dirname(__file__), *(sysconfig.get_path(key) for key in ("stdlib", "purelib", "platlib")))
    own = [frame for frame in frames if not frame.filename.startswith(libraries)] or frames
    place = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    return f"{kind}: {reason}{place}" if reason else f"{kind}{place}"


def check_arguments(
    function: Callable[..., Any], given: Mapping[str, Any], setting: str, *positional: Any, **own: Any
) -> None:
    """Refuse arguments of the config that a function does not take.

    Args:
        function: What is to be called.
        given: The arguments of the config.
        setting: Where in the config they stand, to begin the message with.
        positional: What else it is called with.
        own: What else it is called with, by name.

    Raises:
        ConfigError: naming the nearest argument that there is.
    """
    signature = inspect.signature(function)
    try:
        signature.bind(*positional, **own, **given)
    except TypeError as error:
        known = [name for name in list(signature.parameters)[len(positional) :] if name not in own]
        unknown = [name for name in given if name not in known]
        hint = did_you_mean(unknown[0], known) if unknown and known else ""
        raise ConfigError(f"{setting}: {error}.{hint}") from error


def make_importable() -> None:
    """Let import paths in a config name modules of the working directory, whichever command runs."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _unimportable(name: str, setting: str, error: BaseException) -> ConfigError:
    module_name = name.partition(":")[0]
    mend = "Correct it, or install what it needs"
    return ConfigError(f"{setting}: module '{module_name}' cannot be imported: {describe(error)}. {mend}.")
