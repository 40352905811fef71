from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow_serving.apis.prediction_log_pb2 import PredictionLog

from components import artifacts
from components.config import SECTIONS, MonitorConfig
from components.errors import DataError
from components.examples import MISSING_INT, ExamplesInfo, Feature
from components.monitor import MonitorResult, monitor
from components.statistics import StatisticsBuilder, to_json

FEATURES = {
    "fare": Feature("float"),
    "payment": Feature("string"),
    "hour": Feature("int"),
    "comment": Feature("string"),
    "image": Feature("uint8", (2, 2, 1)),
    "label": Feature("int"),
}
INFO = ExamplesInfo(FEATURES, "label", "binary", None, {})


@dataclass(frozen=True)
class _Result:
    label: str = "label"


def _data(rows: int, seed: int, *, shift: float = 0, cash: float = 0.5, hours: int = 24, word: bytes = b"x") -> Any:
    rng = np.random.default_rng(seed)
    return {
        "fare": (rng.normal(size=rows) + shift).astype(np.float32),
        "payment": np.where(rng.random(rows) < cash, b"Cash", b"Card").astype(object),
        "hour": rng.integers(24 - hours, 24, rows),
        "comment": np.array([b"good " + word] * rows, object),
        "image": rng.integers(0, 255, (rows, 2, 2, 1)).astype(np.uint8),
    }


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Artifacts of the steps before: only what monitor reads is in them."""
    builder = StatisticsBuilder(INFO, text_features=["comment"], max_top_values=100, num_quantiles=100)
    builder.update({**_data(2000, 0), "label": np.zeros(2000, np.int64)})
    files = {"statistics": "validate", "proof": "verify", "pushed": "push"}
    for name, step in files.items():
        with artifacts.writing(tmp_path / name, step=step, inputs={}, config=SECTIONS[step]()) as out:
            if name == "statistics":
                (out.path / "statistics.json").write_text(to_json({"train": builder.finish()}))
            if name == "proof":
                _log(out.path / "request_log.tfrecord", [_data(40, 1)])
            out.result = _Result()
    return tmp_path


def _log(file: Path, requests: list[dict[str, Any]]) -> Path:
    with tf.io.TFRecordWriter(str(file)) as writer:
        for inputs in requests:
            log = PredictionLog()
            for name, values in inputs.items():
                log.predict_log.request.inputs[name].CopyFrom(tf.make_tensor_proto(values))
            writer.write(log.SerializeToString())
    return file


def _monitor(made: Path, **fields: Any) -> MonitorResult:
    paths = {name: made / name for name in ("statistics", "proof", "pushed")}
    return monitor(**paths, monitoring=made / "monitoring", config=MonitorConfig(**{"min_examples": 20, **fields}))


def test_requests_like_the_train_split_are_ok(made):
    assert _monitor(made) == MonitorResult("ok", 1, 40, [])
    report = (made / "monitoring" / "report.md").read_text()
    assert "1 requests, 40 examples: no feature is skewed." in report
    found = json.loads((made / "monitoring" / "skew.json").read_text())
    assert {skew["feature"] for skew in found["features"]} == {"fare", "payment", "hour", "comment"}


@pytest.mark.parametrize(
    ("changes", "feature", "measure"),
    [
        ({"shift": 2}, "fare", "jensen_shannon"),
        ({"cash": 1.0}, "payment", "l_infinity"),
        ({"hours": 3}, "hour", "l_infinity"),
        ({"word": b"bad"}, "comment", "l_infinity"),
    ],
)
def test_skew_is_found_feature_by_feature(made, changes, feature, measure):
    log = _log(made / "log", [_data(10, seed, **changes) for seed in range(20)])
    result = _monitor(made, request_log=str(log))
    assert (result.status, result.num_requests, result.num_examples) == ("skew", 20, 200)
    assert [(skew.feature, skew.measure) for skew in result.skewed] == [(feature, measure)]
    assert f"skewed: {feature}." in (made / "monitoring" / "report.md").read_text()
    lenient = _monitor(made, request_log=str(log), max_linf=1.0, max_jensen_shannon=1.0)
    assert lenient.status == "ok"


@pytest.mark.parametrize(("min_examples", "status"), [(20, "skew"), (21, "too_few")])
def test_too_few_examples_are_not_judged(made, min_examples, status):
    log = _log(made / "log", [_data(20, 2, shift=5)])
    assert _monitor(made, request_log=str(log), min_examples=min_examples).status == status


def test_an_empty_log_is_too_few(made):
    assert _monitor(made, request_log=str(_log(made / "log", []))) == MonitorResult("too_few", 0, 0, [])


def test_requests_with_serialized_examples_count_and_the_label_does_not(made):
    data, records = _data(50, 3), []
    for row in range(50):
        example = tf.train.Example()
        feature = example.features.feature
        feature["fare"].float_list.value.append(data["fare"][row])
        feature["payment"].bytes_list.value.append(data["payment"][row])
        feature["hour"].int64_list.value.append(data["hour"][row])
        feature["comment"].bytes_list.value.append(data["comment"][row])
        feature["image"].bytes_list.value.append(data["image"][row].tobytes())
        records.append(example.SerializeToString())
    log = _log(made / "log", [{"examples": np.array(records, object)}])
    assert _monitor(made, request_log=str(log)) == MonitorResult("ok", 1, 50, [])


def test_missing_values_are_shown(made):
    data = _data(40, 1)
    data["hour"][:10] = MISSING_INT
    _monitor(made, request_log=str(_log(made / "log", [data])))
    assert "| hour | l_infinity |" in (report := (made / "monitoring" / "report.md").read_text())
    assert "| 0.0% | 25.0% |" in report


def test_a_column_of_numbers_per_row_is_the_same_as_a_vector(made):
    data = {name: values.reshape(-1, 1) if name != "image" else values for name, values in _data(40, 1).items()}
    assert _monitor(made, request_log=str(_log(made / "log", [data]))).num_examples == 40


def test_bad_logs(made):
    with pytest.raises(DataError, match=r"there is no file .*Start the server with --request_log_file"):
        _monitor(made, request_log=str(made / "nothing"))
    (made / "broken").write_bytes(b"this is no TFRecord")
    with pytest.raises(DataError, match="broken cannot be read"):
        _monitor(made, request_log=str(made / "broken"))
    other = _log(made / "other", [{"x": np.zeros(3)}])
    with pytest.raises(DataError, match=r"none of the 1 requests in .* holds a feature of the train split"):
        _monitor(made, request_log=str(other))
    assert not (made / "monitoring").exists()
