"""What a request log is made of: records, a sink for them, of which each format has one, and when the next file begins."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LogRecord:
    """One call of a signature and its answer.

    Attributes:
        model_name: the model that answered.
        version: its version.
        signature_name: the signature called.
        inputs: input alias -> array; the serialized tf.Examples of a Classify or Regress request are its `inputs`.
        outputs: output alias -> array.
        time_seconds: Unix time at which the answer was ready; 0 if the log does not say.
        request_id: the request's `x-request-id`, or one made up for it; empty if the log does not say.
        latency_seconds: how long the call took; 0 if the log does not say.
    """

    model_name: str
    version: int
    signature_name: str
    inputs: Mapping[str, np.ndarray]
    outputs: Mapping[str, np.ndarray]
    time_seconds: float = 0.0
    request_id: str = ""
    latency_seconds: float = 0.0

    @property
    def size_bytes(self) -> int:
        """About what its arrays take in memory."""
        return size_bytes(self.inputs) + size_bytes(self.outputs)


def size_bytes(arrays: Mapping[str, np.ndarray]) -> int:
    """About what arrays take in memory."""
    return sum(
        array.nbytes + (sum(map(sys.getsizeof, array.flat)) if array.dtype == object else 0)
        for array in arrays.values()
    )


@dataclass(frozen=True)
class Rotation:
    """When a file of the log is full.

    Attributes:
        max_bytes: size above which the next file begins.
        max_seconds: age above which it does.
        max_files: files kept in all, the oldest deleted first; 0 keeps all.
    """

    max_bytes: int = 256 << 20
    max_seconds: float = 3600.0
    max_files: int = 0


class Sink:
    """Where the records of a log go. What cannot be written is counted, and complained of once until it can again.

    Args:
        path: the log.
        rotation: when the next file begins.
        clock: Unix time in seconds.

    Attributes:
        written: records that are in a file.
        lost: records that are not.
    """

    def __init__(self, path: Path, rotation: Rotation, clock: Callable[[], float] = time.time) -> None:
        self.written = self.lost = 0
        self._path, self._rotation, self._clock = path, rotation, clock
        self._is_disk_failing = False
        self._complaints: set[type] = set()

    def write(self, records: Sequence[LogRecord]) -> None:
        """Write records; never raises for what the disk or a record is like."""
        raise NotImplementedError

    def due_seconds(self) -> float | None:
        """How long until `rotate` has something to do; None if nothing is being written."""
        raise NotImplementedError

    def rotate(self) -> None:
        """Finish the files that are too large or too old."""
        raise NotImplementedError

    def close(self) -> None:
        """Finish all files."""
        raise NotImplementedError

    def _wrote(self, count: int) -> None:
        self.written += count
        if self._is_disk_failing:
            self._is_disk_failing = False
            logger.warning("request log %s is written again; %d requests were dropped", self._path, self.lost)

    def _lose(self, count: int, error: Exception) -> None:
        self.lost += count
        if isinstance(error, OSError):
            if not self._is_disk_failing:
                logger.warning("request log %s: %s; requests are dropped until it can be written", self._path, error)
            self._is_disk_failing = True
        elif type(error) not in self._complaints:
            self._complaints.add(type(error))
            logger.warning("request log %s: requests such as this one are not written: %s", self._path, error)
