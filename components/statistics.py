"""Statistics of each feature: mergeable, bounded in memory, computed in one pass.

They are used three times: to validate, to set the state of the preprocessing layers, and as the baseline that served
requests are compared with.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from components.errors import DataError
from components.examples import MISSING_INT, ExamplesInfo, Feature

STATISTICS_FILE = "statistics.json"
LOW_CARDINALITY = 100

# As keras.layers.TextVectorization(standardize="lower_and_strip_punctuation", split="whitespace") does it.
_PUNCTUATION = r'[!"#$%&()\*\+,-\./:;<=>?@\[\\\]^_`{|}~\']'
_EXACT_QUANTILES_UP_TO = 1_000_000
_SKETCH_SHARE = 10
_KEEP_FACTOR = 4
_MIN_LABEL_VALUES = 100_000


@dataclass(frozen=True)
class FeatureStatistics:
    """What is known of one feature in one split. A field that the type does not have is `None` or empty.

    Attributes:
        type: As in `components.examples.Feature`.
        count: Rows.
        missing: Rows without a value. Everything below leaves them out.
        shape: As in `components.examples.Feature`.
        zeros: int, float: values equal to 0.
        min: int, float, uint8: smallest value.
        max: int, float, uint8: largest value.
        mean: int, float: of the finite values, every element of a tensor counted.
        std: int, float: population standard deviation of the finite values.
        quantiles: int, float: `num_quantiles + 1` values of the data, ascending: minimum, ..., maximum. Exact up to a
            million values, beyond that a sketch whose ranks are off by less than 1e-5 for each million values read.
        log1p_mean: int, float: mean of log(1 + x); `None` where there are negative values.
        log1p_std: int, float: its population standard deviation.
        num_infinite: float: values that are infinite.
        top_values: int, string (not text): `(value, count)`, most frequent first, then by value.
        num_unique: int, string: distinct values (of text, words); a lower bound beyond eight times those kept.
        num_invalid_utf8: string: rows that are not text in UTF-8.
        mean_length_bytes: string: mean length.
        top_tokens: text: `(token, count, num_documents)`, most frequent first, then by token.
        num_tokens: text: words in all.
        channel_mean: uint8: mean of each channel (last axis), in 0..255.
        channel_std: uint8: population standard deviation of each channel.
        min_num_values: lists: fewest values of a row that has some.
        max_num_values: lists: most values of a row.
        mean_num_values: lists: mean number of values of the rows that have some.
        min_length_bytes: string: shortest length.
        max_length_bytes: string: longest length.
    """

    type: str
    count: int
    missing: int
    shape: tuple[int, ...] = ()
    zeros: int | None = None
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    std: float | None = None
    quantiles: tuple[float, ...] = ()
    log1p_mean: float | None = None
    log1p_std: float | None = None
    num_infinite: int = 0
    top_values: tuple[tuple[int | str, int], ...] = ()
    num_unique: int | None = None
    num_invalid_utf8: int = 0
    mean_length_bytes: float | None = None
    top_tokens: tuple[tuple[str, int, int], ...] = ()
    num_tokens: int | None = None
    channel_mean: tuple[float, ...] = ()
    channel_std: tuple[float, ...] = ()
    min_num_values: int | None = None
    max_num_values: int | None = None
    mean_num_values: float | None = None
    min_length_bytes: int | None = None
    max_length_bytes: int | None = None

    @property
    def present(self) -> int:
        """Rows with a value."""
        return self.count - self.missing


Statistics = dict[str, FeatureStatistics]


class StatisticsBuilder:
    """Takes batches of examples and adds up their statistics.

    Args:
        info: The columns.
        text_features: String features whose words are counted.
        max_top_values: Distinct values (or words) kept for each feature; of the label, at least 100,000.
        num_quantiles: Resolution of the quantiles.
        max_exact_values: Numbers of each feature up to which quantiles are exact; beyond, a tenth of them is kept.

    Example:
        >>> builder = StatisticsBuilder(info, text_features=[], max_top_values=1000, num_quantiles=100)
        >>> builder.update(read_arrays(examples, "train"))
        >>> builder.finish()["fare"].mean
    """

    def __init__(
        self,
        info: ExamplesInfo,
        *,
        text_features: Sequence[str],
        max_top_values: int,
        num_quantiles: int,
        max_exact_values: int = _EXACT_QUANTILES_UP_TO,
    ) -> None:
        self._shapes = {name: feature.shape for name, feature in info.features.items()}
        self._features = {
            name: _accumulator(
                feature,
                name in text_features,
                # Every class of the label is needed, however few values are kept of other features.
                max(max_top_values, _MIN_LABEL_VALUES) if name == info.label else max_top_values,
                num_quantiles,
                max_exact_values,
            )
            for name, feature in info.features.items()
        }

    def update(self, batch: Mapping[str, np.ndarray]) -> None:
        """Add a batch, as `examples.read_arrays` gives it; features that it lacks are passed over."""
        for name, accumulator in self._features.items():
            if name in batch and len(batch[name]):
                accumulator.update(batch[name])

    def merge(self, other: StatisticsBuilder) -> None:
        """Add what another builder of the same settings has seen."""
        for name, accumulator in self._features.items():
            accumulator.merge(other._features[name])

    def finish(self) -> Statistics:
        """The statistics of all that was added."""
        return {
            name: dataclasses.replace(accumulator.finish(), shape=self._shapes[name])
            for name, accumulator in self._features.items()
        }


def to_json(statistics: Mapping[str, Statistics]) -> str:
    """Statistics of each split as the text of `statistics.json`."""
    fields = {
        split: {name: dataclasses.asdict(feature) for name, feature in features.items()}
        for split, features in statistics.items()
    }
    return json.dumps(fields) + "\n"


def from_json(text: str) -> dict[str, Statistics]:
    """Inverse of `to_json`."""
    return {
        split: {name: _from_fields(fields) for name, fields in features.items()}
        for split, features in json.loads(text).items()
    }


def load_statistics(path: Path) -> dict[str, Statistics]:
    """The statistics of a statistics artifact, by split and feature.

    Raises:
        DataError: its `statistics.json` is missing or damaged.
    """
    file = path / STATISTICS_FILE
    try:
        return from_json(file.read_text())
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{file} cannot be read ({error}). Delete {path} and run validate again.") from error


def class_values(info: ExamplesInfo, train: Statistics) -> list[int | str]:
    """The label's values in the order of their class numbers: the configured classes, else those in `train`, sorted.

    With configured classes, an integer label is the class number itself.
    """
    label = train[info.label]
    if info.classes is not None:
        return list(range(len(info.classes))) if label.type == "int" else list(info.classes)
    return sorted(value for value, _ in label.top_values)


def tokenize(texts: tf.Tensor) -> tf.RaggedTensor:
    """Words of each text `(batch,)`, lower-cased and without punctuation, as Keras's TextVectorization finds them."""
    return tf.strings.split(tf.strings.regex_replace(tf.strings.lower(texts), _PUNCTUATION, ""))


