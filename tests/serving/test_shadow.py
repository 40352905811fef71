"""Shadow traffic and its report."""

from __future__ import annotations

import json
import threading
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving.calls import Call, CallContext
from serving.client import RestClient
from serving.errors import Code, ServingError
from serving.monitoring.shadow import OutputDifference, Shadow
from serving.served_model import Version
from serving.server import ModelServer
from serving.versions import all_versions
from tests.serving.models import copy_half_plus_two, save_sleeper


@pytest.mark.parametrize(
    ("serving", "shadow", "expected"),
    [  # rows, changed, max_abs, mean of the numbers, misshapen
        (np.float32([[1, 2], [3, 1]]), np.float32([[1, 2.5], [3, 4]]), (2, 1, 3.0, 0.875, 0)),
        (np.float32([1, 2]), np.float32([1, 3]), (2, 1, 1.0, 0.5, 0)),
        (np.float32([[np.nan], [1]]), np.float32([[np.nan], [np.nan]]), (2, 1, 0.0, 0.0, 0)),
        (np.float32([[np.inf, 0]]), np.float32([[np.inf, 1]]), (1, 0, 1.0, 0.5, 0)),
        (np.array([b"a", b"b"], object), np.array([b"a", b"c"], object), (2, 1, 0.0, 0.0, 0)),
        (np.int64([[1, 2], [3, 4]]), np.int64([[1, 2], [3, 5]]), (2, 1, 0.0, 0.0, 0)),
        (np.float32(2), np.float32(3), (1, 1, 1.0, 1.0, 0)),
        (np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32), (0, 0, 0.0, 0.0, 0)),
        (np.zeros((1, 3), np.float32), np.zeros((1, 2), np.float32), (0, 0, 0.0, 0.0, 1)),
        (np.zeros(2, np.float32), np.zeros(2, np.int32), (0, 0, 0.0, 0.0, 1)),
    ],
)
def test_differences_of_an_output(serving: np.ndarray, shadow: np.ndarray, expected: tuple[Any, ...]) -> None:
    found = OutputDifference()
    found.add(serving, shadow)
    mean = found.sum_abs / max(found.numbers, 1)
    assert (found.rows, found.changed, found.max_abs, mean, found.misshapen) == expected


class FakeModel:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def run(self, signature_name: str, inputs: Any, outputs: Any = ()) -> Any:
        return self.answer()


class FakeManager:
    def __init__(self, answer: Any) -> None:
        self.shadow = Version("m", 2, Path("m/2"), model=FakeModel(answer))  # type: ignore[arg-type]

    def labels(self, name: str) -> dict[str, int]:
        return {"canary": 2} if name == "m" else {}

    @contextmanager
    def lease(self, name: str, number: int, label: None) -> Any:
        assert number == 2
        yield self.shadow


def call(version: int = 1, name: str = "m", error: ServingError | None = None, inputs: Any = None) -> Call:
    outputs = {"y": np.float32([[1, 2]])}
    return Call(Version(name, version, Path("m")), "sig", inputs or {}, outputs, error, 0.5, CallContext())


def test_only_calls_of_another_version_that_succeeded_are_repeated() -> None:
    shadow = Shadow(FakeManager(lambda: {"y": np.float32([[2, 1]])}), "canary")  # type: ignore[arg-type]
    for one in (call(), call(2), call(name="other"), call(error=ServingError(Code.INTERNAL, "no")), call()):
        shadow(one)
    shadow.close()
    [entry] = shadow.report()["comparisons"]
    assert (entry["calls"], entry["shadow_errors"], entry["shadow_version"]) == (2, 0, 2)
    assert entry["mean_milliseconds"]["serving"] == 500
    assert entry["outputs"] == {
        "y": {"rows": 2, "rows_changed": 2, "mean_abs_difference": 1.0, "max_abs_difference": 1.0, "misshapen": 0}
    }


def test_errors_and_missing_outputs_of_the_shadow_are_reported() -> None:
    def fail() -> Any:
        raise ServingError(Code.INVALID_ARGUMENT, "<b>bad</b>")

    answers = iter([fail, fail, dict])
    shadow = Shadow(FakeManager(lambda: next(answers)()), "canary")  # type: ignore[arg-type]
    for _ in range(3):
        shadow(call())
    shadow.close()
    [entry] = shadow.report()["comparisons"]
    assert (entry["calls"], entry["shadow_errors"], entry["outputs"]["y"]["misshapen"]) == (1, 2, 1)
    assert [count for message, count in entry["errors"].items() if "bad" in message] == [2]
    assert "&lt;b&gt;bad&lt;/b&gt;" in shadow.page()


def test_serving_does_not_wait_for_the_shadow() -> None:
    goes_on = threading.Event()
    shadow = Shadow(FakeManager(lambda: goes_on.wait() and {}), "canary")  # type: ignore[arg-type]
    for _ in range(200):
        shadow(call())
    assert shadow.dropped == 200 - 64
    goes_on.set()
    shadow.close()
    report = shadow.report()
    assert report["comparisons"][0]["calls"] + report["dropped"] == 200


def test_few_large_calls_wait() -> None:
    goes_on = threading.Event()
    shadow = Shadow(FakeManager(lambda: goes_on.wait() and {}), "canary")  # type: ignore[arg-type]
    large = {"x": np.zeros(24 << 20, np.uint8)}
    for inputs in (large, large, large, {}, {"x": np.zeros(65 << 20, np.uint8)}):
        shadow(call(inputs=inputs))
    assert shadow.dropped == 2, "one does not fit beside two others, and one never would"
    goes_on.set()
    shadow.close()
    assert shadow.report()["comparisons"][0]["calls"] == 3


def test_report_of_a_server(tmp_path: Path) -> None:
    copy_half_plus_two(tmp_path / "1")
    save_sleeper(tmp_path / "2", scale=2.0)
    with ModelServer(
        "m", tmp_path, version_policy=all_versions, version_labels={"canary": 2}, shadow_label="canary"
    ) as server:
        url = f"http://127.0.0.1:{server.rest_port}"
        with RestClient(url) as client:
            x = np.float32([-1.0, 0.0])
            assert client.predict("m", {"x": x}, version=1)["y"].tolist() == [1.5, 2.0]
            client.predict("m", {"x": x}, version=2)
        assert server._shadow is not None
        server._shadow.close()
        with urllib.request.urlopen(f"{url}/shadow") as response:
            [entry] = json.load(response)["comparisons"]
        request = urllib.request.Request(f"{url}/shadow", headers={"Accept": "text/html,*/*"})
        with urllib.request.urlopen(request) as response:
            page = response.read().decode()
    assert (entry["serving_version"], entry["shadow_version"], entry["calls"]) == (1, 2, 1)
    assert entry["outputs"]["y"]["max_abs_difference"] == 3.5
    assert "<td>m</td><td>serving_default</td><td>1</td><td>2</td><td>1</td>" in page
