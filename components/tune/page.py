"""report.html: the search on one page with pictures, without scripts or anything from elsewhere."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from components import html_page
from components.config import Candidates, Range, TuneConfig
from components.metrics import HIGHER_IS_BETTER
from components.search_space import ends_of
from components.tune.study import TrialRecord, best_of

if TYPE_CHECKING:
    from components.tune.step import TuneResult

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _INSET = 420, 180, 60, 14, 34, 12
_SPACING = 150
_BEST, _COMPLETE, _PRUNED = "#d95f02", "#1f77b4", "#aaa"
_MOST_LABELS = 8


@dataclass(frozen=True)
class _Axis:
    """Where values stand on an axis, from 0 to 1, and what is written beside it at which place."""

    place: Callable[[Any], float]
    labels: Mapping[float, str]


def html(records: Sequence[TrialRecord], result: TuneResult, config: TuneConfig) -> str:
    """The text of report.html."""
    metric = result.metric
    best = best_of(records, metric)
    shown = [record for record in records if record.value is not None]
    values = [record.value for record in shown if record.value is not None]
    reached = _numbers(min(values), max(values), log=False)
    axes = {path: _axis_of(candidates) for path, candidates in config.space.items()}
    better = "more" if HIGHER_IS_BETTER[metric] else "less"
    body = ["<h1>Search of settings</h1>", f'<p class="verdict">{escape(_headline(result))}</p>']
    rows = (("", [path, json.dumps(value)]) for path, value in result.settings.items())
    body += ["<h2>Best settings</h2>", html_page.table(["setting", "value"], rows)]
    body.append(f"<h2>Validation {escape(metric)} ({better} is better): best orange, others blue, pruned grey</h2>")
    numbers = _numbers(0, max(len(records) - 1, 1), log=False)
    points = [(record, record.number) for record in shown]
    body.append(
        _figure("by trial; line: best so far", _scatter(points, numbers, reached, best, _best_so_far(records, metric)))
    )
    for path, axis in axes.items():
        body.append(_figure(path, _scatter([(record, record.settings[path]) for record in shown], axis, reached, best)))
    body.append(_figure("each trial a line", _parallel(shown, axes, reached, metric, best)))
    body += ["<h2>Trials</h2>", _trials(records, result)]
    return html_page.document("Search of settings", body)


def _headline(result: TuneResult) -> str:
    counts = ", ".join(f"{count} {state}" for state, count in result.num_trials.items() if count)
    written = f", as written {result.value_as_written:.4f}" if result.value_as_written is not None else ""
    return f"{counts}. Best: trial {result.trial}, validation {result.metric} {result.value:.4f}{written}."


def _trials(records: Sequence[TrialRecord], result: TuneResult) -> str:
    sign = -1 if HIGHER_IS_BETTER[result.metric] else 1
    order = {"complete": 0, "pruned": 1, "failed": 2}
    ranked = sorted(records, key=lambda record: (order[record.state], sign * (record.value or 0.0)))
    columns = ["trial", "state", result.metric, "epochs", "parameters", "seconds", *result.settings, "why"]
    rows = (
        (
            "" if record.state == "complete" else "too_few",
            [
                str(record.number),
                record.state,
                "" if record.value is None else f"{record.value:.4f}",
                str(record.epochs),
                f"{record.num_parameters:,}",
                f"{record.seconds:.1f}",
                *(_text(value) for value in record.settings.values()),
                record.reason,
            ],
        )
        for record in ranked
    )
    return html_page.table(columns, rows)


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)


def _numbers(low: float, high: float, *, log: bool) -> _Axis:
    def scale(value: float) -> float:
        return math.log(value) if log else value

    span = scale(high) - scale(low)
    return _Axis(lambda value: (scale(value) - scale(low)) / span if span else 0.5, {0.0: _text(low), 1.0: _text(high)})


def _axis_of(candidates: Candidates) -> _Axis:
    ends = ends_of(candidates)
    if isinstance(candidates, Range):
        return _numbers(*ends, log=candidates.log)
    places = {json.dumps(value): index / (len(ends) - 1) for index, value in enumerate(ends)}
    labels = {place: text for text, place in places.items()} if len(ends) <= _MOST_LABELS else {}
    return _Axis(lambda value: places[json.dumps(value)], labels)


def _best_so_far(records: Sequence[TrialRecord], metric: str) -> Iterator[tuple[int, float]]:
    for end in range(1, len(records) + 1):
        best = best_of(records[:end], metric)
        if best is not None and best.value is not None:
            yield end - 1, best.value


def _scatter(
    points: Sequence[tuple[TrialRecord, Any]],
    across: _Axis,
    up: _Axis,
    best: TrialRecord | None,
    line: Iterator[tuple[int, float]] | None = None,
) -> str:
    """The metric of each trial over something, and a line."""

    def place(x: Any, y: float) -> tuple[float, float]:
        inner_width, inner_height = _WIDTH - _LEFT - 2 * _INSET, _HEIGHT - 2 * _INSET
        return _LEFT + _INSET + across.place(x) * inner_width, _TOP + _INSET + (1 - up.place(y)) * inner_height

    parts = [f'<path d="M{_LEFT} {_TOP} V{_TOP + _HEIGHT} H{_WIDTH}" fill="none" stroke="#666"/>']
    for at, text in up.labels.items():
        y = _TOP + _INSET + (1 - at) * (_HEIGHT - 2 * _INSET)
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(text)}</text>')
    for at, text in across.labels.items():
        x = _LEFT + _INSET + at * (_WIDTH - _LEFT - 2 * _INSET)
        parts.append(f'<text x="{x:.1f}" y="{_TOP + _HEIGHT + 16}" text-anchor="middle">{escape(text)}</text>')
    if line is not None:
        corners = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in line)
        parts.append(f'<polyline points="{corners}" fill="none" stroke="{_BEST}"/>')
    for record, value in points:
        x, y = place(value, record.value or 0.0)
        colour = _colour(record, best)
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" stroke="{colour}" '
            f'fill="{"white" if record.state == "pruned" else colour}"><title>{_described(record)}</title></circle>'
        )
    return _svg(parts, _WIDTH, _TOP + _HEIGHT + _BOTTOM)


def _parallel(
    records: Sequence[TrialRecord],
    axes: Mapping[str, _Axis],
    reached: _Axis,
    metric: str,
    best: TrialRecord | None,
) -> str:
    """Parallel coordinates: an axis for each setting and one for the metric."""
    columns = [*axes.items(), (metric, reached)]
    parts = []
    for index, (name, axis) in enumerate(columns):
        x = _LEFT + index * _SPACING
        parts.append(f'<path d="M{x} {_TOP} V{_TOP + _HEIGHT}" stroke="#666"/>')
        parts.append(
            f'<text x="{x}" y="{_TOP + _HEIGHT + 16 + 12 * (index % 2)}" text-anchor="middle">'
            f"{escape(name.rpartition('.')[2])}<title>{escape(name)}</title></text>"
        )
        parts += [
            f'<text x="{x - 5}" y="{_TOP + (1 - at) * _HEIGHT + 4:.1f}" text-anchor="end">{escape(text)}</text>'
            for at, text in axis.labels.items()
        ]
    for record in sorted(records, key=lambda record: (record is best, record.state == "complete")):
        places = [*(axis.place(record.settings[path]) for path, axis in axes.items()), reached.place(record.value)]
        corners = " ".join(
            f"{_LEFT + index * _SPACING},{_TOP + (1 - at) * _HEIGHT:.1f}" for index, at in enumerate(places)
        )
        width = 2.5 if record is best else 1
        parts.append(
            f'<polyline points="{corners}" fill="none" stroke="{_colour(record, best)}" stroke-width="{width}" '
            f'stroke-opacity="{1 if record is best else 0.5}"><title>{_described(record)}</title></polyline>'
        )
    return _svg(parts, 2 * _LEFT + _SPACING * (len(columns) - 1), _TOP + _HEIGHT + _BOTTOM)


def _colour(record: TrialRecord, best: TrialRecord | None) -> str:
    return _BEST if record is best else _COMPLETE if record.state == "complete" else _PRUNED


def _described(record: TrialRecord) -> str:
    settings = ", ".join(f"{path.rpartition('.')[2]} {_text(value)}" for path, value in record.settings.items())
    return escape(f"trial {record.number}, {record.state}: {record.value:.4f} with {settings}")


def _figure(caption: str, picture: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{picture}</figure>"


def _svg(parts: Sequence[str], width: int, height: int) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="10">{"".join(parts)}</svg>'
    )
