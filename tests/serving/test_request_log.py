"""TFRecord framing and the request log."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from pyarrow import parquet

from serving import tfrecord
from serving.__main__ import _make_server, main
from serving.calls import Call, CallContext
from serving.client import GrpcClient, RestClient
from serving.errors import Code, ServingError
from serving.protos import PredictionLog
from serving.request_log import files as request_log_files
from serving.request_log import log as request_log
from serving.request_log import parquet as request_log_parquet
from serving.request_log.files import log_files, rotated_files
from serving.request_log.log import LogRecord, RequestLog, Rotation, read_records, write_records
from serving.request_log.parquet import ParquetSink
from serving.request_log.tfrecord_format import TfrecordSink
from serving.served_model import Version
from serving.server import ModelServer
from tests.serving import models

VERSION = Version("m", 7, Path("m/7"))
INPUTS = {
    "x": np.arange(6, dtype=np.float32).reshape(2, 3),
    "text": np.array([[b"a"], [b"\xff"]], dtype=object),
    "id": np.array(2**40, np.int64),
}
OUTPUTS = {"y": np.array([1.5, 2.5])}
FORMATS = ["tfrecord", "parquet"]
NOW = 1_700_000_000.25


class Clock:
    """Unix time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def call(
    inputs: Any = INPUTS, outputs: Any = OUTPUTS, *, signature_name: str = "s", request_id: str | None = None
) -> Call:
    context = CallContext(header={"x-request-id": request_id}.get)
    return Call(VERSION, signature_name, inputs, outputs, error=None, seconds=0.002, context=context)


def record(number: int, size: int = 1, *, alias: str = "x") -> LogRecord:
    return LogRecord("m", 1, "s", {alias: np.full(size, number)}, {}, NOW + number, f"id-{number}")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.message for each in caplog.records if each.levelname == "WARNING"]


def ids(path: Path | str, **options: Any) -> list[str]:
    return [found.request_id for found in read_records(path, **options)]


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


@pytest.mark.parametrize("format", FORMATS)
def test_round_trip(tmp_path: Path, format: str) -> None:
    file = tmp_path / f"log.{format}"
    log = RequestLog(file, clock=Clock())
    log.add(call(request_id="abc"))
    log.add(call({"x": np.zeros((0, 3), np.float16)}, {"y": np.array([[True]])}, signature_name="other"))
    log.close()
    assert (log.written, log.dropped) == (2, 0)
    found, other = sorted(read_records(file), key=lambda each: each.signature_name, reverse=True)
    assert (found.model_name, found.version, found.signature_name) == ("m", 7, "s")
    assert (found.request_id, found.time_seconds, found.latency_seconds) == ("abc", NOW, 0.002)
    for alias, array in {**INPUTS, **OUTPUTS}.items():
        read = {**found.inputs, **found.outputs}[alias]
        assert read.dtype == array.dtype
        np.testing.assert_array_equal(read, array)
    assert other.inputs["x"].dtype == np.float16
    assert len(other.inputs["x"]) == 0
    assert other.outputs["y"].tolist() == [[True]]
    assert len(other.request_id) == 32


def test_tfrecords_are_prediction_logs(tmp_path: Path) -> None:
    file = tmp_path / "log"
    log = RequestLog(file, clock=Clock())
    log.add(call(signature_name="sig"))
    log.close()
    [data] = tf.data.TFRecordDataset(str(file))
    proto = PredictionLog.FromString(data.numpy())
    assert proto.log_metadata.model_spec.version.value == 7
    assert proto.log_metadata.timestamp_secs == int(NOW)
    assert proto.predict_log.request.model_spec.signature_name == "sig"
    np.testing.assert_array_equal(tf.make_ndarray(proto.predict_log.request.inputs["x"]), INPUTS["x"])
    np.testing.assert_array_equal(tf.make_ndarray(proto.predict_log.response.outputs["y"]), OUTPUTS["y"])


