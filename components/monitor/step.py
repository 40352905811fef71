"""Step `monitor`: skew, drift, prediction drift and late quality of what a request log holds."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from components import artifacts
from components.config import MonitorConfig
from components.errors import ConfigError, did_you_mean
from components.monitor import comparisons, page, report
from components.monitor.comparisons import Candidate, Thresholds
from components.monitor.findings import Findings, MonitorResult
from components.monitor.quality import Labelled
from components.monitor.traffic import Traffic, Window, predictions_builder, predictions_of
from components.schema import SCHEMA_FILE, Schema, load_schema
from components.statistics import Statistics, load_statistics

PROOF_LOG = "request_log.tfrecord"
PREDICTIONS = "predictions.npy"
PUSHED = "pushed.json"
MONITOR_FILE = "monitor.json"
_PREDICTION_NAMES = ("predicted_label", "predicted_score", "predicted_value")


def monitor(
    *,
    statistics: Path,
    proof: Path,
    pushed: Path,
    monitoring: Path,
    config: MonitorConfig,
    now_seconds: float | None = None,
) -> MonitorResult:
    """Compare logged requests with the train split, with earlier ones and with their labels. An alarm is no error.

    Args:
        statistics: Artifact of `validate`.
        proof: Artifact of `verify`: the predictions of the test split, and the log that is read unless the config names one.
        pushed: Artifact of `push`: the model whose requests these are.
        monitoring: Where the artifact will stand: monitor.json, report.md, report.html and metrics.prom.
        config: The log, the labels and the thresholds.
        now_seconds: Unix time, from which windows are counted back; default: now.

    Returns:
        The status and the alarms.

    Raises:
        ConfigError: there is a threshold for a feature that does not exist.
        DataError: the log or the labels cannot be read, or its requests hold none of the trained features.
    """
    inputs = {"statistics": statistics, "proof": proof, "pushed": pushed}
    label = artifacts.open_artifact(statistics, step="validate").result["label"]
    artifacts.open_artifact(proof, step="verify")
    artifacts.open_artifact(pushed, step="push")
    with artifacts.writing(monitoring, step="monitor", inputs=inputs, config=config) as out:
        splits = {
            split: {name: feature for name, feature in features.items() if name != label}
            for split, features in load_statistics(statistics).items()
        }
        record = json.loads((pushed / PUSHED).read_text())
        now = time.time() if now_seconds is None else now_seconds
        schema = load_schema(statistics / SCHEMA_FILE, setting="statistics")
        found = _Look(splits, schema, record, np.load(proof / PREDICTIONS), config).at(
            config.request_log or proof / PROOF_LOG, now
        )
        (out.path / MONITOR_FILE).write_text(report.to_json(found))
        (out.path / "report.md").write_text(report.markdown(found, config))
        (out.path / "report.html").write_text(page.html(found), encoding="utf-8")
        (out.path / "metrics.prom").write_text(report.prometheus(found), encoding="utf-8")
        out.result = found.result
    return found.result


class _Look:
    """One look at a log, with all that it is compared with."""

    def __init__(
        self,
        splits: dict[str, Statistics],
        schema: Schema,
        record: dict[str, Any],
        answers: np.ndarray,
        config: MonitorConfig,
    ) -> None:
        self.train, self.test, self.config = splits["train"], splits["test"], config
        self.classes: list[str | int] = record["classes"]
        known = [*self.train, *_PREDICTION_NAMES]
        for name in config.thresholds:
            if name not in known:
                raise ConfigError(f"monitor.thresholds: there is no feature '{name}'.{did_you_mean(name, known)}")
        by_measure = {"l_infinity": config.max_linf, "jensen_shannon": config.max_jensen_shannon}
        self.skew, self.drift = (
            Thresholds(
                config.thresholds,
                by_measure,
                {name: getattr(feature, kind) for name, feature in schema.features.items()},
                getattr(schema.defaults, kind),
            )
            for kind in ("skew", "drift")
        )
        builder = predictions_builder(config.task, max_top_values=10_000, num_quantiles=1000)
        builder.update(predictions_of(answers, self.classes))
        self.held_out_predictions = builder.finish()
        self.held_out_metrics = {
            "": {"metrics": record["metrics"]["test"], "num_examples": len(answers)},
            **{f"{piece['feature']}={piece['value']}": piece for piece in record["slices"]},
        }

    def at(self, log: Path | str, now_seconds: float) -> Findings:
        labelled = Labelled(self.config, self.classes)
        traffic = Traffic(log, self.train, self.classes, self.config, labelled, now_seconds)
        enough = [window for window in traffic.windows if window.num_examples >= self.config.min_examples]
        candidates = list(self._of_windows(enough)) if enough else []
        judged_quality = list(labelled.judged(self.held_out_metrics))
        candidates += [candidate for _, candidate in judged_quality]
        judged = comparisons.judge(
            candidates, significance=self.config.significance, min_examples=self.config.min_examples
        )
        alarms = [each for each in judged if each.verdict == "alarm"]
        result = MonitorResult(
            status="alarm" if alarms else "ok" if enough else "too_few",
            num_requests=traffic.num_requests,
            num_examples=traffic.num_examples,
            num_windows=len(traffic.windows),
            window_start_seconds=enough[-1].start_seconds if enough else None,
            num_judged_examples=enough[-1].num_examples if enough else 0,
            label_coverage=labelled.num_matched / labelled.num_labels if labelled.num_labels else None,
            alarms=alarms,
        )
        return Findings(
            model_name=self.config.name,
            time_seconds=now_seconds,
            result=result,
            comparisons=judged,
            quality=[quality for quality, _ in judged_quality],
            train=self.train,
            held_out_predictions=self.held_out_predictions,
            windows=traffic.windows,
            judged=enough[-1] if enough else None,
        )

    def _of_windows(self, windows: Sequence[Window]) -> Iterator[Candidate]:
        """What is to be judged of the newest window that has enough examples."""
        *earlier, now = windows
        yield from comparisons.distances("skew", "train", self.train, now.features, self.skew, self.skew.measures)
        yield from comparisons.missing(self.train, now.features, self.config.max_missing_increase)
        yield from comparisons.unseen(self.train, self.test, now.features, self.config.max_unseen_increase)
        yield from self._of_predictions("held_out", self.held_out_predictions, now)
        references = {"first": earlier[0], "previous": earlier[-1]} if earlier else {}
        if len(earlier) == 1:
            del references["first"]  # the same one
        for reference, before in references.items():
            yield from comparisons.distances(
                "drift", reference, before.features, now.features, self.drift, self.drift.measures
            )
            if before.version == now.version:
                yield from self._of_predictions(reference, before.predictions, now)

    def _of_predictions(self, reference: str, before: Statistics, now: Window) -> Iterator[Candidate]:
        return iter(comparisons.distances("prediction", reference, before, now.predictions, self.skew))
