"""The log of requests and their answers, written beside serving and never waited for."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from serving.request_log import files as request_log_files
from serving.request_log import parquet as request_log_parquet
from serving.request_log.parquet import ParquetSink, read_parquet
from serving.request_log.sink import LogRecord, Rotation, Sink
from serving.request_log.tfrecord_format import TfrecordSink, read_tfrecord

if TYPE_CHECKING:
    from serving.calls import Call

__all__ = ["LogRecord", "RequestLog", "Rotation", "read_records", "write_records"]

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "x-request-id"
Format = Literal["tfrecord", "parquet"]
_SINKS: dict[str, type[Sink]] = {"tfrecord": TfrecordSink, "parquet": ParquetSink}
_MAX_QUEUED = 10_000
_MAX_QUEUED_BYTES = 64 << 20


class RequestLog:
    """Writes calls to files from a thread of its own; serving never waits for it.

    Args:
        path: the log; see request_log_files.
        sampling_rate: the share of requests that are written, 0 to 1. Of requests that bring an `x-request-id` the same
            ones are chosen by every server.
        format: default: parquet if the path ends so, else tfrecord.
        rotation: when the next file begins, and how many are kept.
        clock: Unix time in seconds.

    Raises:
        OSError: the log cannot be written, or another process writes it.
        ServingError: DATA_LOSS when the file is something else than a request log.
    """

    def __init__(
        self,
        path: Path,
        sampling_rate: float = 1.0,
        *,
        format: Format | None = None,
        rotation: Rotation | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path, self._sampling_rate, self._clock = path, sampling_rate, clock
        self._refused = 0
        self._queue: list[LogRecord] = []
        self._queued = self._queued_bytes = 0
        self._is_closing = False
        self._wake = threading.Condition()
        self._lock = request_log_files.lock(path)
        try:
            self._sink = _SINKS[format or _format_of(path)](path, rotation or Rotation(), clock)
        except BaseException:
            self._lock.close()
            raise
        self._thread = threading.Thread(target=self._write_all, name="request-log", daemon=True)
        self._thread.start()

    @property
    def written(self) -> int:
        """Requests that are in a file."""
        return self._sink.written

    @property
    def dropped(self) -> int:
        """Requests that were not written, because the disk was slower than they came or refused them."""
        return self._refused + self._sink.lost

    def add(self, call: Call) -> None:
        """Hand over a call; returns at once. When the queue is full it is dropped, and counted."""
        if call.error is not None:
            return
        request_id = call.context.header(REQUEST_ID_HEADER)
        if not self._is_sampled(request_id):
            return
        version = call.version
        record = LogRecord(
            model_name=version.model_name,
            version=version.number,
            signature_name=call.signature_name,
            inputs=call.inputs,
            outputs=call.outputs,
            time_seconds=self._clock(),
            request_id=request_id or uuid.uuid4().hex,
            latency_seconds=call.seconds,
        )
        size_bytes = record.size_bytes
        with self._wake:
            if self._queued >= _MAX_QUEUED or self._queued_bytes + size_bytes > _MAX_QUEUED_BYTES or self._is_closing:
                self._refused += 1
                return
            self._queue.append(record)
            self._queued += 1
            self._queued_bytes += size_bytes
            self._wake.notify()

    def _is_sampled(self, request_id: str | None) -> bool:
        if self._sampling_rate >= 1:
            return True
        if not request_id:
            return random.random() < self._sampling_rate
        digest = hashlib.blake2b(request_id.encode("utf-8", "surrogateescape"), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self._sampling_rate * 2**64

    def close(self) -> None:
        """Write what is queued, then finish the files."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join()
        self._lock.close()
        if self.dropped:
            logger.warning("request log %s: %d requests were not written", self._path, self.dropped)

    def _write_all(self) -> None:
        while True:
            due_seconds = self._sink.due_seconds()
            with self._wake:
                if not self._queue and not self._is_closing:
                    self._wake.wait(None if due_seconds is None else max(due_seconds, 0.01))
                records, self._queue = self._queue, []
            if not records and self._is_closing:
                break
            try:
                self._sink.write(records)
                self._sink.rotate()
            except Exception:
                self._refused += len(records)
                logger.exception("request log %s: a defect of ours", self._path)
            with self._wake:
                self._queued -= len(records)
                self._queued_bytes -= sum(record.size_bytes for record in records)
        self._sink.close()


def _format_of(path: Path) -> Format:
    return "parquet" if path.suffix == ".parquet" else "tfrecord"


def write_records(path: Path, records: Sequence[LogRecord], *, format: Format | None = None) -> None:
    """Write a whole log: of TFRecord the file `path`, of Parquet one beside it for each schema.

    Raises:
        OSError: it cannot be written.
        TypeError: a record has a tensor that the format cannot hold.
    """
    sink = _SINKS[format or _format_of(path)](path, Rotation())
    sink.write(records)
    sink.close()
    if sink.lost:
        raise OSError(f"{path}: {sink.lost} of {len(records)} records could not be written")


def read_records(path: Path | str, *, since_seconds: float = 0.0) -> Iterator[LogRecord]:
    """The calls in a log, of either format, one after the other.

    Args:
        path: the log with all that was rotated out of it, a folder of logs, or a glob.
        since_seconds: leave out what is older than this Unix time; files that were finished before are not opened. Records
            without a time stay.

    Raises:
        FileNotFoundError: there is no such log.
        ServingError: DATA_LOSS when a file is damaged, INVALID_ARGUMENT when a tensor in it is.
        OSError: a file cannot be read.

    Example:
        >>> for record in read_records("logs/requests.parquet"):
        ...     print(record.request_id, record.inputs["x"].shape)
    """
    for file in request_log_files.open_files(path):
        if os.fstat(file.fileno()).st_mtime < since_seconds:
            continue
        magic = file.read(len(request_log_parquet.MAGIC))
        file.seek(0)
        for record in (read_parquet if magic == request_log_parquet.MAGIC else read_tfrecord)(file):
            if not 0 < record.time_seconds < since_seconds:
                yield record