def _from_fields(fields: dict[str, Any]) -> FeatureStatistics:
    nested = {"top_values", "top_tokens"}
    flat = {"shape", "quantiles", "channel_mean", "channel_std"}
    converted: dict[str, Any] = {
        key: tuple(tuple(item) for item in value) if key in nested else tuple(value) if key in flat else value
        for key, value in fields.items()
    }
    return FeatureStatistics(**converted)


def _accumulator(
    feature: Feature, is_text: bool, max_top_values: int, num_quantiles: int, max_exact_values: int
) -> Any:
    if feature.type == "uint8":
        return _Images()
    if feature.type == "string":
        return _Texts(max_top_values) if is_text else _Strings(max_top_values)
    return _Numbers(feature.type, max_top_values, num_quantiles, max_exact_values)


class _Moments:
    """Mean and variance. Source: Chan, Golub, LeVeque, "Updating formulae ... sample variances" (1979)."""

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, 0.0, 0.0

    def update(self, values: np.ndarray) -> None:
        if len(values):
            mean = float(values.mean())
            self._add(len(values), mean, float(np.square(values - mean).sum()))

    def merge(self, other: _Moments) -> None:
        if other.count:
            self._add(other.count, other.mean, other.squares)

    def finish(self) -> tuple[float, float] | tuple[None, None]:
        return (self.mean, (self.squares / self.count) ** 0.5) if self.count else (None, None)

    def _add(self, count: int, mean: float, squares: float) -> None:
        total, difference = self.count + count, mean - self.mean
        self.squares += squares + difference**2 * self.count * count / total
        self.mean += difference * count / total
        self.count = total


