"""TFRecord framing and the request log."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from serving import request_log, tfrecord
from serving.calls import Call, CallContext
from serving.errors import Code, ServingError
from serving.protos import PredictionLog
from serving.request_log import RequestLog
from serving.served_model import Version

VERSION = Version("m", 7, Path("m/7"))
INPUTS = {
    "x": np.arange(6, dtype=np.float32).reshape(2, 3),
    "text": np.array([[b"a"], [b"\xff"]], dtype=object),
    "id": np.array(2**40, np.int64),
}
OUTPUTS = {"y": np.array([1.5, 2.5])}


def call(version: Version, signature_name: str, inputs: Any, outputs: Any) -> Call:
    return Call(version, signature_name, inputs, outputs, error=None, seconds=0.0, context=CallContext())


@pytest.mark.parametrize(
    ("data", "crc"),
    [  # RFC 3720, B.4
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_crc32c(data: bytes, crc: int) -> None:
    assert tfrecord.crc32c(data) == crc


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 1023, 1024, 1025, 1026, 1027, 1028, 5000])
def test_tensorflow_reads_our_records_and_we_read_its(tmp_path: Path, size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.write_bytes(tfrecord.frame(data) + tfrecord.frame(b"second"))
    assert [record.numpy() for record in tf.data.TFRecordDataset(str(ours))] == [data, b"second"]
    with tf.io.TFRecordWriter(str(theirs)) as writer:
        writer.write(data)
    assert list(tfrecord.read(theirs)) == [data]


def test_damage_is_found_and_a_torn_tail_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "records"
    whole = tfrecord.frame(b"first") + tfrecord.frame(b"second")
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        expected = [b"first"] if length >= len(tfrecord.frame(b"first")) else []
        assert list(tfrecord.read(file)) == expected
        assert tfrecord.whole_bytes(file) == len(tfrecord.frame(b"first")) * len(expected)
    for index in range(len(whole)):
        file.write_bytes(whole[:index] + bytes([whole[index] ^ 1]) + whole[index + 1 :])
        with pytest.raises(ServingError, match="checksum is wrong") as raised:
            list(tfrecord.read(file))
        assert raised.value.code is Code.DATA_LOSS


def test_round_trip(tmp_path: Path) -> None:
    file = tmp_path / "log"
    log = RequestLog(file, sampling_rate=1.0)
    log.add(call(VERSION, "serving_default", INPUTS, OUTPUTS))
    log.close()
    [record] = request_log.read_records(file)
    assert (record.model_name, record.version, record.signature_name) == ("m", 7, "serving_default")
    for alias, array in {**INPUTS, **OUTPUTS}.items():
        found = {**record.inputs, **record.outputs}[alias]
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)
    assert [set(inputs) for inputs in request_log.read(file)] == [set(INPUTS)]


def test_records_are_prediction_logs(tmp_path: Path) -> None:
    file = tmp_path / "log"
    log = RequestLog(file, sampling_rate=1.0)
    log.add(call(VERSION, "sig", INPUTS, OUTPUTS))
    log.close()
    [data] = tf.data.TFRecordDataset(str(file))
    proto = PredictionLog.FromString(data.numpy())
    assert proto.log_metadata.model_spec.version.value == 7
    assert proto.predict_log.request.model_spec.signature_name == "sig"
    np.testing.assert_array_equal(tf.make_ndarray(proto.predict_log.request.inputs["x"]), INPUTS["x"])
    np.testing.assert_array_equal(tf.make_ndarray(proto.predict_log.response.outputs["y"]), OUTPUTS["y"])


def test_appends_after_cutting_away_a_torn_record(tmp_path: Path) -> None:
    file = tmp_path / "log"
    for _ in range(2):
        log = RequestLog(file, sampling_rate=1.0)
        log.add(call(VERSION, "s", INPUTS, OUTPUTS))
        log.close()
        with file.open("ab") as torn:
            torn.write(tfrecord.frame(b"torn")[:-3])
    assert len(list(request_log.read(file))) == 2


def test_another_file_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("these are my notes, not a request log")
    with pytest.raises(ServingError, match="not a TFRecord file, or damaged"):
        RequestLog(file, sampling_rate=1.0)
    assert file.read_text().startswith("these are my notes")


@pytest.mark.parametrize(("rate", "low", "high"), [(0.0, 0, 0), (0.5, 60, 140), (1.0, 200, 200)])
def test_sampling(tmp_path: Path, rate: float, low: int, high: int) -> None:
    log = RequestLog(tmp_path / "log", sampling_rate=rate)
    for _ in range(200):
        log.add(call(VERSION, "s", {}, {}))
    log.close()
    assert low <= len(list(request_log.read(tmp_path / "log"))) <= high


def test_full_queue_drops_and_counts_without_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    original = request_log._to_proto

    def slow(record: Any) -> Any:
        release.wait(5)
        return original(record)

    monkeypatch.setattr(request_log, "_to_proto", slow)
    log = RequestLog(tmp_path / "log", sampling_rate=1.0)
    for _ in range(1000):
        log.add(call(VERSION, "s", {}, {}))
    assert log.dropped in (1000 - 256, 1000 - 257)  # the writer may hold one
    release.set()
    log.close()
    assert len(list(request_log.read(tmp_path / "log"))) == 1000 - log.dropped


def test_record_that_cannot_be_written_is_counted_and_the_next_one_is_written(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "log", sampling_rate=1.0)
    log.add(call(VERSION, "s", {"x": np.array([object()])}, {}))
    log.add(call(VERSION, "s", INPUTS, {}))
    log.close()
    assert log.dropped == 1
    assert len(list(request_log.read(tmp_path / "log"))) == 1
