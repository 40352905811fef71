"""Step `validate`: statistics of the examples, their schema, and whether they are fit to train on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from components import anomalies, artifacts, external
from components.anomalies import Anomaly
from components.config import ValidateConfig
from components.distances import distance
from components.errors import ConfigError, did_you_mean
from components.examples import LEAKAGE_FILE, ExamplesInfo, check_slices, read_info
from components.schema import SCHEMA_FILE, Schema, load_schema, write_schema
from components.schema.checks import compare
from components.schema.drift import MAX_DISTANCE, drift, exceeded
from components.schema.infer import infer_schema
from components.shard_statistics import build_statistics
from components.statistics import (
    SLICES_FILE,
    STATISTICS_FILE,
    FeatureStatistics,
    Statistics,
    StatisticsBuilder,
    class_values,
    load_statistics,
    to_json,
)
from components.statistics.page import html


@dataclass(frozen=True)
class ValidateResult:
    """What was found; a result exists only where there was no error.

    Attributes:
        num_examples: Rows of each split.
        label: The column to predict.
        num_classes: Classes of the label; `None` for regression.
        warnings: One line each.
        anomalies: The same with kind, feature, split, severity and message of each.
    """

    num_examples: dict[str, int]
    label: str
    num_classes: int | None
    warnings: list[str]
    anomalies: list[dict[str, str]]


def validate(*, examples: Path, statistics: Path, config: ValidateConfig) -> ValidateResult:
    """Compute statistics of every split and compare them with the schema and with what the task needs.

    Args:
        examples: Artifact of `ingest`.
        statistics: Where the artifact will stand: statistics.json, statistics.html, slices.json (where there are
            slices), schema.yaml, and the anomalies as JSON, HTML and Markdown.
        config: The schema, and how much is kept.

    Returns:
        The warnings.

    Raises:
        ConfigError: the schema cannot be read, or a text feature is none.
        DataError: the data is not fit to train on; nothing is written.
    """
    artifacts.open_artifact(examples, step="ingest")
    info = read_info(examples)
    _check_text_features(info, config.text_features)
    for pair in config.needs.moments:
        for name, types in ((pair.number, ("int", "float")), (pair.key, ("int", "string"))):
            _check_single(info, name, types)
    check_slices(info, config.slice_features)
    _check_weight_feature(info, config.weight_feature)
    supplied = None if config.schema_path is None else load_schema(Path(config.schema_path))
    last = external.last_statistics(config.drift_from, examples.parent)
    with artifacts.writing(statistics, step="validate", inputs={"examples": examples}, config=config) as out:
        builders = build_statistics(examples, info, config, out.scratch)
        computed = {split: builder.finish() for split, builder in builders.items()}
        schema = supplied or infer_schema(computed["train"], info.label)
        before = {} if last is None else load_statistics(last.parent)
        shared = [Anomaly(**fields) for fields in json.loads((examples / LEAKAGE_FILE).read_text())]
        seen = _anomalies(info, computed, before, schema, supplied is not None, config)
        found = list(anomalies.with_severities([*shared, *seen], config.severities))
        anomalies.raise_errors(found)
        (out.path / STATISTICS_FILE).write_text(to_json(computed))
        (out.path / "statistics.html").write_text(html(computed))
        if config.slice_features:
            (out.path / SLICES_FILE).write_text(to_json(_slices(builders)))
        write_schema(out.path / SCHEMA_FILE, schema)
        listed = [dataclasses.asdict(anomaly) for anomaly in found]
        (out.path / "anomalies.json").write_text(json.dumps(listed, indent=1) + "\n")
        (out.path / "anomalies.html").write_text(anomalies.page(found), encoding="utf-8")
        (out.path / "anomalies.md").write_text(anomalies.markdown(found), encoding="utf-8")
        out.result = ValidateResult(
            num_examples=info.num_examples,
            label=info.label,
            num_classes=None if info.task == "regression" else len(class_values(info, computed["train"])),
            warnings=[f"{a.split} split, '{a.feature}': {a.message}" for a in found],
            anomalies=listed,
        )
    result: ValidateResult = out.result
    return result


def _slices(builders: dict[str, StatisticsBuilder]) -> dict[str, Statistics]:
    """Statistics by `split/feature=value`."""
    return {
        f"{split}/{name}": found
        for split, builder in builders.items()
        for name, found in builder.finish_slices().items()
    }


def _check_weight_feature(info: ExamplesInfo, name: str | None) -> None:
    if name is None:
        return
    if name not in info.features:
        raise ConfigError(f"validate.weight_feature: the data has no '{name}'.{did_you_mean(name, info.features)}")
    if info.features[name].type not in ("int", "float") or info.features[name].shape:
        raise ConfigError(f"validate.weight_feature: '{name}' is not one number a row. Choose a numeric column.")


def _check_text_features(info: ExamplesInfo, text_features: list[str]) -> None:
    for name in text_features:
        if name not in info.inputs:
            raise ConfigError(
                f"transform.features: op text reads '{name}', which the data lacks.{did_you_mean(name, info.inputs)}"
            )
        if info.features[name].type != "string":
            raise ConfigError(
                f"transform.features: op text reads '{name}', which is {info.features[name].type}, not string."
            )


def _check_single(info: ExamplesInfo, name: str, types: tuple[str, ...]) -> None:
    feature = info.inputs.get(name)
    if feature is None:
        raise ConfigError(
            f"transform.features: op normalize reads '{name}', which the data lacks.{did_you_mean(name, info.inputs)}"
        )
    if feature.type not in types or feature.shape:
        raise ConfigError(
            f"transform.features: op normalize with a key takes '{name}' as a single {' or '.join(types)}, but it is "
            f"{feature.type} of shape {feature.shape}. Leave out key, or choose another feature."
        )


def _anomalies(
    info: ExamplesInfo,
    computed: dict[str, Statistics],
    before: dict[str, Statistics],
    schema: Schema,
    supplied: bool,
    config: ValidateConfig,
) -> Iterator[Anomaly]:
    for split, found in computed.items():
        yield from compare(found, schema, split=split, supplied=supplied)
        yield from _unusable_values(found, split)
        if split in before:
            yield from drift(found, before[split], schema, split=split, supplied=supplied)
    yield from _test_that_differs(computed, info)
    yield from _label_anomalies(info, computed, config.min_class_examples)


def _unusable_values(found: Statistics, split: str) -> Iterator[Anomaly]:
    for name, feature in found.items():
        if feature.num_infinite:
            message = f"{feature.num_infinite} values are infinite. Correct them, or leave those rows out."
            yield Anomaly("FLOAT_TYPE_HAS_INF", name, split, "error", message)
        if feature.num_invalid_utf8:
            message = (
                f"{feature.num_invalid_utf8} of {feature.count} rows hold bytes that are not text in UTF-8. Convert them "
                "to UTF-8, or leave the column out with data.drop."
            )
            yield Anomaly("ENUM_TYPE_INVALID_UTF8", name, split, "error", message)
        if split == "train" and not feature.present:
            message = "no row has a value, so nothing can be learnt from it. Leave it out with data.drop."
            yield Anomaly("FEATURE_TYPE_NO_VALUES", name, split, "warning", message)


def _test_that_differs(computed: dict[str, Statistics], info: ExamplesInfo) -> Iterator[Anomaly]:
    """Train and test that differ by as much as `monitor` calls skew by default."""
    for name in info.features:
        measured = distance(computed["train"][name], computed["test"][name])
        if measured is not None and measured[1] > MAX_DISTANCE:
            kind, said = exceeded(*measured, MAX_DISTANCE, "the train split")
            yield Anomaly(kind, name, "test", "warning", f"{said} Look at the split.")


def _label_anomalies(info: ExamplesInfo, computed: dict[str, Statistics], min_class_examples: int) -> Iterator[Anomaly]:
    for split, found in computed.items():
        label = found[info.label]
        if label.missing:
            message = (
                f"{label.missing} of {label.count} rows have no label (it is absent, empty or NaN). Fill it in, or "
            )
            yield Anomaly("LABEL_MISSING", info.label, split, "error", f"{message}leave those rows out.")
    if (problem := _label_type_problem(info)) is not None:
        yield Anomaly("LABEL_TYPE", info.label, "train", "error", problem)
        return
    if info.task != "regression":
        classes = class_values(info, computed["train"])
        yield from _class_anomalies(info, classes, computed)
        yield from _train_class_anomalies(info, classes, computed["train"][info.label], min_class_examples)


def _label_type_problem(info: ExamplesInfo) -> str | None:
    label = info.features[info.label]
    if label.shape or label.type == "uint8":
        return "the label is a tensor; it must be one number or string. Choose another column with data.label."
    if info.task == "regression" and label.type == "string":
        return "a string cannot be regressed on. Set data.task to binary or multiclass, or data.label to a number."
    if info.task != "regression" and label.type == "float":
        return (
            f"the label is a fractional number, {info.task} needs whole numbers or strings. Write whole numbers without "
            "a point and with none missing, or set data.task: regression."
        )
    return None


def _class_anomalies(
    info: ExamplesInfo, classes: list[int | str], computed: dict[str, Statistics]
) -> Iterator[Anomaly]:
    for split, found in computed.items():
        counts = dict(found[info.label].top_values)
        unknown = {value: count for value, count in counts.items() if value not in classes}
        if unknown:
            yield Anomaly("LABEL_UNKNOWN_CLASS", info.label, split, "error", _unknown_message(info, classes, unknown))
        if len(counts) == 1:
            message = f"every row is of the one class {next(iter(counts))!r}. Give data of others, or another split."
            yield Anomaly("LABEL_ONE_CLASS", info.label, split, "error", message)
        absent = [_class_name(info, value) for value in classes if value not in counts]
        if absent and split != "train":
            message = f"no example of {len(absent)} of {len(classes)} classes: {_some(absent)}. Metrics miss them."
            yield Anomaly("LABEL_CLASS_ABSENT", info.label, split, "warning", message)


def _train_class_anomalies(
    info: ExamplesInfo, classes: list[int | str], label: FeatureStatistics, min_class_examples: int
) -> Iterator[Anomaly]:
    if info.task == "binary" and len(classes) != 2:
        message = f"binary needs 2 classes, there are {len(classes)}: {_some(classes)}. Set data.task: multiclass?"
        yield Anomaly("LABEL_NUM_CLASSES", info.label, "train", "error", message)
    counts = dict(label.top_values)
    for value in classes:
        number = counts.get(value, 0)
        if number < min_class_examples:
            message = (
                f"class {_class_name(info, value)!r} has {number} examples, at least {min_class_examples} are needed. "
                "Add examples, leave the class out, or lower validate.min_class_examples."
            )
            yield Anomaly("LABEL_FEW_EXAMPLES", info.label, "train", "error", message)


def _class_name(info: ExamplesInfo, value: int | str) -> int | str:
    """The name of a class, if it was given one."""
    return info.classes[value] if info.classes is not None and isinstance(value, int) else value


def _unknown_message(info: ExamplesInfo, classes: list[int | str], unknown: dict[int | str, int]) -> str:
    rows = f"{sum(unknown.values())} rows have a label that is no class: {_some(list(unknown))}"
    if info.classes is None:
        return f"{rows}; the train split has {_some(classes)}. Add such rows to it, or leave them out."
    if info.features[info.label].type == "int":
        return f"{rows}; with {len(classes)} data.classes, labels are 0 to {len(classes) - 1}. Correct one of the two."
    return f"{rows}; data.classes are {_some(classes)}. Add it there, or correct the rows."


def _some(values: list[int | str]) -> str:
    return ", ".join(repr(value) for value in values[:10]) + (" ..." if len(values) > 10 else "")