def test_parquet_has_typed_columns_that_others_read(tmp_path: Path) -> None:
    write_records(tmp_path / "log.parquet", [LogRecord("m", 7, "s", INPUTS, OUTPUTS, NOW, "abc", 0.002)])
    [file] = tmp_path.glob("log-*.parquet")
    assert {field.name: str(field.type) for field in parquet.read_schema(file)} == {
        "time": "timestamp[us, tz=UTC]",
        "model": "string",
        "version": "int64",
        "signature": "string",
        "request_id": "string",
        "latency_us": "int64",
        "inputs.id": "int64",
        "inputs.text": "list<element: list<element: binary>>",
        "inputs.x": "list<element: list<element: float>>",
        "outputs.y": "list<element: double>",
    }
    query = f"""select request_id, latency_us, epoch(time), "inputs.x"[2][3], "outputs.y"[1] from '{file}'"""
    assert duckdb.sql(query).fetchall() == [("abc", 2000, NOW, 5.0, 1.5)]


def test_logs_of_tensorflow_serving_are_read(tmp_path: Path) -> None:
    example = tf.train.Example(features={"feature": {"x": {"float_list": {"value": [2.0]}}}})
    classify, regress, session = PredictionLog(), PredictionLog(), PredictionLog()
    for log, name in ((classify.classify_log, "classify"), (regress.regress_log, "regress")):
        log.request.model_spec.name, log.request.model_spec.signature_name = "m", name
        log.request.input.example_list.examples.append(example)
    for label, score in (("no", 0.25), ("yes", 0.75)):
        classify.classify_log.response.result.classifications.add().classes.add(label=label, score=score)
    regress.regress_log.response.result.regressions.add(value=4.0)
    regress.log_metadata.model_spec.name = "other"
    regress.log_metadata.timestamp_secs = 17
    session.session_run_log.request.model_spec.name = "m"
    with tf.io.TFRecordWriter(str(tmp_path / "log")) as writer:
        for log in (classify, session, regress):
            writer.write(log.SerializeToString())
    first, second = read_records(tmp_path / "log")
    assert (first.model_name, first.signature_name, first.time_seconds) == ("m", "classify", 0)
    assert first.inputs["inputs"].tolist() == [example.SerializeToString()]
    assert first.outputs["classes"].tolist() == [[b"no"], [b"yes"]]
    np.testing.assert_allclose(first.outputs["scores"], [[0.25], [0.75]])
    assert (second.model_name, second.signature_name, second.time_seconds) == ("other", "regress", 17)
    assert second.outputs["outputs"].tolist() == [4]


def test_appends_after_cutting_away_a_torn_record(tmp_path: Path) -> None:
    file = tmp_path / "log"
    for _ in range(2):
        log = RequestLog(file)
        log.add(call())
        log.close()
        with file.open("ab") as torn:
            torn.write(tfrecord.frame(b"torn")[:-3])
    assert len(list(read_records(file))) == 2


def test_another_file_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("these are my notes, not a request log")
    with pytest.raises(ServingError, match="not a TFRecord file, or damaged"):
        RequestLog(file)
    assert file.read_text().startswith("these are my notes")


def test_two_servers_do_not_share_a_log(tmp_path: Path) -> None:
    first = RequestLog(tmp_path / "log")
    with pytest.raises(OSError, match="another server writes this request log"):
        RequestLog(tmp_path / "log")
    first.close()
    RequestLog(tmp_path / "log").close()


@pytest.mark.parametrize(("rate", "low", "high"), [(0.0, 0, 0), (0.5, 60, 140), (1.0, 200, 200)])
def test_sampling(tmp_path: Path, rate: float, low: int, high: int) -> None:
    logs = [RequestLog(tmp_path / name, rate) for name in ("one", "two")]
    for log in logs:
        for number in range(200):
            log.add(call({}, {}, request_id=f"request {number}"))
            log.add(call({}, {}))
        log.close()
    one, two = ([each for each in ids(tmp_path / name) if each.startswith("request")] for name in ("one", "two"))
    assert one == two
    assert low <= len(one) <= high
    assert low <= len(ids(tmp_path / "one")) - len(one) <= high


