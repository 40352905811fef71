"""JPEG and PNG files: in a folder for each class, or listed with their labels in a manifest."""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
from PIL import Image, ImageOps

from components import progress
from components.errors import ConfigError, DataError, did_you_mean
from components.external import unreadable
from components.ingest.sources.arrays import tensor_array
from components.ingest.sources.files import at_rest
from components.ingest.sources.tables import csv, jsonl
from components.ingest.splits import SPLIT_NAMES

_ROWS_PER_BATCH = 256
_BYTES_PER_BATCH = 64 << 20
_ENDINGS = (".jpg", ".jpeg", ".png")
_FORMATS = ("JPEG", "PNG")
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_NAMED = 20  # files, in a message

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class _Options:
    size: Sequence[int] | None
    channels: int
    max_bad_files: int

    def __post_init__(self) -> None:
        if self.channels not in _MODES:
            raise ConfigError(f"data.args.channels: 1 (grey), 3 (RGB) or 4 (RGBA), received {self.channels}.")
        if self.size is not None and (len(self.size) != 2 or any(not isinstance(n, int) or n < 1 for n in self.size)):
            raise ConfigError(f"data.args.size: [height, width] in pixels, received {list(self.size)}.")
        if self.max_bad_files < 0:
            raise ConfigError(f"data.args.max_bad_files: 0 or more, received {self.max_bad_files}.")


class _BadImageError(Exception):
    """A file is no whole JPEG or PNG."""


def image_folder(
    *, path: str | None, size: Sequence[int] | None = None, channels: int = 3, max_bad_files: int = 0
) -> Iterator[pa.RecordBatch]:
    """JPEG and PNG files in a folder for each class: `<class>/x.jpg`, or `train/<class>/x.jpg`, `test/...` and so on.

    Yields `image` (uint8, upright as EXIF says), `label` (name of the folder) and, where the outer folders name splits,
    `split`.

    Args:
        path: The folder.
        size: `[height, width]` in pixels that every image is resized to; default: all have one size already.
        channels: 1 (grey), 3 (RGB; transparency is dropped) or 4 (RGBA).
        max_bad_files: Files that may be truncated or no images; they are left out, and told of.

    Raises:
        ConfigError: an option has no such value.
        DataError: more files than that are truncated or no images, or one has another size or cannot be read.
    """
    options = _Options(size, channels, max_bad_files)
    root = _folder(path, "one that has a folder of images for each class")
    files, split_level = _files(root)

    def columns(kept: Sequence[int]) -> dict[str, pa.Array]:
        found = {"label": pa.array([files[i].parent.name for i in kept])}
        if split_level:
            found["split"] = pa.array([files[i].parent.parent.name for i in kept])
        return found

    with at_rest(files):
        for images, kept in _images(files, root, options):
            yield pa.RecordBatch.from_pydict({"image": images, **columns(kept)})


def image_manifest(
    *,
    path: str | None,
    manifest: str = "metadata.csv",
    file_column: str = "file_name",
    size: Sequence[int] | None = None,
    channels: int = 3,
    max_bad_files: int = 0,
) -> Iterator[pa.RecordBatch]:
    """JPEG and PNG files that a CSV or JSON Lines file lists, a row each, with labels and whatever else belongs to them.

    Yields `image` (uint8, upright as EXIF says) and the columns of the manifest without that of the files, in its order.

    Args:
        path: The folder that holds the manifest and the images.
        manifest: The file below it, `.csv` or `.jsonl`.
        file_column: Its column of paths, which start from `path`.
        size, channels, max_bad_files: As for `image_folder`; a file that is not there is bad, too.

    Raises:
        ConfigError: an option has no such value.
        DataError: the manifest cannot be read or has no such column, or as for `image_folder`.
    """
    options = _Options(size, channels, max_bad_files)
    root = _folder(path, "the one of the manifest and the images")
    table = _manifest(root / manifest)
    if file_column not in table.column_names:
        hint = did_you_mean(file_column, table.column_names)
        raise DataError(f"data.args.file_column: {root / manifest} has no column '{file_column}'.{hint}")
    if "image" in table.column_names and file_column != "image":
        raise DataError(f"data.path: {root / manifest} has a column 'image', as the pixels are called. Rename it.")
    names = table[file_column].to_pylist()
    for number, name in enumerate(names):
        if not isinstance(name, str) or not name:
            raise DataError(f"data.path: {root / manifest} names no file in row {number + 1} ({name!r}).")
    others = table.drop_columns([file_column])
    files = [root / name for name in names]
    with at_rest(files):
        for images, kept in _images(files, root, options):
            rest = others.take(pa.array(kept)).combine_chunks()
            columns = {name: _whole(rest[name]) for name in rest.column_names}
            yield pa.RecordBatch.from_pydict({"image": images, **columns})


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks else pa.array([], column.type)


