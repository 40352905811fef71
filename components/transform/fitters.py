"""What each operation learns from the statistics of the feature that it reads."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.errors import ConfigError, DataError
from components.examples import Feature
from components.statistics import FeatureStatistics
from components.tokens import name_of
from components.transform.vocabulary import check_enough_kept, vocabulary_of
from components.transform_config import (
    CYCLES,
    WORDS,
    Bucketize,
    Date,
    Hash,
    Image,
    Impute,
    Log,
    MinMax,
    Normalize,
    Robust,
    Text,
    Vocabulary,
)
from models.spec import FeatureSpec

Params = dict[str, Any]
NUMBERS, CATEGORIES = ("int", "float"), ("int", "string")


@dataclass(frozen=True)
class Source:
    """The raw feature that an operation reads.

    Attributes:
        name: Its name.
        feature: Its type and shape.
        stats: Those of the train split.
        where: The operation's place in the configuration, which errors begin with.
    """

    name: str
    feature: Feature
    stats: FeatureStatistics
    where: str


def fit_normalize(op: Normalize, source: Source) -> tuple[Params, FeatureSpec]:
    stats = source.stats
    mean, std = (stats.log1p_mean, stats.log1p_std) if op.log else (stats.mean, stats.std)
    if mean is None or std is None:
        is_negative = op.log and stats.mean is not None
        reason = "it has negative values, which log cannot take" if is_negative else "it has no values"
        raise DataError(f"{source.where}: cannot normalise by the train split: {reason}. Choose another operation.")
    params, spec = _number(op, source)
    params |= {"log": op.log}
    if op.key is None:
        return {**params, "mean": mean, "std": std}, spec
    rows = stats.moments_by_key.get(op.key, ())
    moments = [(row[4], row[5]) if op.log else (row[2], row[3]) for row in rows]
    if not rows:
        raise DataError(f"{source.where}.key: no row of the train split has both '{source.name}' and '{op.key}'.")
    return {
        **params,
        "keys": [row[0] for row in rows],
        "means": [mean, *(own for own, _ in moments)],
        # Of one row, or of equal ones, there is no deviation to divide by.
        "stds": [std, *(own or std for _, own in moments)],
    }, spec


def fit_min_max(op: MinMax, source: Source) -> tuple[Params, FeatureSpec]:
    low, high = _known(source, source.stats.min), _known(source, source.stats.max)
    params, spec = _number(op, source)
    if params["fill"] is None:
        params["fill"] = source.stats.mean
    return {**params, "low": low, "high": high, "range": list(op.range), "clip": op.clip}, spec


def fit_robust(op: Robust, source: Source) -> tuple[Params, FeatureSpec]:
    low, median, high = (
        _known(source, _quantile(source, q)) for q in (op.quantile_range[0], 0.5, op.quantile_range[1])
    )
    if low == high:
        raise DataError(
            f"{source.where}: the quantiles {op.quantile_range[0]} and {op.quantile_range[1]} of the train split are "
            f"both {low}. Widen quantile_range, or choose another operation."
        )
    params, spec = _number(op, source)
    return {**params, "median": median, "width": high - low}, spec


def fit_unscaled(op: Impute | Log, source: Source) -> tuple[Params, FeatureSpec]:
    return _number(op, source)


def fit_bucketize(op: Bucketize, source: Source) -> tuple[Params, FeatureSpec]:
    boundaries, stats = op.boundaries, source.stats
    _check_single(source)
    if not boundaries:
        if not stats.quantiles:
            raise DataError(
                f"{source.where}: has no quantiles in the train split to make buckets from. Choose another operation."
            )
        cuts = [_quantile(source, i / op.num_buckets) for i in range(1, op.num_buckets)]
        boundaries = sorted({float(cut) for cut in cuts if cut is not None and cut > stats.quantiles[0]})
    if not boundaries:
        raise DataError(
            f"{source.where}: nearly all values are {stats.quantiles[0]}, so there are no buckets. Choose another "
            "operation."
        )
    return {"boundaries": boundaries}, FeatureSpec(shape=(1,), dtype="int64", num_categories=len(boundaries) + 2)


def fit_vocabulary(op: Vocabulary, source: Source) -> tuple[Params, FeatureSpec]:
    if op.missing != "oov" and source.feature.shape:
        raise ConfigError(
            f"{source.where}.missing: is for single values; in a list the missing ones are passed over. Leave it out."
        )
    vocabulary = vocabulary_of(op, source.feature, source.stats, source.where)
    has_category = op.missing == "category"
    params, spec = _categories(op, source, op.num_oov_buckets + len(vocabulary) + has_category)
    params |= {"vocabulary": vocabulary, "num_oov_buckets": op.num_oov_buckets, "missing_category": has_category}
    return {**params, "fill": _most_frequent(source) if op.missing == "most_frequent" else None}, spec


def fit_hash(op: Hash, source: Source) -> tuple[Params, FeatureSpec]:
    params, spec = _categories(op, source, op.num_bins)
    return {**params, "salt": op.salt}, spec


def fit_text(op: Text, source: Source) -> tuple[Params, FeatureSpec]:
    _check_single(source)
    stats, cut = source.stats, op.tokenization
    counts = stats.token_counts.get(name_of(cut))
    if cut != WORDS and counts is None:
        raise DataError(f"{source.where}: the statistics do not count such tokens. Run validate again.")
    known, num_unique = (
        (stats.top_tokens, stats.num_unique) if counts is None else (counts.top_tokens, counts.num_unique)
    )
    # Two places are taken by padding and the unknown token; its name is no entry.
    tokens = [token for token in known if token[1] >= op.min_count and token[0] != "[UNK]"]
    if len(tokens) == len(known):
        check_enough_kept(op.max_tokens - 2, len(known), num_unique, source.where)
    tokens = tokens[: op.max_tokens - 2]
    if not tokens:
        raise DataError(
            f"{source.where}: no token occurs {op.min_count} times in the train split. Lower min_count."
            if known
            else f"{source.where}: there are no words in the train split."
        )
    params = {
        **cut.model_dump(),
        "vocabulary": [token for token, _, _ in tokens],
        "output": op.output,
        "length": op.length,
        "idf": [math.log(1 + stats.count / (1 + documents)) for _, _, documents in tokens if op.output == "tf_idf"],
    }
    if op.output == "ids":
        num_ids = len(tokens) + 2
        return params, FeatureSpec(shape=(op.length,), dtype="int64", num_categories=num_ids, is_sequence=True)
    return params, FeatureSpec(shape=(len(tokens) + 1,), dtype="float32")


def fit_date(op: Date, source: Source) -> tuple[Params, FeatureSpec]:
    _check_single(source)
    if op.zone == "written" and source.feature.type != "string":
        raise ConfigError(f"{source.where}.zone: '{source.name}' is seconds, which are UTC. Leave zone out.")
    since = datetime.datetime.fromisoformat(op.since).replace(tzinfo=datetime.timezone.utc)
    params = {
        "parts": op.parts,
        "output": op.output,
        "zone": op.zone,
        "since": int(since.timestamp()),
        "missing_indicator": op.missing_indicator,
    }
    if op.output == "ids":
        return params, FeatureSpec(shape=(1,), dtype="int64", num_categories=CYCLES[op.parts[0]] + 1)
    width = len(op.parts) * (2 if op.output == "cyclic" else 1) + op.missing_indicator
    return params, FeatureSpec(shape=(width,), dtype="float32")


def fit_image(op: Image, source: Source) -> tuple[Params, FeatureSpec]:
    shape = source.feature.shape
    if op.decode != (source.feature.type == "string"):
        mend = "Leave decode out" if op.decode else "Files of images need decode: true and size: [height, width]"
        raise ConfigError(f"{source.where}: '{source.name}' is of type {source.feature.type}. {mend}.")
    if len(shape) != (0 if op.decode else 3):
        wanted = "()" if op.decode else "(height, width, channels)"
        raise ConfigError(f"{source.where}: an image has the shape {wanted}, received {shape}.")
    channels = op.channels if op.decode else shape[2]
    for setting, values in (("mean", op.mean), ("std", op.std)):
        if len(values) not in (1, channels):
            raise ConfigError(
                f"{source.where}.{setting}: give one number or one per channel ({channels}), received {len(values)}."
            )
    params = {
        "size": list(op.size) if op.size else None,
        "mean": op.mean,
        "std": op.std,
        "channels": channels if op.decode else None,
    }
    height, width = op.size or shape[:2]
    return params, FeatureSpec(shape=(height, width, channels), dtype="float32")


def _number(op: Any, source: Source) -> tuple[Params, FeatureSpec]:
    """What the operations on numbers have in common."""
    shape = source.feature.shape
    if None in shape:
        raise ConfigError(
            f"{source.where}: '{source.name}' is a list whose length varies; op '{op.op}' takes single numbers, or tensors "
            "of one shape."
        )
    if op.missing_indicator and shape:
        raise ConfigError(
            f"{source.where}: missing_indicator is for single numbers, not for a tensor of shape {shape}."
        )
    fill = {
        None: lambda: None,
        "constant": lambda: op.fill_value,
        "mean": lambda: _known(source, source.stats.mean),
        "median": lambda: _known(source, _quantile(source, 0.5)),
        "most_frequent": lambda: float(_most_frequent(source)),
    }[op.impute]()
    spec = FeatureSpec(shape=shape or ((2,) if op.missing_indicator else (1,)), dtype="float32")
    return {"fill": fill, "missing_indicator": op.missing_indicator}, spec


def _categories(op: Any, source: Source, num_categories: int) -> tuple[Params, FeatureSpec]:
    """What the operations on categories have in common."""
    shape = source.feature.shape
    if len(shape) > 1:
        raise ConfigError(f"{source.where}: op '{op.op}' takes single values or lists, not a tensor of shape {shape}.")
    if shape and op.output == "ids" and op.length is None:
        raise ConfigError(
            f"{source.where}: '{source.name}' is a list: say output: multi_hot or count, or give the ids a length."
        )
    if op.length is not None and not shape:
        raise ConfigError(f"{source.where}.length: is for lists, but '{source.name}' is a single value. Leave it out.")
    params = {"num_categories": num_categories, "output": op.output, "length": op.length}
    if op.output != "ids":
        return params, FeatureSpec(shape=(num_categories,), dtype="float32")
    if not shape:
        return params, FeatureSpec(shape=(1,), dtype="int64", num_categories=num_categories)
    spec = FeatureSpec(shape=(op.length,), dtype="int64", num_categories=num_categories + 1, is_sequence=True)
    return params, spec


def _check_single(source: Source) -> None:
    if source.feature.shape:
        raise ConfigError(
            f"{source.where}: takes single values, but '{source.name}' is of shape {source.feature.shape}. Choose another "
            "operation."
        )


def _known(source: Source, value: float | None) -> float:
    """A number of the train split that there has to be."""
    if value is None or not math.isfinite(value):
        reason = "has no values" if value is None else "has infinite values"
        raise DataError(f"{source.where}: '{source.name}' {reason} in the train split. Choose another operation.")
    return value


def _quantile(source: Source, rank: float) -> float | None:
    quantiles: Sequence[float] = source.stats.quantiles
    return quantiles[round((len(quantiles) - 1) * rank)] if quantiles else None


def _most_frequent(source: Source) -> int | str:
    if not source.stats.top_values:
        raise ConfigError(
            f"{source.where}: the most frequent value is known of integers and of strings that no op text reads, not of "
            f"'{source.name}'. Impute another value."
        )
    return source.stats.top_values[0][0]


Fitter = Callable[[Any, Source], tuple[Params, FeatureSpec]]
FITTERS: Mapping[str, tuple[tuple[str, ...], Fitter]] = {
    "normalize": (NUMBERS, fit_normalize),
    "min_max": (NUMBERS, fit_min_max),
    "robust": (NUMBERS, fit_robust),
    "log": (NUMBERS, fit_unscaled),
    "impute": (NUMBERS, fit_unscaled),
    "bucketize": (NUMBERS, fit_bucketize),
    "vocabulary": (CATEGORIES, fit_vocabulary),
    "hash": (CATEGORIES, fit_hash),
    "text": (("string",), fit_text),
    "date": (("int", "float", "string"), fit_date),
    "image": (("uint8", "string"), fit_image),
}