class _Quantiles:
    """Sorted values with weights; beyond `max_exact` of them, thinned to a tenth as many points of equal weight."""

    def __init__(self, max_exact: int) -> None:
        self._max_exact = max_exact
        self._chunks: list[tuple[np.ndarray, np.ndarray]] = []
        self._size = 0

    def update(self, values: np.ndarray) -> None:
        self._add(values, np.ones(len(values)))

    def merge(self, other: _Quantiles) -> None:
        for values, weights in other._chunks:
            self._add(values, weights)

    def finish(self, num_quantiles: int) -> tuple[float, ...]:
        if not self._size:
            return ()
        values, weights = self._sorted()
        return tuple(_at_ranks(values, weights, np.arange(num_quantiles + 1) / num_quantiles).tolist())

    def _add(self, values: np.ndarray, weights: np.ndarray) -> None:
        self._chunks.append((values, weights))
        self._size += len(values)
        if self._size > self._max_exact:
            values, weights = self._sorted()
            if len(values) > self._max_exact // 2:
                size = self._max_exact // _SKETCH_SHARE
                middles = (np.arange(size) + 0.5) / size
                low, high, total = values[0], values[-1], weights.sum()
                values = _at_ranks(values, weights, middles)
                values[0], values[-1] = low, high
                weights = np.full(size, total / size)
            self._chunks, self._size = [(values, weights)], len(values)

    def _sorted(self) -> tuple[np.ndarray, np.ndarray]:
        values, places = np.unique(np.concatenate([values for values, _ in self._chunks]), return_inverse=True)
        return values, np.bincount(places, np.concatenate([weights for _, weights in self._chunks]))


