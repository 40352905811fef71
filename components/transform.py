"""Step `transform`: fit the preprocessing to the train split's statistics, without another pass over the data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components import artifacts
from components.config import (
    Bucketize,
    Hash,
    Image,
    Normalize,
    Text,
    TransformConfig,
    Vocabulary,
)
from components.errors import ConfigError, DataError, did_you_mean
from components.examples import ExamplesInfo, Feature, read_info
from components.preprocessing import FittedOp, Preprocessing
from components.statistics import FeatureStatistics, load_statistics
from models.spec import FeatureSpec


@dataclass(frozen=True)
class TransformResult:
    """What was fitted.

    Attributes:
        outputs: Output name -> shape without the batch dimension.
        classes: Class names in the order of their ids; empty for regression.
        unused: Raw features that no operation reads.
    """

    outputs: dict[str, list[int | None]]
    classes: list[str | int]
    unused: list[str]


def transform(*, examples: Path, statistics: Path, transform: Path, config: TransformConfig) -> TransformResult:
    """Fit every operation and write them as one `transform.json`.

    Args:
        examples: Artifact of `ingest`.
        statistics: Artifact of `validate`.
        transform: Where the artifact is written.
        config: The operations; empty for the default of each feature's type.

    Raises:
        ConfigError: an operation reads an unknown feature, or one of a type that it cannot take.
        DataError: a feature has no values in the train split to learn from.
    """
    artifacts.open_artifact(examples, step="ingest")
    artifacts.open_artifact(statistics, step="validate")
    inputs = {"examples": examples, "statistics": statistics}
    with artifacts.writing(transform, step="transform", inputs=inputs, config=config) as out:
        info = read_info(examples)
        train = load_statistics(statistics)["train"]
        operations = config.features or default_operations(info)
        fitted = {name: fit(name, op, info, train) for name, op in operations.items()}
        preprocessing = Preprocessing(info, fitted, class_names(info, train))
        preprocessing.save(out.path)
        out.result = TransformResult(
            outputs={name: list(op.output.shape) for name, op in fitted.items()},
            classes=preprocessing.classes,
            unused=sorted(set(info.inputs) - set(preprocessing.raw_inputs)),
        )
    return out.result


def default_operations(info: ExamplesInfo) -> dict[str, Any]:
    """One operation a feature, by its type: numbers normalised, strings looked up, images scaled."""
    kinds: dict[str, Callable[[], Any]] = {
        "int": Normalize,
        "float": Normalize,
        "string": lambda: Vocabulary(op="vocabulary"),
        "uint8": lambda: Image(op="image"),
    }
    return {name: kinds[feature.type]() for name, feature in info.inputs.items()}


def class_names(info: ExamplesInfo, train: dict[str, FeatureStatistics]) -> list[str | int]:
    """The classes in the order of their ids: as configured, else the train split's labels, sorted."""
    if info.task == "regression":
        return []
    return (
        list(info.classes) if info.classes is not None else sorted(value for value, _ in train[info.label].top_values)
    )


def fit(name: str, op: Any, info: ExamplesInfo, train: dict[str, FeatureStatistics]) -> FittedOp:
    """One operation with what it learns from the statistics of its input."""
    source = op.input or name
    where = f"transform.features.{name}"
    if source not in info.inputs:
        raise ConfigError(f"{where}: there is no feature '{source}'.{did_you_mean(source, info.inputs)}")
    feature = info.features[source]
    allowed, fitter = FITTERS[op.op]
    if feature.type not in allowed:
        mend = " A CSV column is string as soon as one value is no number: correct it, or set data.args.null_values."
        raise ConfigError(
            f"{where}: op '{op.op}' takes {' or '.join(allowed)} features, but '{source}' is of type {feature.type}."
            f"{mend if feature.type == 'string' else ''}"
        )
    params, output = fitter(op, feature, train[source], where)
    return FittedOp(op=op.op, input=source, params=params, output=output)


def fit_normalize(
    op: Normalize, feature: Feature, stats: FeatureStatistics, where: str
) -> tuple[dict[str, Any], FeatureSpec]:
    mean, std = (stats.log1p_mean, stats.log1p_std) if op.log else (stats.mean, stats.std)
    if mean is None or std is None:
        reason = (
            "it has negative values, which log cannot take" if op.log and stats.mean is not None else "it has no values"
        )
        raise DataError(f"{where}: cannot normalise by the train split: {reason}. Choose another operation.")
    if op.missing_indicator and feature.shape:
        raise ConfigError(
            f"{where}: missing_indicator is for single numbers, not for a tensor of shape {feature.shape}."
        )
    params = {"mean": mean, "std": std, "log": op.log, "missing_indicator": op.missing_indicator}
    shape = feature.shape or ((2,) if op.missing_indicator else (1,))
    return params, FeatureSpec(shape=shape, dtype="float32")


