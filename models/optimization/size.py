"""Size of a file as it travels: zipped, so that zeros and shared values count."""

from __future__ import annotations

import zlib
from pathlib import Path

_CHUNK_BYTES = 1 << 20


def zipped_size(file: Path) -> int:
    """Bytes of a file's content after deflate (RFC 1951) at its highest level, without the headers of an archive."""
    compressor, size = zlib.compressobj(level=9, wbits=-zlib.MAX_WBITS), 0
    with file.open("rb") as content:
        while chunk := content.read(_CHUNK_BYTES):
            size += len(compressor.compress(chunk))
    return size + len(compressor.flush())
