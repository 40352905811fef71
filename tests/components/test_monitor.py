from __future__ import annotations

import csv
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from typing import Any

import duckdb
import numpy as np
import pytest
import tensorflow as tf
from tensorflow_serving.apis.prediction_log_pb2 import PredictionLog

from components import artifacts, external
from components.config import SECTIONS, MonitorConfig
from components.errors import ConfigError, DataError
from components.examples import MISSING_INT, ExamplesInfo, Feature
from components.monitor import MonitorResult, comparisons, monitor
from components.statistics import FeatureStatistics, StatisticsBuilder, to_json
from serving.request_log.files import rotated_name
from serving.request_log.log import LogRecord, write_records

FEATURES = {
    "fare": Feature("float"),
    "payment": Feature("string"),
    "hour": Feature("int"),
    "comment": Feature("string"),
    "image": Feature("uint8", (2, 2, 1)),
    "label": Feature("int"),
}
INFO = ExamplesInfo(FEATURES, "label", "binary", None, {})
CLASSES = ["no", "yes"]
HOUR = 3600.0
NOW = 490_000 * HOUR + 60


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


def _probabilities(rows: int, seed: int, mean: float = 0.0) -> np.ndarray:
    yes = 1 / (1 + np.exp(-np.random.default_rng(seed).normal(mean, 2, rows)))
    return np.stack([1 - yes, yes], axis=1).astype(np.float32)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Artifacts of the steps before: only what monitor reads is in them."""
    for name, step in {"statistics": "validate", "proof": "verify", "pushed": "push"}.items():
        with artifacts.writing(tmp_path / name, step=step, inputs={}, config=SECTIONS[step]()) as out:
            if name == "statistics":
                (out.path / "statistics.json").write_text(to_json({"train": _split(2000, 0), "test": _split(500, 9)}))
                (out.path / "schema.yaml").write_text("features: {}\n")
            if name == "proof":
                _log(out.path / "request_log.tfrecord", [_data(40, 1)])
                np.save(out.path / "predictions.npy", _probabilities(1000, 5))
            if name == "pushed":
                (out.path / "pushed.json").write_text(json.dumps(PUSHED))
            out.result = _Result()
    return tmp_path


PUSHED = {
    "classes": CLASSES,
    "metrics": {"test": {"accuracy": 0.9, "auc": 0.95}},
    "slices": [{"feature": "payment", "value": "Cash", "num_examples": 500, "metrics": {"accuracy": 0.95}}],
}


def _split(rows: int, seed: int) -> Any:
    builder = StatisticsBuilder(INFO, text_features=["comment"], max_top_values=100, num_quantiles=100)
    builder.update({**_data(rows, seed), "label": np.zeros(rows, np.int64)})
    return builder.finish()


def _log(file: Path, requests: list[dict[str, Any]]) -> Path:
    """As TF Serving writes it: no times, ids or answers."""
    with tf.io.TFRecordWriter(str(file)) as writer:
        for inputs in requests:
            log = PredictionLog()
            for name, values in inputs.items():
                log.predict_log.request.inputs[name].CopyFrom(tf.make_tensor_proto(values))
            writer.write(log.SerializeToString())
    return file


def _record(
    number: int,
    hours_ago: float,
    *,
    rows: int = 50,
    mean: float = 0.0,
    version: int = 1,
    model: str = "m",
    **changes: Any,
) -> LogRecord:
    return LogRecord(
        model_name=model,
        version=version,
        signature_name="serving_default",
        inputs=_data(rows, number + 100, **changes),
        outputs={"probabilities": _probabilities(rows, number + 100, mean)},
        time_seconds=NOW - hours_ago * HOUR,
        request_id=f"id-{number}",
    )


def _monitor(made: Path, **fields: Any) -> MonitorResult:
    paths = {name: made / name for name in ("statistics", "proof", "pushed")}
    settings = {"min_examples": 20, "task": "binary", "primary_metric": "accuracy", **fields}
    return monitor(**paths, monitoring=made / "monitoring", config=MonitorConfig(**settings), now_seconds=NOW)


def _alarms(result: MonitorResult) -> list[tuple[str, str, str]]:
    return [(alarm.kind, alarm.name, alarm.reference) for alarm in result.alarms]


def _found(made: Path) -> dict[str, Any]:
    return json.loads((made / "monitoring" / "monitor.json").read_text())


def _comparison(made: Path, kind: str, name: str, reference: str | None = None, where: str = "") -> dict[str, Any]:
    [found] = [
        each
        for each in _found(made)["comparisons"]
        if (each["kind"], each["name"], each["where"]) == (kind, name, where) and reference in (None, each["reference"])
    ]
    return found


def test_requests_like_the_train_split_are_ok(made):
    assert _monitor(made) == MonitorResult("ok", 1, 40, 1, None, 40, None, [])
    report = (made / "monitoring" / "report.md").read_text()
    assert "1 requests, 40 examples: no alarm." in report
    found = _found(made)["comparisons"]
    assert {each["name"] for each in found if each["kind"] == "skew"} == {"fare", "payment", "hour", "comment"}


@pytest.mark.parametrize(
    ("changes", "feature", "measure", "detail"),
    [
        ({"shift": 2}, "fare", "jensen_shannon", r"median: -?0\.0\d+ -> [12]\.\d+"),
        ({"cash": 1.0}, "payment", "l_infinity", r"Ca(sh|rd): .*% -> .*%"),
        ({"hours": 3}, "hour", "l_infinity", r"2[123]: 4\..% -> 3.\..%"),
        ({"word": b"bad"}, "comment", "l_infinity", "x: 50.0% -> 0.0%"),
    ],
)
def test_skew_is_found_feature_by_feature(made, changes, feature, measure, detail):
    log = _log(made / "log", [_data(10, seed, **changes) for seed in range(20)])
    result = _monitor(made, request_log=str(log))
    assert (result.status, result.num_requests, result.num_examples) == ("alarm", 20, 200)
    assert [(each.kind, each.name, each.measure) for each in result.alarms] == [("skew", feature, measure)]
    assert re.fullmatch(detail, result.alarms[0].detail)
    assert f"1 alarms: skew of {feature}." in (made / "monitoring" / "report.md").read_text()
    lenient = {"max_linf": 1.0, "max_jensen_shannon": 1.0}
    assert _monitor(made, request_log=str(log), **lenient).status == "ok"
    assert _monitor(made, request_log=str(log), thresholds={feature: 1.0}).status == "ok"
    assert _monitor(made, request_log=str(log), **lenient, thresholds={feature: 0.01}).status == "alarm"


def test_threshold_of_no_feature(made):
    with pytest.raises(ConfigError, match=r"monitor.thresholds: there is no feature 'fair'. Did you mean 'fare'"):
        _monitor(made, thresholds={"fair": 0.1})


@pytest.mark.parametrize(("min_examples", "status"), [(20, "alarm"), (21, "too_few")])
def test_too_few_examples_are_not_judged(made, min_examples, status):
    log = _log(made / "log", [_data(20, 2, shift=5)])
    assert _monitor(made, request_log=str(log), min_examples=min_examples).status == status


def test_an_empty_log_is_too_few(made):
    result = _monitor(made, request_log=str(_log(made / "log", [])))
    assert result == MonitorResult("too_few", 0, 0, 0, None, 0, None, [])


def test_a_distance_that_may_be_noise_is_no_alarm(made):
    log = _log(made / "log", [_data(30, 4)])
    settings = {"request_log": str(log), "thresholds": {"payment": 0.001, "hour": 0.001, "fare": 0.001}}
    assert _monitor(made, **settings).status == "ok"
    assert {_comparison(made, "skew", name)["verdict"] for name in ("payment", "hour", "fare")} == {"too_few"}
    noise = _comparison(made, "skew", "fare")["noise"]
    _monitor(made, **settings, significance=0.5)
    assert _comparison(made, "skew", "fare")["noise"] < noise / 1.5


def _exceeds_noise(kind: str, rng: np.random.Generator, rows: int, chance: float) -> bool:
    """Whether the distance of two samples of one distribution is above its noise."""
    if kind == "shares":
        shares = rng.binomial(rows, 0.3, 2) / rows
        return abs(shares[0] - shares[1]) > comparisons.shares_noise(*shares, rows, rows, chance)
    if kind == "jensen_shannon":
        p, q = rng.multinomial(rows, [0.1] * 10, 2) / rows
        middle = (p + q) / 2
        value = sum(np.sum(side * np.log2(side / middle)) for side in (p, q)) / 2
        return value > comparisons.jensen_shannon_noise(rows, rows, chance)
    before, now = (
        {"x": FeatureStatistics("int", rows, 0, top_values=tuple(enumerate(counts.tolist())), num_unique=30)}
        for counts in rng.multinomial(rows, [1 / 30] * 30, 2)
    )
    [candidate] = comparisons.distances("skew", "train", before, now, lambda *_: 0.0)
    return candidate.distance > candidate.noise(chance)


@pytest.mark.parametrize(("kind", "least"), [("jensen_shannon", 0.02), ("shares", 0.02), ("categories", 0.0)])
def test_noise_is_what_samples_of_one_distribution_reach(kind, least):
    rng = np.random.default_rng(0)
    exceeded = sum(_exceeds_noise(kind, rng, 400, 0.05) for _ in range(400)) / 400
    assert least <= exceeded < 0.08


def test_the_chance_of_a_false_alarm_is_shared_out_over_all_comparisons():
    chances = []
    candidate = comparisons.Candidate(
        "skew", "x", "l_infinity", "train", 0.5, 0.1, lambda chance: chances.append(chance) or 0.2, 100
    )
    [alarm] = comparisons.judge([candidate], significance=0.01, min_examples=100)
    assert (alarm.noise, alarm.verdict) == (0.2, "alarm")
    comparisons.judge([candidate] * 5, significance=0.01, min_examples=100)
    assert chances == pytest.approx([0.01] + [0.002] * 5)


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
    for alias in ("examples", "inputs"):
        log = _log(made / "log", [{alias: np.array(records, object)}])
        assert _monitor(made, request_log=str(log)) == MonitorResult("ok", 1, 50, 1, None, 50, None, [])


def test_missing_values_are_an_alarm_above_their_threshold(made):
    data = _data(400, 1)
    data["hour"][:100] = MISSING_INT
    log = str(_log(made / "log", [data]))
    assert _alarms(_monitor(made, request_log=log)) == [("missing", "hour", "train")]
    assert "| hour |  | train | increase | 0.250 | 0.1 |" in (made / "monitoring" / "report.md").read_text()
    assert _monitor(made, request_log=log, max_missing_increase=0.3).status == "ok"


def test_unseen_categories_are_an_alarm_above_their_threshold(made):
    data = _data(400, 1)
    data["payment"][:60] = b"Crypto"
    log = str(_log(made / "log", [data]))
    assert _alarms(_monitor(made, request_log=log)) == [("unseen", "payment", "held_out")]
    assert _comparison(made, "unseen", "payment")["distance"] == pytest.approx(0.15)
    assert _monitor(made, request_log=log, max_unseen_increase=0.2).status == "ok"


def test_a_column_of_numbers_per_row_is_the_same_as_a_vector(made):
    data = {name: values.reshape(-1, 1) if name != "image" else values for name, values in _data(40, 1).items()}
    assert _monitor(made, request_log=str(_log(made / "log", [data]))).num_examples == 40


def test_a_log_that_has_grown_or_rotated_or_got_labels_is_looked_at_again(made):
    log, labels = made / "log.tfrecord", made / "labels.csv"
    config = MonitorConfig(request_log=str(log), labels=str(labels))
    states = [external.state("monitor", config, {})]
    for change in (
        lambda: write_records(log, [_record(0, 1)]),
        lambda: write_records(log, [_record(1, 1)]),
        lambda: log.rename(rotated_name(log, NOW)),
        lambda: labels.write_text("request_id,label\nid-0,yes\n"),
    ):
        change()
        states.append(external.state("monitor", config, {}))
    assert all(before != after for before, after in pairwise(states))
    assert external.state("monitor", config, {}) == states[-1]


def test_images_are_counted(made):
    result = _monitor(made, request_log=str(_log(made / "log", [{"image": _data(30, 1)["image"]}])))
    assert (result.status, result.num_examples) == ("ok", 30)


@pytest.mark.parametrize("format", ["tfrecord", "parquet"])
def test_the_newest_window_is_judged_against_the_ones_before(made, format):
    folder = made / "logs"
    folder.mkdir()
    hours = [30, *range(6, 0, -1)]
    records = [_record(number, hour, shift=3.0 if hour == 1 else 0.0) for number, hour in enumerate(hours)]
    records.append(_record(99, 0, rows=5))  # the window has only begun
    write_records(folder / "a", records[::-1], format=format)
    result = _monitor(made, request_log=str(folder), window_seconds=HOUR, num_windows=12)
    assert set(_alarms(result)) == {
        ("drift", "fare", "first"),
        ("drift", "fare", "previous"),
        ("skew", "fare", "train"),
    }
    assert (result.num_windows, result.num_examples, result.num_judged_examples) == (7, 305, 50)
    assert result.window_start_seconds == NOW - 60 - HOUR
    assert [window["num_requests"] for window in _found(made)["windows"]] == [1] * 7
    assert _monitor(made, request_log=str(folder), window_seconds=HOUR, num_windows=2).num_windows == 2


def test_a_slow_drift_shows_against_the_first_window(made):
    records = [_record(hour, hour, rows=2000, shift=(6 - hour) * 0.25) for hour in range(6, 0, -1)]
    write_records(made / "log", records)
    settings = {"window_seconds": HOUR, "max_jensen_shannon": 0.1, "thresholds": {}}
    assert set(_alarms(_monitor(made, request_log=str(made / "log"), **settings))) == {
        ("skew", "fare", "train"),
        ("drift", "fare", "first"),
    }


def test_windows_need_times(made):
    log = _log(made / "log", [_data(10, 0)])
    with pytest.raises(DataError, match="do not say when they were made"):
        _monitor(made, request_log=str(log), window_seconds=HOUR)


def test_predictions_drift_from_those_of_the_test_split(made):
    write_records(made / "log", [_record(number, 1, mean=3.0) for number in range(10)])
    result = _monitor(made, request_log=str(made / "log"))
    assert set(_alarms(result)) == {("prediction", name, "held_out") for name in ("predicted_label", "predicted_score")}
    thresholds = {"predicted_label": 1.0, "predicted_score": 1.0}
    assert _monitor(made, request_log=str(made / "log"), thresholds=thresholds).status == "ok"


def test_predictions_of_another_version_are_no_drift(made):
    old = [_record(number, 2, mean=4.0, version=1) for number in range(5)]
    new = [_record(number, 1, version=2) for number in range(5, 10)]
    write_records(made / "log", [*new[:2], *old, *new[2:]])
    assert _monitor(made, request_log=str(made / "log")).status == "ok"
    assert _comparison(made, "prediction", "predicted_score")["distance"] < 0.05
    assert _monitor(made, request_log=str(made / "log"), window_seconds=HOUR).status == "ok"


def test_predictions_of_a_regression(made):
    pushed = {**PUSHED, "classes": [], "metrics": {"test": {"rmse": 1.0}}}
    with artifacts.writing(made / "pushed", step="push", inputs={}, config=SECTIONS["push"]()) as out:
        (out.path / "pushed.json").write_text(json.dumps(pushed))
        out.result = _Result()
    values = np.random.default_rng(0).normal(size=(300, 1)).astype(np.float32)
    with artifacts.writing(made / "proof", step="verify", inputs={}, config=SECTIONS["verify"]()) as out:
        np.save(out.path / "predictions.npy", values.ravel())
        out.result = _Result()
    for alias, shift, status in [("value", 0.0, "ok"), ("outputs", 2.0, "alarm")]:
        log = made / alias
        write_records(log, [LogRecord("m", 1, "s", _data(300, 1), {alias: values + shift})])
        assert _monitor(made, request_log=str(log), task="regression", primary_metric="rmse").status == status


def test_only_the_named_model_counts(made):
    write_records(made / "log", [_record(0, 1), _record(1, 1, model="other", shift=9.0)])
    result = _monitor(made, request_log=str(made / "log"), model_name="m")
    assert (result.status, result.num_requests) == ("ok", 1)
    assert _monitor(made, request_log=str(made / "log"), max_jensen_shannon=0.15).status == "alarm"


def _write_labels(file: Path, rows: list[tuple[str, int, str]]) -> Path:
    with file.with_suffix(".csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([("request_id", "row", "label"), *rows])
    if file.suffix == ".parquet":
        duckdb.sql(f"copy (from read_csv('{file.with_suffix('.csv')}', all_varchar=true)) to '{file}'")
    if file.suffix == ".jsonl":
        duckdb.sql(f"copy (from read_csv('{file.with_suffix('.csv')}')) to '{file}' (format json)")
    return file


def _labelled(made: Path, suffix: str, wrong: float, only: bytes | None = None) -> Path:
    """A log of 10 requests, and labels in which a share of the answers, to one kind of payment, is wrong."""
    records = [_record(number, 1) for number in range(10)]
    write_records(made / "log", records)
    rows, rng = [], np.random.default_rng(0)
    for record in records:
        answers = record.outputs["probabilities"].argmax(axis=1)
        for row, answer in enumerate(answers.tolist()):
            concerned = only in (None, record.inputs["payment"][row])
            label = 1 - answer if concerned and rng.random() < wrong else answer
            rows.append((record.request_id, row, CLASSES[label]))
    rows += [(f"unknown-{number}", 0, "yes") for number in range(500)]
    return _write_labels(made / f"labels{suffix}", rows)


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".jsonl"])
def test_late_labels_give_quality_and_coverage(made, suffix):
    labels = _labelled(made, suffix, wrong=0.5)
    result = _monitor(made, request_log=str(made / "log"), labels=str(labels))
    assert (result.status, result.label_coverage) == ("alarm", 0.5)
    assert _alarms(result) == [("quality", "accuracy", "held_out")]
    [whole] = _found(made)["quality"]
    assert whole["num_examples"] == 500
    assert 0.4 < whole["metrics"]["accuracy"] < 0.6
    chance = 0.01 / len(_found(made)["comparisons"])
    of_both_samples = (0.25 / 500 + 0.25 / 1000) ** 0.5
    noise = _comparison(made, "quality", "accuracy")["noise"]
    assert noise == pytest.approx(NormalDist().inv_cdf(1 - chance) * of_both_samples, rel=0.15)
    assert _monitor(made, request_log=str(made / "log"), labels=str(labels), max_drop=0.6).status == "ok"


def test_a_bad_slice_is_found_behind_a_good_whole(made):
    labels = _labelled(made, ".csv", wrong=0.2, only=b"Cash")
    settings = {"request_log": str(made / "log"), "labels": str(labels), "slice_features": ["payment", "label"]}
    result = _monitor(made, **settings)
    assert [(each.name, each.where) for each in result.alarms] == [("accuracy", "payment=Cash")]
    assert {piece["where"] for piece in _found(made)["quality"]} == {"", "payment=Card", "payment=Cash"}
    assert (
        _comparison(made, "quality", "accuracy", where="payment=Card")["verdict"] == "too_few"
    )  # nothing to compare with
    assert _monitor(made, **settings, min_examples=300).status == "ok"


def test_quality_is_that_of_the_newest_version(made):
    records = [_record(number, 1, version=version) for number, version in enumerate([2, 1, 3, 2, 3])]
    write_records(made / "log", records)
    rows = [
        (record.request_id, row, CLASSES[answer if record.version == 3 else 1 - answer])
        for record in records
        for row, answer in enumerate(record.outputs["probabilities"].argmax(axis=1).tolist())
    ]
    labels = _write_labels(made / "labels.csv", rows)
    assert _monitor(made, request_log=str(made / "log"), labels=str(labels)).label_coverage == 0.4
    [whole] = _found(made)["quality"]
    assert (whole["num_examples"], whole["metrics"]["accuracy"]) == (100, 1.0)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.csv", "request_id,label\na,maybe\n", "has the label 'maybe', which is none of the classes no, yes"),
        ("x.csv", "id,label\na,yes\n", "has no column request_id. It has: id, label"),
        ("x.txt", "", r"ends in none of \.csv, \.parquet, \.jsonl"),
        ("x.jsonl", "{", "cannot be read"),
        ("x.parquet", "PAR1", "cannot be read"),
        ("gone.csv", None, "cannot be read"),
    ],
)
def test_bad_labels(made, name, text, message):
    if text is not None:
        (made / name).write_text(text)
    with pytest.raises(DataError, match=message):
        _monitor(made, labels=str(made / name))


def test_labels_as_numbers_are_classes(made):
    write_records(made / "log", [_record(0, 1)])
    answers = _record(0, 1).outputs["probabilities"].argmax(axis=1)
    rows = [("id-0", row, f"{answer}.0") for row, answer in enumerate(answers)]
    _monitor(made, request_log=str(made / "log"), labels=str(_write_labels(made / "l.csv", rows)))
    assert _found(made)["quality"][0]["metrics"]["accuracy"] == 1


def test_gauges_are_what_prometheus_reads(made):
    labels = _labelled(made, ".csv", wrong=0.5)
    _monitor(made, request_log=str(made / "log"), labels=str(labels), name='a"b')
    lines = (made / "monitoring" / "metrics.prom").read_text().splitlines()
    series = [line for line in lines if not line.startswith("#")]
    pattern = r'[a-z_]+\{model="a\\"b"(,[a-z]+="[^"]*")*\} [-+.\de]+'
    assert [line for line in series if not re.fullmatch(pattern, line)] == []
    assert len({line.rpartition(" ")[0] for line in series}) == len(series)
    assert 'headrace_monitor_alarms{model="a\\"b"} 1' in series
    assert 'headrace_label_coverage_ratio{model="a\\"b"} 0.5' in series
    fare = _comparison(made, "skew", "fare")["distance"]
    gauge = 'headrace_feature_distance{model="a\\"b",feature="fare",measure="jensen_shannon",reference="train"}'
    assert f"{gauge} {fare}" in series


def test_page_stands_alone_and_escapes_what_clients_send(made):
    evil = b"<script>alert(1)</script>"
    records = [_record(hour, hour) for hour in range(4, 0, -1)]
    for record in records:
        record.inputs["payment"][:20] = evil
    write_records(made / "log", records)
    _monitor(made, request_log=str(made / "log"), window_seconds=HOUR)
    page = (made / "monitoring" / "report.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert re.findall(r'(?:src|href)="?([^" >]+)', page) == []
    assert page.count("<figure>") == page.count("</figure>") == 4 + 2
    assert page.count("<polyline") == 6
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(svg)


def test_bad_logs(made):
    with pytest.raises(DataError, match=r"there is no file .*Start the server with --request_log_file"):
        _monitor(made, request_log=str(made / "nothing"))
    (made / "broken").write_bytes(b"this is no TFRecord")
    with pytest.raises(DataError, match="broken cannot be read"):
        _monitor(made, request_log=str(made / "broken"))
    other = _log(made / "other", [{"x": np.zeros(3)}])
    with pytest.raises(DataError, match=r"none of the 1 requests in .* holds a feature of the train split"):
        _monitor(made, request_log=str(other))
    for inputs in ({"hour": np.array([b"noon"], object)}, {"examples": np.array([b"no example"], object)}):
        another = _log(made / "another", [inputs])
        with pytest.raises(DataError, match=r"does not fit the train split: .* name yours in monitor.model_name"):
            _monitor(made, request_log=str(another))
    assert not (made / "monitoring").exists()
