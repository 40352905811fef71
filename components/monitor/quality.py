"""How good the served answers were, once their labels have come."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import duckdb
import numpy as np

from components import metrics
from components.config import MonitorConfig
from components.errors import DataError
from components.examples import MISSING_INT
from components.monitor.comparisons import Candidate
from serving.request_log.log import LogRecord

ALL = ""
_NUM_RESAMPLES = 100
_READERS = {".csv": "read_csv(?, all_varchar = true)", ".parquet": "read_parquet(?)", ".jsonl": "read_json_auto(?)"}


@dataclass(frozen=True)
class Quality:
    """Metrics of the labelled examples of a slice.

    Attributes:
        where: `feature=value`; empty for all of them.
        num_examples: How many they are.
        metrics: Metric -> value; None where it is not defined.
        held_out: The first threshold's metric on the test split; None if it is not known there.
    """

    where: str
    num_examples: int
    metrics: dict[str, float | None]
    held_out: float | None


class Labelled:
    """Finds the logged answers whose labels are known.

    Args:
        config: Where the labels are.
        classes: Names of the classes; empty for regression.

    Attributes:
        num_labels: Labels in the file.
        num_matched: Those whose request is in the log.

    Raises:
        DataError: the labels cannot be read, lack a column, or one of them is no class.
    """

    def __init__(self, config: MonitorConfig, classes: Sequence[str | int]) -> None:
        self.num_labels = self.num_matched = 0
        self._config = config
        self._labels: dict[str, dict[int, float]] = defaultdict(dict)
        self._version = 0
        self._forget()
        if config.labels is not None:
            encode = _encoder(config, classes)
            for request_id, row, label in _read(config.labels):
                self._labels[request_id][row] = encode(label)
            self.num_labels = sum(map(len, self._labels.values()))

    def _forget(self) -> None:
        self._answers: list[np.ndarray] = []
        self._found: list[float] = []
        self._slices: dict[str, list[Any]] = {name: [] for name in self._config.slice_features}

    def add(self, record: LogRecord, features: Mapping[str, np.ndarray], answers: np.ndarray) -> None:
        """Keep the answers of a call that have labels; of those of the newest version only."""
        labels = self._labels.get(record.request_id)
        if not labels or record.version < self._version:
            return
        if record.version > self._version:
            self._version = record.version
            self._forget()
        for row in sorted(labels.keys() & range(len(answers))):
            self._answers.append(answers[row])
            self._found.append(labels[row])
            for name, values in self._slices.items():
                values.append(_readable(features[name][row]) if name in features else None)
        self.num_matched = len(self._found)

    def judged(self, held_out: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[Quality, Candidate]]:
        """The quality of all labelled answers and of each slice, and what is to be judged of it.

        Args:
            held_out: Where (as in `Quality`) -> `metrics` and `num_examples` of the test split.
        """
        if not self._found:
            return
        regression = self._config.task == "regression"
        answers, labels = np.stack(self._answers), np.array(self._found, np.float32 if regression else np.int64)
        for where, rows in self._pieces():
            yield self._judge(where, labels[rows], answers[rows], held_out.get(where))

    def _pieces(self) -> Iterator[tuple[str, np.ndarray]]:
        yield ALL, np.arange(len(self._found))
        for name, values in self._slices.items():
            array = np.array(values, object)
            for value in sorted({value for value in values if value is not None}):
                yield f"{name}={value}", np.flatnonzero(array == value)

    def _judge(
        self, where: str, labels: np.ndarray, answers: np.ndarray, held_out: Mapping[str, Any] | None
    ) -> tuple[Quality, Candidate]:
        metric, task = self._config.primary_metric, self._config.task
        measured = metrics.jsonable(metrics.compute(task, labels, answers))
        value, reference = measured[metric], None if held_out is None else held_out["metrics"][metric]
        known = value is not None and reference is not None
        drop = max(metrics.improvement(metric, reference or 0.0, value or 0.0), 0.0) if known else 0.0
        share = len(labels) / held_out["num_examples"] if held_out else 0.0
        deviation = _deviation(metric, task, labels, answers) * (1 + share) ** 0.5
        candidate = Candidate(
            kind="quality",
            name=metric,
            measure="drop",
            reference="held_out",
            distance=drop,
            threshold=self._config.max_drop,
            noise=_normal_noise(deviation),
            num_examples=len(labels) if known else 0,
            where=where,
            detail=f"{_text(reference)} -> {_text(value)}",
        )
        return Quality(where, len(labels), measured, reference), candidate


def _normal_noise(deviation: float) -> Callable[[float], float]:
    return lambda chance: NormalDist().inv_cdf(1 - chance) * deviation


def _deviation(metric: str, task: Any, labels: np.ndarray, answers: np.ndarray) -> float:
    """Standard deviation of a metric, by the bootstrap (Efron 1979); 0 where it is never defined."""
    rng = np.random.default_rng(0)
    samples = (rng.integers(0, len(labels), len(labels)) for _ in range(_NUM_RESAMPLES))
    values = np.array([metrics.compute(task, labels[rows], answers[rows])[metric] for rows in samples])
    values = values[np.isfinite(values)]
    return float(values.std()) if len(values) else 0.0


def _text(value: float | None) -> str:
    return "not defined" if value is None else f"{value:.4f}"


def _encoder(config: MonitorConfig, classes: Sequence[str | int]) -> Callable[[str], float]:
    """A label as written -> class id, or value."""
    ids = {str(name): number for number, name in enumerate(classes)}

    def encode(label: str) -> float:
        if label in ids:
            return ids[label]
        try:
            number = float({"true": 1, "false": 0}.get(label.lower(), label))
        except ValueError:
            number = float("nan")
        if config.task == "regression" and np.isfinite(number):
            return number
        # Some write 1.0 or true for 1; with names for the classes, an integer is the class number itself.
        if number.is_integer():
            if str(int(number)) in ids:
                return ids[str(int(number))]
            if 0 <= number < len(classes):
                return number
        raise DataError(
            f"monitor.labels: {config.labels} has the label '{label}', which is "
            + (f"none of the classes {', '.join(ids)}." if ids else "no number.")
        )

    return encode


def _read(path: str) -> Iterator[tuple[str, int, str]]:
    """Request id, row in the request and label of each line."""
    suffix = next((each for each in Path(path.removesuffix(".gz")).suffixes[-1:] if each in _READERS), None)
    if suffix is None:
        raise DataError(
            f"monitor.labels: {path} ends in none of {', '.join(_READERS)}. Rename it, or give another file."
        )
    try:
        with duckdb.connect() as connection:
            rows = connection.execute(f"from {_READERS[suffix]}", [path])
            columns = [column[0] for column in rows.description or ()]
            if missing := [name for name in ("request_id", "label") if name not in columns]:
                raise DataError(f"monitor.labels: {path} has no column {missing[0]}. It has: {', '.join(columns)}.")
            places = [columns.index("request_id"), columns.index("label")]
            row_place = columns.index("row") if "row" in columns else None
            while batch := rows.fetchmany(10_000):
                for values in batch:
                    request_id, label = (values[place] for place in places)
                    if request_id is not None and label is not None:
                        yield str(request_id), int(values[row_place] or 0) if row_place is not None else 0, str(label)
    except (duckdb.Error, ValueError) as error:
        raise DataError(f"monitor.labels: {path} cannot be read: {str(error).splitlines()[0]}") from error


def _readable(value: Any) -> str:
    """A value as `evaluate` names the slice of it."""
    if isinstance(value, bytes):
        return value.decode(errors="replace") or "(missing)"
    return "(missing)" if value == MISSING_INT else str(value)
