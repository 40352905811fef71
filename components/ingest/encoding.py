"""Whole columns to serialised `tf.train.Example`s, without a Python call for each cell.

The bytes are those of protobuf's deterministic serialisation: entries sorted by name, numbers packed, a missing feature
left out. Sources: tensorflow/core/example/{example,feature}.proto and https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from components.examples import Feature
from components.ingest.columns import Values, flat_values

_FIRST = b"\x0a"  # field 1, length-delimited
_SECOND = b"\x12"
_LISTS = {"string": _FIRST, "uint8": _FIRST, "float": _SECOND, "int": b"\x1a"}  # the one-of fields of Feature
_VARINT_BYTES = 10  # of the longest
_AFTER_ALL = b"\xff"  # in no UTF-8 text: protobuf puts a name behind those that it begins


def serialize(batch: pa.RecordBatch, features: Mapping[str, Feature]) -> Iterator[bytes]:
    """Each row as a serialised `tf.train.Example`; equal rows give equal bytes.

    Args:
        batch: Has a column for each feature.
        features: The columns to encode.

    Raises:
        DataError: a value does not fit its type, or a tensor is missing.
    """
    parts: list[pa.LargeBinaryArray] = []
    for name in sorted(features, key=lambda name: name.encode() + _AFTER_ALL):
        payload = _payload(flat_values(name, batch.column(name), features[name]), features[name].type)
        parts += [_by_length(payload, _entry_header(name, features[name].type)), payload]
    entries = _joined(*parts)
    headers = _by_length(entries, lambda size: _header(_FIRST, size) if size else b"")
    offsets, buffer = _offsets_and_data(_joined(headers, entries))
    data = buffer.to_pybytes()
    for start, stop in itertools.pairwise(offsets.tolist()):
        yield data[start:stop]


def _payload(values: Values, kind: str) -> pa.LargeBinaryArray:
    """What each row holds of a feature: packed numbers, or strings each after its length; nothing where missing."""
    row_ends = np.concatenate([[0], np.cumsum(values.lengths)])
    if kind == "string":
        headers = _by_length(values.flat, lambda size: _header(_FIRST, size))
        offsets, data = _offsets_and_data(_joined(headers, values.flat))
        return _binary(offsets[row_ends], data)
    if kind == "int":
        offsets, packed = _varints(values.flat)
        return _binary(offsets[row_ends], packed)
    little_endian = np.ascontiguousarray(values.flat, "<f4" if kind == "float" else np.uint8)
    return _binary(row_ends * little_endian.itemsize, little_endian)


def _entry_header(name: str, kind: str) -> Callable[[int], bytes]:
    """All that stands before a payload of so many bytes in the entry of a map, the name among it."""
    key = _header(_FIRST, len(name.encode())) + name.encode()

    def header(size: int) -> bytes:
        if not size:
            return b""
        packed = b"" if kind == "string" else _header(_FIRST, size)
        feature = _header(_LISTS[kind], len(packed) + size) + packed
        entry = key + _header(_SECOND, len(feature) + size) + feature
        return _header(_FIRST, len(entry) + size) + entry

    return header


def _by_length(values: pa.LargeBinaryArray, header: Callable[[int], bytes]) -> pa.LargeBinaryArray:
    """The header of each value, made once for each length that occurs."""
    lengths, which = np.unique(np.diff(_offsets_and_data(values)[0]), return_inverse=True)
    return pa.array([header(length) for length in lengths.tolist()], pa.large_binary()).take(pa.array(which))


def _header(tag: bytes, size: int) -> bytes:
    encoded = bytearray(tag)
    while size > 0x7F:
        encoded.append(size & 0x7F | 0x80)
        size >>= 7
    encoded.append(size)
    return bytes(encoded)


def _varints(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each value starts, `(values + 1,)`, and the bytes of all; negative ones take ten, as in protobuf."""
    bits = np.ascontiguousarray(values, np.int64).view(np.uint64)
    lengths = np.ones(len(bits), np.int64)
    for number in range(1, _VARINT_BYTES):
        lengths += bits >= np.uint64(1 << 7 * number)
    longest = int(lengths.max(initial=1))
    encoded = np.empty((len(bits), longest), np.uint8)
    for number in range(longest):
        more = np.where(lengths > number + 1, np.uint8(0x80), np.uint8(0))
        encoded[:, number] = (bits >> np.uint64(7 * number) & np.uint64(0x7F)).astype(np.uint8) | more
    used = np.arange(longest) < lengths[:, None]
    return np.concatenate([[0], np.cumsum(lengths)]), encoded[used]


def _joined(*columns: pa.LargeBinaryArray) -> pa.LargeBinaryArray:
    return pc.binary_join_element_wise(*columns, pa.scalar(b"", pa.large_binary()))


def _binary(offsets: np.ndarray, data: pa.Buffer | np.ndarray) -> pa.LargeBinaryArray:
    buffers = [None, pa.py_buffer(np.ascontiguousarray(offsets, np.int64)), pa.py_buffer(data)]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)


def _offsets_and_data(values: pa.LargeBinaryArray) -> tuple[np.ndarray, pa.Buffer]:
    _, offsets, data = values.buffers()
    if not len(values):
        return np.zeros(1, np.int64), pa.py_buffer(b"")
    starts = np.frombuffer(offsets, np.int64, len(values) + 1, values.offset * 8)
    return starts, pa.py_buffer(b"") if data is None else data
