"""report.html: the findings on one page with pictures, without scripts or anything from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

import numpy as np

from components import html_page
from components.distances import distance
from components.monitor.findings import Findings
from components.monitor.report import COLUMNS, KINDS, cells, headline, number, rows_of, utc
from components.statistics import FeatureStatistics, Statistics

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 380, 130, 46, 22, 34
_NUM_BARS, _CHARACTER = 12, 5.5
_BEFORE, _NOW, _THRESHOLD = "#9db4c8", "#d95f02", "#c00"


def html(found: Findings) -> str:
    """The text of report.html."""
    body = [f"<h1>Served requests of {escape(found.model_name)}</h1>"]
    status = found.result.status
    body.append(f'<p class="verdict {status}">{escape(headline(found))} Looked at {utc(found.time_seconds)}.</p>')
    for kind, heading in KINDS.items():
        if rows := rows_of(found, kind):
            body.append(f"<h2>{escape(heading)}</h2>")
            body.append(html_page.table(COLUMNS, ((each.verdict, cells(each)) for each in rows)))
    if found.quality:
        body.append(
            f"<h2>Metrics</h2><p>{found.result.label_coverage or 0:.1%} of the labels are of requests in the log.</p>"
        )
        pieces = (
            ("", [each.where or "all", str(each.num_examples), *map(number, each.metrics.values())])
            for each in found.quality
        )
        body.append(html_page.table(["slice", "examples", *found.quality[0].metrics], pieces))
    if found.judged is not None:
        body += ["<h2>Predictions: test split (grey), served (orange)</h2>"]
        body += _pictures(found.held_out_predictions, found.judged.predictions, found, "predictions")
        body += ["<h2>Features: train split (grey), served (orange)</h2>"]
        body += _pictures(found.train, found.judged.features, found, "features")
    return html_page.document(f"{found.model_name}: monitoring", body)


def _pictures(before: Statistics, now: Statistics, found: Findings, side: str) -> Iterator[str]:
    """Each feature's distribution, and its distance from `before` over the windows; those with alarms first."""
    rank = {name: place for place, name in enumerate(dict.fromkeys(each.name for each in found.comparisons))}
    for name in sorted(before, key=lambda name: rank.get(name, len(rank))):
        if distance(before[name], now[name]) is None:
            continue
        yield f"<figure><figcaption>{escape(name)}</figcaption>{_bars(before[name], now[name])}"
        series = [
            (window.start_seconds, measured[1])
            for window in found.windows
            if window.start_seconds is not None and (measured := distance(before[name], getattr(window, side)[name]))
        ]
        threshold = next(
            (each.threshold for each in found.comparisons if each.name == name and each.kind != "missing"), 0.0
        )
        yield (_lines(series, threshold) if len(series) > 1 else "") + "</figure>"


def _bars(before: FeatureStatistics, now: FeatureStatistics) -> str:
    """Shares of the commonest values or words, or of ranges of equal width."""
    is_category = (distance(before, now) or [""])[0] == "l_infinity"
    names, *sides = (_shares if is_category else _histogram)(before, now)
    top = max([*sides[0], *sides[1], 1e-9])
    step = (_WIDTH - _LEFT) / max(len(names), 1)
    room = int(2 * step / _CHARACTER)  # names stand on two lines in turn
    parts = [_axes(f"{top:.0%}", "0")]
    for place, (name, *pair) in enumerate(zip(names, *sides, strict=True)):
        left = _LEFT + place * step
        for which, (share, colour) in enumerate(zip(pair, (_BEFORE, _NOW), strict=True)):
            height, x = _HEIGHT * share / top, left + step * (0.1 + 0.4 * which)
            parts.append(
                f'<rect x="{x:.1f}" y="{_TOP + _HEIGHT - height:.1f}" width="{step * 0.4:.1f}" height="{height:.1f}" '
                f'fill="{colour}"><title>{escape(name)}: {share:.1%}</title></rect>'
            )
        parts.append(
            f'<text x="{left + step / 2:.1f}" y="{_TOP + _HEIGHT + 12 + 12 * (place % 2)}" text-anchor="middle">'
            f"{escape(name if len(name) <= room else name[: room - 1] + '…')}</text>"
        )
    return _svg(parts)


