"""From Arrow columns to the four types of features that examples hold."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from components.errors import DataError
from components.examples import Feature

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
    fixed-shape tensors keep their shape.

    Raises:
        DataError: a column is nested or of a type that no feature can hold.
    """
    return {field.name: _feature(field.name, field.type) for field in schema}


def payloads(name: str, values: pa.Array, feature: Feature) -> pa.Array:
    """What the list of a `tf.train.Feature` holds of each row of one column, in protobuf's wire format.

    Args:
        name: Of the column, for messages.
        values: `(rows,)`.
        feature: What the column becomes.

    Returns:
        `(rows,)` of bytes, null where the value is missing: int64 as varints, float32 in little endian, both packed; strings
        and uint8 tensors as they are. NaN and the empty string count as missing, because a missing value is read back as
        them. Source of the format: https://protobuf.dev/programming-guides/encoding.

    Raises:
        DataError: a value does not fit its type, or a tensor is missing.
    """
    if isinstance(values.type, pa.FixedShapeTensorType):
        return _tensor_payloads(name, values, feature)
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if feature.type == "string":
        found = _as_bytes(values)
        return pc.if_else(pc.greater(pc.binary_length(found), 0), found, None)
    try:
        if feature.type == "int":
            whole = values.cast(pa.int64())
            return _with_missing(*_varints(whole.fill_null(0).to_numpy()[:, None]), pc.is_valid(whole))
        numbers = values.cast(pa.float64()).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid as error:
        raise DataError(f"Column '{name}': {error}. Numbers must fit 64 bits.") from error
    return _with_missing(*_floats(numbers[:, None]), pa.array(~np.isnan(numbers)))


def _feature(name: str, kind: pa.DataType) -> Feature:
    if isinstance(kind, pa.FixedShapeTensorType):
        return Feature(_number_type(name, kind.value_type, tensor=True), tuple(kind.shape))
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if any(is_text(kind) for is_text in _TEXTS):
        return Feature("string")
    return Feature(_number_type(name, kind, tensor=False))


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


def _tensor_payloads(name: str, values: pa.Array, feature: Feature) -> pa.Array:
    if values.null_count:
        row = values.is_null().to_pylist().index(True)
        raise DataError(f"Column '{name}' has no tensor in row {row} of a batch. Leave such rows out.")
    rows = values.to_numpy_ndarray().reshape(len(values), -1)
    if feature.type == "uint8":
        return _binary(np.ascontiguousarray(rows).ravel(), np.full(len(rows), rows.shape[1]))
    return _binary(*(_varints(rows.astype(np.int64)) if feature.type == "int" else _floats(rows)))


def _floats(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`(rows, values)` as float32: all bytes, and how many each row has."""
    with np.errstate(over="ignore"):
        narrow = np.ascontiguousarray(rows.astype("<f4"))
    return narrow.view(np.uint8).ravel(), np.full(len(rows), 4 * rows.shape[1])


def _varints(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`(rows, values)` of int64 as varints, seven bits a byte, the lowest first: all bytes, and how many each row has."""
    values = np.ascontiguousarray(rows).view(np.uint64).ravel()
    sizes = 1 + sum((values >= np.uint64(1) << np.uint64(7 * place)).astype(np.int64) for place in range(1, 10))
    starts = np.cumsum(sizes) - sizes
    out = np.empty(int(sizes.sum()), np.uint8)
    for place in range(int(sizes.max(initial=0))):
        here = sizes > place
        bits = (values[here] >> np.uint64(7 * place)).astype(np.uint8) & 0x7F
        out[starts[here] + place] = bits | (sizes[here] > place + 1).astype(np.uint8) << 7
    return out, sizes.reshape(rows.shape).sum(axis=1)


def _with_missing(content: np.ndarray, sizes: np.ndarray, is_present: pa.Array) -> pa.Array:
    found = _binary(content, sizes)
    return pc.if_else(is_present, found, None)


def _binary(content: np.ndarray, sizes: np.ndarray) -> pa.Array:
    """Bytes of all rows and how many each has, as an array of bytes."""
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(sizes), [None, pa.py_buffer(offsets), pa.py_buffer(content)]
    )


def _as_bytes(values: pa.Array) -> pa.Array:
    if pa.types.is_timestamp(values.type):
        text = pc.replace_substring(pc.cast(values, pa.string()), " ", "T", max_replacements=1)
        return text.cast(pa.large_binary())
    if any(is_time(values.type) for is_time in _TIMES) or pa.types.is_null(values.type):
        values = pc.cast(values, pa.string())
    return values.cast(pa.large_binary())
