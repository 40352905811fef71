"""What the reports of the steps have in common: one page in HTML, without scripts or anything from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 78rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; }
th, td { border-bottom: 1px solid #ddd; padding: .2rem .7rem; text-align: left; }
.verdict { font-size: 1.1rem; padding: .6rem 1rem; background: #eef3f7; }
.alarm { background: #fde8e4; }
.too_few { color: #888; }
figure { display: inline-block; margin: 0 1rem 1rem 0; }
figcaption { font-weight: 600; }
svg { display: block; }
"""


def document(title: str, body: Iterable[str]) -> str:
    """The text of a page.

    Args:
        title: Plain text.
        body: Pieces of HTML.
    """
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def table(columns: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    """A table.

    Args:
        columns: Headings, in plain text.
        rows: The class of each row, which the style knows, and its cells in plain text.
    """
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    lines = (
        f'<tr class="{verdict}">{"".join(f"<td>{escape(cell)}</td>" for cell in row)}</tr>' for verdict, row in rows
    )
    return f"<table><tr>{head}</tr>\n" + "\n".join(lines) + "</table>"
