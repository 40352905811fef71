"""What callers give, in the forms that the clients of both protocols send: arrays, and the features of examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from serving import dtypes
from serving.client.model_info import SignatureInfo
from serving.errors import invalid_argument

Features = dict[str, list[Any]]


def to_features(example: Mapping[str, Any]) -> Features:
    """One example as lists of one kind each: int, float or bytes, those of tf.Example.

    Args:
        example: feature name -> a value, a list of values or an array; str counts as its UTF-8 bytes, bool as int, and
            integers beside floats as floats.

    Raises:
        ServingError: INVALID_ARGUMENT, naming the feature whose values are none of these, or of several kinds.
    """
    return {name: _values(name, value) for name, value in example.items()}


def _values(name: str, value: Any) -> list[Any]:
    if isinstance(value, np.ndarray):
        value = value.ravel().tolist()
    values = [_plain(item) for item in (value if isinstance(value, list | tuple) else [value])]
    kinds = set(map(type, values))
    if kinds == {int, float}:
        return list(map(float, values))
    if len(kinds) > 1 or not kinds <= {int, float, bytes}:
        found = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise invalid_argument(
            f"feature {name!r} holds {found}; give integers, floats or strings, and one kind of them"
        )
    for item in values:
        if isinstance(item, int) and not -(2**63) <= item < 2**63:
            raise invalid_argument(f"feature {name!r} holds {item}, which is no int64")
    return values


def _plain(value: Any) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    return int(value) if isinstance(value, bool) else value


def num_rows(arrays: Mapping[str, np.ndarray]) -> int:
    """The rows that all arrays have.

    Raises:
        ServingError: INVALID_ARGUMENT for none, or different numbers of them.
    """
    lengths = {alias: array.shape[0] if array.ndim else None for alias, array in arrays.items()}
    [length, *others] = set(lengths.values()) or {None}
    if not length or others:
        raise invalid_argument(f"the inputs must have the same number of rows, and at least one; they have {lengths}")
    return length


def to_array(alias: str, value: Any, signature: SignatureInfo) -> np.ndarray:
    """An input as an array, of the type that the signature wants if it has this input.

    Raises:
        ServingError: INVALID_ARGUMENT for what is no array, or does not fit into the type.
    """
    info = signature.inputs.get(alias)
    wanted = dtypes.NUMPY.get(info.number) if info else None
    array = value if isinstance(value, np.ndarray) else _as_array(alias, value, wanted)
    if wanted is not None and wanted.kind == "O":
        return _check_strings(alias, array)
    if wanted is None:
        return _check_type(alias, array)
    if array.dtype == wanted:
        return array
    if array.size and not np.can_cast(array.dtype, wanted, "same_kind"):
        raise invalid_argument(f"input {alias!r} takes {wanted}, but got an array of {array.dtype}")
    with np.errstate(over="ignore"):  # a float that is too large is infinite, as in TensorFlow
        cast = array.astype(wanted)
    if wanted.kind in "iu" and (cast != array).any():
        raise invalid_argument(f"input {alias!r} takes {wanted}, but {array[cast != array][0]} is out of its range")
    return cast


def _check_type(alias: str, array: np.ndarray) -> np.ndarray:
    try:
        dtypes.number_of(array)
    except TypeError as error:
        raise invalid_argument(f"input {alias!r}: {error}") from error
    return array


def _check_strings(alias: str, array: np.ndarray) -> np.ndarray:
    if array.dtype.kind not in "OSU":
        raise invalid_argument(f"input {alias!r} takes strings, but got an array of {array.dtype}")
    for value in array.flat:
        if not isinstance(value, str | bytes):
            raise invalid_argument(f"input {alias!r} takes strings, but {value!r} is none")
    return array


def _as_array(alias: str, value: Any, wanted: np.dtype | None) -> np.ndarray:
    is_string = wanted is not None and wanted.kind == "O"
    try:
        array = np.asarray(value, dtype=object if is_string else None)
        # numpy's own string types drop zeros at the end of bytes.
        return np.asarray(value, dtype=object) if array.dtype.kind in "SU" else array
    except ValueError as error:
        raise invalid_argument(f"input {alias!r} is no array: {error}") from error
