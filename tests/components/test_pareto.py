"""The Pareto front by hand-made points, and its picture."""

from __future__ import annotations

import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest

from components.verify.pareto import draw, on_front, pareto_front


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(1, 0.7), (2, 0.9), (3, 0.8), (4, 0.95)], [True, True, False, True]),
        ([(1, 0.9), (2, 0.9)], [True, False]),
        ([(1, 0.9), (1, 0.8)], [True, False]),
        ([(1, 0.9), (1, 0.9)], [True, True]),
        ([(2, 0.1)], [True]),
        ([], []),
    ],
)
def test_the_front_is_what_nothing_beats(points: list[tuple[float, float]], expected: list[bool]) -> None:
    assert pareto_front(points) == expected


def row(name: str, value: float | None, latency: float, size: int, *, passed: bool = True) -> dict[str, Any]:
    measured = {"value": value, "latency_ms_p50_batch_1": latency, "size_bytes": size}
    return {"format": name, **measured, "passed": passed, "reason": "" if passed else "auc < 1"}


ROWS = [
    row("saved_model", 0.90, 3.0, 900),
    row("onnx", 0.90, 1.0, 500),
    row("tflite_int8", 0.80, 2.0, 100),
    row("broken", 0.99, 0.1, 10, passed=False),
    {"format": "saved_model: tf.Example", "value": 0.9, "passed": True, "reason": ""},
]


def test_forms_that_failed_or_were_not_measured_are_not_on_the_front() -> None:
    fronts = on_front(ROWS, "auc")
    assert fronts == {
        "saved_model": [],
        "onnx": ["latency", "size"],
        "tflite_int8": ["size"],
        "broken": [],
        "saved_model: tf.Example": [],
    }


def test_an_error_is_the_better_the_smaller_it_is() -> None:
    assert on_front(ROWS, "rmse")["tflite_int8"] == ["latency", "size"]
    assert on_front([row("a", None, 1, 1), row("b", 0.1, 2, 2)], "auc") == {"a": [], "b": ["latency", "size"]}


def test_the_picture_has_a_point_for_each_form_and_a_line_through_the_front(tmp_path: Path) -> None:
    fronts = on_front(ROWS, "auc")
    draw([{**each, "pareto_front": fronts[each["format"]]} for each in ROWS], "auc", tmp_path / "pareto.svg")
    tree = xml.etree.ElementTree.parse(tmp_path / "pareto.svg").getroot()
    circles, lines = (
        [each.attrib for each in tree.iter(f"{{{tree.tag[1:-4]}}}{kind}")] for kind in ("circle", "polyline")
    )
    latency, size = circles[:4], circles[4:]
    assert [circle["fill"] == circle["stroke"] for circle in latency] == [False, True, False, False]
    assert [circle["fill"] == circle["stroke"] for circle in size] == [False, True, True, False]
    assert latency[3]["stroke"] != latency[0]["stroke"]
    saved_model, onnx, int8, broken = (float(circle["cx"]) for circle in latency)
    assert broken < onnx < int8 < saved_model
    # 0.90 stands above 0.80, which has a larger y.
    assert float(latency[0]["cy"]) == float(latency[1]["cy"]) < float(latency[2]["cy"])
    assert [len(line["points"].split()) for line in lines] == [1, 2]
    text = "".join(tree.itertext())
    assert "broken: 0.9900, 0.100 ms, 10 bytes: left out, auc < 1" in text
    assert "tf.Example" not in text