def _images(files: list[Path], root: Path, options: _Options) -> Iterator[tuple[pa.Array, list[int]]]:
    """Batches of decoded images, `(rows, height, width, channels)`, and the numbers of the files that they are of."""
    bad: list[tuple[Path, _BadImageError]] = []
    first: tuple[Path, tuple[int, ...]] | None = None
    images: list[np.ndarray] = []
    kept: list[int] = []
    try:
        for number, decoded in enumerate(_in_parallel(lambda file: _try_decode(file, options), files)):
            if isinstance(decoded, _BadImageError):
                bad.append((files[number], decoded))
                _check_number(bad, options.max_bad_files)
                continue
            first = first or (files[number], decoded.shape)
            _check_size(files[number], decoded.shape, *first)
            images.append(decoded)
            kept.append(number)
            if len(images) == _ROWS_PER_BATCH or len(images) * decoded.nbytes >= _BYTES_PER_BATCH:
                yield tensor_array(np.stack(images)), kept
                images, kept = [], []
        if images:
            yield tensor_array(np.stack(images)), kept
    finally:  # also where no more than data.limit rows are asked for
        if 0 < len(bad) <= options.max_bad_files:
            _tell(bad, len(files), root)


def _in_parallel(function: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
    """The results in order; a few items a core are worked on ahead of what is taken."""
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    waiting: deque[Future[_Result]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > 4 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _try_decode(file: Path, options: _Options) -> np.ndarray | _BadImageError:
    try:
        return _decode(file, options)
    except _BadImageError as error:
        return error


def _decode(file: Path, options: _Options) -> np.ndarray:
    """`(height, width, channels)` of uint8."""
    if file.suffix.lower() not in _ENDINGS:
        raise _BadImageError(f"not named as a JPEG or PNG ({', '.join(_ENDINGS)})")
    try:
        content = file.read_bytes()
    except FileNotFoundError as error:
        raise _BadImageError("not there") from error
    except OSError as error:
        raise unreadable(file, error, "data.path") from error
    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            upright = _eight_bits(ImageOps.exif_transpose(image)).convert(_MODES[options.channels])
    except Image.UnidentifiedImageError as error:
        raise _BadImageError("truncated or no JPEG or PNG") from error
    # Pillow's readers raise what their bytes lead to; the content alone decides here.
    except (OSError, SyntaxError, ValueError, IndexError, KeyError, EOFError, Image.DecompressionBombError) as error:
        raise _BadImageError(f"truncated or no JPEG or PNG: {error}") from error
    if options.size is not None:
        height, width = options.size
        upright = upright.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(upright).reshape(upright.height, upright.width, options.channels)


def _eight_bits(image: Image.Image) -> Image.Image:
    """An image with 8 bits a channel: those of 16 bits are scaled, not cut off."""
    if image.mode.startswith("I"):
        return Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    return image


def _tell(bad: list[tuple[Path, _BadImageError]], num_files: int, root: Path) -> None:
    # Paths below the folder, which may be a copy of one elsewhere.
    told = [f"{os.path.relpath(file, root)} is {why}" for file, why in bad[:_NAMED]]
    progress.warn(f"{len(bad)} of {num_files} files left out: " + "; ".join(told) + "; ..." * (len(bad) > _NAMED))


def _check_number(bad: list[tuple[Path, _BadImageError]], limit: int) -> None:
    if len(bad) <= limit:
        return
    told = "; ".join(f"{file} is {why}" for file, why in bad[-_NAMED:])
    allowed = f"{len(bad)} files are no whole images, and {limit} may be: " if limit else ""
    raise DataError(
        f"data.path: {allowed}{told}. Delete such files or copy them again, or raise data.args.max_bad_files, which leaves "
        "them out."
    )


def _check_size(file: Path, shape: tuple[int, ...], other: Path, expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise DataError(
            f"data.path: {file} is {shape[0]} x {shape[1]} pixels, {other} is {expected[0]} x {expected[1]}. "
            "Set data.args.size: [height, width] to resize all of them."
        )


def _folder(path: str | None, which: str) -> Path:
    if path is None or not Path(path).is_dir():
        raise DataError(f"data.path: {path} is not a folder. Give {which}.")
    return Path(path)


def _files(root: Path) -> tuple[list[Path], bool]:
    """The files, and whether the outer folders name splits."""
    folders = sorted(folder for folder in root.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    split_level = bool(folders) and all(folder.name.lower() in SPLIT_NAMES for folder in folders)
    pattern = "*/*/*" if split_level else "*/*"
    files = sorted(file for file in root.glob(pattern) if file.is_file() and not file.name.startswith("."))
    if not files:
        raise DataError(f"data.path: {root} has no images. They belong in a folder for each class.")
    return files, split_level


def _manifest(file: Path) -> pa.Table:
    readers = {".csv": csv, ".jsonl": jsonl}
    if file.suffix not in readers:
        raise ConfigError(f"data.args.manifest: {file.name} is neither .csv nor .jsonl.")
    batches = list(readers[file.suffix](path=str(file)))
    if not batches:
        raise DataError(f"data.path: {file} lists no images.")
    return pa.Table.from_batches(batches)
