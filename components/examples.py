"""Examples at rest: TFRecord shards of `tf.train.Example` beside a `features.json`, and how they are read back.

    <examples>/features.json                                {"features", "label", "task", "classes", "num_examples"}
    <examples>/leakage.json                                 what splits share, as a list of anomalies
    <examples>/<split>/part-00000-of-00003.tfrecord         rows of a split in the order of the source

A missing value is left out of its Example and comes back as `MISSING_INT`, NaN or the empty string. Lists of varying
length come back as long as the longest that is read with them, padded by the missing value; an empty list is missing.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from components.errors import ConfigError, DataError, did_you_mean
from models.spec import Task

FEATURES_FILE = "features.json"
LEAKAGE_FILE = "leakage.json"
SPLITS = ("train", "validation", "test")
MISSING_INT = -(2**63)
MISSING: dict[str, Any] = {"int": MISSING_INT, "float": float("nan"), "string": b""}

_READ_BATCH = 4096
_DTYPES: dict[str, Any] = {"int": np.int64, "float": np.float32, "string": object, "uint8": np.uint8}
_TF_DTYPES = {"int": tf.int64, "float": tf.float32, "string": tf.string}


@dataclass(frozen=True)
class Feature:
    """One column of the examples.

    Attributes:
        type: `int` (64 bits), `float` (32 bits), `string` (bytes) or `uint8` (an image or another tensor of bytes).
        shape: Of one example; `()` for a scalar, `(None,)` for a list of int, float or string whose length varies.
    """

    type: str
    shape: tuple[int | None, ...] = ()

    @property
    def is_list(self) -> bool:
        """Whether it is a list whose length varies from row to row."""
        return self.shape == (None,)


@dataclass(frozen=True)
class ExamplesInfo:
    """What `features.json` says.

    Attributes:
        features: Every column, the label too, in the order of the source.
        label: Name of the column to predict.
        task: `binary`, `multiclass` or `regression`.
        classes: Class names as configured; `None`: the label's values in the train split, sorted.
        num_examples: Rows of each split.
    """

    features: dict[str, Feature]
    label: str
    task: Task
    classes: tuple[str, ...] | None
    num_examples: dict[str, int]

    @property
    def inputs(self) -> dict[str, Feature]:
        """The features without the label: what a served request carries."""
        return {name: feature for name, feature in self.features.items() if name != self.label}

    def to_json(self) -> dict[str, Any]:
        """As JSON-able values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> ExamplesInfo:
        """Inverse of `to_json`."""
        features = {name: Feature(f["type"], tuple(f["shape"])) for name, f in fields["features"].items()}
        classes = fields["classes"]
        return cls(**{**fields, "features": features, "classes": None if classes is None else tuple(classes)})


