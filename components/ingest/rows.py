"""The rows of a source on their way to the splits: checked, assigned, counted and written, whole or in shares."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from components import artifacts
from components.anomalies import Anomaly
from components.config import DataConfig
from components.errors import ArtifactError, DataError, did_you_mean
from components.examples import SPLITS, ExamplesInfo, Feature, read_info, write_info
from components.ingest import splits
from components.ingest.columns import features_of
from components.ingest.encoding import serialize
from components.ingest.leakage import Leakage
from components.ingest.shards import ShardWriter, divide, read_shards
from components.ingest.times import TimeSplit
from components.section import effective_settings

_TRAIN_SHARES = "train_shares.npy"
_LEAKAGE = "leakage"


@dataclass(frozen=True)
class Share:
    """What is known of the rows of a source when one share of them has been encoded.

    Attributes:
        number: Of the share, from 0.
        num_shares: All of them; batch `i` of the source belongs to share `i % num_shares`.
        num_rows: Rows that were read, of all shares.
        batches: Rows that each batch, of all shares, gave to each split.
        warnings: What the source told of.
        inputs: The spans or files that were read, as of `IngestResult`.
        cut_offs: Of a split by time, as of `IngestResult`.
    """

    number: int
    num_shares: int
    num_rows: int
    batches: list[dict[str, int]]
    warnings: list[str]
    inputs: list[dict[str, Any]]
    cut_offs: dict[str, Any]


class Rows:
    """Takes batches, writes each row to its split.

    Args:
        folder: Where the splits are written.
        config: Label, splits, limit.
        number: Of the share that is written; all shares decide of every row alike.
        num_shares: Batch `i` belongs to share `i % num_shares`.
    """

    def __init__(self, folder: Path, config: DataConfig, number: int = 0, num_shares: int = 1) -> None:
        self._number, self._num_shares = number, num_shares
        self._batches: list[dict[str, int]] = []  # rows that each batch gave to each split
        self._num_examples = dict.fromkeys(SPLITS, 0)
        self._folder = folder
        self._config = config
        self._features: dict[str, Feature] = {}
        self._writers = {name: ShardWriter(folder / name, config.examples_per_shard) for name in SPLITS}
        self._train_shares: list[np.ndarray] = []
        self._num_rows = 0
        self._leakage = Leakage(config, folder / ".leakage")
        self._times = TimeSplit(config.split) if config.split.method == "time" else None
        self._cut_offs: dict[str, Any] = {}  # as the shares have them
        self.inputs: list[dict[str, Any]] = []

    @property
    def full(self) -> bool:
        """Whether every split has all the rows that it may have."""
        limit = self._config.limit
        return limit is not None and all(number >= limit for number in self._num_examples.values())

    @property
    def cut_offs(self) -> dict[str, Any]:
        """Of a split by time, where the later splits begin."""
        return self._cut_offs if self._times is None or self._cut_offs else self._times.record()

    @property
    def needs_times(self) -> bool:
        """Whether `see_times` comes before the first `write`: shares of a split by time are to become cut-offs."""
        return self._times is not None and self._times.needs_fit

    def see_times(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Look at the times of all rows."""
        assert self._times is not None
        self._times.fit(self._checked(batch) for batch in batches)

    def write(self, batch: pa.RecordBatch, part: str | None = None) -> None:
        """Write the rows of a batch, if it belongs to this share; `part` is the split of their file, if that decides."""
        self._checked(batch)
        if self._times is None:
            assigned = splits.assign(batch, self._config.split, self._config.seed, part)
        else:
            assigned = self._times.assign(batch)
        is_ours = len(self._batches) % self._num_shares == self._number
        counts = dict.fromkeys(SPLITS, 0)
        for number, name in enumerate(SPLITS):
            rows = np.flatnonzero(assigned == number)[: self._room(name)]
            counts[name] = len(rows)
            self._num_examples[name] += len(rows)
            if is_ours and len(rows):
                self._write_split(name, batch.take(pa.array(rows)))
        self._batches.append(counts)
        self._num_rows += batch.num_rows

    def finish_share(self, warnings: list[str]) -> Share:
        """Close the shards of a share; `take` puts all shares together."""
        for writer in self._writers.values():
            writer.close()
        write_info(self._folder, self._info())
        np.save(self._folder / _TRAIN_SHARES, np.concatenate([np.empty(0), *self._train_shares]))
        self._leakage.save(self._folder / _LEAKAGE)
        read = (warnings, self.inputs, self.cut_offs)
        return Share(self._number, self._num_shares, self._num_rows, self._batches, *read)

    def take(self, encoded: Sequence[Path]) -> list[str]:
        """Write the rows of all shares, in the order of the source, and return what the source told of.

        Args:
            encoded: Artifacts of `encode`.

        Raises:
            ArtifactError: one is not whole, or they are not all shares of one division of this configuration.
            DataError: the data changed while it was encoded.
        """
        manifests = {path: artifacts.open_artifact(path, step="encode") for path in encoded}
        shares = {path: Share(**manifest.result) for path, manifest in manifests.items()}
        folders = sorted(encoded, key=lambda path: shares[path].number)
        numbers = [(shares[path].number, shares[path].num_shares) for path in folders]
        config = effective_settings(self._config)
        if numbers != [(number, len(folders)) for number in range(len(folders))] or any(
            manifest.made_from["config"] != config for manifest in manifests.values()
        ):
            raise ArtifactError(f"{', '.join(map(str, folders))} are not all shares of this data. Run them again.")
        outside = [manifests[path].made_from["outside"] for path in folders]
        if any(each != outside[0] for each in outside):
            raise _changed_meanwhile()
        return self.put_together(folders, [shares[path] for path in folders])

    def put_together(self, folders: Sequence[Path], shares: Sequence[Share]) -> list[str]:
        """Write the rows of shares in the order of the source, and return what the source told of.

        Args:
            folders: What `finish_share` closed, in the order of their numbers.
            shares: Of each folder: all shares of one division of the source, or parts of it one after the other, each
                by itself the only share of its division.

        Raises:
            DataError: the data changed while it was encoded, or its parts have different columns.
        """
        if shares[0].num_shares > 1:
            if any(share.batches != shares[0].batches for share in shares):
                raise _changed_meanwhile()
            order = [(number % len(shares), counts) for number, counts in enumerate(shares[0].batches)]
            self._num_rows, warnings = shares[0].num_rows, shares[0].warnings
            self._features = read_info(folders[0]).features if self._num_rows else {}
        else:
            order = [(number, counts) for number, share in enumerate(shares) for counts in share.batches]
            warnings = [warning for share in shares for warning in share.warnings]
            for folder, share in zip(folders, shares, strict=True):
                self._continue_with(folder, share)
        limit = self._config.limit
        for name in SPLITS:
            records = [read_shards(folder / name) for folder in folders]
            for record in itertools.islice(_in_order(records, name, order), limit):
                self._writers[name].write(record)
        train_shares = [iter(np.load(folder / _TRAIN_SHARES)) for folder in folders]
        in_order = itertools.islice(_in_order(train_shares, "train", order), limit)
        self._train_shares = [np.fromiter(in_order, np.float64)]
        for folder in folders:
            self._leakage.load(folder / _LEAKAGE)
        self.inputs = shares[0].inputs or self.inputs
        self._cut_offs = next((share.cut_offs for share in shares if share.cut_offs), {})
        return warnings

    def finish(self) -> tuple[ExamplesInfo, dict[str, int], list[Anomaly]]:
        """Close the shards, carve a validation split where a split column named none, and say what splits share."""
        for writer in self._writers.values():
            writer.close()
        carves = self._config.split.method == "column" and not self._writers["validation"].num_examples
        if carves:
            self._carve_validation()
        info = self._info()
        self._check_none_is_empty(info.num_examples)
        anomalies = self._leakage.anomalies(info.num_examples, carved=carves)
        return info, {name: writer.num_shards for name, writer in self._writers.items()}, anomalies

    def _continue_with(self, folder: Path, share: Share) -> None:
        """Count the rows of a part that follows those before, if it has their columns."""
        if not share.num_rows:
            return
        features = read_info(folder).features
        if self._features and list(features.items()) != list(self._features.items()):
            raise DataError(_describe_change(self._features, features, self._num_rows))
        self._features = features
        self._num_rows += share.num_rows

    def _info(self) -> ExamplesInfo:
        classes = self._config.classes
        return ExamplesInfo(
            features=self._features,
            label=self._config.label,
            task=self._config.task,
            classes=None if classes is None else tuple(classes),
            num_examples={name: writer.num_examples for name, writer in self._writers.items()},
        )

    def _room(self, split: str) -> int | None:
        limit = self._config.limit
        return None if limit is None else limit - self._num_examples[split]

    def _write_split(self, name: str, batch: pa.RecordBatch) -> None:
        carved = None
        if name == "train" and self._config.split.method == "column":
            shares = splits.row_shares(batch, self._config.split.key, self._config.seed)
            self._train_shares.append(shares)
            carved = shares < self._config.split.validation
        records = list(serialize(batch, self._features))
        self._leakage.add(name, batch, records, carved)
        for record in records:
            self._writers[name].write(record)

    def _checked(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        schema = batch.schema
        if not self._features:
            _check_columns(schema.names, self._config)
        kept = [field for field in schema if field.name not in _left_out(self._config)]
        features = features_of(pa.schema(kept))
        if features[self._config.label].is_list:
            raise DataError(f"data.label: '{self._config.label}' is a list; a label is one number or string.")
        if self._features and features != self._features:
            raise DataError(_describe_change(self._features, features, self._num_rows))
        self._features = features
        return batch

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
        mend = splits.how_to_fill(empty[0], self._config.split)
        raise DataError(f"The {empty[0]} split is empty ({self._num_rows} rows were read): {mend}.")


def _in_order(
    shares: Sequence[Iterator[Any]], split: str, order: Sequence[tuple[int, dict[str, int]]]
) -> Iterator[Any]:
    """What the shares hold of a split, row by row: `order` has the share of each batch, and its rows by split."""
    for number, counts in order:
        yield from itertools.islice(shares[number], counts[split])


def _changed_meanwhile() -> DataError:
    return DataError("data.path: the data changed while it was encoded. Run again when it is at rest.")


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
    splits.check_columns(config, columns)
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
