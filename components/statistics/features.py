"""What is known of a feature, and statistics.json, in which it is kept."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.errors import DataError
from components.examples import ExamplesInfo
from components.keyed_moments import KeyMoments

STATISTICS_FILE = "statistics.json"
SLICES_FILE = "slices.json"
LOW_CARDINALITY = 100


@dataclass(frozen=True)
class WeightedStatistics:
    """A feature's statistics with every row counted by its weight. Fields are as in `FeatureStatistics`.

    Attributes:
        count: Weight of all rows.
        missing: Weight of the rows without a value.
    """

    count: float
    missing: float
    zeros: float | None = None
    mean: float | None = None
    std: float | None = None
    quantiles: tuple[float, ...] = ()
    top_values: tuple[tuple[int | str, float], ...] = ()


@dataclass(frozen=True)
class TokenCounts:
    """Tokens of a text that are not its words.

    Attributes:
        num_unique: As in `FeatureStatistics`.
        top_tokens: As in `FeatureStatistics`.
    """

    num_unique: int
    top_tokens: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class FeatureStatistics:
    """What is known of one feature in one split. A field that the type does not have is `None` or empty.

    There are no sizes of images: all images of a feature have the one size that `shape` tells.

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
        histogram: int, float: `(low, high, count)` of ten ranges of equal width from the smallest to the largest finite
            value; a value on an edge counts to the upper range. Exact as far as the quantiles are.
        log1p_mean: int, float: mean of log(1 + x); `None` where there are negative values.
        log1p_std: int, float: its population standard deviation.
        num_infinite: float: values that are infinite.
        top_values: int, string (not text): `(value, count)`, most frequent first, then by value.
        num_unique: int, string: distinct values (of text, words); beyond eight times those kept an estimate with a
            standard error of 0.8 %.
        num_invalid_utf8: string: values that are not text in UTF-8.
        min_length_bytes: string: length of the shortest value.
        max_length_bytes: string: length of the longest value.
        mean_length_bytes: string: mean length.
        min_num_values: lists: fewest values in a row that has any.
        max_num_values: lists: most values in a row.
        mean_num_values: lists: values in a row that has any, on average.
        top_tokens: text: `(token, count, num_documents)`, most frequent first, then by token.
        num_tokens: text: words in all.
        channel_mean: uint8: mean of each channel (last axis), in 0..255.
        channel_std: uint8: population standard deviation of each channel.
        weighted: Where rows have weights: what the weights change.
        token_counts: text: by the name of another tokenization that an operation needs.
        moments_by_key: int, float: by the name of a key feature that an operation needs, most frequent key first.
    """

    type: str
    count: int
    missing: int
    shape: tuple[int | None, ...] = ()
    zeros: int | None = None
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    std: float | None = None
    quantiles: tuple[float, ...] = ()
    histogram: tuple[tuple[float, float, int], ...] = ()
    log1p_mean: float | None = None
    log1p_std: float | None = None
    num_infinite: int = 0
    top_values: tuple[tuple[int | str, int], ...] = ()
    num_unique: int | None = None
    num_invalid_utf8: int = 0
    min_length_bytes: int | None = None
    max_length_bytes: int | None = None
    mean_length_bytes: float | None = None
    min_num_values: int | None = None
    max_num_values: int | None = None
    mean_num_values: float | None = None
    top_tokens: tuple[tuple[str, int, int], ...] = ()
    num_tokens: int | None = None
    channel_mean: tuple[float, ...] = ()
    channel_std: tuple[float, ...] = ()
    weighted: WeightedStatistics | None = None
    token_counts: Mapping[str, TokenCounts] = dataclasses.field(default_factory=dict)
    moments_by_key: Mapping[str, tuple[KeyMoments, ...]] = dataclasses.field(default_factory=dict)

    @property
    def present(self) -> int:
        """Rows with a value."""
        return self.count - self.missing


Statistics = dict[str, FeatureStatistics]


def to_json(statistics: Mapping[str, Statistics]) -> str:
    """Statistics of each split (or slice) as the text of `statistics.json`."""
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
    return _load(path, STATISTICS_FILE)


def load_slices(path: Path) -> dict[str, Statistics]:
    """The statistics of the slices in a statistics artifact, by `split/feature=value`; none if it has no slices.

    Raises:
        DataError: its `slices.json` is damaged.
    """
    return _load(path, SLICES_FILE) if (path / SLICES_FILE).exists() else {}


def _load(path: Path, name: str) -> dict[str, Statistics]:
    file = path / name
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


def _from_fields(fields: dict[str, Any]) -> FeatureStatistics:
    converted = _values_as_tuples(fields)
    if (weighted := converted.get("weighted")) is not None:
        converted["weighted"] = WeightedStatistics(**_values_as_tuples(weighted))
    counts = {name: TokenCounts(**_values_as_tuples(each)) for name, each in fields.get("token_counts", {}).items()}
    moments = _values_as_tuples(fields.get("moments_by_key", {}))
    return FeatureStatistics(**{**converted, "token_counts": counts, "moments_by_key": moments})


def _values_as_tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _as_tuples(value) for name, value in fields.items()}


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list) else value