def _at_ranks(values: np.ndarray, weights: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """The smallest value whose cumulative weight reaches each rank in [0, 1] (numpy's `inverted_cdf`)."""
    cumulative = np.cumsum(weights)
    places = np.searchsorted(cumulative, ranks * cumulative[-1] * (1 - 1e-12))
    return values[np.minimum(places, len(values) - 1)]


class _TopCounts:
    """Counts of the most frequent values; the rarest are forgotten when there are far too many."""

    def __init__(self, max_kept: int) -> None:
        self._max_kept = max_kept
        self._counts: Counter[Any] = Counter()
        self._forgotten = 0

    def update(self, values: Sequence[Any], counts: Sequence[int]) -> None:
        for value, count in zip(values, counts, strict=True):
            self._counts[value] += count
        if len(self._counts) > 2 * _KEEP_FACTOR * self._max_kept:
            kept = self._ranked(_KEEP_FACTOR * self._max_kept)
            self._forgotten = max(self._forgotten, len(self._counts))
            self._counts = Counter(dict(kept))

    def merge(self, other: _TopCounts) -> None:
        self.update(list(other._counts.keys()), list(other._counts.values()))
        self._forgotten = max(self._forgotten, other._forgotten)

    def finish(self) -> tuple[tuple[Any, int], ...]:
        return tuple((_as_text(value), count) for value, count in self._ranked(self._max_kept))

    @property
    def values(self) -> Collection[Any]:
        return self._counts.keys()

    @property
    def num_unique(self) -> int:
        return max(len(self._counts), self._forgotten)

    def _ranked(self, limit: int) -> list[tuple[Any, int]]:
        return sorted(self._counts.items(), key=lambda item: (-item[1], item[0]))[:limit]


def _as_text(value: Any) -> Any:
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value


class _Numbers:
    def __init__(self, kind: str, max_top_values: int, num_quantiles: int, max_exact_values: int) -> None:
        self._kind, self._num_quantiles = kind, num_quantiles
        self._count = self._missing = self._zeros = self._infinite = 0
        self._min, self._max = np.inf, -np.inf
        self._moments, self._log_moments, self._quantiles = _Moments(), _Moments(), _Quantiles(max_exact_values)
        self._top = _TopCounts(max_top_values)

    def update(self, batch: np.ndarray) -> None:
        absent = batch == MISSING_INT if self._kind == "int" else np.isnan(batch)
        self._count += len(batch)
        self._missing += int(absent.reshape(len(batch), -1).all(axis=1).sum())
        exact = batch[~absent]
        if not len(exact):
            return
        if self._kind == "int":
            self._top.update(*(array.tolist() for array in np.unique(exact, return_counts=True)))
        values = exact.astype(np.float64)
        finite = values[np.isfinite(values)]
        self._zeros += int((values == 0).sum())
        self._infinite += len(values) - len(finite)
        self._min, self._max = min(self._min, values.min()), max(self._max, values.max())
        self._moments.update(finite)
        self._quantiles.update(values)
        if self._min >= 0:
            self._log_moments.update(np.log1p(finite))

    def merge(self, other: _Numbers) -> None:
        self._count, self._missing = self._count + other._count, self._missing + other._missing
        self._zeros, self._infinite = self._zeros + other._zeros, self._infinite + other._infinite
        self._min, self._max = min(self._min, other._min), max(self._max, other._max)
        self._moments.merge(other._moments)
        self._log_moments.merge(other._log_moments)
        self._quantiles.merge(other._quantiles)
        self._top.merge(other._top)

    def finish(self) -> FeatureStatistics:
        mean, std = self._moments.finish()
        log_mean, log_std = self._log_moments.finish() if self._min >= 0 else (None, None)
        whole = self._kind == "int"
        seen = self._max >= self._min
        return FeatureStatistics(
            type=self._kind,
            count=self._count,
            missing=self._missing,
            zeros=self._zeros,
            min=float(self._min) if seen else None,
            max=float(self._max) if seen else None,
            mean=mean,
            std=std,
            quantiles=self._quantiles.finish(self._num_quantiles),
            log1p_mean=log_mean,
            log1p_std=log_std,
            num_infinite=self._infinite,
            top_values=self._top.finish() if whole else (),
            num_unique=self._top.num_unique if whole else None,
        )


class _Strings:
    def __init__(self, max_top_values: int) -> None:
        self._count = self._missing = self._length = self._invalid = 0
        self._top = _TopCounts(max_top_values)

    def update(self, batch: np.ndarray) -> None:
        counts = Counter(batch.ravel().tolist())
        self._count += len(batch)
        self._missing += counts.pop(b"", 0)
        self._length += sum(len(value) * count for value, count in counts.items())
        self._invalid += sum(count for value, count in counts.items() if not _is_utf8(value))
        self._top.update(list(counts.keys()), list(counts.values()))

    def merge(self, other: _Strings) -> None:
        self._count, self._missing = self._count + other._count, self._missing + other._missing
        self._length, self._invalid = self._length + other._length, self._invalid + other._invalid
        self._top.merge(other._top)

    def finish(self) -> FeatureStatistics:
        return FeatureStatistics(
            type="string",
            count=self._count,
            missing=self._missing,
            top_values=self._top.finish(),
            num_unique=self._top.num_unique,
            num_invalid_utf8=self._invalid,
            mean_length_bytes=_mean(self._length, self._count - self._missing),
        )


class _Texts:
    def __init__(self, max_top_values: int) -> None:
        self._count = self._missing = self._length = self._num_tokens = self._invalid = 0
        self._tokens, self._documents = _TopCounts(max_top_values), Counter[bytes]()

    def update(self, batch: np.ndarray) -> None:
        self._count += len(batch)
        self._missing += sum(not text for text in batch)
        self._length += sum(len(text) for text in batch)
        self._invalid += sum(not _is_utf8(text) for text in batch)
        words = tokenize(tf.constant(batch, tf.string))
        tokens, places, counts = tf.unique_with_counts(words.flat_values)
        pairs = np.unique(words.value_rowids().numpy() * max(len(tokens), 1) + places.numpy().astype(np.int64))
        documents = np.bincount(pairs % max(len(tokens), 1), minlength=len(tokens))
        self._num_tokens += len(places)
        self._tokens.update(tokens.numpy().tolist(), counts.numpy().tolist())
        self._documents.update(dict(zip(tokens.numpy().tolist(), documents.tolist(), strict=True)))
        self._forget_rare()

    def merge(self, other: _Texts) -> None:
        self._count, self._missing = self._count + other._count, self._missing + other._missing
        self._length, self._num_tokens = self._length + other._length, self._num_tokens + other._num_tokens
        self._invalid += other._invalid
        self._tokens.merge(other._tokens)
        self._documents.update(other._documents)
        self._forget_rare()

    def finish(self) -> FeatureStatistics:
        tokens = [
            (token, count, self._documents[token.encode("utf-8", "surrogateescape")])
            for token, count in self._tokens.finish()
        ]
        return FeatureStatistics(
            type="string",
            count=self._count,
            missing=self._missing,
            num_unique=self._tokens.num_unique,
            num_invalid_utf8=self._invalid,
            mean_length_bytes=_mean(self._length, self._count - self._missing),
            top_tokens=tuple(tokens),
            num_tokens=self._num_tokens,
        )

    def _forget_rare(self) -> None:
        if len(self._documents) > len(self._tokens.values):
            self._documents = Counter({token: self._documents[token] for token in self._tokens.values})


class _Images:
    def __init__(self) -> None:
        self._count, self._pixels = 0, 0
        self._sum: Any = 0
        self._squares: Any = 0
        self._min, self._max = 255, 0

    def update(self, batch: np.ndarray) -> None:
        flat = batch.reshape(-1, batch.shape[-1])
        histograms = np.stack([np.bincount(channel, minlength=256) for channel in flat.T])
        levels = np.arange(256)
        self._count, self._pixels = self._count + len(batch), self._pixels + len(flat)
        self._sum = self._sum + histograms @ levels
        self._squares = self._squares + histograms @ levels**2
        self._min, self._max = min(self._min, int(batch.min())), max(self._max, int(batch.max()))

    def merge(self, other: _Images) -> None:
        self._count, self._pixels = self._count + other._count, self._pixels + other._pixels
        self._sum, self._squares = self._sum + other._sum, self._squares + other._squares
        self._min, self._max = min(self._min, other._min), max(self._max, other._max)

    def finish(self) -> FeatureStatistics:
        if not self._count:
            return FeatureStatistics(type="uint8", count=0, missing=0)
        mean = self._sum / self._pixels
        variance = np.maximum(self._squares / self._pixels - mean**2, 0)
        return FeatureStatistics(
            type="uint8",
            count=self._count,
            missing=0,
            min=float(self._min),
            max=float(self._max),
            channel_mean=tuple(mean.tolist()),
            channel_std=tuple(np.sqrt(variance).tolist()),
        )


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _mean(total: float, count: int) -> float | None:
    return total / count if count else None
