"""Small pictures of distributions, as SVG: one colour for each side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

import numpy as np

COLOURS = ("#4c78a8", "#d95f02", "#54a24b", "#b279a2")
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 300, 90, 40, 8, 18
_ROW = 14
_NAME_WIDTH, _MAX_NAME = 120, 20


def histogram(sides: Sequence[Sequence[tuple[float, float, float]]]) -> str:
    """Shares of ranges of equal width, as steps.

    Args:
        sides: Each the `(low, high, count)` of a side's ranges; the axis spans all of them.
    """
    known = [side for side in sides if side]
    if not known:
        return ""
    low, high = min(side[0][0] for side in known), max(side[-1][1] for side in known)
    # A share by width, for the ranges of one side may be wider than those of another.
    densities = [[_density(piece, side, high - low) for piece in side] for side in sides]
    top = max(value for density in densities for value in density) or 1.0
    parts = [*_axes(f"{low:.4g}", f"{high:.4g}")]
    for side, density, colour in zip(sides, densities, COLOURS, strict=False):
        points = [
            f"{_x(edge, low, high):.1f},{_TOP + _HEIGHT * (1 - value / top):.1f}"
            for (left, right, _), value in zip(side, density, strict=True)
            for edge in ((left, right) if left < right else (low, high))
        ]
        hints = ", ".join(f"{left:.4g} to {right:.4g}: {count:g}" for left, right, count in side)
        parts.append(
            f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="2">'
            f"<title>{hints}</title></polyline>"
        )
    return _svg(parts, _TOP + _HEIGHT + _BOTTOM)


def quantiles(sides: Sequence[Sequence[float]]) -> str:
    """A line for each side, from its smallest to its largest value, with ticks at every tenth of the rows."""
    deciles = [np.quantile(side, np.arange(11) / 10, method="nearest").tolist() if side else [] for side in sides]
    finite = [value for side in deciles for value in side if np.isfinite(value)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    parts = []
    for place, (side, colour) in enumerate(zip(deciles, COLOURS, strict=False)):
        y = _TOP + _ROW * place
        for rank, value in enumerate(side):
            x, half = _x(min(max(value, low), high), low, high), 6 if rank == 5 else 4
            parts.append(
                f'<path d="M{x:.1f} {y - half + 6} V{y + half + 6}" stroke="{colour}" stroke-width="2">'
                f"<title>{rank * 10} %: {value:.4g}</title></path>"
            )
        parts.append(f'<path d="M{_LEFT} {y + 6} H{_WIDTH}" stroke="{colour}" stroke-width="0.5"/>')
    bottom = _TOP + _ROW * len(sides) + 10
    parts += [
        f'<text x="{_LEFT}" y="{bottom}">{low:.4g}</text>',
        f'<text x="{_WIDTH}" y="{bottom}" text-anchor="end">{high:.4g}</text>',
    ]
    return _svg(parts, bottom + 4)


def bars(names: Sequence[str], sides: Sequence[Sequence[float]]) -> str:
    """Lying bars.

    Args:
        names: Of the values, plain text.
        sides: For each side the share of each value, in [0, 1].
    """
    if not names:
        return ""
    top = max(share for side in sides for share in side) or 1.0
    thickness, parts = (_ROW - 4) / max(len(sides), 1), []
    for place, name in enumerate(names):
        y = _TOP + place * _ROW
        shown = name if len(name) <= _MAX_NAME else name[: _MAX_NAME - 1] + "…"
        parts.append(f'<text x="{_NAME_WIDTH - 4}" y="{y + 8}" text-anchor="end">{_safe(shown)}</text>')
        for which, (side, colour) in enumerate(zip(sides, COLOURS, strict=False)):
            width = (_WIDTH - _NAME_WIDTH) * side[place] / top
            parts.append(
                f'<rect x="{_NAME_WIDTH}" y="{y + which * thickness:.1f}" width="{width:.1f}" '
                f'height="{thickness:.1f}" fill="{colour}"><title>{_safe(name)}: {side[place]:.2%}</title></rect>'
            )
    return _svg(parts, _TOP + len(names) * _ROW + 4)


def _density(piece: tuple[float, float, float], side: Sequence[tuple[float, float, float]], span: float) -> float:
    low, high, count = piece
    share = count / max(sum(each[2] for each in side), 1)
    return share * span / (high - low) if high > low else share


def _x(value: float, low: float, high: float) -> float:
    # Halves, since the width of the range may be more than a float can hold.
    part = (value / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.5
    return _LEFT + part * (_WIDTH - _LEFT)


def _axes(low: str, high: str) -> Iterator[str]:
    bottom = _TOP + _HEIGHT
    yield f'<path d="M{_LEFT} {_TOP} V{bottom} H{_WIDTH}" fill="none" stroke="#999"/>'
    yield f'<text x="{_LEFT}" y="{bottom + 12}">{low}</text>'
    yield f'<text x="{_WIDTH}" y="{bottom + 12}" text-anchor="end">{high}</text>'


def _safe(text: str) -> str:
    """Escaped, and with bytes that are not UTF-8 made visible: a page cannot hold them."""
    return escape(text.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))


def _svg(parts: Sequence[str], height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + 10}" height="{height}" '
        f'viewBox="0 0 {_WIDTH + 10} {height}" font-family="sans-serif" font-size="10">{"".join(parts)}</svg>'
    )
