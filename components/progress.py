"""Progress of a long step: the step reports a line, whoever runs the step decides where it is shown."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

Sink = Callable[[str], None]


def _print(message: str) -> None:
    print(message, flush=True)


_sink: ContextVar[Sink] = ContextVar("progress_sink", default=_print)


def report(message: str) -> None:
    """Say how far a step is, such as `epoch 3/20 loss 0.31 val_auc 0.95`.

    Without a view around it, as in a container, the message is a line on standard output.

    Args:
        message: One line; the next one replaces it where a view shows it.
    """
    _sink.get()(message)


@contextlib.contextmanager
def shown_by(sink: Sink) -> Iterator[None]:
    """Send what is reported inside the block to `sink`."""
    token = _sink.set(sink)
    try:
        yield
    finally:
        _sink.reset(token)
