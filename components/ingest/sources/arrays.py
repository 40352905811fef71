"""Numpy arrays, and how arrays of any source become Arrow columns."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from components.errors import DataError
from components.ingest.sources.files import at_rest, find_files, first_lines

_ROWS_PER_BATCH = 8192
_BYTES_PER_BATCH = 64 << 20
_INT64_MAX = np.iinfo(np.int64).max


def numpy_arrays(*, path: str | None) -> Iterator[pa.RecordBatch]:
    """Arrays with one row for each example: an `.npz` file of named ones, or a folder of `<column>.npy`.

    One-dimensional arrays become columns. Others become tensors, uint8 ones images `(height, width, channels)`. Files
    `.npy` are mapped, not loaded, so they may be larger than the memory.

    Raises:
        DataError: a file cannot be read, holds Python objects, or the arrays differ in length.
    """
    files = find_files(path)
    with at_rest(files):
        arrays = _load_arrays(files)
        lengths = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
        if len(set(lengths.values())) != 1:
            told = ", ".join(f"{name} {length}" for name, length in lengths.items()) or "there are none"
            raise DataError(f"data.path: {path}: arrays must have the same number of rows: {told}.")
        num_rows = next(iter(lengths.values()))
        row_bytes = sum(array.nbytes for array in arrays.values()) // max(num_rows, 1)
        step = min(max(_BYTES_PER_BATCH // max(row_bytes, 1), 1), _ROWS_PER_BATCH)
        for start in range(0, num_rows, step):
            part = {name: array_column(name, array[start : start + step]) for name, array in arrays.items()}
            yield pa.RecordBatch.from_pydict(part)


def tensor_array(values: np.ndarray) -> pa.Array:
    """`(rows, *shape)` as an Arrow array of fixed-shape tensors."""
    return pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(values))


def array_column(name: str, values: np.ndarray) -> pa.Array:
    """`(rows, *shape)` as an Arrow column of the same type; uint8 `(rows, height, width)` as grey images.

    Raises:
        DataError: no column can hold the array; `name` says which.
    """
    kind = values.dtype.kind
    if kind not in "biufUSM" or values.dtype == np.longdouble:
        raise DataError(f"data.path: array '{name}' holds {values.dtype}; use numbers, booleans, times or strings.")
    if values.ndim == 1:
        return pa.array(values.tolist() if kind in "US" else values)
    if kind in "USM":
        what = "times" if kind == "M" else "strings"
        raise DataError(f"data.path: array '{name}' of {what} has {values.ndim} axes; use one.")
    if values.dtype == np.uint64 and values.size and values.max() > _INT64_MAX:
        raise DataError(f"data.path: array '{name}' holds {values.max()}; tensors of whole numbers go to 2^63 - 1.")
    if values.dtype == np.uint8:
        return tensor_array(values[..., np.newaxis] if values.ndim == 3 else values)
    narrow = {"b": np.int64, "u": np.int64, "f": np.float64 if values.dtype.itemsize == 8 else np.float32}
    return tensor_array(values.astype(narrow.get(kind, values.dtype), copy=False))


def _load_arrays(files: list[Path]) -> dict[str, np.ndarray]:
    if len(files) == 1 and files[0].suffix == ".npz":
        return _load_numpy(files[0])
    others = [file for file in files if file.suffix != ".npy"]
    if others:
        raise DataError(f"data.path: {others[0]} is not .npy. Give one .npz file, or .npy files alone.")
    return {file.stem: _load_numpy(file)[""] for file in files}


def _load_numpy(file: Path) -> dict[str, np.ndarray]:
    try:
        loaded: Any = np.load(file, allow_pickle=False, mmap_mode="r")
        if isinstance(loaded, np.ndarray):
            return {"": loaded}
        with loaded:
            return {name: loaded[name] for name in loaded.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"data.path: {file} cannot be read: {first_lines(error)}") from error