def test_failed_calls_are_not_logged(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "log")
    failed = call()
    failed.error = ServingError(Code.INTERNAL, "")
    log.add(failed)
    log.close()
    assert (log.written, log.dropped) == (0, 0)


@pytest.fixture(scope="module")
def base_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "m"
    models.copy_half_plus_two(path / "3")
    return path


def test_the_client_names_its_requests_in_both_protocols(tmp_path: Path, base_path: Path) -> None:
    x = np.array([2], np.float32)
    with ModelServer("m", base_path, request_log_file=tmp_path / "log.parquet") as server:
        for client in (
            RestClient(f"http://127.0.0.1:{server.rest_port}", headers={"X-Request-Id": "by rest"}),
            GrpcClient(f"127.0.0.1:{server.grpc_port}", headers={"x-request-id": "by grpc"}),
        ):
            client.predict("m", {"x": x})
            client.close()
    found = list(read_records(tmp_path / "log.parquet"))
    assert [(each.request_id, each.version, each.outputs["y"].tolist()) for each in found] == [
        ("by rest", 3, [3.0]),
        ("by grpc", 3, [3.0]),
    ]
    assert all(0 < each.latency_seconds < 60 for each in found)


def test_flags(tmp_path: Path, base_path: Path) -> None:
    arguments = [f"--model_base_path={base_path}", f"--request_log_file={tmp_path / 'log'}"]
    limits = ["--request_log_max_bytes=1", "--request_log_max_seconds=2.5", "--request_log_max_files=3"]
    with main.make_context("serving", [*arguments, *limits, "--request_log_format=parquet"]) as context:
        server = _make_server(context.params)
    assert server._request_log_format == "parquet"
    assert server._request_log_rotation == Rotation(max_bytes=1, max_seconds=2.5, max_files=3)
    with main.make_context("serving", arguments) as context:
        assert _make_server(context.params)._request_log_rotation == Rotation()


class _HeldSink(TfrecordSink):
    """A slow disk."""

    holds, release = threading.Event(), threading.Event()

    def write(self, records: Any) -> None:
        self.holds.set()
        self.release.wait(20)
        super().write(records)


@pytest.mark.parametrize(
    ("size_bytes", "fit"),
    [(8, request_log._MAX_QUEUED), (4 << 20, request_log._MAX_QUEUED_BYTES // (4 << 20))],
    ids=["count", "bytes"],
)
def test_full_queue_drops_and_counts_without_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size_bytes: int, fit: int
) -> None:
    monkeypatch.setitem(request_log._SINKS, "tfrecord", _HeldSink)
    monkeypatch.setattr(_HeldSink, "holds", threading.Event())
    monkeypatch.setattr(_HeldSink, "release", threading.Event())
    log = RequestLog(tmp_path / "log")
    inputs = {"x": np.zeros(size_bytes, np.uint8)}
    for number in range(fit + 100):
        log.add(call(inputs, {}))
        if number == 0:
            assert _HeldSink.holds.wait(20)
    assert log.dropped == 100
    _HeldSink.release.set()
    log.close()
    assert (log.written, log.dropped) == (fit, 100)
    assert (log._queued, log._queued_bytes) == (0, 0)  # there is room again


@pytest.mark.parametrize("format", FORMATS)
def test_record_that_cannot_be_written_is_counted_and_the_next_one_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, format: str
) -> None:
    log = RequestLog(tmp_path / f"log.{format}")
    for _ in range(3):
        log.add(call({"x": np.array([object()])}, {}))
    log.add(call())
    log.close()
    assert (log.written, log.dropped) == (1, 3)
    assert len(list(read_records(tmp_path / f"log.{format}"))) == 1
    assert caplog.text.count("requests such as this one are not written: an array of objects") == 1


