"""The log of predict requests: PredictionLog records in a TFRecord file, written beside serving.

The same format as TF Serving's request logs and warm-up files (tensorflow_serving/apis/prediction_log.proto).
"""

from __future__ import annotations

import logging
import queue
import random
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from serving import tfrecord
from serving.calls import Call
from serving.tensors import decode, encode_content

logger = logging.getLogger(__name__)

_MAX_QUEUED = 256


@dataclass(frozen=True)
class LogRecord:
    """One predict request and its answer.

    Attributes:
        model_name: the model that answered.
        version: its version.
        signature_name: the signature called.
        inputs: input alias -> array.
        outputs: output alias -> array.
    """

    model_name: str
    version: int
    signature_name: str
    inputs: Mapping[str, np.ndarray]
    outputs: Mapping[str, np.ndarray]


class RequestLog:
    """Appends requests to a file from a thread of its own; serving never waits for it.

    Args:
        path: the file; made when missing, appended to when there (a record cut off by a crash is cut away first).
        sampling_rate: the share of requests that are written, 0 to 1.

    Attributes:
        dropped: requests that were not written, because the disk was slower than they came or refused them.

    Raises:
        OSError: the file cannot be written.
        ServingError: DATA_LOSS when the file is something else than a request log.
    """

    def __init__(self, path: Path, sampling_rate: float) -> None:
        self.dropped = 0
        self._path = path
        self._sampling_rate = sampling_rate
        self._queue: queue.Queue[LogRecord | None] = queue.Queue(_MAX_QUEUED)
        whole_bytes = tfrecord.whole_bytes(path) if path.exists() else 0
        self._file = path.open("ab")
        self._file.truncate(whole_bytes)
        self._thread = threading.Thread(target=self._write_all, name="request-log", daemon=True)
        self._thread.start()

    def add(
        self,
        call: Call,
    ) -> None:
        """Hand over a request; returns at once. When the queue is full it is dropped, and counted."""
        if call.error is not None:
            return
        if random.random() >= self._sampling_rate:
            return
        try:
            self._queue.put_nowait(
                LogRecord(call.version.model_name, call.version.number, call.signature_name, call.inputs, call.outputs)
            )
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Write what is queued, then close the file."""
        self._queue.put(None)
        self._thread.join()
        self._file.close()
        if self.dropped:
            logger.warning("request log %s: %d requests were not written", self._path, self.dropped)

    def _write_all(self) -> None:
        while (record := self._queue.get()) is not None:
            try:
                self._file.write(tfrecord.frame(_to_proto(record).SerializeToString()))
                if self._queue.empty():
                    self._file.flush()
            except Exception:
                self.dropped += 1
                logger.exception("request log %s: a request was not written", self._path)


def _to_proto(record: LogRecord) -> Any:
    from serving.protos import PredictionLog

    log = PredictionLog()
    request, response = log.predict_log.request, log.predict_log.response
    for spec in (log.log_metadata.model_spec, request.model_spec, response.model_spec):
        spec.name, spec.signature_name = record.model_name, record.signature_name
        spec.version.value = record.version
    for alias, array in record.inputs.items():
        encode_content(array, request.inputs[alias])
    for alias, array in record.outputs.items():
        encode_content(array, response.outputs[alias])
    return log


def read_records(path: Path) -> Iterator[LogRecord]:
    """The predict requests of a log, with their answers.

    Raises:
        ServingError: DATA_LOSS when the file is damaged, INVALID_ARGUMENT when a tensor in it is.
        OSError: the file cannot be read.
    """
    from serving.protos import PredictionLog

    for data in tfrecord.read(path):
        log = PredictionLog.FromString(data)
        if log.HasField("predict_log"):
            request, response = log.predict_log.request, log.predict_log.response
            spec = log.log_metadata.model_spec if log.HasField("log_metadata") else request.model_spec
            yield LogRecord(
                model_name=spec.name,
                version=spec.version.value,
                signature_name=request.model_spec.signature_name,
                inputs={alias: decode(tensor) for alias, tensor in request.inputs.items()},
                outputs={alias: decode(tensor) for alias, tensor in response.outputs.items()},
            )


def read(path: Path) -> Iterator[dict[str, np.ndarray]]:
    """The inputs of each predict request of a log: input alias -> array, strings as object arrays of bytes.

    Raises:
        ServingError: DATA_LOSS when the file is damaged.
        OSError: the file cannot be read.

    Example:
        >>> for inputs in read(Path("requests.tfrecord")):
        ...     print(inputs["x"].shape)
    """
    for record in read_records(path):
        yield dict(record.inputs)