def _shares(before: FeatureStatistics, now: FeatureStatistics) -> tuple[list[str], list[float], list[float]]:
    def of(side: FeatureStatistics) -> dict[int | str, float]:
        counts = {each[0]: each[1] for each in (side.top_tokens or side.top_values)}
        total = side.num_tokens or max(side.present, 1)
        return {value: count / total for value, count in counts.items()}

    a, b = of(before), of(now)
    values = sorted(a.keys() | b.keys(), key=lambda value: (-max(a.get(value, 0.0), b.get(value, 0.0)), str(value)))
    shown = values[:_NUM_BARS]
    return (
        [str(value) for value in shown],
        [a.get(value, 0.0) for value in shown],
        [b.get(value, 0.0) for value in shown],
    )


def _histogram(before: FeatureStatistics, now: FeatureStatistics) -> tuple[list[str], list[float], list[float]]:
    """Shares of the quantiles in ranges of equal width; the outer percentiles count to the outer ranges."""
    sides = [np.array(side.quantiles[1:] or (0.0,)) for side in (before, now)]
    low, high = (pick(np.quantile(side, q) for side in sides) for pick, q in ((min, 0.01), (max, 0.99)))
    edges = np.linspace(low, high if high > low else low + 1, _NUM_BARS + 1)
    places = [np.clip(np.searchsorted(edges, side, side="right") - 1, 0, _NUM_BARS - 1) for side in sides]
    shares = [(np.bincount(place, minlength=_NUM_BARS) / len(place)).tolist() for place in places]
    return [f"{edge:.4g}" for edge in edges[:-1]], shares[0], shares[1]


def _lines(series: Sequence[tuple[float, float]], threshold: float) -> str:
    """A distance over time, with its threshold."""
    times = [time for time, _ in series]
    top = max([value for _, value in series] + [threshold, 1e-9]) * 1.1
    span = times[-1] - times[0]

    def place(time: float, value: float) -> str:
        return f"{_LEFT + (time - times[0]) / span * (_WIDTH - _LEFT):.1f},{_TOP + _HEIGHT * (1 - value / top):.1f}"

    points = " ".join(place(time, value) for time, value in series)
    level = _TOP + _HEIGHT * (1 - threshold / top)
    return _svg(
        [
            _axes(f"{top:.2f}", "0"),
            f'<path d="M{_LEFT} {level:.1f} H{_WIDTH}" stroke="{_THRESHOLD}" stroke-dasharray="4 3"/>',
            f'<polyline points="{points}" fill="none" stroke="{_NOW}" stroke-width="2"/>',
            f'<text x="{_LEFT}" y="{_TOP + _HEIGHT + 14}">{utc(times[0])}</text>',
            f'<text x="{_WIDTH}" y="{_TOP + _HEIGHT + 14}" text-anchor="end">{utc(times[-1])}</text>',
            f'<text x="{_LEFT + 4}" y="{_TOP - 8}">distance by window; dashed: threshold</text>',
        ]
    )


def _axes(top: str, bottom: str) -> str:
    return (
        f'<path d="M{_LEFT} {_TOP} V{_TOP + _HEIGHT} H{_WIDTH}" fill="none" stroke="#666"/>'
        f'<text x="{_LEFT - 6}" y="{_TOP + 8}" text-anchor="end">{top}</text>'
        f'<text x="{_LEFT - 6}" y="{_TOP + _HEIGHT}" text-anchor="end">{bottom}</text>'
    )


def _svg(parts: Sequence[str]) -> str:
    height = _TOP + _HEIGHT + _BOTTOM
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + 10}" height="{height}" '
        f'viewBox="0 0 {_WIDTH + 10} {height}" font-family="sans-serif" font-size="10">{"".join(parts)}</svg>'
    )
