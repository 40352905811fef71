"""The progress of a run on the terminal: a line a step, with a spinner while it runs; plain lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from components import progress

_MARKS = {"done": ("✓", "green"), "reused": ("=", "cyan"), "skipped": ("-", "yellow"), "failed": ("✗", "red")}
_SECONDS_BETWEEN_PLAIN_REPORTS = 2.0


class View:
    """Shows the steps of a run.

    Args:
        console: Where; a spinner only if it is an interactive terminal.
        names: The steps' names, to line up the columns.
    """

    def __init__(self, console: Console, names: Sequence[str]) -> None:
        self._console = console
        self._width = max(map(len, names), default=0)

    @contextlib.contextmanager
    def running(self, name: str) -> Iterator[None]:
        """Show a step as running, with what it reports, until the end of the block."""
        with self._spinner(name) if self._console.is_interactive else self._plain(name):
            yield

    def ended(self, name: str, state: str, seconds: float, reasons: Sequence[str] = ()) -> None:
        """Show how a step ended, and below it the reasons."""
        mark, color = _MARKS[state]
        time_taken = "" if state == "skipped" else f"{seconds:8.1f} s"
        line = Text.assemble((mark, color), f" {name:<{self._width}}  ", (f"{state:<7}", color), time_taken)
        self._console.print(line)
        for reason in reasons:
            self._print(f"    {reason}")

    @contextlib.contextmanager
    def _spinner(self, name: str) -> Iterator[None]:
        columns = (
            SpinnerColumn(),
            TextColumn(f"{name:<{self._width}}  running", markup=False),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
        )
        with Progress(
            *columns, console=self._console, transient=True, refresh_per_second=5, redirect_stderr=False
        ) as bar:
            task = bar.add_task("")
            with progress.shown_by(lambda message: bar.update(task, description=message)):
                yield

    @contextlib.contextmanager
    def _plain(self, name: str) -> Iterator[None]:
        self._print(f"  {name:<{self._width}}  running")
        last = float("-inf")

        def show(message: str) -> None:
            nonlocal last
            if time.monotonic() - last >= _SECONDS_BETWEEN_PLAIN_REPORTS:
                last = time.monotonic()
                self._print(f"    {message}")

        with progress.shown_by(show):
            yield

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)
