"""Splits by time: what was later is validation, what was last is test."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from components.errors import DataError
from components.ingest.splits import TEST, TRAIN, VALIDATION
from components.split_config import SplitConfig, read_time

_MICROSECONDS = pa.timestamp("us")
_TEXTS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
_Number = int | float


class TimeSplit:
    """Cut-offs in the values of one column: a row at a cut-off belongs to the later split.

    Times without a zone are compared as they are written, those with one as instants. A cut-off without a zone means, where
    the column has one, that of the column (UTC where the column is text).

    Args:
        config: The column, and cut-offs or shares.
    """

    def __init__(self, config: SplitConfig) -> None:
        self._config = config
        self._zone: str | None = None
        self._kind: str | None = None  # numbers, times, or times with a zone
        self._cut_offs: dict[str, _Number | None] = {}

    @property
    def needs_fit(self) -> bool:
        """Whether shares are to become cut-offs."""
        return self._config.validation_from is None or self._config.test_from is None

    def fit(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Find the cut-offs that leave at least the shares asked for to the later splits.

        Rows of one time stay together, so that a split may get more. Takes 8 bytes of memory for each row.

        Raises:
            DataError: as `assign`.
        """
        times = np.concatenate([np.empty(0, np.int64), *(self._numbers(batch) for batch in batches)])
        if self._config.test_from is None:
            self._cut_offs["test"] = _at(times, len(times), self._config.test * len(times))
        if self._config.validation_from is None:
            test_from = self._cut_offs.get("test")
            before = len(times) if test_from is None else int(np.count_nonzero(times < test_from))
            self._cut_offs["validation"] = _at(times, before, self._config.validation * len(times))

    def assign(self, batch: pa.RecordBatch) -> np.ndarray:
        """The split of each row, `(rows,)` of `TRAIN`, `VALIDATION`, `TEST`.

        Raises:
            DataError: a row has no time, or the column or a cut-off is none that can be compared.
        """
        numbers = self._numbers(batch)
        splits = np.full(len(numbers), TRAIN)
        for name, split in (("validation", VALIDATION), ("test", TEST)):
            cut_off = self._cut_offs[name]
            if cut_off is not None:
                splits[numbers >= cut_off] = split
        return splits

    def record(self) -> dict[str, Any]:
        """The first moment of the validation and of the test rows, in ISO 8601 or as a number; None: they have none."""
        return {name: self._written(cut_off) for name, cut_off in sorted(self._cut_offs.items())}

    def _written(self, cut_off: _Number | None) -> _Number | str | None:
        if cut_off is None or self._kind == "numbers":
            return cut_off
        zone = datetime.timezone.utc if self._zone else None
        first = datetime.datetime(1970, 1, 1, tzinfo=zone)
        return (first + datetime.timedelta(microseconds=int(cut_off))).isoformat()

    def _numbers(self, batch: pa.RecordBatch) -> np.ndarray:
        """The times of a batch as numbers that can be compared: microseconds since 1970, or the numbers themselves."""
        column = self._config.column
        values = batch.column(column)
        if pa.types.is_dictionary(values.type):
            values = values.cast(values.type.value_type)
        if any(is_text(values.type) for is_text in _TEXTS):
            texts = values.cast(pa.string())
            values = _parsed(_refuse_missing(texts, pc.equal(texts, ""), column), column)
        elif pa.types.is_floating(values.type):
            values = _refuse_missing(values, pc.is_nan(values), column)
        else:
            values = _refuse_missing(values, None, column)
        if pa.types.is_date(values.type) or pa.types.is_timestamp(values.type):
            self._note(getattr(values.type, "tz", None), "times")
            return values.cast(pa.timestamp("us", self._zone), safe=False).cast(pa.int64()).to_numpy()
        if pa.types.is_integer(values.type) or pa.types.is_floating(values.type) or pa.types.is_decimal(values.type):
            self._note(None, "numbers")
            try:
                kind = pa.int64() if pa.types.is_integer(values.type) else pa.float64()
                return values.cast(kind).to_numpy()
            except pa.ArrowInvalid as error:
                raise DataError(f"data.split.column: column '{column}': {error}. Convert it to times.") from error
        raise DataError(
            f"data.split.column: column '{column}' is {values.type}, by which no time can be told. Name a column of dates, "
            "times or numbers."
        )

    def _note(self, zone: str | None, kind: str) -> None:
        """Remember what the column holds, and bring the cut-offs of the configuration into the same form."""
        kind = f"{kind} with a zone" if zone else kind
        if self._kind is None:
            self._kind, self._zone = kind, zone
            for name, given in (("validation", self._config.validation_from), ("test", self._config.test_from)):
                if given is not None:
                    self._cut_offs[name] = self._converted(given, f"data.split.{name}_from")
        elif kind != self._kind:
            raise DataError(
                f"data.split.column: column '{self._config.column}' holds {self._kind} first, {kind} later. Write all alike."
            )

    def _converted(self, given: _Number | str, setting: str) -> _Number:
        is_number = not isinstance(given, str)
        if is_number != (self._kind == "numbers"):
            raise DataError(
                f"{setting}: column '{self._config.column}' holds {self._kind}, received {given!r}. Give one of its kind."
            )
        if not isinstance(given, str):
            return given
        time = read_time(given)
        if time.tzinfo is not None:
            if self._zone is None:
                raise DataError(
                    f"{setting}: {given} has a zone, the times of column '{self._config.column}' have none. Leave it out."
                )
            return int(pa.scalar(time, pa.timestamp("us", "UTC")).value)
        scalar = pa.scalar(time, _MICROSECONDS)
        if self._zone is not None:
            scalar = pc.assume_timezone(scalar, self._zone, ambiguous="earliest", nonexistent="earliest")
        return int(scalar.value)


def _at(times: np.ndarray, end: int, num_later: float) -> _Number | None:
    """The time of the first of the last `num_later` rows before the `end`-th in order; None if there is none."""
    index = max(end - round(num_later), 0)
    if index >= end:
        return None
    found: _Number = np.partition(times, index)[index].item()
    return found


def _refuse_missing(values: pa.Array, empty: pa.Array | None, column: str) -> pa.Array:
    missing = values.is_null() if empty is None else pc.fill_null(empty, True)
    number = pc.sum(missing).as_py()
    if number:
        raise DataError(
            f"data.split.column: {number} of the {len(values)} rows of a batch have no time in column '{column}', and so no "
            "split. Fill it in, or leave them out."
        )
    return values


def _parsed(texts: pa.Array, column: str) -> pa.Array:
    """Texts in ISO 8601 as timestamps, with a zone if they have one."""
    for kind in (_MICROSECONDS, pa.timestamp("us", "UTC")):
        try:
            return texts.cast(kind)
        except pa.ArrowInvalid:
            continue
    for text in texts.to_pylist():
        try:
            read_time(text)
        except ValueError as error:
            raise DataError(
                f"data.split.column: column '{column}' holds {text!r}, which is no date or time in ISO 8601 as 2013-11-01 "
                "08:30. Convert it; for csv, data.args.types can."
            ) from error
    raise DataError(
        f"data.split.column: column '{column}' holds times with a zone and times without, or not in one of the forms "
        "2013-11-01, 2013-11-01 08:30 and 2013-11-01T08:30:00.5. Write all alike."
    )
