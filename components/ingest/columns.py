"""From Arrow columns to the four types of features that examples hold."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from components.errors import DataError
from components.examples import MISSING_INT, Feature

_TIMES = (pa.types.is_date, pa.types.is_timestamp, pa.types.is_time)
_TEXTS = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_string_view,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
    pa.types.is_null,
    *_TIMES,
)


def features_of(schema: pa.Schema) -> dict[str, Feature]:
    """The feature that each column becomes.

    Whole numbers and booleans become int, other numbers float, text, bytes, dates and times (ISO 8601) string;
    fixed-shape tensors keep their shape. A list of any of the first three has the shape `(None,)`.

    Raises:
        DataError: a column is nested deeper or of a type that no feature can hold.
    """
    return {field.name: _feature(field.name, field.type) for field in schema}


@dataclass(frozen=True)
class Values:
    """What the rows of a column hold, one after the other.

    Attributes:
        flat: `(elements,)`: int64, float32, uint8, or an Arrow array of bytes for strings.
        lengths: Elements of each row, `(rows,)`; 0 where the value is missing.
    """

    flat: np.ndarray | pa.LargeBinaryArray
    lengths: np.ndarray


def flat_values(name: str, values: pa.Array, feature: Feature) -> Values:
    """The values of one column, as the type of its feature.

    NaN, the empty string and the empty list count as missing, because a missing value is read back as them. Within a
    list a missing value keeps its place as the value that it is read back as.

    Raises:
        DataError: a value does not fit its type, or a tensor is missing.
    """
    if isinstance(values.type, pa.FixedShapeTensorType):
        return _tensors(name, values, feature)
    if feature.is_list:
        lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False)
        return Values(_scalars(name, values.flatten(), feature.type)[0], lengths.astype(np.int64))
    elements, present = _scalars(name, values, feature.type)
    kept = elements[present] if isinstance(elements, np.ndarray) else elements.filter(pa.array(present))
    return Values(kept, present.astype(np.int64))


def _feature(name: str, kind: pa.DataType) -> Feature:
    if isinstance(kind, pa.FixedShapeTensorType):
        return Feature(_number_type(name, kind.value_type, tensor=True), tuple(kind.shape))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return Feature(_scalar_type(name, kind.value_type), (None,))
    return Feature(_scalar_type(name, kind))


def _scalar_type(name: str, kind: pa.DataType) -> str:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if any(is_text(kind) for is_text in _TEXTS):
        return "string"
    return _number_type(name, kind, tensor=False)


def _number_type(name: str, kind: pa.DataType, *, tensor: bool) -> str:
    if tensor and pa.types.is_uint8(kind):
        return "uint8"
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return "int"
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "float"
    advice = "Flatten it into columns" if pa.types.is_nested(kind) else "Convert it to a number or a string"
    raise DataError(
        f"Column '{name}' has type {kind}, which no feature can hold. {advice}, or leave it out with data.drop."
    )


def _scalars(name: str, values: pa.Array, kind: str) -> tuple[np.ndarray | pa.LargeBinaryArray, np.ndarray]:
    """Every value, the missing ones as what they are read back as, and which are there, bool `(values,)`."""
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if kind == "string":
        texts = pc.fill_null(_as_bytes(values), b"")
        return texts, pc.greater(pc.binary_length(texts), 0).to_numpy(zero_copy_only=False)
    try:
        if kind == "int":
            numbers = pc.fill_null(values.cast(pa.int64()), MISSING_INT)
            return numbers.to_numpy(zero_copy_only=False), values.is_valid().to_numpy(zero_copy_only=False)
        floats = values.cast(pa.float64()).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid as error:
        raise DataError(
            f"Column '{name}': {error}. Numbers must fit 64 bits: give larger ones as floats or strings, "
            "or leave the column out with data.drop."
        ) from error
    with np.errstate(over="ignore"):
        return floats.astype(np.float32), ~np.isnan(floats)


def _tensors(name: str, values: pa.Array, feature: Feature) -> Values:
    if values.null_count:
        row = values.is_null().to_pylist().index(True)
        raise DataError(f"Column '{name}' has no tensor in row {row} of a batch. Leave such rows out.")
    kind = {"uint8": np.uint8, "float": np.float32}.get(feature.type, np.int64)
    flat = values.to_numpy_ndarray().reshape(-1).astype(kind, copy=False)
    return Values(flat, np.full(len(values), math.prod(values.type.shape)))


def _as_bytes(values: pa.Array) -> pa.Array:
    if pa.types.is_timestamp(values.type):
        text = pc.replace_substring(pc.cast(values, pa.string()), " ", "T", max_replacements=1)
        return text.cast(pa.large_binary())
    if any(is_time(values.type) for is_time in _TIMES) or pa.types.is_null(values.type):
        values = pc.cast(values, pa.string())
    return values.cast(pa.large_binary())
