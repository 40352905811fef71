"""Nested JSON lists to arrays, with TF Serving's type rules and messages.

Source: tensorflow_serving/util/json_tensor.cc. Ordinary values are converted level by level at C speed (quick_array);
whatever does not fit is walked again element by element (careful_array), to say what the trouble is as TF Serving does.
"""

from __future__ import annotations

import base64
import binascii
from array import array as c_array
from itertools import chain
from typing import Any

import numpy as np

from serving import dtypes
from serving.errors import Code, ServingError, invalid_argument
from serving.rest import json_text
from serving.tensors import object_array

# Which JSON integers a type takes: narrow integers take any 32-bit one, without a range check.
_INT_RANGE: dict[int, tuple[int, int]] = {
    dtypes.INT8: (-(2**31), 2**31 - 1),
    dtypes.INT16: (-(2**31), 2**31 - 1),
    dtypes.INT32: (-(2**31), 2**31 - 1),
    dtypes.UINT8: (-(2**31), 2**31 - 1),
    dtypes.INT64: (-(2**63), 2**63 - 1),
    dtypes.UINT32: (0, 2**32 - 1),
    dtypes.UINT64: (0, 2**64 - 1),
}
_MAX_RANK = 63  # numpy's limit, less the batch dimension
_FLOATS = frozenset((dtypes.FLOAT, dtypes.DOUBLE))
_SUPPORTED = frozenset((*_INT_RANGE, *_FLOATS, dtypes.BOOL, dtypes.STRING))


def to_array(value: Any, number: int) -> np.ndarray:
    """The array of a nested JSON list.

    Args:
        value: the parsed JSON.
        number: TensorFlow's number of the type its leaves must have.

    Raises:
        ServingError: INVALID_ARGUMENT when lists are ragged or a leaf has another type, UNIMPLEMENTED for a type that
            has no JSON form.
    """
    array = quick_array(value, number)
    return careful_array(value, number) if array is None else array


def quick_array(value: Any, number: int) -> np.ndarray | None:
    """The array of a regular nested list whose leaves all have the right type; None for anything else."""
    shape: list[int] = []
    level = [value]
    while level and len(shape) <= _MAX_RANK and type(level[0]) is list:
        if set(map(type, level)) != {list}:
            return None
        sizes = set(map(len, level))
        if len(sizes) != 1:
            return None
        shape.extend(sizes)
        level = list(chain.from_iterable(level))
    flat = _leaves(level, number) if len(shape) <= _MAX_RANK else None
    return None if flat is None else flat.reshape(shape)


def _leaves(values: list[Any], number: int) -> np.ndarray | None:
    kinds = set(map(type, values))
    if number in _FLOATS and kinds <= {int, float}:
        # The C array turns 1e300 into an infinite float, as C++ does.
        return np.array(c_array("f", values)) if number == dtypes.FLOAT else np.array(values, dtype=np.float64)
    if number in _INT_RANGE and kinds <= {int}:
        low, high = _INT_RANGE[number]
        if values and (min(values) < low or max(values) > high):
            return None
        return np.array(values, dtype=np.uint64 if low == 0 else np.int64).astype(dtypes.NUMPY[number])
    if number == dtypes.BOOL and kinds <= {bool}:
        return np.array(values, dtype=np.bool_)
    if number == dtypes.STRING and kinds <= {str, dict} and all(type(v) is str or is_base64(v) for v in values):
        return object_array([string_bytes(value) for value in values])
    return None


def string_bytes(value: str | dict[str, Any]) -> bytes:
    """The bytes of a JSON string or of `{"b64": "..."}`.

    Raises:
        ServingError: INVALID_ARGUMENT for what is not base64.
    """
    return value.encode("utf-8", "surrogateescape") if isinstance(value, str) else _decode_base64(value)


def careful_array(value: Any, number: int) -> np.ndarray:
    """The array of any JSON value, or the error that TF Serving gives for it."""
    shape = []
    element = value
    while isinstance(element, list):
        shape.append(len(element))
        if not element:
            break
        element = element[0]
    if len(shape) > _MAX_RANK:
        raise invalid_argument(f"lists are nested {len(shape)} deep; a tensor has at most {_MAX_RANK} dimensions")
    scalars: list[np.ndarray] = []
    _walk(value, 0, shape, number, scalars)
    flat = np.concatenate(scalars) if scalars else np.empty(0, dtype=dtypes.DECODED.get(number, np.dtype(object)))
    return flat.reshape(shape)


def _walk(value: Any, level: int, shape: list[int], number: int, scalars: list[np.ndarray]) -> None:
    """FillTensorProto of json_tensor.cc. The recursion is as deep as the tensor's rank."""
    if not isinstance(value, list):
        if level != len(shape):
            raise invalid_argument(
                f"JSON Value: {json_text.echo(value)} found at incorrect level: {level + 1} in the JSON DOM. "
                f"Expected at level: {len(shape)}"
            )
        scalars.append(_scalar(value, number))
        return
    if level >= len(shape):
        raise invalid_argument(f"Encountered list at unexpected level: {level} expected < {len(shape)}")
    if len(value) != shape[level]:
        raise invalid_argument(
            f"Encountered list at unexpected size: {len(value)} at level: {level} expected size: {shape[level]}"
        )
    for element in value:
        _walk(element, level + 1, shape, number, scalars)


def _scalar(value: Any, number: int) -> np.ndarray:
    """One leaf as an array of one element."""
    if isinstance(value, dict):
        if number != dtypes.STRING:
            raise _type_error(value, number)
        return object_array([_decode_base64(value)])
    if number not in _SUPPORTED:
        raise _unimplemented(value, number)
    array = _leaves([value], number)
    if array is None:
        raise _type_error(value, number)
    return array


def is_base64(value: Any) -> bool:
    """Whether a JSON value is `{"b64": "..."}`, the form of binary strings."""
    return isinstance(value, dict) and len(value) == 1 and isinstance(value.get("b64"), str)


def _decode_base64(value: dict[str, Any]) -> bytes:
    if not is_base64(value):
        raise invalid_argument(f"JSON Value: {json_text.echo(value)} not formatted correctly for base64 data")
    text = "".join(value["b64"].split()).rstrip("=")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise invalid_argument("Unable to base64 decode") from error


def _type_error(value: Any, number: int) -> ServingError:
    return invalid_argument(
        f"JSON Value: {json_text.echo(value)} Type: {json_type(value)} is not of expected type: {dtypes.name(number)}"
    )


def json_type(value: Any) -> str:
    """RapidJSON's name of a value's type."""
    if value is None or isinstance(value, bool):
        return {None: "Null", True: "True", False: "False"}[value]
    names: dict[type, str] = {dict: "Object", list: "Array", str: "String"}
    return names.get(type(value), "Number")


def _unimplemented(value: Any, number: int) -> ServingError:
    message = f"Conversion of JSON Value: {json_text.echo(value)} to type: {dtypes.name(number)}"
    return ServingError(Code.UNIMPLEMENTED, message)
