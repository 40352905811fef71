"""Progress of a long step: the step reports a line, whoever runs the step decides where it is shown."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

Sink = Callable[[str], None]


def _print(message: str) -> None:
    print(message, flush=True)


_sink: ContextVar[Sink] = ContextVar("progress_sink", default=_print)
_warnings: ContextVar[list[str] | None] = ContextVar("progress_warnings", default=None)


def report(message: str) -> None:
    """Say how far a step is, such as `epoch 3/20 loss 0.31 val_auc 0.95`.

    Without a view around it, as in a container, the message is a line on standard output.

    Args:
        message: One line; the next one replaces it where a view shows it.
    """
    _sink.get()(message)


def warn(message: str) -> None:
    """Say what the user should know of a step's result, though it is no error; `warnings_kept` writes it down.

    Args:
        message: One line.
    """
    report(f"warning: {message}")
    if (kept := _warnings.get()) is not None:
        kept.append(message)


@contextlib.contextmanager
def warnings_kept() -> Iterator[list[str]]:
    """The warnings of the block, as they come."""
    kept: list[str] = []
    token = _warnings.set(kept)
    try:
        yield kept
    finally:
        _warnings.reset(token)


@contextlib.contextmanager
def shown_by(sink: Sink) -> Iterator[None]:
    """Send what is reported inside the block to `sink`."""
    token = _sink.set(sink)
    try:
        yield
    finally:
        _sink.reset(token)
