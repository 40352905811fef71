"""What a conversion gives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Quantization:
    """What the integers of a tensor mean: `value = scale * (integer - zero_point)`."""

    scale: float
    zero_point: int


@dataclass(frozen=True)
class TensorInfo:
    """An input or output of a file.

    Attributes:
        name: As the Keras model names it.
        dtype: As numpy names it, or `string`.
        shape: Sizes; a free one is `None`, or its name where the format has one. The first is the batch.
        quantization: For integers that stand for floats.
    """

    name: str
    dtype: str
    shape: tuple[int | str | None, ...]
    quantization: Quantization | None = None


@dataclass(frozen=True)
class Conversion:
    """A converted model that was run and compared with the Keras model before it was written.

    Attributes:
        format: The form, such as `tflite_int8`.
        path: The file.
        size_bytes: Its size.
        inputs: What it takes.
        outputs: What it answers.
        max_abs_difference: Largest difference between its answers and Keras's in float32, over all outputs.
        notes: What is otherwise than in the Keras model, such as a fixed batch.
    """

    format: str
    path: Path
    size_bytes: int
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    max_abs_difference: float
    notes: tuple[str, ...] = ()
