"""TFRecord files of `tf.train.Example` or `tf.train.SequenceExample`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import tensorflow as tf
from google.protobuf.message import DecodeError

from components.errors import DataError
from components.examples import check_whole, damaged_file
from components.ingest.shards import read_records
from components.ingest.sources.arrays import tensor_array
from components.ingest.sources.files import at_rest, find_files

_ROWS_PER_BATCH = 8192
_BYTES_PER_BATCH = 32 << 20
_TYPES = {"int64_list": pa.int64(), "float_list": pa.float32(), "bytes_list": pa.binary()}
_DTYPES = {"int64_list": np.int64, "float_list": np.float32}


def tfrecord(*, path: str | None) -> Iterator[pa.RecordBatch]:
    """TFRecord files of `tf.train.Example` or `tf.train.SequenceExample`, plain or gzipped.

    Types and lengths follow from all the records. A feature of at most one value becomes a column, one of `n > 1` numbers
    in every record a tensor of shape `(n,)`, any other a list; where a record lacks it, it is missing. A feature list
    becomes a list with an element for each step: a value, or a list where steps do not have one value each.

    Raises:
        DataError: a file is damaged, holds something else, or changed while it was read; or a feature varies in type.
    """
    files = find_files(path)
    with at_rest(files):
        yield from typed_records(files, record_types(files))


def record_types(files: list[Path]) -> RecordTypes:
    """What all records of some files say of their features.

    Raises:
        DataError: as `tfrecord`.
    """
    types = RecordTypes()
    for file, record in _read(files):
        types.num_records += 1
        _note(types.features, record, file)
    return types


def typed_records(files: list[Path], types: RecordTypes) -> Iterator[pa.RecordBatch]:
    """The records of some files, which may be a part of those that the types are of.

    Raises:
        DataError: as `tfrecord`.
    """
    features = types.features
    builders = {name: features[name].builder(types.num_records) for name in sorted(features)}
    rows: list[tf.train.SequenceExample] = []
    num_bytes = 0
    for _, record in _read(files):
        rows.append(record)
        num_bytes += record.ByteSize()
        if len(rows) == _ROWS_PER_BATCH or num_bytes >= _BYTES_PER_BATCH:
            yield _batch(rows, features, builders)
            rows, num_bytes = [], 0
    if rows:
        yield _batch(rows, features, builders)


@dataclass
class RecordTypes:
    """What the records of some files say of their features."""

    features: dict[str, RecordFeature] = field(default_factory=dict)
    num_records: int = 0

    def merge(self, other: RecordTypes) -> bool:
        """Add what other files say; false, and nothing of use, if a feature is of another type there."""
        self.num_records += other.num_records
        return all(
            self.features.setdefault(name, RecordFeature(each.kind, each.is_list, each.least, each.most, 0)).merge(each)
            for name, each in other.features.items()
        )


@dataclass
class RecordFeature:
    """What all records say of a feature, or of the steps of a feature list."""

    kind: str
    is_list: bool  # a feature list of a SequenceExample
    least: int  # values, or steps
    most: int
    records: int = 0
    one_value_a_step: bool = True

    def merge(self, other: RecordFeature) -> bool:
        """Add what other records say; false if they are of another type."""
        self.least, self.most = min(self.least, other.least), max(self.most, other.most)
        self.records += other.records
        self.one_value_a_step &= other.one_value_a_step
        return (self.kind, self.is_list) == (other.kind, other.is_list)

    def builder(self, num_records: int) -> Callable[[Sequence[Any]], pa.Array]:
        """What makes a column of the values of some records, None where there are none."""
        if self.is_list:
            return self._steps
        if self.most <= 1:
            return lambda rows: pa.array([row[0] if row else None for row in rows], _TYPES[self.kind])
        if self.kind in _DTYPES and self.least == self.most and self.records == num_records:
            return lambda rows: tensor_array(np.array(rows, _DTYPES[self.kind]))
        return lambda rows: pa.array(rows, pa.list_(_TYPES[self.kind]))

    def _steps(self, rows: Sequence[Any]) -> pa.Array:
        kind = pa.list_(_TYPES[self.kind])
        if not self.one_value_a_step:
            return pa.array(rows, pa.list_(kind))
        return pa.array([None if row is None else [step[0] for step in row] for row in rows], kind)


def _read(files: list[Path]) -> Iterator[tuple[Path, tf.train.SequenceExample]]:
    for file in files:
        compression = "GZIP" if file.suffix == ".gz" else ""
        if not compression:
            check_whole(file)
        try:
            for record in read_records([str(file)], compression):
                # An Example is a SequenceExample, whose context has the same place: see example.proto of TensorFlow.
                yield file, tf.train.SequenceExample.FromString(record)
        except tf.errors.OpError as error:
            raise damaged_file(file, error) from error
        except DecodeError as error:
            raise DataError(f"data.path: {file} holds records that are no tf.train.Example: {error}.") from error


def _note(features: dict[str, RecordFeature], record: tf.train.SequenceExample, file: Path) -> None:
    for name, feature in record.context.feature.items():
        if (kind := feature.WhichOneof("kind")) is not None:
            _note_one(features, name, kind, False, len(getattr(feature, kind).value), file)
    for name, steps in record.feature_lists.feature_list.items():
        kinds = {step.WhichOneof("kind") for step in steps.feature} - {None}
        for kind in sorted(kinds):
            _note_one(features, name, kind, True, len(steps.feature), file)
        if kinds and any(len(_step_values(step)) != 1 for step in steps.feature):
            features[name].one_value_a_step = False


def _note_one(features: dict[str, RecordFeature], name: str, kind: str, is_list: bool, length: int, file: Path) -> None:
    known = features.setdefault(name, RecordFeature(kind, is_list, length, length))
    if known.kind != kind:
        raise DataError(
            f"data.path: feature '{name}' is {known.kind} in some records and {kind} in {file}. It must have one type."
        )
    if known.is_list != is_list:
        raise DataError(f"data.path: '{name}' is both a feature and a feature list in {file}. Rename one.")
    known.least, known.most = min(known.least, length), max(known.most, length)
    known.records += 1


def _batch(
    rows: list[tf.train.SequenceExample],
    features: dict[str, RecordFeature],
    builders: dict[str, Callable[..., pa.Array]],
) -> pa.RecordBatch:
    def values(row: tf.train.SequenceExample, name: str) -> Any:
        feature = features[name]
        if feature.is_list:
            steps = row.feature_lists.feature_list
            return [list(_step_values(step)) for step in steps[name].feature] if name in steps else None
        context = row.context.feature
        if name not in context or context[name].WhichOneof("kind") is None:
            return None
        return getattr(context[name], feature.kind).value

    return pa.RecordBatch.from_pydict(
        {name: build([values(row, name) for row in rows]) for name, build in builders.items()}
    )


def _step_values(step: tf.train.Feature) -> Sequence[Any]:
    kind = step.WhichOneof("kind")
    return getattr(step, kind).value if kind is not None else ()
