"""What was found, for people (Markdown), programs (JSON) and Prometheus."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Iterable, Iterator, Sequence

from components.config import MonitorConfig
from components.monitor.comparisons import Comparison
from components.monitor.findings import Findings
from serving.monitoring.prometheus import Labels, Reading, page

_MARKS = {"alarm": "ALARM", "too_few": "too few", "ok": ""}
KINDS = {
    "skew": "Features against the train split",
    "drift": "Features against earlier windows",
    "missing": "Values that are missing",
    "unseen": "Values that the train split does not have",
    "prediction": "Predictions",
    "quality": "Quality, by the labels that have come",
}


def to_json(found: Findings) -> str:
    """The text of monitor.json."""
    content = {
        "model": found.model_name,
        "time_seconds": found.time_seconds,
        **dataclasses.asdict(found.result),
        "comparisons": [dataclasses.asdict(each) for each in found.comparisons],
        "quality": [dataclasses.asdict(each) for each in found.quality],
        "windows": [
            {
                "start_seconds": window.start_seconds,
                "num_requests": window.num_requests,
                "num_examples": window.num_examples,
                "version": window.version,
            }
            for window in found.windows
        ],
    }
    return json.dumps(content, indent=1) + "\n"


def headline(found: Findings) -> str:
    """The verdict in a line."""
    result = found.result
    counts = f"{result.num_requests} requests, {result.num_examples} examples"
    if len(found.windows) > 1:
        counts += f" in {result.num_windows} windows"
    if result.window_start_seconds is not None:
        counts += f"; judged: the {result.num_judged_examples} examples from {utc(result.window_start_seconds)}"
    if result.status == "too_few":
        return f"{counts}: too few examples to judge."
    if not result.alarms:
        return f"{counts}: no alarm."
    return f"{counts}: {len(result.alarms)} alarms: {', '.join(dict.fromkeys(map(title, result.alarms)))}."


def title(one: Comparison) -> str:
    """What was compared, in a few words."""
    return f"{one.kind} of {one.name}" + (f" [{one.where}]" if one.where else "")


def utc(time_seconds: float) -> str:
    """A Unix time as people read it."""
    return f"{datetime.datetime.fromtimestamp(time_seconds, datetime.timezone.utc):%Y-%m-%d %H:%M} UTC"


def markdown(found: Findings, config: MonitorConfig) -> str:
    """The text of report.md."""
    lines = [f"# Served requests of {found.model_name}", "", headline(found), ""]
    if found.result.label_coverage is not None:
        lines += [f"Of the labels, {found.result.label_coverage:.1%} are of requests in the log.", ""]
    for kind, heading in KINDS.items():
        if rows := rows_of(found, kind):
            lines += [f"## {heading}", "", *_table(COLUMNS, map(cells, rows)), ""]
    if found.quality:
        names = list(found.quality[0].metrics)
        pieces = (
            [each.where or "all", str(each.num_examples), *map(number, each.metrics.values())] for each in found.quality
        )
        lines += ["## Metrics", "", *_table(["slice", "examples", *names], pieces), ""]
    lines += [
        "An alarm is a distance above its threshold and above the noise: what samples of these sizes, drawn from one "
        f"distribution, would reach with a chance of {config.significance:g} over all {len(found.comparisons)} comparisons. "
        "Above the threshold alone, there are too few examples to tell; so there are below "
        f"{config.min_examples} examples."
    ]
    return "\n".join(lines) + "\n"


def rows_of(found: Findings, kind: str) -> list[Comparison]:
    """The comparisons of a kind that found any difference."""
    return [each for each in found.comparisons if each.kind == kind and (each.distance or each.verdict != "ok")]


COLUMNS = ("name", "slice", "against", "measure", "distance", "threshold", "noise", "what changed most", "")


def cells(one: Comparison) -> list[str]:
    """A comparison as a row of a table."""
    numbers = [f"{one.distance:.3f}", f"{one.threshold:g}", f"{one.noise:.3f}"]
    return [one.name, one.where, one.reference, one.measure, *numbers, one.detail, _MARKS[one.verdict]]


def number(value: float | None) -> str:
    """A metric as text."""
    return "-" if value is None else f"{value:.4f}"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{' --- |' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in row)} |"


def prometheus(found: Findings) -> str:
    """The gauges of metrics.prom, in the text format; of the names as https://prometheus.io/docs/practices/naming/ asks."""
    result, judged = found.result, found.judged.features if found.judged else {}
    distances = [
        ((one.name, one.measure, one.reference), one)
        for one in found.comparisons
        if one.measure in ("l_infinity", "jensen_shannon")
    ]
    unseen = [((one.name,), one.distance) for one in found.comparisons if one.kind == "unseen"]
    missing = [((name,), side.missing / side.count) for name, side in judged.items() if side.count]
    quality = [((name, each.where), value) for each in found.quality for name, value in each.metrics.items()]
    labelled = [((each.where,), each.num_examples) for each in found.quality]
    alarms = [
        ((one.kind, one.name, one.where, one.reference), float(one.verdict == "alarm")) for one in found.comparisons
    ]
    of_distance = ("feature", "measure", "reference")
    families: list[tuple[str, tuple[str, ...], str, Sequence[tuple[Labels, float | None]]]] = [
        ("monitor_time_seconds", (), "When the log was looked at.", [((), found.time_seconds)]),
        ("monitor_alarms", (), "Alarms of that look.", [((), len(result.alarms))]),
        ("monitor_requests", (), "Calls in the log.", [((), result.num_requests)]),
        ("monitor_examples", (), "Examples in the window that was judged.", [((), result.num_judged_examples)]),
        ("alarm", ("kind", "name", "slice", "reference"), "1 for an alarm.", alarms),
        ("feature_distance", of_distance, "How far it is.", [(names, one.distance) for names, one in distances]),
        ("feature_threshold", of_distance, "How far it may be.", [(names, one.threshold) for names, one in distances]),
        ("feature_noise", of_distance, "How far samples are.", [(names, one.noise) for names, one in distances]),
        ("feature_missing_ratio", ("feature",), "Examples without a value.", missing),
        ("feature_unseen_increase_ratio", ("feature",), "Rise of categories not in the train split.", unseen),
        ("quality", ("metric", "slice"), "Metrics of the labelled examples.", quality),
        ("labelled_examples", ("slice",), "Examples with a label.", labelled),
        ("label_coverage_ratio", (), "Labels whose request is in the log.", [((), result.label_coverage)]),
    ]
    return page(_gauge(found.model_name, *family) for family in families).decode()


def _gauge(
    model: str, name: str, labels: Sequence[str], help: str, series: Iterable[tuple[Labels, float | None]]
) -> Reading:
    known: list[tuple[Labels, float]] = [((model, *values), value) for values, value in series if value is not None]
    return Reading(f"headrace_{name}", "gauge", ("model", *labels), help, lambda: known)
