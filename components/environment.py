"""What TensorFlow and Keras read from the environment when they are first imported."""

from __future__ import annotations

import os


def set_environment() -> None:
    """Set it for a process of ours; what the user set stays.

    oneDNN is on whatever the processor: TensorFlow's own default is on only where there are int8 instructions, so that the
    same seed would give other bytes on another machine, and grouped one-dimensional convolutions would have no kernel there.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
