"""What TensorFlow and Keras read from the environment when they are first imported, and what they write then."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path


def set_environment() -> None:
    """Set it for a process of ours; what the user set stays.

    oneDNN is on whatever the processor: TensorFlow's own default is on only where there are int8 instructions, so that the
    same seed would give other bytes on another machine, and grouped one-dimensional convolutions would have no kernel there.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")


def import_tensorflow() -> None:
    """Import it for a short command, without what it writes while it loads, which no level of logging holds back."""
    set_environment()
    with noise_kept_in(Path(os.devnull)):
        importlib.import_module("tensorflow")


@contextlib.contextmanager
def noise_kept_in(file: Path) -> Iterator[None]:
    """Send what libraries write to standard error, from C++ too, to a file: it would drown what the user should read."""
    sys.stderr.flush()
    terminal = os.dup(2)
    with file.open("ab") as log:
        os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(terminal, 2)
        os.close(terminal)
