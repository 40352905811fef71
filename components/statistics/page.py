"""statistics.html: the features of several splits or spans side by side, on one page with nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

from components import html_page
from components.statistics import charts
from components.statistics.features import FeatureStatistics, Statistics

_NUM_VALUES = 10
_MANY_MISSING, _MANY_ZEROS = 0.05, 0.5
_Found = FeatureStatistics | None
_Column = tuple[str, Callable[[FeatureStatistics], str]]

_FILTER = """<p><label>Show features that contain <input id="wanted"></label></p>
<script>
document.getElementById("wanted").oninput = event => document.querySelectorAll("tbody[data-name]").forEach(
  body => body.hidden = !body.dataset.name.toLowerCase().includes(event.target.value.toLowerCase()));
</script>"""


def html(sides: Mapping[str, Statistics]) -> str:
    """The text of the page.

    Args:
        sides: Statistics by the name of the split or span.
    """
    names = list(dict.fromkeys(name for side in sides.values() for name in side))
    body = ["<h1>Statistics</h1>", _legend(list(sides)), _FILTER]
    for heading, kinds, columns in _GROUPS:
        chosen = [name for name in names if _kind([side.get(name) for side in sides.values()]) in kinds]
        if chosen:
            body.append(f"<h2>{heading}</h2>")
            body.append(_table(chosen, sides, [*_COMMON, *columns]))
    return html_page.document("Statistics", body)


def _kind(found: Sequence[_Found]) -> str:
    known = next(each for each in found if each is not None)
    return "text" if known.num_tokens is not None else known.type


def _legend(sides: Sequence[str]) -> str:
    marks = (
        f'<span style="color:{colour}">&#9632;</span> {escape(side)}'
        for side, colour in zip(sides, charts.COLOURS, strict=False)
    )
    return f"<p>{' &nbsp; '.join(marks)}</p>"


def _table(names: Sequence[str], sides: Mapping[str, Statistics], columns: Sequence[_Column]) -> str:
    """A row of each feature and side; a column that is empty throughout is left out."""
    known = [side[name] for side in sides.values() for name in names if name in side]
    columns = [(title, cell) for title, cell in columns if any(map(cell, known))]
    head = "".join(f"<th>{title}</th>" for title in ("feature", "", *(title for title, _ in columns), "distribution"))
    bodies = (_rows(name, [(side, found.get(name)) for side, found in sides.items()], columns) for name in names)
    return f"<table><thead><tr>{head}</tr></thead>\n" + "\n".join(bodies) + "</table>"


def _rows(name: str, found: Sequence[tuple[str, _Found]], columns: Sequence[_Column]) -> str:
    """A feature, with a row for each side."""
    span = f'rowspan="{len(found)}"'
    lines = []
    for place, (side, statistics) in enumerate(found):
        cells = "".join(f"<td>{cell(statistics)}</td>" if statistics else "<td>absent</td>" for _, cell in columns)
        before = f"<th {span}>{escape(name)}</th>" if not place else ""
        after = f"<td {span}>{_pictures([each for _, each in found])}</td>" if not place else ""
        lines.append(f"<tr>{before}<td>{escape(side)}</td>{cells}{after}</tr>")
    return f'<tbody data-name="{escape(name)}">{"".join(lines)}</tbody>'


def _pictures(found: Sequence[_Found]) -> str:
    if any(each and each.quantiles for each in found):
        return charts.histogram([each.histogram if each else () for each in found]) + charts.quantiles(
            [each.quantiles if each else () for each in found]
        )
    shares = [_shares(each) for each in found]
    most = {value: max(side.get(value, 0.0) for side in shares) for side in shares for value in side}
    shown = sorted(most, key=lambda value: (-most[value], value))[:_NUM_VALUES]
    return charts.bars(shown, [[side.get(value, 0.0) for value in shown] for side in shares])


def _shares(found: _Found) -> dict[str, float]:
    """Shares of the most frequent values or words."""
    if found is None:
        return {}
    total = max(found.num_tokens or found.present, 1)
    return {str(each[0]): each[1] / total for each in (found.top_tokens or found.top_values)}


def _marked(share: float, limit: float) -> str:
    text = f"{share:.2%}"
    return f'<strong class="alarm">{text}</strong>' if share >= limit else text


def _missing(found: FeatureStatistics) -> str:
    return _marked(found.missing / max(found.count, 1), _MANY_MISSING)


def _zeros(found: FeatureStatistics) -> str:
    num_values = sum(count for _, _, count in found.histogram) + found.num_infinite
    return _marked((found.zeros or 0) / max(num_values, 1), _MANY_ZEROS)


def _whole(count: int | None) -> str:
    """Nothing where nobody counted, as of files."""
    return "" if count is None else f"{count:,}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _median(found: FeatureStatistics) -> str:
    return _number(found.quantiles[len(found.quantiles) // 2]) if found.quantiles else ""


def _num_values(found: FeatureStatistics) -> str:
    if found.mean_num_values is None:
        return ""
    return f"{found.min_num_values} to {found.max_num_values}, {found.mean_num_values:.4g} on average"


def _lengths(found: FeatureStatistics) -> str:
    if found.mean_length_bytes is None:
        return ""
    return f"{found.min_length_bytes} to {found.max_length_bytes}, {found.mean_length_bytes:.4g} on average"


def _weight(found: FeatureStatistics) -> str:
    if found.weighted is None:
        return ""
    mean = "" if found.weighted.mean is None else f", mean {found.weighted.mean:.4g}"
    return f"{found.weighted.count:.6g}{mean}"


def _channels(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)


_COMMON: list[_Column] = [
    ("rows", lambda found: f"{found.count:,}"),
    ("missing", _missing),
    ("weighted", _weight),
    ("values in a row", _num_values),
]
_LENGTH: _Column = ("length in bytes", _lengths)
_GROUPS: list[tuple[str, set[str], list[_Column]]] = [
    (
        "Numeric features",
        {"int", "float"},
        [
            ("mean", lambda found: _number(found.mean)),
            ("std", lambda found: _number(found.std)),
            ("zeros", _zeros),
            ("min", lambda found: _number(found.min)),
            ("median", _median),
            ("max", lambda found: _number(found.max)),
            ("infinite", lambda found: str(found.num_infinite or "")),
        ],
    ),
    (
        "Categorical features",
        {"string"},
        [
            ("unique", lambda found: _whole(found.num_unique)),
            ("not UTF-8", lambda found: str(found.num_invalid_utf8 or "")),
            _LENGTH,
        ],
    ),
    (
        "Texts",
        {"text"},
        [
            ("words", lambda found: _whole(found.num_tokens)),
            ("different words", lambda found: _whole(found.num_unique)),
            _LENGTH,
        ],
    ),
    (
        "Images",
        {"uint8"},
        [
            ("size", lambda found: " x ".join(map(str, found.shape))),
            ("mean of channels", lambda found: _channels(found.channel_mean)),
            ("std of channels", lambda found: _channels(found.channel_std)),
            ("min", lambda found: _number(found.min)),
            ("max", lambda found: _number(found.max)),
        ],
    ),
]
