"""Step `monitor`: whether the features that are served still look like the ones that were trained on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import tensorflow as tf

from components import artifacts
from components.config import MonitorConfig
from components.errors import DataError
from components.examples import ExamplesInfo, Feature, parse
from components.statistics import Statistics, StatisticsBuilder, distance, load_statistics
from serving import request_log
from serving.errors import ServingError

PROOF_LOG = "request_log.tfrecord"
_EXAMPLES_INPUT = "examples"
_MAX_TOP_VALUES = 100_000
_NUM_QUANTILES = 1000
_DTYPES = {"int": np.int64, "float": np.float32, "string": object, "uint8": np.uint8}


@dataclass(frozen=True)
class Skew:
    """How far a served feature is from the train split.

    Attributes:
        feature: Its name.
        measure: `l_infinity` (categories, words) or `jensen_shannon` (numbers, base 2).
        distance: In [0, 1].
        threshold: Above it the feature is skewed.
        missing_in_train: Share of the train rows without a value.
        missing_in_requests: Share of the served examples without a value.
    """

    feature: str
    measure: str
    distance: float
    threshold: float
    missing_in_train: float
    missing_in_requests: float

    @property
    def is_skewed(self) -> bool:
        """Whether the distance is above the threshold."""
        return self.distance > self.threshold


@dataclass(frozen=True)
class MonitorResult:
    """What the requests look like.

    Attributes:
        status: `ok`, `skew`, or `too_few` examples to judge.
        num_requests: Predict requests in the log.
        num_examples: Examples in them.
        skewed: Features above their threshold, farthest first; empty where there are too few examples.
    """

    status: Literal["ok", "skew", "too_few"]
    num_requests: int
    num_examples: int
    skewed: list[Skew]


def monitor(*, statistics: Path, proof: Path, pushed: Path, monitoring: Path, config: MonitorConfig) -> MonitorResult:
    """Compare the raw features of logged requests with the train split. Skew is told, it is no error.

    Args:
        statistics: Artifact of `validate`.
        proof: Artifact of `verify`, whose request log is read unless the config names another.
        pushed: Artifact of `push`: the model whose requests these are.
        monitoring: Where the artifact will stand: skew.json and report.md.
        config: The log and the thresholds.

    Returns:
        The status and the skewed features.

    Raises:
        DataError: there is no log, it is damaged, or its requests hold none of the trained features.
    """
    inputs = {"statistics": statistics, "proof": proof, "pushed": pushed}
    label = artifacts.open_artifact(statistics, step="validate").result["label"]
    artifacts.open_artifact(proof, step="verify")
    artifacts.open_artifact(pushed, step="push")
    log = Path(config.request_log) if config.request_log is not None else proof / PROOF_LOG
    with artifacts.writing(monitoring, step="monitor", inputs=inputs, config=config) as out:
        train = {name: seen for name, seen in load_statistics(statistics)["train"].items() if name != label}
        served, num_requests, num_examples = _served_statistics(log, train)
        features = sorted(_compare(train, served, config), key=lambda skew: (-skew.distance, skew.feature))
        skewed = [skew for skew in features if skew.is_skewed] if num_examples >= config.min_examples else []
        status: Literal["ok", "skew", "too_few"] = "skew" if skewed else "ok"
        if num_examples < config.min_examples:
            status = "too_few"
        result = MonitorResult(status, num_requests, num_examples, skewed)
        found = {**dataclasses.asdict(result), "features": [dataclasses.asdict(skew) for skew in features]}
        (out.path / "skew.json").write_text(json.dumps(found, indent=1) + "\n")
        (out.path / "report.md").write_text(_report(result, features, config))
        out.result = result
    return result


def _served_statistics(log: Path, train: Statistics) -> tuple[Statistics, int, int]:
    """Statistics of the served features, the number of requests, and of examples in them."""
    info = _info_of(train)
    texts = [name for name, feature in train.items() if feature.num_tokens is not None]
    builder = StatisticsBuilder(info, text_features=texts, max_top_values=_MAX_TOP_VALUES, num_quantiles=_NUM_QUANTILES)
    num_requests = num_examples = 0
    for inputs in _read(log):
        batch = _raw_features(inputs, info)
        num_requests += 1
        if batch:
            num_examples += len(next(iter(batch.values())))
            builder.update(batch)
    if num_requests and not num_examples:
        raise DataError(
            f"monitor.request_log: none of the {num_requests} requests in {log} holds a feature of the train split "
            f"({', '.join(train)}). Give the log of this model."
        )
    return builder.finish(), num_requests, num_examples


def _read(log: Path) -> Iterator[dict[str, np.ndarray]]:
    try:
        yield from request_log.read(log)
    except FileNotFoundError as error:
        raise DataError(
            f"monitor.request_log: there is no file {log}. Start the server with --request_log_file, send requests, "
            "and name that file."
        ) from error
    except (OSError, ServingError) as error:
        raise DataError(f"monitor.request_log: {log} cannot be read: {error}. Give another log.") from error


def _info_of(train: Statistics) -> ExamplesInfo:
    features = {name: Feature(feature.type, feature.shape) for name, feature in train.items()}
    return ExamplesInfo(features=features, label="", task="regression", classes=None, num_examples={})


def _raw_features(inputs: dict[str, np.ndarray], info: ExamplesInfo) -> dict[str, np.ndarray]:
    """The trained features of one request, as `examples.read_arrays` would give them."""
    if set(inputs) == {_EXAMPLES_INPUT} and _EXAMPLES_INPUT not in info.features:
        parsed = parse(tf.constant(inputs[_EXAMPLES_INPUT].ravel(), tf.string), info, with_label=False)
        inputs = {name: tensor.numpy() for name, tensor in parsed.items()}
    return {
        name: values.astype(_DTYPES[feature.type]).reshape(-1, *feature.shape)
        for name, feature in info.features.items()
        if (values := inputs.get(name)) is not None
    }


def _compare(train: Statistics, served: Statistics, config: MonitorConfig) -> Iterator[Skew]:
    thresholds = {"l_infinity": config.max_linf, "jensen_shannon": config.max_jensen_shannon}
    for name, feature in train.items():
        measured = distance(feature, served[name])
        if measured is not None:
            measure, value = measured
            shares = (side.missing / side.count for side in (feature, served[name]))
            yield Skew(name, measure, value, thresholds[measure], *shares)


def _report(result: MonitorResult, features: Iterable[Skew], config: MonitorConfig) -> str:
    verdicts = {
        "ok": "no feature is skewed.",
        "skew": f"skewed: {', '.join(skew.feature for skew in result.skewed)}.",
        "too_few": f"too few examples to judge: at least {config.min_examples} are needed.",
    }
    lines = [
        "# Served features against the train split",
        "",
        f"{result.num_requests} requests, {result.num_examples} examples: {verdicts[result.status]}",
        "",
        "| feature | measure | distance | threshold | missing in train | missing in requests | |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for skew in features:
        mark = "SKEW" if skew in result.skewed else ""
        missing = f"{skew.missing_in_train:.1%} | {skew.missing_in_requests:.1%}"
        lines.append(
            f"| {skew.feature} | {skew.measure} | {skew.distance:.3f} | {skew.threshold:g} | {missing} | {mark} |"
        )
    return "\n".join(lines) + "\n"
