"""TensorProto and numpy: our code against TensorFlow's own."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from serving import dtypes
from serving.errors import ServingError
from serving.protos import TensorProto
from serving.tensors import decode, encode_content, encode_values

CODES = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "c8", "c16", "?")
NUMERIC = [np.dtype(code) for code in CODES]


def sample(dtype: np.dtype) -> np.ndarray:
    values = np.array([[0, 1, -3], [7, 100, 2]]).astype(dtype)
    return values + dtype.type(1j) if dtype.kind == "c" else values


@pytest.mark.parametrize("dtype", NUMERIC, ids=str)
@pytest.mark.parametrize("encode", [encode_values, encode_content])
def test_tensorflow_reads_what_we_write(dtype: np.dtype, encode: object) -> None:
    for array in (sample(dtype), sample(dtype)[0, 1].reshape(()), np.empty((0, 3), dtype)):
        proto = TensorProto()
        encode(array, proto)  # type: ignore[operator]
        for found in (tf.make_ndarray(proto), decode(proto)):
            assert found.dtype == dtype
            np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize("dtype", [*NUMERIC, np.dtype(tf.bfloat16.as_numpy_dtype)], ids=str)
def test_we_read_what_tensorflow_writes(dtype: np.dtype) -> None:
    array = sample(dtype)
    proto = tf.make_tensor_proto(array)
    assert proto.dtype == dtypes.number_of(array)
    np.testing.assert_array_equal(decode(proto), array.astype(decode(proto).dtype))


@pytest.mark.parametrize("encode", [encode_values, encode_content])
def test_bfloat16_is_written_as_it_is_and_read_as_float32(encode: object) -> None:
    array = sample(np.dtype(tf.bfloat16.as_numpy_dtype))
    proto = TensorProto()
    encode(array, proto)  # type: ignore[operator]
    assert tf.make_ndarray(proto).dtype == array.dtype
    assert decode(proto).dtype == np.float32
    np.testing.assert_array_equal(decode(proto), array.astype(np.float32))


@pytest.mark.parametrize("array", [np.array([["é", "b"]]), np.array([["é".encode(), b"b"]], object)])
def test_strings(array: np.ndarray) -> None:
    proto = TensorProto()
    encode_values(array, proto)
    assert decode(proto).tolist() == [["é".encode(), b"b"]]
    assert tf.make_ndarray(proto).tolist() == [["é".encode(), b"b"]]


def test_the_last_value_fills_the_shape() -> None:
    proto = TensorProto(dtype=dtypes.FLOAT, float_val=[1, 2])
    proto.tensor_shape.dim.add().size = 4
    assert decode(proto).tolist() == [1, 2, 2, 2]
    assert decode(TensorProto(dtype=dtypes.INT32, tensor_shape=proto.tensor_shape)).tolist() == [0] * 4
    assert decode(TensorProto(dtype=dtypes.STRING, tensor_shape=proto.tensor_shape)).tolist() == [b""] * 4


def test_not_a_tensor() -> None:
    huge = TensorProto(dtype=dtypes.FLOAT, float_val=[0])
    huge.tensor_shape.dim.add().size = 2**40
    huge_and_empty = TensorProto(dtype=dtypes.FLOAT)
    for size in (0, 2**62, 2**62):
        huge_and_empty.tensor_shape.dim.add().size = size
    short = TensorProto(dtype=dtypes.FLOAT, tensor_content=b"123")
    text = TensorProto(dtype=dtypes.STRING, tensor_content=b"123")
    open_ended = TensorProto(dtype=dtypes.FLOAT)
    open_ended.tensor_shape.dim.add().size = -1
    for proto, message in [
        (huge, "needs more than 2147483647 bytes"),
        (huge_and_empty, "needs more than 2147483647 bytes"),
        (short, r"tensor_content has 3 bytes, but shape \[\] needs 4"),
        (text, "must hold its values in string_val"),
        (open_ended, "every dimension must be known"),
        (TensorProto(dtype=20), "dtype 20, which cannot be served"),
    ]:
        with pytest.raises(ServingError, match=message):
            decode(proto)
    with pytest.raises(TypeError, match="arrays of datetime64"):
        encode_values(np.array(["2020-01-01"], "datetime64[D]"), TensorProto())


@pytest.mark.parametrize("size", [0, 1, 31, 32, 5000])
@pytest.mark.parametrize(("dtype", "field"), [("<f4", "float_val"), (">f4", "float_val"), ("<f8", "double_val")])
def test_fixed_width_values_are_those_of_extend(size: int, dtype: str, field: str) -> None:
    array = np.random.default_rng(0).normal(size=(size, 1)).astype(dtype)
    found, expected = TensorProto(), TensorProto()
    encode_values(array, found)
    expected.dtype = found.dtype
    expected.tensor_shape.CopyFrom(found.tensor_shape)
    getattr(expected, field).extend(array.ravel().tolist())
    assert found.SerializeToString(deterministic=True) == expected.SerializeToString(deterministic=True)
