"""Which forms are worth choosing, and the picture of it: the metric against size and against latency."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from components.metrics import HIGHER_IS_BETTER

# Name of a cost -> what it is measured by, and its title in the picture.
COSTS = {
    "latency": ("latency_ms_p50_batch_1", "median latency at batch 1, ms"),
    "size": ("size_bytes", "size, bytes"),
}
_WIDTH, _HEIGHT, _MARGIN, _INSET, _LINE = 360, 240, 60, 24, 18
_COLOUR = "#1f77b4"


def pareto_front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Which points no other one beats: none costs as little and is as good, and is better in one of the two.

    Args:
        points: Cost (less is better) and quality (more is better) of each.
    """

    def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
        return one[0] <= other[0] and one[1] >= other[1] and one != other

    return [not any(beats(one, other) for one in points) for other in points]


def on_front(rows: Sequence[Mapping[str, Any]], metric: str) -> dict[str, list[str]]:
    """Form -> the costs for which it is on the Pareto front of the forms that passed."""
    sign = 1 if HIGHER_IS_BETTER[metric] else -1
    fronts: dict[str, list[str]] = {row["format"]: [] for row in rows}
    for cost, (measure, _) in COSTS.items():
        judged = [row for row in rows if row["passed"] and row.get(measure) is not None and row["value"] is not None]
        for row, best in zip(judged, pareto_front([(r[measure], sign * r["value"]) for r in judged]), strict=True):
            fronts[row["format"]] += [cost] if best else []
    return fronts


def draw(rows: Sequence[Mapping[str, Any]], metric: str, file: Path) -> None:
    """Draw every measured form by its number: filled and joined on the Pareto front, hollow beside it, grey if it failed.

    Args:
        rows: As in `VerifyResult.formats`.
        metric: What `value` is.
        file: An SVG file, which any browser shows.
    """
    shown = [row for row in rows if row.get("value") is not None and COSTS["latency"][0] in row]
    width, height = 2 * (_WIDTH + _MARGIN) + _MARGIN, _HEIGHT + 2 * _MARGIN + _LINE * len(shown)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_MARGIN}" y="24">filled: no form that passed is better in both (the Pareto front)</text>',
        *(
            line
            for number, cost in enumerate(COSTS if shown else ())
            for line in _panel(shown, cost, metric, left=_MARGIN + number * (_WIDTH + _MARGIN))
        ),
        *(
            f'<text x="{_MARGIN}" y="{_HEIGHT + 2 * _MARGIN + _LINE * number}">{number + 1}  {_described(row)}</text>'
            for number, row in enumerate(shown)
        ),
        "</svg>",
    ]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _panel(rows: Sequence[Mapping[str, Any]], cost: str, metric: str, left: int) -> list[str]:
    measure, title = COSTS[cost]
    costs, values = [row[measure] for row in rows], [row["value"] for row in rows]
    bottom, middle = _MARGIN + _HEIGHT, left + _WIDTH // 2
    # Costs are far apart and compared by their ratios.
    xs = _pixels([math.log10(each) for each in costs], left + _INSET, left + _WIDTH - _INSET)
    ys = _pixels(values, bottom - _INSET, _MARGIN + _INSET)
    is_best = [cost in row["pareto_front"] for row in rows]
    front = sorted((x, y) for x, y, best in zip(xs, ys, is_best, strict=True) if best)
    better = "" if HIGHER_IS_BETTER[metric] else ", less is better"
    return [
        f'<path d="M{left} {_MARGIN} V{bottom} H{left + _WIDTH}" fill="none" stroke="#666"/>',
        f'<text x="{middle}" y="{bottom + 36}" text-anchor="middle">{title}, less is better</text>',
        f'<text x="{left}" y="{_MARGIN - 10}" font-weight="bold">{escape(metric)}{better}</text>',
        *(
            f'<text x="{xs[i]:.1f}" y="{bottom + 16}" text-anchor="middle">{costs[i]:,.{0 if cost == "size" else 3}f}</text>'
            for i in _ends(costs)
        ),
        *(f'<text x="{left - 6}" y="{ys[i] + 4:.1f}" text-anchor="end">{values[i]:.4f}</text>' for i in _ends(values)),
        f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in front)}" fill="none" stroke="{_COLOUR}"/>',
        *(
            _point(number, row, x, y, best=best)
            for number, (row, x, y, best) in enumerate(zip(rows, xs, ys, is_best, strict=True), 1)
        ),
    ]


def _point(number: int, row: Mapping[str, Any], x: float, y: float, *, best: bool) -> str:
    colour = _COLOUR if row["passed"] else "#aaa"
    return (
        f'<g><title>{_described(row)}</title><circle cx="{x:.1f}" cy="{y:.1f}" r="5" stroke="{colour}" '
        f'fill="{colour if best else "white"}"/>'
        f'<text x="{x:.1f}" y="{y - 9 if best else y + 18:.1f}" text-anchor="middle">{number}</text></g>'
    )


def _pixels(values: Sequence[float], start: float, end: float) -> list[float]:
    """Where values stand between `start`, the least one's place, and `end`; in the middle if they are all alike."""
    least, most = min(values), max(values)
    if least == most:
        return [(start + end) / 2] * len(values)
    return [start + (value - least) / (most - least) * (end - start) for value in values]


def _ends(values: Sequence[float]) -> set[int]:
    return {values.index(min(values)), values.index(max(values))}


def _described(row: Mapping[str, Any]) -> str:
    verdict = "" if row["passed"] else f": left out, {row['reason']}"
    return escape(
        f"{row['format']}: {row['value']:.4f}, {row[COSTS['latency'][0]]:.3f} ms, {row['size_bytes']} bytes{verdict}"
    )