def fit_bucketize(
    op: Bucketize, feature: Feature, stats: FeatureStatistics, where: str
) -> tuple[dict[str, Any], FeatureSpec]:
    if not stats.quantiles or feature.shape:
        raise DataError(f"{where}: has no quantiles in the train split to make buckets from. Choose another operation.")
    last = len(stats.quantiles) - 1
    cuts = [stats.quantiles[round(last * i / op.num_buckets)] for i in range(1, op.num_buckets)]
    boundaries = sorted({float(cut) for cut in cuts if cut > stats.quantiles[0]})
    if not boundaries:
        raise DataError(
            f"{where}: nearly all values are {stats.quantiles[0]}, so there are no buckets. Choose another operation."
        )
    return {"boundaries": boundaries}, FeatureSpec(shape=(1,), dtype="int64", num_categories=len(boundaries) + 2)


def fit_vocabulary(
    op: Vocabulary, feature: Feature, stats: FeatureStatistics, where: str
) -> tuple[dict[str, Any], FeatureSpec]:
    vocabulary = [value for value, count in stats.top_values if count >= op.min_count]
    if len(vocabulary) == len(stats.top_values):
        _check_enough_kept(op.max_tokens or 0, len(vocabulary), stats, where)
    vocabulary = vocabulary[: op.max_tokens]
    if not vocabulary:
        raise DataError(f"{where}: no value occurs {op.min_count} times in the train split. Lower min_count.")
    return {"vocabulary": vocabulary}, FeatureSpec(shape=(1,), dtype="int64", num_categories=len(vocabulary) + 1)


def fit_hash(op: Hash, feature: Feature, stats: FeatureStatistics, where: str) -> tuple[dict[str, Any], FeatureSpec]:
    return {"num_bins": op.num_bins}, FeatureSpec(shape=(1,), dtype="int64", num_categories=op.num_bins)


def fit_text(op: Text, feature: Feature, stats: FeatureStatistics, where: str) -> tuple[dict[str, Any], FeatureSpec]:
    # Two places are taken by padding and the unknown word.
    _check_enough_kept(op.max_tokens - 2, len(stats.top_tokens), stats, where)
    tokens = stats.top_tokens[: op.max_tokens - 2]
    if not tokens:
        raise DataError(f"{where}: there are no words in the train split.")
    vocabulary = [token for token, _, _ in tokens]
    idf = [math.log(1 + stats.count / (1 + documents)) for _, _, documents in tokens]
    params = {
        "vocabulary": vocabulary,
        "output": op.output,
        "length": op.length,
        "idf": idf if op.output == "tf_idf" else [],
    }
    if op.output == "tf_idf":
        return params, FeatureSpec(shape=(len(vocabulary) + 1,), dtype="float32")
    return params, FeatureSpec(shape=(op.length,), dtype="int64", num_categories=len(vocabulary) + 2, is_sequence=True)


def _check_enough_kept(wanted: int, kept: int, stats: FeatureStatistics, where: str) -> None:
    """Refuse a `max_tokens` that the statistics cannot fill though the data could."""
    if wanted > kept and stats.num_unique is not None and stats.num_unique > kept:
        raise ConfigError(
            f"{where}.max_tokens: {wanted} values are wanted and the train split has more than the {kept} that the "
            "statistics keep. Raise validate.max_top_values, or lower max_tokens."
        )


def fit_image(op: Image, feature: Feature, stats: FeatureStatistics, where: str) -> tuple[dict[str, Any], FeatureSpec]:
    if len(feature.shape) != 3:
        raise ConfigError(f"{where}: an image has the shape (height, width, channels), received {feature.shape}.")
    channels = feature.shape[2]
    for setting, values in (("mean", op.mean), ("std", op.std)):
        if len(values) not in (1, channels):
            raise ConfigError(
                f"{where}.{setting}: give one number or one per channel ({channels}), received {len(values)}."
            )
    params = {"size": list(op.size) if op.size else None, "mean": op.mean, "std": op.std}
    height, width = op.size or feature.shape[:2]
    return params, FeatureSpec(shape=(height, width, channels), dtype="float32")


Fitter = Callable[[Any, Feature, FeatureStatistics, str], tuple[dict[str, Any], FeatureSpec]]
FITTERS: dict[str, tuple[tuple[str, ...], Fitter]] = {
    "normalize": (("int", "float"), fit_normalize),
    "bucketize": (("int", "float"), fit_bucketize),
    "vocabulary": (("int", "string"), fit_vocabulary),
    "hash": (("int", "string"), fit_hash),
    "text": (("string",), fit_text),
    "image": (("uint8",), fit_image),
}