@pytest.mark.parametrize("format", FORMATS)
def test_files_rotate_by_size_and_age_and_the_oldest_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    monkeypatch.setattr(request_log_parquet, "_ROW_GROUP_ROWS", 1)
    file, clock = tmp_path / f"log.{format}", Clock()
    sink = request_log._SINKS[format](file, Rotation(max_bytes=1 << 30, max_seconds=60, max_files=3), clock)
    for number in range(5):
        sink.write([record(number)])
        clock.now += 59.5
        sink.rotate()
        assert sink.due_seconds() == 0.5
        clock.now += 0.5
        sink.rotate()
        assert sink.due_seconds() is None
    sink.close()
    assert ids(file) == [f"id-{number}" for number in (range(3, 5) if format == "tfrecord" else range(2, 5))]
    assert len(log_files(file)) == 3
    sink = request_log._SINKS[format](file, Rotation(max_bytes=1, max_seconds=1e9), clock)
    for number in range(8):
        sink.write([record(number, 2000)])
    assert len(log_files(file)) == 3 + 8
    sink.close()


@pytest.mark.parametrize("when", ["listed", "listed twice", "read"])
def test_a_file_that_is_rotated_meanwhile_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The server renames what it has filled, and begins a new file, at the worst moment for a reader."""
    file, clock = tmp_path / "log.tfrecord", Clock()
    sink = TfrecordSink(file, Rotation(max_seconds=60), clock)
    for number in range(2):
        sink.write([record(number)])
        clock.now += 60 * (number == 0)
        sink.rotate()
    assert ids(file) == ["id-0", "id-1"]
    moments = {"listed": [1], "listed twice": [1, 3], "read": []}[when]
    calls = itertools.count(1)

    def rotate() -> None:
        clock.now += 60
        sink.rotate()
        sink.write([record(int(clock.now))])

    def rotated_late(path: Path) -> list[Path]:
        found = rotated_files(path)
        if next(calls) in moments:
            rotate()  # what was `path` has another name now, which is not among those found
        return found

    monkeypatch.setattr(request_log_files, "rotated_files", rotated_late)
    found = []
    for each in read_records(file):
        if when == "read" and not found:
            rotate()
        found.append(each.request_id)
    sink.close()
    assert found[:2] == ["id-0", "id-1"]


def test_a_file_that_is_deleted_meanwhile_is_left_out(tmp_path: Path) -> None:
    for number in range(3):
        write_records(tmp_path / f"{number}.tfrecord", [record(number)])
    found = read_records(tmp_path)
    assert next(found).request_id == "id-0"
    (tmp_path / "1.tfrecord").unlink()
    assert [each.request_id for each in found] == ["id-2"]


def test_parquet_files_are_whole_or_absent(tmp_path: Path) -> None:
    (tmp_path / ".log.parquet.7.tmp").write_text("left by a crash")
    (tmp_path / ".log.b.parquet.7.tmp").write_text("of another log")
    sink = ParquetSink(tmp_path / "log.parquet", Rotation())
    sink.write([record(0)] * request_log_parquet._ROW_GROUP_ROWS)
    sink.write([record(1, alias="y")])
    assert {file.name for file in tmp_path.iterdir()} == {".log.parquet.0.tmp", ".log.b.parquet.7.tmp"}
    assert log_files(tmp_path) == []
    sink.close()
    assert [parquet.read_metadata(file).num_rows for file in log_files(tmp_path)] == [10_000, 1]
    assert {file.name for file in tmp_path.iterdir() if file.name.startswith(".")} == {".log.b.parquet.7.tmp"}


class _FullDisk:
    """A file that takes half of what is written, then has no room, until there is some."""

    is_full = True

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: memoryview) -> int:
        if not self.is_full:
            return self._file.write(data)
        self._file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_full_disk_of_tfrecord_loses_whole_records_and_complains_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = TfrecordSink(tmp_path / "log", Rotation())
    sink.write([record(0)])
    disk = _FullDisk(sink._file)
    sink._file = disk
    sink.write([record(1), record(2)])
    sink.write([record(3)])
    assert (sink.written, sink.lost) == (1, 3)
    assert len(warnings(caplog)) == 1 and "No space left on device; requests are dropped" in warnings(caplog)[0]
    disk.is_full = False
    sink.write([record(4)])
    sink.close()
    assert ids(tmp_path / "log") == ["id-0", "id-4"]
    assert len(warnings(caplog)) == 2 and "is written again; 3 requests were dropped" in warnings(caplog)[1]


def test_full_disk_of_parquet_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sink = ParquetSink(tmp_path / "log.parquet", Rotation())
    sink.write([record(0), record(1)])
    with monkeypatch.context() as patch:
        patch.setattr(parquet.ParquetWriter, "write_table", full)
        sink.close()
    assert (sink.written, sink.lost) == (0, 2)
    assert list(tmp_path.iterdir()) == []
    sink.write([record(2)])
    sink.close()
    assert ids(tmp_path / "log.parquet") == ["id-2"]
    assert len(warnings(caplog)) == 2


_WRITER = """
import sys, time
from pathlib import Path
import numpy as np
from serving.request_log.log import *
from serving.request_log.parquet import ParquetSink
from serving.request_log.tfrecord_format import TfrecordSink
sink = {"tfrecord": TfrecordSink, "parquet": ParquetSink}[sys.argv[2]](Path(sys.argv[1]), Rotation())
number = 0
while True:
    sink.write([LogRecord("m", 1, "s", {"x": np.full(300, number)}, {}, float(number), str(number))])
    number += 1
    if number == 5:
        print("ready", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_kill_9_leaves_a_log_that_goes_on(tmp_path: Path, format: str) -> None:
    file = tmp_path / f"log.{format}"
    writer = subprocess.Popen([sys.executable, "-c", _WRITER, str(file), format], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"ready\n"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    write_records(file, [record(77)])
    found = ids(file)
    assert found[-1] == "id-77"
    assert found[:-1] == [str(number) for number in range(len(found) - 1)]
    assert (len(found) > 5) == (format == "tfrecord")
    assert [each.name for each in tmp_path.iterdir() if each.name.endswith(".tmp")] == []


def test_folders_globs_and_both_formats_are_read(tmp_path: Path) -> None:
    (tmp_path / "pod").mkdir()
    write_records(tmp_path / "a.tfrecord", [record(0), record(1)])
    write_records(tmp_path / "pod" / "b", [record(2)], format="parquet")
    (tmp_path / ".hidden").write_text("not a log")
    assert ids(tmp_path) == ids(str(tmp_path / "**/*")) == ["id-0", "id-1", "id-2"]
    assert ids(tmp_path / "*.tfrecord") == ["id-0", "id-1"]
    assert ids(tmp_path, since_seconds=NOW + 1) == ["id-1", "id-2"]
    os.utime(tmp_path / "a.tfrecord", (NOW - 5, NOW - 5))
    assert ids(tmp_path, since_seconds=NOW) == ["id-2"]
    with pytest.raises(FileNotFoundError, match="there is no request log"):
        ids(tmp_path / "nothing*")


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(file.read_bytes()[:-50]),
        lambda file: parquet.write_table(pa.table({"x": [1]}), file),
    ],
    ids=["cut", "other"],
)
def test_damaged_parquet(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    write_records(tmp_path / "log.parquet", [record(0)])
    [file] = log_files(tmp_path)
    damage(file)
    with pytest.raises(ServingError, match="no request log, or damaged") as raised:
        ids(tmp_path)
    assert raised.value.code is Code.DATA_LOSS
