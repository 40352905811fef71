"""Metrics and the page that Prometheus scrapes.

Text format: https://prometheus.io/docs/instrumenting/exposition_formats/. The official client library is not used: it
gives every counter's name the end `_total`, which TF Serving's do not have, and searches a histogram's buckets one by one.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

Labels = tuple[str | int, ...]
Series = list[float]


class Family(Protocol):
    """All series of one name."""

    def lines(self) -> Iterator[str]:
        """The lines of the page, in the text format."""


class Counter:
    """A number that only grows, for each combination of labels.

    Args:
        name: the name of the family.
        labels: the names of the labels.
        help: what is counted, if the page is to say it.

    Attributes:
        lock: held while numbers change.

    Example:
        >>> requests = Counter("requests_total", ("code",), "Requests by status code.")
        >>> requests.add(("OK",))
    """

    def __init__(self, name: str, labels: Sequence[str], help: str = "", lock: threading.Lock | None = None) -> None:
        self.lock = lock or threading.Lock()
        self._name = name
        self._head = _head(name, "counter", help)
        self._labels = labels
        self._series: dict[Labels, Series] = {}

    def add(self, labels: Labels, value: float = 1) -> None:
        """Count; may be called from any thread."""
        with self.lock:
            self.series(labels)[0] += value

    def series(self, labels: Labels) -> Series:
        """The number itself, `[n]`, for those who count often; to be had and changed with the lock held."""
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = [0]
        return series

    def first_value(self) -> float:
        """The number whose labels come first; 0 without any."""
        with self.lock:
            return self._series[min(self._series)][0] if self._series else 0

    def discard(self, is_over: Callable[[Labels], bool]) -> None:
        """Forget the series whose labels are over."""
        with self.lock:
            _discard(self._series, is_over)

    def lines(self) -> Iterator[str]:
        """See Family."""
        with self.lock:
            found = sorted((labels, value) for labels, [value] in self._series.items())
        yield from self._head
        for labels, value in found:
            yield f"{self._name}{{{_text(self._labels, labels)}}} {value}"


class Histogram:
    """How often values lay in which bucket, for each combination of labels.

    Args:
        name: the name of the family.
        labels: the names of the labels.
        bounds: the upper bounds of the buckets, growing; +Inf is added.
        help: what is measured, if the page is to say it.
        bisect: the bucket of a value that is a bound: `bisect_left`, the one that ends there, as Prometheus means it;
            or `bisect_right`, the one that begins there, as TensorFlow has it.

    Attributes:
        lock: held while numbers change.
    """

    def __init__(
        self,
        name: str,
        labels: Sequence[str],
        bounds: Sequence[float],
        help: str = "",
        bisect: Callable[[Sequence[float], float], int] = bisect_left,
        lock: threading.Lock | None = None,
    ) -> None:
        self.lock = lock or threading.Lock()
        self._name = name
        self._head = _head(name, "histogram", help)
        self._labels = labels
        self._bounds = bounds
        self._bisect = bisect
        self._series: dict[Labels, Series] = {}  # the count of each bucket, then the sum of the values

    def observe(self, labels: Labels, value: float) -> None:
        """Count a value; may be called from any thread."""
        with self.lock:
            self.record(self.series(labels), value)

    def series(self, labels: Labels) -> Series:
        """What `record` counts in, for those who count often; to be had with the lock held."""
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = [0] * (len(self._bounds) + 2)
        return series

    def record(self, series: Series, value: float) -> None:
        """Count a value, with the lock held."""
        series[self._bisect(self._bounds, value)] += 1
        series[-1] += value

    def discard(self, is_over: Callable[[Labels], bool]) -> None:
        """Forget the series whose labels are over."""
        with self.lock:
            _discard(self._series, is_over)

    def lines(self) -> Iterator[str]:
        """See Family."""
        with self.lock:
            found = sorted((labels, tuple(series)) for labels, series in self._series.items())
        bounds = [f"{bound:g}" for bound in self._bounds] + ["+Inf"]
        yield from self._head
        for labels, (*buckets, total) in found:
            text = _text(self._labels, labels)
            start = f"{self._name}_bucket{{{text},le=" if text else f"{self._name}_bucket{{le="
            count = 0
            for bound, bucket in zip(bounds, buckets, strict=True):
                count += int(bucket)
                yield f'{start}"{bound}"}} {count}'
            yield f"{self._name}_sum{{{text}}} {total}"
            yield f"{self._name}_count{{{text}}} {count}"


def _discard(series: dict[Labels, Series], is_over: Callable[[Labels], bool]) -> None:
    for labels in [labels for labels in series if is_over(labels)]:
        del series[labels]


class Reading:
    """Numbers that are looked up when the page is asked for.

    Args:
        name: the name of the family.
        kind: `gauge` or `counter`.
        labels: the names of the labels.
        help: what they are.
        read: gives the labels and the value of each series.
    """

    def __init__(
        self, name: str, kind: str, labels: Sequence[str], help: str, read: Callable[[], Iterable[tuple[Labels, float]]]
    ) -> None:
        self._name = name
        self._head = _head(name, kind, help)
        self._labels = labels
        self._read = read

    def lines(self) -> Iterator[str]:
        """See Family."""
        yield from self._head
        for labels, value in self._read():
            yield f"{self._name}{{{_text(self._labels, labels)}}} {value}"


def page(families: Iterable[Family]) -> bytes:
    """What a scrape gets."""
    return "".join(f"{line}\n" for family in families for line in family.lines()).encode()


def _head(name: str, kind: str, help: str) -> list[str]:
    return ([f"# HELP {name} {help}"] if help else []) + [f"# TYPE {name} {kind}"]


def _text(names: Sequence[str], values: Labels) -> str:
    return ",".join(f'{name}="{_escaped(str(value))}"' for name, value in zip(names, values, strict=True))


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def process_families() -> list[Family]:
    """What every client library says of its process, under the same names; all but the CPU time on Linux only.

    https://prometheus.io/docs/instrumenting/writing_clientlibs/#process-metrics
    """

    def one(name: str, kind: str, help: str, read: Callable[[], float]) -> Family:
        return Reading(name, kind, (), help, lambda: [((), read())])

    families = [
        one("process_cpu_seconds_total", "counter", "User and system CPU time in seconds.", time.process_time),
    ]
    if sys.platform == "linux":
        started_seconds = _process_start_seconds()
        families += [
            one("process_resident_memory_bytes", "gauge", "Resident memory in bytes.", lambda: _memory_pages(1)),
            one("process_virtual_memory_bytes", "gauge", "Virtual memory in bytes.", lambda: _memory_pages(0)),
            one("process_open_fds", "gauge", "Open file descriptors.", lambda: len(os.listdir("/proc/self/fd"))),
            one(
                "process_max_fds",
                "gauge",
                "Limit of open file descriptors.",
                lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            ),
            one(
                "process_start_time_seconds",
                "gauge",
                "Start of the process, in seconds since 1970.",
                lambda: started_seconds,
            ),
        ]
    return families


def _memory_pages(column: int) -> int:
    return int(Path("/proc/self/statm").read_text().split()[column]) * resource.getpagesize()


def _process_start_seconds() -> float:
    """proc(5): the start is in clock ticks since the boot."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
    return int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
