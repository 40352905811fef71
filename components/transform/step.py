"""Step `transform`: fit the preprocessing to the train split's statistics, without another pass over the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components import artifacts
from components.errors import ConfigError, did_you_mean
from components.examples import ExamplesInfo, Feature, read_info
from components.preprocessing import FittedOp, Preprocessing
from components.statistics import FeatureStatistics, load_statistics
from components.transform.fitters import CATEGORIES, FITTERS, Source
from components.transform_config import Cross, Image, Normalize, TransformConfig, Vocabulary
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
        fitted = fit_all(operations, info, train)
        preprocessing = Preprocessing(info, fitted, class_names(info, train))
        preprocessing.save(out.path)
        out.result = TransformResult(
            outputs={name: list(op.output.shape) for name, op in fitted.items()},
            classes=preprocessing.classes,
            unused=sorted(set(info.inputs) - set(preprocessing.raw_inputs)),
        )
    return out.result


def default_operations(info: ExamplesInfo) -> dict[str, Any]:
    """One operation a feature, by its type: numbers normalised, strings looked up, images scaled; not lists of floats."""
    defaults = {name: _default_operation(feature) for name, feature in info.inputs.items()}
    return {name: op for name, op in defaults.items() if op is not None}


def _default_operation(feature: Feature) -> Any:
    is_list = None in feature.shape
    if feature.type == "uint8":
        return Image(op="image")
    if feature.type == "string" or (feature.type == "int" and is_list):
        several: dict[str, Any] = {"output": "multi_hot", "max_tokens": 1000} if feature.shape else {}
        return Vocabulary(op="vocabulary", **several)
    return None if is_list else Normalize()


def class_names(info: ExamplesInfo, train: dict[str, FeatureStatistics]) -> list[str | int]:
    """The classes in the order of their ids: as configured, else the train split's labels, sorted."""
    if info.task == "regression":
        return []
    return (
        list(info.classes) if info.classes is not None else sorted(value for value, _ in train[info.label].top_values)
    )


def fit_all(
    operations: Mapping[str, Any], info: ExamplesInfo, train: Mapping[str, FeatureStatistics]
) -> dict[str, FittedOp]:
    """Every operation with what it learns; crosses may read the outputs of others."""
    fitted = {name: fit(name, op, info, train) for name, op in operations.items() if not isinstance(op, Cross)}
    crosses = {name: fit_cross(name, op, info, fitted) for name, op in operations.items() if isinstance(op, Cross)}
    return {name: (fitted | crosses)[name] for name in operations}


def fit(name: str, op: Any, info: ExamplesInfo, train: Mapping[str, FeatureStatistics]) -> FittedOp:
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
    params, output = fitter(op, Source(source, feature, train[source], where))
    if isinstance(op, Normalize) and op.key is not None:
        return FittedOp(op="normalize_by_key", inputs=(source, op.key), params=params, output=output)
    return FittedOp(op=op.op, inputs=(source,), params=params, output=output)


def fit_cross(name: str, op: Cross, info: ExamplesInfo, fitted: Mapping[str, FittedOp]) -> FittedOp:
    """A cross of raw features and of outputs of other operations."""
    where = f"transform.features.{name}"
    for source in op.inputs:
        if source in info.inputs:
            feature = info.features[source]
            if feature.type not in CATEGORIES or feature.shape:
                raise ConfigError(
                    f"{where}: crosses single strings and integers, but '{source}' is {feature.type} of shape "
                    f"{feature.shape}. Name an operation that gives one id of it, such as bucketize."
                )
        elif source not in fitted:
            known = [*info.inputs, *fitted]
            raise ConfigError(f"{where}: there is no feature or operation '{source}'.{did_you_mean(source, known)}")
        elif (given := fitted[source].output).dtype != "int64" or given.shape != (1,):
            raise ConfigError(
                f"{where}: crosses ids, but '{source}' gives {given.dtype} of shape {given.shape}. Name an operation that "
                "gives one id, such as bucketize."
            )
    spec = FeatureSpec(shape=(1,), dtype="int64", num_categories=op.num_bins)
    params = {"num_categories": op.num_bins, "salt": op.salt}
    return FittedOp(op="cross", inputs=tuple(op.inputs), params=params, output=spec)
