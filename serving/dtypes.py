"""TensorFlow's data types by number: their names and their numpy types, without TensorFlow.

The numbers are those of tensorflow/core/framework/types.proto.
"""

from __future__ import annotations

import numpy as np

FLOAT, DOUBLE, INT32, UINT8, INT16, INT8, STRING = 1, 2, 3, 4, 5, 6, 7
COMPLEX64, INT64, BOOL, BFLOAT16, UINT16, COMPLEX128, HALF, UINT32, UINT64 = 8, 9, 10, 14, 17, 18, 19, 22, 23

# DataTypeString() of TensorFlow: the names in error messages.
NAMES: dict[int, str] = {
    FLOAT: "float",
    DOUBLE: "double",
    INT32: "int32",
    UINT8: "uint8",
    INT16: "int16",
    INT8: "int8",
    STRING: "string",
    COMPLEX64: "complex64",
    INT64: "int64",
    BOOL: "bool",
    BFLOAT16: "bfloat16",
    UINT16: "uint16",
    COMPLEX128: "complex128",
    HALF: "half",
    UINT32: "uint32",
    UINT64: "uint64",
}

NUMPY: dict[int, np.dtype] = {
    FLOAT: np.dtype(np.float32),
    DOUBLE: np.dtype(np.float64),
    INT32: np.dtype(np.int32),
    UINT8: np.dtype(np.uint8),
    INT16: np.dtype(np.int16),
    INT8: np.dtype(np.int8),
    STRING: np.dtype(object),
    COMPLEX64: np.dtype(np.complex64),
    INT64: np.dtype(np.int64),
    BOOL: np.dtype(np.bool_),
    UINT16: np.dtype(np.uint16),
    COMPLEX128: np.dtype(np.complex128),
    HALF: np.dtype(np.float16),
    UINT32: np.dtype(np.uint32),
    UINT64: np.dtype(np.uint64),
}

# numpy has no bfloat16; float32 holds each of its values exactly.
DECODED: dict[int, np.dtype] = {**NUMPY, BFLOAT16: np.dtype(np.float32)}

_NUMBERS: dict[np.dtype, int] = {dtype: number for number, dtype in NUMPY.items()}


def name(number: int) -> str:
    """TensorFlow's name of a data type, as its error messages print it."""
    return NAMES.get(number, f"type {number}")


def number_of(array: np.ndarray) -> int:
    """The TensorFlow number of an array's type; any kind of string array counts as STRING.

    Raises:
        TypeError: TensorFlow has no such type.
    """
    number = _NUMBERS.get(array.dtype) or _NUMBERS.get(array.dtype.newbyteorder("="))
    if number is not None:
        return number
    if array.dtype.kind in "SU":
        return STRING
    if array.dtype.name == "bfloat16":
        return BFLOAT16
    raise TypeError(f"arrays of {array.dtype} cannot be sent; use one of {sorted(map(str, _NUMBERS))}")
