"""The built-in sources: each is a function that yields Arrow record batches.

A source takes `path` and its own options as keywords and yields `pyarrow.RecordBatch`es of one schema, tensors as
`pyarrow.fixed_shape_tensor`. Write your own the same way and name it `package.module:function`.
"""

from __future__ import annotations

import gzip
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from csv import Error as CsvError
from csv import reader as csv_reader
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import tensorflow as tf
from google.protobuf.message import DecodeError

from components.errors import ConfigError, DataError
from components.examples import check_whole, damaged_file
from components.external import data_files, unreadable
from components.ingest.shards import read_records
from components.ingest.splits import SPLIT_NAMES

_ROWS_PER_BATCH = 8192
_IMAGES_PER_BATCH = 256
_BLOCK = 1 << 20
_IMAGE_ENDINGS = (".jpg", ".jpeg", ".png")
# No BOOLEAN: it would take yes and no, Y and N, and turn named classes into numbers.
_CSV_TYPES = ["BIGINT", "DOUBLE", "VARCHAR"]


def csv(
    *,
    path: str | None,
    delimiter: str = ",",
    columns: list[str] | None = None,
    types: Mapping[str, str] | None = None,
    null_values: list[str] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Comma-separated files, plain or gzipped. Types follow from the whole file: whole numbers,
    numbers, or else text.

    Args:
        path: File, folder or glob.
        delimiter: Between the fields.
        columns: Names for files without a header line.
        types: SQL types of columns that are not to be inferred, as `{zip: VARCHAR, member: BOOLEAN}`.
        null_values: Texts that stand for a missing value; default: the empty field.

    Raises:
        DataError: a file cannot be read or is not a CSV.
    """
    # Everything but the types is said, because DuckDB's own guess skips lines that do not fit the rest.
    options: dict[str, object] = {
        "header": columns is None,
        "auto_type_candidates": _CSV_TYPES,
        "delim": delimiter,
        "quote": '"',
        "escape": '"',
        "comment": "",
        "skip": 0,
        "sample_size": -1,
        "union_by_name": True,
    }
    given = {"names": columns, "types": types, "nullstr": null_values}
    options |= {name: value for name, value in given.items() if value is not None}
    try:
        yield from _duckdb("read_csv", path, options)
    except DataError as error:
        if (place := _odd_line(find_files(path), delimiter)) is not None:
            raise DataError(f"data.path: {place}. Correct it, or set data.args.delimiter.") from error
        raise


def parquet(*, path: str | None) -> Iterator[pa.RecordBatch]:
    """Parquet files.

    Raises:
        DataError: a file cannot be read or is no Parquet file.
    """
    yield from _duckdb("read_parquet", path, {"union_by_name": True})


def jsonl(*, path: str | None) -> Iterator[pa.RecordBatch]:
    """JSON Lines, plain or gzipped: one flat object a line. Types follow from the whole file.

    Raises:
        DataError: a file cannot be read or a line is not JSON.
    """
    yield from _duckdb(
        "read_json", path, {"format": "newline_delimited", "sample_size": -1, "union_by_name": True, "records": True}
    )


def tfrecord(*, path: str | None) -> Iterator[pa.RecordBatch]:
    """TFRecord files of `tf.train.Example`, plain or gzipped. Types and lengths follow from all the records.

    A feature of one value becomes a column, one of `n > 1` numbers in every record a tensor of shape `(n,)`.

    Raises:
        DataError: a file is damaged or holds something else, or a feature varies in type or length.
    """
    files = find_files(path)
    kinds: dict[str, tuple[str, int]] = {}
    always: dict[str, int] = {}
    num_records = 0
    for file, example in _read_tfrecords(files):
        num_records += 1
        for name, feature in example.features.feature.items():
            kind = feature.WhichOneof("kind")
            if kind is not None and (length := len(getattr(feature, kind).value)):
                _note_kind(kinds, name, (kind, length), file)
                always[name] = always.get(name, 0) + 1
    for name, (_, length) in kinds.items():
        if length > 1 and always[name] < num_records:
            raise DataError(f"data.path: feature '{name}' has {length} values, but none in some records. Fill them in.")
    rows: list[tf.train.Example] = []
    for _, example in _read_tfrecords(files):
        rows.append(example)
        if len(rows) == _ROWS_PER_BATCH:
            yield _example_batch(rows, kinds)
            rows = []
    if rows:
        yield _example_batch(rows, kinds)


def image_folder(*, path: str | None, size: Sequence[int] | None = None, channels: int = 3) -> Iterator[pa.RecordBatch]:
    """JPEG and PNG files in a folder for each class: `<class>/x.jpg`, or `train/<class>/x.jpg`, `test/...` and so on.

    Yields `image` (uint8), `label` (name of the folder) and, where the outer folders name splits, `split`.

    Args:
        path: The folder.
        size: `[height, width]` in pixels that every image is resized to; default: all have one size already.
        channels: 1 (grey) or 3 (RGB).

    Raises:
        DataError: a file is no image, is truncated, or has another size.
    """
    if path is None or not Path(path).is_dir():
        raise DataError(f"data.path: {path} is not a folder. Give one that has a folder of images for each class.")
    if channels not in (1, 3):
        raise ConfigError(f"data.args.channels: 1 (grey) or 3 (RGB), received {channels}.")
    if size is not None and (len(size) != 2 or any(not isinstance(n, int) or n < 1 for n in size)):
        raise ConfigError(f"data.args.size: [height, width] in pixels, received {list(size)}.")
    files, split_level = _image_files(Path(path))
    expected: tuple[int, ...] | None = None
    for start in range(0, len(files), _IMAGES_PER_BATCH):
        chunk = files[start : start + _IMAGES_PER_BATCH]
        images = [_decode_image(file, size, channels) for file in chunk]
        expected = expected or images[0].shape
        for file, image in zip(chunk, images, strict=True):
            if image.shape != expected:
                raise DataError(
                    f"data.path: {file} is {image.shape[0]} x {image.shape[1]} pixels, {files[0]} is {expected[0]} x "
                    f"{expected[1]}. Set data.args.size: [height, width] to resize all of them."
                )
        columns = {"image": tensor_array(np.stack(images)), "label": pa.array([file.parent.name for file in chunk])}
        if split_level:
            columns["split"] = pa.array([file.parent.parent.name for file in chunk])
        yield pa.RecordBatch.from_pydict(columns)


def numpy_arrays(*, path: str | None) -> Iterator[pa.RecordBatch]:
    """Arrays with one row for each example: an `.npz` file of named ones, or a folder of `<column>.npy`.

    One-dimensional arrays become columns. Others become tensors, uint8 ones images `(height, width, channels)`.

    Raises:
        DataError: a file cannot be read, holds Python objects, or the arrays differ in length.
    """
    arrays = _load_arrays(path)
    lengths = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    if len(set(lengths.values())) != 1:
        told = ", ".join(f"{name} {length}" for name, length in lengths.items()) or "there are none"
        raise DataError(f"data.path: {path}: arrays must have the same number of rows: {told}.")
    for start in range(0, next(iter(lengths.values())), _ROWS_PER_BATCH):
        part = {name: _array_column(name, array[start : start + _ROWS_PER_BATCH]) for name, array in arrays.items()}
        yield pa.RecordBatch.from_pydict(part)


def tensor_array(values: np.ndarray) -> pa.Array:
    """`(rows, *shape)` as an Arrow array of fixed-shape tensors."""
    return pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(values))


def find_files(path: str | None) -> list[Path]:
    """The files that `data.path` names, none of them empty.

    Raises:
        ConfigError: no path was given.
        DataError: there is no such file, or it is empty or not readable.
    """
    if path is None:
        raise ConfigError("data.path: this source needs a file, folder or glob.")
    try:
        files = data_files(path)
    except OSError as error:
        raise unreadable(path, error, "data.path") from error
    if not files:
        what = f"the folder {path} holds no file" if Path(path).is_dir() else f"there is no file {path}"
        raise DataError(f"data.path: {what} (seen from {Path.cwd()}). Correct the path, or put the data there.")
    for file in files:
        try:
            with file.open("rb") as stream:
                if not stream.read(1):
                    raise DataError(f"data.path: {file} is empty. Delete it or write it again.")
        except OSError as error:
            raise unreadable(file, error, "data.path") from error
    return files


def _duckdb(function: str, path: str | None, options: Mapping[str, object]) -> Iterator[pa.RecordBatch]:
    files = find_files(path)
    for file in files:
        if file.suffix == ".gz":
            _check_gzip(file)
    arguments = [_sql([str(file) for file in files]), *(f"{name}={_sql(value)}" for name, value in options.items())]
    try:
        # One thread: rows keep the order of the file.
        with duckdb.connect(config={"threads": 1}) as connection:
            relation = connection.sql(f"SELECT * FROM {function}({', '.join(arguments)})")
            yield from relation.to_arrow_reader(_ROWS_PER_BATCH)
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        names = ", ".join(str(file) for file in files[:3]) + (" ..." if len(files) > 3 else "")
        mend = "Write it again, or set data.source and data.args to what it holds; text must be in UTF-8."
        raise DataError(f"data.path: {names} cannot be read: {_first_lines(error)} {mend}") from error


def _check_gzip(file: Path) -> None:
    """Refuse a gzipped file that is cut off or damaged: DuckDB compares no checksum and reads other values from it."""
    try:
        with gzip.open(file) as stream:
            while stream.read(_BLOCK):
                pass
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"data.path: {file} is cut off, damaged or not gzipped: {error}. Copy it again, or name it without .gz."
        ) from error


def _odd_line(files: list[Path], delimiter: str) -> str | None:
    """The first line of CSV files with another number of fields than the line at the top."""
    for file in files:
        open_text = gzip.open if file.suffix == ".gz" else open
        try:
            with open_text(file, "rt", newline="") as stream:
                rows = csv_reader(stream, delimiter=delimiter)
                width = len(next(rows))
                for row in rows:
                    if row and len(row) != width:
                        return f"{file}, line {rows.line_num} has {len(row)} fields, the first line has {width}"
        except (OSError, EOFError, ValueError, TypeError, CsvError):
            return None
    return None


def _read_tfrecords(files: list[Path]) -> Iterator[tuple[Path, tf.train.Example]]:
    for file in files:
        compression = "GZIP" if file.suffix == ".gz" else ""
        if not compression:
            check_whole(file)
        try:
            for record in read_records([str(file)], compression):
                yield file, tf.train.Example.FromString(record)
        except tf.errors.OpError as error:
            raise damaged_file(file, error) from error
        except DecodeError as error:
            raise DataError(f"data.path: {file} holds records that are no tf.train.Example: {error}.") from error


def _note_kind(kinds: dict[str, tuple[str, int]], name: str, seen: tuple[str, int], file: Path) -> None:
    known = kinds.setdefault(name, seen)
    if known != seen:
        (kind, length), (other, other_length) = known, seen
        raise DataError(
            f"data.path: feature '{name}' is {length} x {kind} in some records and {other_length} x {other} in {file}. "
            "It must have one type and length."
        )
    if seen[0] == "bytes_list" and seen[1] > 1:
        raise DataError(f"data.path: feature '{name}' holds {seen[1]} strings in {file}, a feature holds one.")


def _example_batch(examples: list[tf.train.Example], kinds: Mapping[str, tuple[str, int]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({name: _example_column(examples, name, *kinds[name]) for name in sorted(kinds)})


def _example_column(examples: list[tf.train.Example], name: str, kind: str, length: int) -> pa.Array:
    values = [getattr(e.features.feature[name], kind).value if name in e.features.feature else () for e in examples]
    if length > 1:
        return tensor_array(np.array(values, np.int64 if kind == "int64_list" else np.float32))
    types = {"int64_list": pa.int64(), "float_list": pa.float32(), "bytes_list": pa.binary()}
    return pa.array([value[0] if value else None for value in values], types[kind])


def _image_files(root: Path) -> tuple[list[Path], bool]:
    """The files, and whether the outer folders name splits."""
    folders = sorted(folder for folder in root.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    split_level = bool(folders) and all(folder.name.lower() in SPLIT_NAMES for folder in folders)
    pattern = "*/*/*" if split_level else "*/*"
    files = sorted(file for file in root.glob(pattern) if file.is_file() and not file.name.startswith("."))
    if not files:
        raise DataError(f"data.path: {root} has no images. They belong in a folder for each class.")
    for file in files:
        if file.suffix.lower() not in _IMAGE_ENDINGS:
            raise DataError(
                f"data.path: {file} is not named as a JPEG or PNG ({', '.join(_IMAGE_ENDINGS)}). Move it away."
            )
    return files, split_level


def _decode_image(file: Path, size: Sequence[int] | None, channels: int) -> np.ndarray:
    try:
        image = tf.io.decode_image(file.read_bytes(), channels=channels, expand_animations=False)
    except OSError as error:
        raise DataError(f"data.path: {file} cannot be read: {error.strerror}.") from error
    except tf.errors.InvalidArgumentError as error:
        reason = str(error.message).partition("\n")[0]
        raise DataError(
            f"data.path: {file} is truncated or no JPEG or PNG: {reason}. Delete it or copy it again."
        ) from error
    if size is not None:
        image = tf.cast(tf.round(tf.image.resize(image, size, antialias=True)), tf.uint8)
    array: np.ndarray = image.numpy()
    return array


def _load_arrays(path: str | None) -> dict[str, np.ndarray]:
    files = find_files(path)
    if len(files) == 1 and files[0].suffix == ".npz":
        return _load_numpy(files[0])
    others = [file for file in files if file.suffix != ".npy"]
    if others:
        raise DataError(f"data.path: {others[0]} is not .npy. Give one .npz file, or .npy files alone.")
    return {file.stem: _load_numpy(file)[""] for file in files}


def _load_numpy(file: Path) -> dict[str, np.ndarray]:
    try:
        loaded: Any = np.load(file, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {"": loaded}
        with loaded:
            return {name: loaded[name] for name in loaded.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"data.path: {file} cannot be read: {_first_lines(error)}") from error


def _array_column(name: str, values: np.ndarray) -> pa.Array:
    if values.dtype.kind not in "biufUS":
        raise DataError(f"data.path: array '{name}' holds {values.dtype}; use numbers, booleans or strings.")
    if values.ndim == 1:
        return pa.array(values.tolist() if values.dtype.kind in "US" else values)
    if values.dtype.kind in "US":
        raise DataError(f"data.path: array '{name}' of strings has {values.ndim} axes; use one.")
    if values.dtype == np.uint8 and values.ndim == 3:
        values = values[..., np.newaxis]
    if values.dtype != np.uint8:
        values = values.astype(np.float32 if values.dtype.kind == "f" else np.int64)
    return tensor_array(values)


def _sql(value: object) -> str:
    if isinstance(value, bool | int):
        return str(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_sql(str(key))}: {_sql(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_sql(item) for item in value) + "]"
    return "'" + str(value).replace("'", "''") + "'"


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.endswith(":")]
    return " ".join(line if line.endswith((".", "!", "?")) else f"{line}." for line in lines[:3])
