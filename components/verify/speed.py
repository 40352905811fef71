"""How fast a form loads and answers, in this process, one call after the other."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from components import formats
from components.formats import Arrays

BATCH_SIZES = (1, 32)
_LOADS = 3
_WARM_UPS = 3


def load_ms(path: Path) -> float:
    """Milliseconds until a form could answer: the median of several fresh loads."""
    return statistics.median(_seconds(functools.partial(formats.load_runner, path), _LOADS)) * 1e3


def latency_ms(run: formats.Runner, sample: Arrays, rounds: int) -> dict[str, float]:
    """Median and 99th percentile of the milliseconds of a call, by batch size.

    Args:
        run: The form.
        sample: What it takes, `(num_examples, ...)` by name; repeated where it is smaller than a batch.
        rounds: Calls to time, after some that warm up.

    Returns:
        `latency_ms_p50_batch_1`, `latency_ms_p99_batch_1` and the same for 32.
    """
    measured = {}
    for size in BATCH_SIZES:
        batch = {name: np.take(values, range(size), axis=0, mode="wrap") for name, values in sample.items()}
        call = functools.partial(run, batch)
        _seconds(call, _WARM_UPS)
        taken = _seconds(call, rounds)
        for percentile in (50, 99):
            measured[f"latency_ms_p{percentile}_batch_{size}"] = float(np.percentile(taken, percentile)) * 1e3
    return measured


def _seconds(call: Callable[[], object], times: int) -> list[float]:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds
