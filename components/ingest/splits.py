"""Which split a row belongs to: by a hash that stays the same as data grows, or by what a column or its file says."""

from __future__ import annotations

import hashlib

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from components.config import DataConfig, SplitConfig
from components.errors import DataError, did_you_mean

TRAIN, VALIDATION, TEST = range(3)

SPLIT_NAMES = {
    "train": TRAIN,
    "training": TRAIN,
    "validation": VALIDATION,
    "valid": VALIDATION,
    "val": VALIDATION,
    "eval": VALIDATION,
    "dev": VALIDATION,
    "test": TEST,
}
_BYTES = (
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
    pa.types.is_fixed_size_binary,
)
_MISSING, _END = "\x00", "\x1f"


def check_columns(config: DataConfig, columns: list[str]) -> None:
    """Refuse a split that asks for columns which the data lacks.

    Raises:
        DataError: naming the column, and the nearest that exists.
    """
    wanted = dict.fromkeys(config.leakage.key, "data.leakage.key") | dict.fromkeys(config.split.key, "data.split.key")
    if config.split.method in ("column", "time"):
        wanted[config.split.column] = "data.split.column"
    for name, setting in wanted.items():
        if name not in columns:
            raise DataError(f"{setting}: the data has no column '{name}'.{did_you_mean(name, columns)}")


def assign(batch: pa.RecordBatch, config: SplitConfig, seed: int, part: str | None = None) -> np.ndarray:
    """The split of each row, by any method but time.

    Args:
        batch: Rows as the source gave them, before columns are dropped, so that `drop` moves no row.
        config: How to divide.
        seed: Another seed, another division (where a hash decides).
        part: The split that the file of these rows is of (path, span).

    Returns:
        `(rows,)` of `TRAIN`, `VALIDATION`, `TEST`.

    Raises:
        DataError: the column holds something that names no split.
    """
    if config.method == "column":
        return _by_column(batch.column(config.column), config.column)
    if part in ("validation", "test"):
        return np.full(batch.num_rows, SPLIT_NAMES[part])
    shares = row_shares(batch, config.key, seed)
    if part == "train":
        carved = 0.0 if config.paths.validation or config.validation_spans else config.validation
        return np.where(shares < carved, VALIDATION, TRAIN)
    if config.method == "fold":
        # Within a fold the fraction is spread evenly, too, and tells nothing of the number before the point.
        within, fold = np.modf(shares * config.num_folds)
        return np.where(fold == config.fold, TEST, np.where(within < config.validation, VALIDATION, TRAIN))
    return np.where(shares < config.test, TEST, np.where(shares < config.test + config.validation, VALIDATION, TRAIN))


def row_shares(batch: pa.RecordBatch, key: list[str], seed: int) -> np.ndarray:
    """A number in [0, 1) for each row that depends on nothing but its values and the seed.

    Equal rows get equal numbers. Columns count in the order of their names, and 3 and 3.0 are the same value, so
    neither a reordered file nor an integer column that later meets a fraction moves a row.
    Hash: BLAKE2b (RFC 7693), 64 bits.

    Args:
        batch: The rows.
        key: Columns to look at; empty: all.
        seed: Salt of the hash.

    Returns:
        float64 `(rows,)`.
    """
    salt = seed.to_bytes(8, "little", signed=True)
    digests = [
        hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8, salt=salt).digest()
        for text in row_texts(batch, key).to_pylist()
    ]
    return (np.frombuffer(b"".join(digests), "<u8") >> np.uint64(11)) / 2.0**53


def row_texts(batch: pa.RecordBatch, key: list[str]) -> pa.Array:
    """A text for each row that is equal where the values of all columns of `key` are (empty: of all)."""
    texts = [_canonical_text(batch.column(name)) for name in sorted(key or batch.schema.names)]
    return pc.binary_join_element_wise(*texts, _END, null_handling="replace", null_replacement=_MISSING)


def readable(text: str) -> str:
    """What one can read of a text of `row_texts`."""
    return text.replace(_MISSING, "missing").replace(_END, ", ")


def how_to_fill(split: str, config: SplitConfig) -> str:
    """What gives a split rows that has none."""
    named = {"column": f"mark rows '{split}' in column '{config.column}'", "path": f"correct data.split.paths.{split}"}
    cut_off = f"{split if split != 'train' else 'validation'}_from"
    if split != "validation" and config.method in named:
        return named[config.method]
    if config.method == "time" and getattr(config, cut_off) is not None:
        return f"correct data.split.{cut_off}"
    unit = f"distinct values of {', '.join(config.key)}" if config.key else "rows"
    setting = {"train": "validation" if config.method == "time" else "key", "test": "test"}.get(split, "validation")
    return f"raise data.split.{setting} or give more {unit}"


def _by_column(values: pa.Array, column: str) -> np.ndarray:
    distinct = values.dictionary_encode()
    numbers = [_split_number(value, column) for value in distinct.dictionary.to_pylist()]
    if distinct.null_count:
        _split_number(None, column)
    return np.array(numbers, np.int64)[distinct.indices.to_numpy(zero_copy_only=False)]


def _split_number(value: object, column: str) -> int:
    number = SPLIT_NAMES.get(str(value).strip().lower())
    if number is None:
        raise DataError(
            f"data.split.column: column '{column}' holds {value!r}, which names no split. Use train, validation "
            "(or valid, val, eval, dev) and test."
        )
    return number


def _canonical_text(values: pa.Array) -> pa.Array:
    if isinstance(values.type, pa.FixedShapeTensorType):
        rows = np.ascontiguousarray(values.to_numpy_ndarray())
        return pa.array([hashlib.blake2b(row.tobytes(), digest_size=16).hexdigest() for row in rows])
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if any(is_bytes(values.type) for is_bytes in _BYTES):
        return pa.array([value if value is None else value.hex() for value in values.to_pylist()], pa.string())
    try:
        return pc.cast(values, pa.string())
    except pa.ArrowNotImplementedError:
        # Nested columns and intervals: no feature can hold them, but `drop` comes after the split.
        return pa.array([value if value is None else repr(value) for value in values.to_pylist()], pa.string())
