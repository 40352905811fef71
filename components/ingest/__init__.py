"""Step `ingest`: raw data to examples, divided into train, validation and test."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from components import artifacts, object_store, plugins
from components.config import DataConfig
from components.errors import DataError, HeadraceError, did_you_mean
from components.examples import SPLITS, ExamplesInfo, Feature, write_info
from components.ingest import splits
from components.ingest.columns import features_of
from components.ingest.shards import ShardWriter, divide, serialize


@dataclass(frozen=True)
class IngestResult:
    """What was written.

    Attributes:
        num_examples: Rows of each split.
        num_shards: Files of each split.
        features: Type of each column, the label among them.
        label: The column to predict.
    """

    num_examples: dict[str, int]
    num_shards: dict[str, int]
    features: dict[str, str]
    label: str


def ingest(*, examples: Path, config: DataConfig) -> IngestResult:
    """Read the source once and write its rows as examples.

    Args:
        examples: Where the artifact will stand (see `components.examples`).
        config: Source, label, splits.

    Returns:
        The counts.

    Raises:
        ConfigError: the source does not exist or takes no such argument.
        DataError: the data cannot be read, lacks a column, or leaves a split empty.
    """
    with artifacts.writing(examples, step="ingest", inputs={}, config=config) as out:
        rows = _Rows(out.path, config)
        with object_store.local_data(config, out.scratch / "data") as local:
            for batch in read_source(local):
                rows.write(batch)
                if rows.full:
                    break
        info, num_shards = rows.finish()
        write_info(out.path, info)
        kinds = {name: feature.type for name, feature in info.features.items()}
        out.result = IngestResult(info.num_examples, num_shards, kinds, info.label)
    result: IngestResult = out.result
    return result


def read_source(config: DataConfig) -> Iterator[pa.RecordBatch]:
    """The record batches of the configured source.

    Raises:
        ConfigError: there is no such source, or it takes no such argument.
        DataError: it yields something else than record batches, or a source of the user's fails.
    """
    source = plugins.resolve(config.source, plugins.SOURCES, "data.source")
    plugins.check_arguments(source, config.args, f"data.args of source '{config.source}'", path=config.path)
    for batch in _batches(source, config):
        if not isinstance(batch, pa.RecordBatch):
            raise DataError(
                f"data.source: '{config.source}' yielded a {type(batch).__name__}; a source yields "
                "pyarrow.RecordBatch (a table's to_batches() gives them)."
            )
        yield batch


def _batches(source: Callable[..., Iterable[Any]], config: DataConfig) -> Iterator[Any]:
    try:
        yield from source(path=config.path, **config.args)
    except HeadraceError:
        raise
    except Exception as error:
        if not plugins.is_own(config.source):
            raise
        raise DataError(
            f"data.source: '{config.source}' failed: {plugins.describe(error)}. Correct the source, or what it reads."
        ) from error


class _Rows:
    """Takes batches, writes each row to its split."""

    def __init__(self, folder: Path, config: DataConfig) -> None:
        self._folder = folder
        self._config = config
        self._features: dict[str, Feature] = {}
        self._writers = {name: ShardWriter(folder / name, config.examples_per_shard) for name in SPLITS}
        self._train_shares: list[np.ndarray] = []
        self._num_rows = 0

    @property
    def full(self) -> bool:
        """Whether every split has all the rows that it may have."""
        limit = self._config.limit
        return limit is not None and all(writer.num_examples >= limit for writer in self._writers.values())

    def write(self, batch: pa.RecordBatch) -> None:
        """Write the rows of a batch."""
        self._check(batch.schema)
        assigned = splits.assign(batch, self._config.split, self._config.seed)
        for number, name in enumerate(SPLITS):
            rows = np.flatnonzero(assigned == number)[: self._room(name)]
            if len(rows):
                self._write_split(name, batch.take(pa.array(rows)))
        self._num_rows += batch.num_rows

    def finish(self) -> tuple[ExamplesInfo, dict[str, int]]:
        """Close the shards, and carve a validation split where a split column named none."""
        for writer in self._writers.values():
            writer.close()
        if self._config.split.method == "column" and not self._writers["validation"].num_examples:
            self._carve_validation()
        num_examples = {name: writer.num_examples for name, writer in self._writers.items()}
        self._check_none_is_empty(num_examples)
        classes = self._config.classes
        info = ExamplesInfo(
            features=self._features,
            label=self._config.label,
            task=self._config.task,
            classes=None if classes is None else tuple(classes),
            num_examples=num_examples,
        )
        return info, {name: writer.num_shards for name, writer in self._writers.items()}

    def _room(self, split: str) -> int | None:
        limit = self._config.limit
        return None if limit is None else limit - self._writers[split].num_examples

    def _write_split(self, name: str, batch: pa.RecordBatch) -> None:
        if name == "train" and self._config.split.method == "column":
            self._train_shares.append(splits.row_shares(batch, [], self._config.seed))
        for record in serialize(batch, self._features):
            self._writers[name].write(record)

    def _check(self, schema: pa.Schema) -> None:
        if not self._features:
            _check_columns(schema.names, self._config)
        kept = [field for field in schema if field.name not in _left_out(self._config)]
        features = features_of(pa.schema(kept))
        if self._features and features != self._features:
            raise DataError(_describe_change(self._features, features, self._num_rows))
        self._features = features

    def _carve_validation(self) -> None:
        whole = self._folder / ".train"
        if not self._writers["train"].num_examples:
            return
        (self._folder / "train").rename(whole)
        for name in ("train", "validation"):
            self._writers[name] = ShardWriter(self._folder / name, self._config.examples_per_shard)
        carved = np.concatenate(self._train_shares) < self._config.split.validation
        divide(whole, carved, self._writers["train"], self._writers["validation"])
        shutil.rmtree(whole)
        for name in ("train", "validation"):
            self._writers[name].close()

    def _check_none_is_empty(self, num_examples: dict[str, int]) -> None:
        if not self._num_rows:
            where = self._config.path or self._config.source
            raise DataError(f"data.path: {where} holds no rows. Give a file with data in it.")
        empty = [name for name, number in num_examples.items() if not number]
        if not empty:
            return
        split = self._config.split
        if split.method == "column" and empty[0] != "validation":
            mend = f"mark rows '{empty[0]}' in column '{split.column}'"
        else:
            unit = f"distinct values of {', '.join(split.key)}" if split.key else "rows"
            mend = f"raise data.split.{empty[0] if empty[0] != 'train' else 'key'} or give more {unit}"
        raise DataError(f"The {empty[0]} split is empty ({self._num_rows} rows were read): {mend}.")


def _left_out(config: DataConfig) -> set[str]:
    return {*config.drop, *([config.split.column] if config.split.method == "column" else [])}


def _check_columns(columns: list[str], config: DataConfig) -> None:
    if len(set(columns)) != len(columns):
        twice = sorted({name for name in columns if columns.count(name) > 1})
        raise DataError(f"The data has two columns named '{twice[0]}'. Rename one.")
    if config.label not in columns:
        delimiter = " It has one column only: set data.args.delimiter?" if len(columns) == 1 else ""
        raise DataError(
            f"data.label: the data has no column '{config.label}'.{did_you_mean(config.label, columns)}{delimiter}"
        )
    for name in config.drop:
        if name not in columns:
            raise DataError(f"data.drop: the data has no column '{name}'.{did_you_mean(name, columns)}")
    splits.check_columns(config.split, columns)
    if config.label in _left_out(config):
        raise DataError(f"data.label: '{config.label}' is dropped or is the split column; it must stay.")
    if set(columns) <= {config.label, *_left_out(config)}:
        raise DataError(f"Nothing is left to learn from: the only columns are {', '.join(columns)}. Drop fewer.")


def _describe_change(first: dict[str, Feature], later: dict[str, Feature], row: int) -> str:
    if set(first) != set(later):
        changed = sorted(set(first) ^ set(later))
        return f"The data changes its columns at row {row}: {', '.join(changed)}. Every batch must have the same ones."
    name = next((name for name in first if first[name] != later[name]), None)
    if name is None:
        return f"The data changes the order of its columns at row {row}."
    was, now = (f"{f.type}{list(f.shape) if f.shape else ''}" for f in (first[name], later[name]))
    return f"Column '{name}' changes from {was} to {now} at row {row}. Give it one type in every batch."
