"""TFRecord framing: length, masked CRC-32C of the length, data, masked CRC-32C of the data.

Format: tensorflow/core/lib/io/record_writer.h. We write it ourselves because TensorFlow's writer cannot append to a
file. The checksum is CRC-32C (RFC 3720, appendix B.4), computed in blocks with numpy: it is linear over bits, so that
of a block is the XOR of what each of its bytes contributes at its place.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from serving.errors import Code, ServingError

_POLYNOMIAL = 0x82F63B78
_BLOCK_BYTES = 1024
_HEADER = struct.Struct("<QI")
_FOOTER = struct.Struct("<I")


@functools.cache
def _contributions() -> np.ndarray:
    """[place, byte] -> checksum of that byte followed by `place` zero bytes, shape (_BLOCK_BYTES, 256)."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1).astype(np.uint32)
    places = np.empty((_BLOCK_BYTES, 256), dtype=np.uint32)
    places[0] = table
    for place in range(1, _BLOCK_BYTES):
        places[place] = (places[place - 1] >> 8) ^ table[places[place - 1] & 0xFF]
    return places


def crc32c(data: bytes) -> int:
    """The CRC-32C of some bytes.

    Example:
        >>> hex(crc32c(b"123456789"))
        '0xe3069283'
    """
    places, state = _contributions(), 0xFFFFFFFF
    octets = np.frombuffer(data, dtype=np.uint8)
    for start in range(0, len(octets), _BLOCK_BYTES):
        state = _add_block(places, state, octets[start : start + _BLOCK_BYTES])
    return state ^ 0xFFFFFFFF


def _add_block(places: np.ndarray, state: int, block: np.ndarray) -> int:
    mixed = block.copy()
    carried = np.frombuffer(struct.pack("<I", state), dtype=np.uint8)
    head = min(4, len(block))
    mixed[:head] ^= carried[:head]
    rest = state >> 8 * head  # of a block shorter than the state, some of the state is left
    return rest ^ int(np.bitwise_xor.reduce(places[np.arange(len(block) - 1, -1, -1), mixed]))


def _masked(data: bytes) -> int:
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def frame(data: bytes) -> bytes:
    """One record, framed."""
    length = struct.pack("<Q", len(data))
    return length + _FOOTER.pack(_masked(length)) + data + _FOOTER.pack(_masked(data))


def read(path: Path) -> Iterator[bytes]:
    """The records of a file. A last record that was cut off in writing is left out.

    Raises:
        ServingError: DATA_LOSS when a record does not match its checksum.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        yield from read_opened(file)


def read_opened(file: BinaryIO) -> Iterator[bytes]:
    """The same of a file that is open, from its beginning."""
    while (data := _read_one(file, f"{file.name}, at byte {file.tell()}")) is not None:
        yield data


def _read_one(file: BinaryIO, place: str) -> bytes | None:
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    length, length_crc = _HEADER.unpack(header)
    if _masked(header[:8]) != length_crc:
        raise ServingError(Code.DATA_LOSS, f"{place}: not a TFRecord, or damaged: the length's checksum is wrong")
    data, footer = file.read(length), file.read(_FOOTER.size)
    if len(footer) < _FOOTER.size:
        return None
    if _masked(data) != _FOOTER.unpack(footer)[0]:
        raise ServingError(Code.DATA_LOSS, f"{place}: the record is damaged: its checksum is wrong")
    return data


def whole_bytes(path: Path) -> int:
    """The size of the file up to its last whole record: where an appending writer must go on.

    Raises:
        ServingError: DATA_LOSS when the file is no TFRecord file.
        OSError: the file cannot be read.
    """
    end, size = 0, path.stat().st_size
    with path.open("rb") as file:
        while end + _HEADER.size <= size:
            length, length_crc = _HEADER.unpack(file.read(_HEADER.size))
            if _masked(struct.pack("<Q", length)) != length_crc:
                raise ServingError(Code.DATA_LOSS, f"{path}, at byte {end}: not a TFRecord file, or damaged")
            following = end + _HEADER.size + length + _FOOTER.size
            if following > size:
                break
            end = following
            file.seek(end)
    return end
