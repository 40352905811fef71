"""What a look at a log found."""

from __future__ import annotations

from dataclasses import dataclass

from components.monitor.comparisons import Comparison, Verdict
from components.monitor.quality import Quality
from components.monitor.traffic import Window
from components.statistics import Statistics


@dataclass(frozen=True)
class MonitorResult:
    """What the requests look like.

    Attributes:
        status: `ok`, `alarm`, or `too_few` examples to judge.
        num_requests: Calls in the log that were read.
        num_examples: Examples in them.
        num_windows: Windows of time that they fall into.
        window_start_seconds: Where the window that was judged begins; None for the whole log.
        num_judged_examples: Examples in that one.
        label_coverage: Share of the labels whose requests are in the log; None without labels.
        alarms: What is above its threshold, farthest first.
    """

    status: Verdict
    num_requests: int
    num_examples: int
    num_windows: int
    window_start_seconds: float | None
    num_judged_examples: int
    label_coverage: float | None
    alarms: list[Comparison]


@dataclass(frozen=True)
class Findings:
    """All that was found, for the reports.

    Attributes:
        model_name: The model.
        time_seconds: When it was looked, Unix time.
        result: The verdict.
        comparisons: All of them, alarms first.
        quality: Of all labelled examples and of each slice; empty without labels.
        train: Statistics of the train split, without the label.
        held_out_predictions: Statistics of the predictions of the test split.
        windows: The windows, oldest first.
        judged: The one that was judged, if any has enough examples.
    """

    model_name: str
    time_seconds: float
    result: MonitorResult
    comparisons: list[Comparison]
    quality: list[Quality]
    train: Statistics
    held_out_predictions: Statistics
    windows: list[Window]
    judged: Window | None
