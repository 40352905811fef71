"""A request log as TFRecord of PredictionLog, which is what TF Serving itself writes.

Time, request id and latency have no place in that message (tensorflow_serving/apis/prediction_log.proto); they are fields of
it that only we know, which others pass over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from serving import tfrecord
from serving.errors import ServingError
from serving.inference import serialized_examples
from serving.message_class import message_class
from serving.request_log.files import forget_oldest, rotated_name
from serving.request_log.sink import LogRecord, Rotation, Sink
from serving.tensors import decode, encode_content, object_array

_WRITE_BYTES = 1 << 20
_OwnFields = message_class(
    "headrace.RequestLogFields",
    {"request_id": "string", "time_seconds": "double", "latency_seconds": "double"},
    first_number=1001,  # where TF Serving has none
)


class TfrecordSink(Sink):
    """Appends to one file, which is renamed when it is full; a record that a crash has cut off is cut away first.

    Raises:
        OSError: the file cannot be written.
        ServingError: DATA_LOSS when it is something else than a request log.
    """

    def __init__(self, path: Path, rotation: Rotation, clock: Callable[[], float] = time.time) -> None:
        super().__init__(path, rotation, clock)
        self._open()

    def _open(self) -> None:
        size_bytes = tfrecord.whole_bytes(self._path) if self._path.exists() else 0
        self._file = self._path.open("ab", buffering=0)
        self._file.truncate(size_bytes)
        self._size_bytes, self._began = size_bytes, self._clock()

    def write(self, records: Sequence[LogRecord]) -> None:
        frames: list[bytes] = []
        size_bytes = 0
        for record in records:
            try:
                frames.append(tfrecord.frame(_to_prediction_log(record)))
            except Exception as error:
                self._lose(1, error)
                continue
            size_bytes += len(frames[-1])
            if size_bytes >= _WRITE_BYTES:
                self._append(frames)
                frames, size_bytes = [], 0
        if frames:
            self._append(frames)

    def _append(self, frames: list[bytes]) -> None:
        try:
            if self._file.closed:
                self._open()
            if not self._size_bytes:
                self._began = self._clock()
            rest = memoryview(b"".join(frames))
            try:
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError:
                self._file.truncate(self._size_bytes)  # half a record would hide all that follow
                raise
        except (OSError, ServingError) as error:
            self._lose(len(frames), error)
        else:
            self._size_bytes += sum(map(len, frames))
            self._wrote(len(frames))
            self.rotate()

    def due_seconds(self) -> float | None:
        return self._began + self._rotation.max_seconds - self._clock() if self._size_bytes else None

    def rotate(self) -> None:
        due = self.due_seconds()
        if due is None or (due > 0 and self._size_bytes < self._rotation.max_bytes):
            return
        try:
            self._file.close()
            self._path.replace(rotated_name(self._path, self._began))
            self._open()
            forget_oldest(self._path, self._rotation.max_files)
        except OSError as error:
            self._began = self._clock()  # not again at once
            self._lose(0, error)

    def close(self) -> None:
        self._file.close()


def _to_prediction_log(record: LogRecord) -> bytes:
    from serving.protos import PredictionLog

    log = PredictionLog()
    request, response = log.predict_log.request, log.predict_log.response
    for spec in (log.log_metadata.model_spec, request.model_spec, response.model_spec):
        spec.name, spec.signature_name = record.model_name, record.signature_name
        spec.version.value = record.version
    log.log_metadata.timestamp_secs = int(record.time_seconds)
    for alias, array in record.inputs.items():
        encode_content(array, request.inputs[alias])
    for alias, array in record.outputs.items():
        encode_content(array, response.outputs[alias])
    own = _OwnFields(
        request_id=record.request_id, time_seconds=record.time_seconds, latency_seconds=record.latency_seconds
    )
    # Else the order of the aliases would be that of a hash table.
    return log.SerializeToString(deterministic=True) + own.SerializeToString()


def _from_prediction_log(data: bytes) -> LogRecord | None:
    """A record of ours or of TF Serving; None for a kind of call that has no tensors of its own."""
    from serving.protos import PredictionLog

    log, own = PredictionLog.FromString(data), _OwnFields.FromString(data)
    kind = log.WhichOneof("log_type")
    if kind not in _TENSORS:
        return None
    call = getattr(log, kind)
    inputs, outputs = _TENSORS[kind](call)
    spec = log.log_metadata.model_spec if log.HasField("log_metadata") else call.request.model_spec
    return LogRecord(
        model_name=spec.name,
        version=spec.version.value,
        signature_name=call.request.model_spec.signature_name,
        inputs=inputs,
        outputs=outputs,
        time_seconds=own.time_seconds or float(log.log_metadata.timestamp_secs),
        request_id=own.request_id,
        latency_seconds=own.latency_seconds,
    )


_Arrays = dict[str, np.ndarray]


def _predict_tensors(call: Any) -> tuple[_Arrays, _Arrays]:
    return (
        {alias: decode(tensor) for alias, tensor in call.request.inputs.items()},
        {alias: decode(tensor) for alias, tensor in call.response.outputs.items()},
    )


def _classify_tensors(call: Any) -> tuple[_Arrays, _Arrays]:
    rows = [each.classes for each in call.response.result.classifications]
    scores = np.array([[each.score for each in row] for row in rows], np.float32)
    labels = object_array([each.label.encode() for row in rows for each in row]).reshape(scores.shape)
    return {"inputs": serialized_examples(call.request.input)}, {"scores": scores, "classes": labels}


def _regress_tensors(call: Any) -> tuple[_Arrays, _Arrays]:
    values = np.array([each.value for each in call.response.result.regressions], np.float32)
    return {"inputs": serialized_examples(call.request.input)}, {"outputs": values}


_TENSORS = {"predict_log": _predict_tensors, "classify_log": _classify_tensors, "regress_log": _regress_tensors}


def read_tfrecord(file: BinaryIO) -> Iterator[LogRecord]:
    """The records of an opened TFRecord file.

    Raises:
        ServingError: DATA_LOSS when the file is damaged, INVALID_ARGUMENT when a tensor in it is.
    """
    for data in tfrecord.read_opened(file):
        record = _from_prediction_log(data)
        if record is not None:
            yield record
