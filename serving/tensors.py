"""TensorProto to numpy and back, without importing TensorFlow.

Works on any message that has TensorProto's fields (tensorflow/core/framework/tensor.proto).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from serving import dtypes
from serving.errors import invalid_argument

# TF Serving's largest gRPC message; a few bytes of shape must not make the server allocate more than that.
MAX_TENSOR_BYTES = 2**31 - 1

_VALUE_FIELD: dict[int, str] = {
    dtypes.FLOAT: "float_val",
    dtypes.DOUBLE: "double_val",
    dtypes.INT32: "int_val",
    dtypes.UINT8: "int_val",
    dtypes.INT16: "int_val",
    dtypes.INT8: "int_val",
    dtypes.UINT16: "int_val",
    dtypes.STRING: "string_val",
    dtypes.COMPLEX64: "scomplex_val",
    dtypes.COMPLEX128: "dcomplex_val",
    dtypes.INT64: "int64_val",
    dtypes.BOOL: "bool_val",
    dtypes.UINT32: "uint32_val",
    dtypes.UINT64: "uint64_val",
    dtypes.HALF: "half_val",
    dtypes.BFLOAT16: "half_val",
}


# Key of the packed field of types whose values protobuf writes as the array holds them: float_val and double_val.
_FIXED_WIDTH_TAGS = {dtypes.FLOAT: b"\x2a", dtypes.DOUBLE: b"\x32"}


def decode(proto: Any) -> np.ndarray:
    """The numpy array that a TensorProto holds; strings as an object array of bytes, bfloat16 as float32.

    Values come from `tensor_content` when it is there, else from the typed list, whose last value fills the rest
    of the shape (as Tensor::FromProto does).

    Raises:
        ServingError: INVALID_ARGUMENT when dtype, shape and values do not make a tensor.
    """
    dtype = dtypes.DECODED.get(proto.dtype)
    if dtype is None:
        raise invalid_argument(f"TensorProto has dtype {proto.dtype}, which cannot be served")
    shape = tuple(dim.size for dim in proto.tensor_shape.dim)
    if proto.tensor_shape.unknown_rank or any(size < 0 for size in shape):
        raise invalid_argument(f"TensorProto has shape {list(shape)}; every dimension must be known")
    if math.prod(filter(None, shape)) * dtype.itemsize > MAX_TENSOR_BYTES:  # numpy, too, reads over a size of 0
        raise invalid_argument(f"TensorProto of shape {list(shape)} needs more than {MAX_TENSOR_BYTES} bytes")
    if proto.tensor_content:
        return _from_content(proto, shape)
    return _from_values(proto, shape, dtype)


def _from_content(proto: Any, shape: tuple[int, ...]) -> np.ndarray:
    if proto.dtype == dtypes.STRING:
        raise invalid_argument("a string tensor must hold its values in string_val, not in tensor_content")
    stored = np.dtype(np.uint16) if proto.dtype == dtypes.BFLOAT16 else dtypes.NUMPY[proto.dtype]
    expected = math.prod(shape) * stored.itemsize
    if len(proto.tensor_content) != expected:
        raise invalid_argument(
            f"tensor_content has {len(proto.tensor_content)} bytes, but shape {list(shape)} needs {expected}"
        )
    array = np.frombuffer(proto.tensor_content, dtype=stored).reshape(shape)
    return _widen_bfloat16(array) if proto.dtype == dtypes.BFLOAT16 else array


def _from_values(proto: Any, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    count = math.prod(shape)
    flat = _flat_values(proto, dtype)[:count]
    if len(flat) < count:
        filler = flat[-1] if len(flat) else (b"" if dtype.kind == "O" else dtype.type(0))
        whole = np.empty(count, dtype=dtype)
        whole[: len(flat)] = flat
        whole[len(flat) :] = filler
        flat = whole
    return flat.reshape(shape)


def _flat_values(proto: Any, dtype: np.dtype) -> np.ndarray:
    values = getattr(proto, _VALUE_FIELD[proto.dtype])
    if proto.dtype == dtypes.STRING:
        return object_array(list(values))
    if proto.dtype == dtypes.BFLOAT16:
        return _widen_bfloat16(np.array(values, dtype=np.int64).astype(np.uint16))
    if proto.dtype == dtypes.HALF:
        return np.array(values, dtype=np.int64).astype(np.uint16).view(np.float16)
    if proto.dtype in (dtypes.COMPLEX64, dtypes.COMPLEX128):
        part = np.float32 if proto.dtype == dtypes.COMPLEX64 else np.float64
        return np.array(values[: len(values) // 2 * 2], dtype=part).view(dtype)
    if dtype.kind in "iu":  # through int64, because int_val of an int8 tensor may hold 300, which wraps
        return np.array(values, dtype=np.uint64 if dtype == np.uint64 else np.int64).astype(dtype)
    return np.array(values, dtype=dtype)


def _widen_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def object_array(values: list[Any]) -> np.ndarray:
    """A one-dimensional object array of exactly these values (np.array would look inside lists)."""
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def encode_values(array: np.ndarray, proto: Any) -> None:
    """Write an array into an empty TensorProto as a typed list: what TF Serving's answers carry (AsProtoField)."""
    number = _describe(array, proto)
    tag = _FIXED_WIDTH_TAGS.get(number)
    if tag is not None and array.size:
        data = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        proto.MergeFromString(tag + _varint(len(data)) + data)  # what extend() would give, 10 times as quick
        return
    getattr(proto, _VALUE_FIELD[number]).extend(_FLATTEN.get(number, _as_numbers)(array.ravel()))


def _varint(number: int) -> bytes:
    """Protobuf's encoding of an unsigned integer."""
    digits = bytearray()
    while number > 127:
        digits.append(number & 127 | 128)
        number >>= 7
    digits.append(number)
    return bytes(digits)


def encode_content(array: np.ndarray, proto: Any) -> None:
    """Write an array into an empty TensorProto as raw bytes: compact and quick, what the client sends."""
    number = _describe(array, proto)
    if number == dtypes.STRING:
        proto.string_val.extend(_as_bytes(array.ravel()))
    else:
        proto.tensor_content = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def _describe(array: np.ndarray, proto: Any) -> int:
    number = dtypes.number_of(array)
    proto.dtype = number
    for size in array.shape:
        proto.tensor_shape.dim.add().size = size
    return number


def _as_numbers(flat: np.ndarray) -> list[Any]:
    return flat.tolist()


def _as_bytes(flat: np.ndarray) -> list[bytes]:
    return [to_bytes(value) for value in flat]


def _as_bits(flat: np.ndarray) -> list[int]:
    return flat.view(np.uint16).tolist()


def _as_parts(flat: np.ndarray) -> list[float]:
    return flat.view(np.float32 if flat.dtype == np.complex64 else np.float64).tolist()


_FLATTEN: dict[int, Callable[[np.ndarray], list[Any]]] = {
    dtypes.STRING: _as_bytes,
    dtypes.HALF: _as_bits,
    dtypes.BFLOAT16: _as_bits,
    dtypes.COMPLEX64: _as_parts,
    dtypes.COMPLEX128: _as_parts,
}


def to_bytes(value: Any) -> bytes:
    """One element of a string array as bytes.

    Raises:
        TypeError: the element is neither str nor bytes.
    """
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    raise TypeError(f"an array of objects is sent as strings, but it holds {value!r} ({type(value).__name__})")