def read_info(examples: Path) -> ExamplesInfo:
    """Read `features.json` of an examples artifact.

    Raises:
        DataError: it is missing or damaged.
    """
    file = examples / FEATURES_FILE
    try:
        return ExamplesInfo.from_json(json.loads(file.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} cannot be read ({error}). Delete {examples} and run ingest again.") from error


def write_info(examples: Path, info: ExamplesInfo) -> None:
    """Write `features.json`."""
    (examples / FEATURES_FILE).write_text(json.dumps(info.to_json(), indent=1) + "\n")


def shard_files(examples: Path, split: str) -> list[Path]:
    """The TFRecord files of a split, in order.

    Raises:
        DataError: the split has none.
    """
    files = sorted((examples / split).glob("part-*.tfrecord"))
    if not files:
        raise DataError(f"{examples} has no split '{split}'. It has: {', '.join(read_info(examples).num_examples)}.")
    return files


def count(examples: Path, split: str) -> int:
    """Number of examples of a split.

    Raises:
        DataError: there is no such split.
    """
    numbers = read_info(examples).num_examples
    if split not in numbers:
        raise DataError(f"{examples} has no split '{split}'. It has: {', '.join(numbers)}.")
    return numbers[split]


def feature_columns(
    info: ExamplesInfo, *, with_label: bool = True
) -> dict[str, tf.io.FixedLenFeature | tf.io.FixedLenSequenceFeature]:
    """The spec that `tf.io.parse_example` takes; missing values get their stand-ins there."""
    features = info.features if with_label else info.inputs
    return {name: _column(feature) for name, feature in features.items()}


def parse(serialized: tf.Tensor, info: ExamplesInfo, *, with_label: bool) -> dict[str, tf.Tensor]:
    """Parse a batch of serialised Examples; batch first, then parse: one call for the whole batch.

    Args:
        serialized: `(batch,)` of bytes.
        info: The columns.
        with_label: Expect the label, too; without it the Examples may lack it.

    Returns:
        Tensors by name: int64 and float32 `(batch, *shape)`, string `(batch,)`, uint8 `(batch, *shape)`; of a list
        `(batch, longest of the batch)`. A missing value, and what pads a list, is `MISSING_INT`, NaN or the empty
        string; a missing uint8 tensor is an error of TensorFlow.
    """
    parsed: dict[str, tf.Tensor] = tf.io.parse_example(serialized, feature_columns(info, with_label=with_label))
    for name, tensor in parsed.items():
        feature = info.features[name]
        if feature.type == "uint8":
            flat = tf.io.decode_raw(tensor, tf.uint8)
            decoded = tf.reshape(flat, [tf.shape(serialized)[0], *feature.shape])
            decoded.set_shape([serialized.shape[0], *feature.shape])
            parsed[name] = decoded
    return parsed


def read_batches(examples: Path, split: str, *, batch_size: int = _READ_BATCH) -> Iterator[dict[str, np.ndarray]]:
    """The examples of a split in order, at most `batch_size` at a time, as `read_arrays` gives them.

    Raises:
        DataError: a file is damaged.
    """
    info = read_info(examples)
    for file in shard_files(examples, split):
        yield from read_shard(file, info, batch_size=batch_size)


def read_shard(file: Path, info: ExamplesInfo, *, batch_size: int = _READ_BATCH) -> Iterator[dict[str, np.ndarray]]:
    """The examples of one TFRecord file of a split, as `read_batches` gives them.

    Raises:
        DataError: the file is damaged.
    """
    check_whole(file)
    dataset = tf.data.TFRecordDataset(str(file)).batch(batch_size)
    dataset = dataset.map(lambda batch: parse(batch, info, with_label=True))
    try:
        yield from dataset.as_numpy_iterator()
    except (tf.errors.DataLossError, tf.errors.InvalidArgumentError) as error:
        raise damaged_file(file, error) from error


def check_slices(info: ExamplesInfo, slices: list[str]) -> None:
    """Refuse features that `evaluate` cannot slice by; `validate` asks before a training that would be in vain.

    Raises:
        ConfigError: naming the feature, and the nearest that will do.
    """
    sliceable = [name for name, feature in info.features.items() if _is_sliceable(feature)]
    for name in slices:
        if name not in sliceable:
            tensor = name in info.features and info.features[name].shape
            received = f" but a tensor of shape {tensor}" if tensor else ""
            raise ConfigError(
                f"evaluate.slices: '{name}' is no string or integer feature{received}.{did_you_mean(name, sliceable)}"
            )


def check_whole(file: Path) -> None:
    """Refuse a TFRecord file that ends inside a record; TensorFlow takes one that ends in a header for whole.

    Source of the format: tensorflow/core/lib/io/record_writer.h.

    Raises:
        DataError: naming the file.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        while (at := stream.tell()) < size:
            header = stream.read(8)
            # length (8 bytes), its checksum (4), data, checksum of the data (4)
            end = at + 16 + int.from_bytes(header, "little")
            if len(header) < 8 or end > size:
                raise damaged_file(file, ValueError(f"the record at byte {at} is cut off"))
            stream.seek(end)


def damaged_file(file: Path, error: Exception) -> DataError:
    """The error that a broken TFRecord file is reported with."""
    reason = str(getattr(error, "message", error)).partition("\n")[0]
    return DataError(f"{file} is truncated or damaged: {reason}. Delete it, or make it again, and run again.")


def read_arrays(examples: Path, split: str) -> dict[str, np.ndarray]:
    """A whole split in memory.

    Returns:
        Features and label by name, `(num_examples, *shape)`: int64, float32, uint8, and strings as objects (`bytes`);
        lists `(num_examples, longest of the split)`. Missing values as `parse` says.

    Raises:
        DataError: there is no such split, a file is damaged, or examples are missing.
    """
    info = read_info(examples)
    total = count(examples, split)
    arrays = {name: _whole(feature, total) for name, feature in info.features.items()}
    start = 0
    for batch in read_batches(examples, split):
        size = len(batch[info.label])
        if start + size <= total:
            for name, values in batch.items():
                if info.features[name].is_list:
                    arrays[name] = _widened(arrays[name], values.shape[1], info.features[name])
                    arrays[name][start : start + size, : values.shape[1]] = values
                else:
                    arrays[name][start : start + size] = values
        start += size
    if start != total:
        raise DataError(
            f"{examples / split} holds {start} examples, features.json says {total}. "
            f"Delete {examples} and run ingest again."
        )
    return arrays


def _is_sliceable(feature: Feature) -> bool:
    return feature.type in ("int", "string") and not feature.shape


def _whole(feature: Feature, rows: int) -> np.ndarray:
    """Room for all rows; lists begin with no length."""
    return np.empty((rows, *(size or 0 for size in feature.shape)), _DTYPES[feature.type])


def _widened(array: np.ndarray, length: int, feature: Feature) -> np.ndarray:
    """Lists `(rows, shorter)`, padded to hold `length`; the same array if it does already."""
    if length <= array.shape[1]:
        return array
    wider = np.full((len(array), length), MISSING[feature.type], array.dtype)
    wider[:, : array.shape[1]] = array
    return wider


def _column(feature: Feature) -> tf.io.FixedLenFeature | tf.io.FixedLenSequenceFeature:
    if feature.type == "uint8":
        return tf.io.FixedLenFeature((), tf.string)
    kind, missing = _TF_DTYPES[feature.type], MISSING[feature.type]
    if feature.is_list:
        return tf.io.FixedLenSequenceFeature((), kind, allow_missing=True, default_value=missing)
    return tf.io.FixedLenFeature(feature.shape, kind, [missing] * math.prod(size or 0 for size in feature.shape))
