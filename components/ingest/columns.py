"""From Arrow columns to the four types of features that examples hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from components.errors import DataError
from components.examples import MISSING, Feature

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


def row_values(name: str, values: pa.Array, feature: Feature) -> Sequence[Any]:
    """The values of one column as Python numbers, bytes, lists of these or flat numpy arrays; `None` where missing.

    NaN, the empty string and the empty list count as missing, because a missing value is read back as them. Within a
    list a missing value keeps its place as the value that it is read back as.

    Raises:
        DataError: a value does not fit its type, or a tensor is missing.
    """
    if isinstance(values.type, pa.FixedShapeTensorType):
        return _tensor_rows(name, values, feature)
    if feature.is_list:
        return _list_rows(name, values, feature)
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if feature.type == "string":
        return [value or None for value in _as_bytes(values).to_pylist()]
    try:
        if feature.type == "int":
            return list(values.cast(pa.int64()).to_pylist())
        numbers = values.cast(pa.float64()).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid as error:
        raise DataError(
            f"Column '{name}': {error}. Numbers must fit 64 bits: give larger ones as floats or strings, "
            "or leave the column out with data.drop."
        ) from error
    missing = np.isnan(numbers)
    with np.errstate(over="ignore"):
        narrow = numbers.astype(np.float32).astype(object)
    narrow[missing] = None
    return list(narrow)


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


def _tensor_rows(name: str, values: pa.Array, feature: Feature) -> Sequence[Any]:
    if values.null_count:
        row = values.is_null().to_pylist().index(True)
        raise DataError(f"Column '{name}' has no tensor in row {row} of a batch. Leave such rows out.")
    rows = values.to_numpy_ndarray().reshape(len(values), -1)
    if feature.type == "uint8":
        return [row.tobytes() for row in rows]
    return list(rows.astype(np.float32 if feature.type == "float" else np.int64))


def _list_rows(name: str, values: pa.Array, feature: Feature) -> Sequence[Any]:
    elements = row_values(name, values.flatten(), Feature(feature.type))
    filled = [MISSING[feature.type] if element is None else element for element in elements]
    stops = np.cumsum(pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False)).tolist()
    return [filled[start:stop] or None for start, stop in zip([0, *stops], stops, strict=False)]


def _as_bytes(values: pa.Array) -> pa.Array:
    if pa.types.is_timestamp(values.type):
        text = pc.replace_substring(pc.cast(values, pa.string()), " ", "T", max_replacements=1)
        return text.cast(pa.binary())
    if any(is_time(values.type) for is_time in _TIMES) or pa.types.is_null(values.type):
        values = pc.cast(values, pa.string())
    return values.cast(pa.binary())
