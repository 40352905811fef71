"""What REST has beyond TF Serving's paths, and its options; without a transport, with a fake model."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving import dtypes
from serving.backends.signatures import Signature
from serving.batching.scheduler import LongWork, finish
from serving.calls import Models
from serving.errors import Code, ServingError
from serving.manager import ModelManager
from serving.protos import SignatureDef
from serving.rest import json_response, rest_api
from serving.rest.http_server import HttpServer
from serving.rest.rest_api import Request, Response, RestApi
from serving.served_model import ModelConfig
from serving.versions import all_versions

CLASSIFIER = SignatureDef(
    method_name="tensorflow/serving/predict", inputs={"inputs": {"dtype": "DT_STRING"}}, outputs={"scores": {}}
)


class Echo:
    """Gives x back as y, and as a classifier knows one class."""

    def __init__(self, path: Path) -> None:
        if (path / "saved_model.pb").read_text() == "broken":
            raise ServingError(Code.INTERNAL, "it is broken")
        self.signatures = {
            "serving_default": Signature("serving_default", {"x": dtypes.FLOAT}, ("y",), {}, None),
            "classify": Signature("classify", {"inputs": dtypes.STRING}, ("scores",), {}, CLASSIFIER),
        }

    def run(self, signature_name: str, inputs: Any, outputs: Any = (), context: Any = None) -> dict[str, np.ndarray]:
        if signature_name == "classify":
            return {"scores": np.ones((len(inputs["inputs"]), 1), np.float32)}
        return {"y": inputs["x"]}

    def close(self) -> None:
        pass


def push(path: Path, content: str = "") -> None:
    path.mkdir(parents=True)
    (path / "saved_model.pb").write_text(content)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ModelManager]:
    push(tmp_path / "m" / "1")
    push(tmp_path / "m" / "2", "broken")
    running = ModelManager([ModelConfig("m", tmp_path / "m", all_versions, {"stable": 1})], Echo, poll_wait_seconds=0)
    running.start()
    yield running
    running.stop()


Ask = Callable[..., Response]


def asking(manager: ModelManager, is_draining: bool = False, **options: Any) -> Ask:
    api = RestApi(Models(manager), lambda: is_draining, **options)
    return lambda target, method="GET", body=b"", **headers: finish(api.handle(Request(method, target, headers, body)))


def test_readiness(manager: ModelManager, tmp_path: Path) -> None:
    ask = asking(manager)
    ready = ask("/healthz/ready")
    assert (ready.status, json.loads(ready.body)) == (200, {"status": "ready"})
    push(tmp_path / "bad" / "1", "broken")
    with pytest.raises(ServingError):
        manager.reload(
            [
                ModelConfig("m", tmp_path / "m", all_versions, {}),
                ModelConfig("bad", tmp_path / "bad", all_versions, {}),
            ]
        )
    answer = ask("/healthz/ready")
    expected = {"status": "not ready", "models_without_available_version": ["bad"]}
    assert (answer.status, json.loads(answer.body)) == (503, expected)
    assert ask("/healthz/live").status == 200
    manager.reload([ModelConfig("m", tmp_path / "m", all_versions, {})])
    assert ask("/healthz/ready").status == 200, "a model that is no longer served does not count"
    draining = asking(manager, is_draining=True)
    assert (draining("/healthz/ready").status, draining("/healthz/live").status) == (503, 200)


def test_model_list(manager: ModelManager, tmp_path: Path) -> None:
    assert json.loads(asking(manager)("/models").body) == {
        "models": [
            {
                "name": "m",
                "base_path": str(tmp_path / "m"),
                "labels": {"stable": 1},
                "versions": [
                    {"version": 2, "state": "END", "error": "it is broken", "signatures": []},
                    {
                        "version": 1,
                        "state": "AVAILABLE",
                        "error": None,
                        "signatures": ["classify", "serving_default"],
                    },
                ],
            }
        ]
    }


def test_method_names_are_checked_on_request(manager: ModelManager) -> None:
    """TF2's exports call every signature a predict; TF Serving's flag is off by default, too."""
    body = b'{"signature_name": "classify", "examples": [{"x": 1}]}'
    answer = asking(manager)("/v1/models/m:classify", "POST", body)
    assert (answer.status, json.loads(answer.body)) == (200, {"results": [[["", 1.0]]]})
    answer = asking(manager, check_method_names=True)("/v1/models/m:classify", "POST", body)
    message = (
        "Expected classification signature method_name to be tensorflow/serving/classify. "
        "Was: tensorflow/serving/predict"
    )
    assert (answer.status, json.loads(answer.body)) == (400, {"error": message})


def test_strict_leaves_texts_alone() -> None:
    body = rb'{"NaN": ["NaN", "a\" -Infinity \\", NaN, -Infinity, Infinity, -1.5], "": 1}'
    expected = rb'{"NaN": ["NaN", "a\" -Infinity \\", null, null, null, -1.5], "": 1}'
    assert json_response.strict(body) == expected


@pytest.mark.parametrize(("key", "answer_key"), [("instances", "predictions"), ("inputs", "outputs")])
def test_strict_json(manager: ModelManager, key: str, answer_key: str) -> None:
    body = b'{"%b": [NaN, Infinity, -Infinity, 1]}' % key.encode()

    def answer(**options: Any) -> Any:
        text = asking(manager, **options)("/v1/models/m/versions/1:predict", "POST", body).body
        return json.loads(text, parse_constant=str)[answer_key]

    assert answer() == ["NaN", "Infinity", "-Infinity", 1.0]
    assert answer(strict_json=True) == [None, None, None, 1.0]


@pytest.mark.parametrize("target", ["/v1/models/m", "/v1/models/nope", "/healthz/live", "/nowhere"])
def test_cors_is_an_option(manager: ModelManager, target: str) -> None:
    """tensorflow_serving/model_servers/http_server.cc: every answer has the headers, or none."""
    assert asking(manager)(target).headers == {}
    assert asking(manager, cors=True)(target).headers == {
        "Access-Control-Allow-Origin": "*",
        "Access-Control-Allow-Methods": "POST, GET",
        "Access-Control-Allow-Headers": "Content-Type",
    }


@pytest.mark.parametrize(
    ("verb", "body", "num_pauses"),
    [
        ("predict", {"instances": [[1.0]] * 4}, 0),
        ("predict", {"instances": [[1.0]] * 5}, 1),
        ("predict", {"inputs": [[1.0]] * 5}, 1),
        ("classify", {"signature_name": "classify", "examples": [{"x": 1.0}] * 4}, 0),
        ("classify", {"signature_name": "classify", "examples": [{"x": 1.0}] * 5}, 1),
    ],
)
def test_a_large_answer_says_so_before_it_is_written(
    manager: ModelManager, monkeypatch: pytest.MonkeyPatch, verb: str, body: Any, num_pauses: int
) -> None:
    monkeypatch.setattr(rest_api, "_MAX_QUICK_CHARACTERS", 40)
    api = RestApi(Models(manager), lambda: False)
    steps = api.handle(Request("POST", f"/v1/models/m:{verb}", {}, json.dumps(body).encode()))
    for _ in range(num_pauses):
        assert isinstance(steps.send(None), LongWork)
    with pytest.raises(StopIteration) as end:
        steps.send(None)
    assert end.value.value.status == 200


def test_a_long_string_is_a_large_answer() -> None:
    assert rest_api._num_characters(np.array([b"x" * 7, "yy"], object)) == 9


def test_health_is_answered_while_a_large_answer_is_written(
    manager: ModelManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of its kind, when requests have been quick so far and so are answered on the event loop."""
    writing, release = threading.Event(), threading.Event()

    def write_slowly(outputs: Any, key: str) -> bytes:
        writing.set()
        assert release.wait(5)
        return b"written"

    monkeypatch.setattr(rest_api, "_MAX_QUICK_CHARACTERS", 10)
    monkeypatch.setattr(json_response, "predictions", write_slowly)
    server = HttpServer(RestApi(Models(manager), lambda: False).handle, "127.0.0.1", 0, 5.0)
    server._slowest_seconds = 0.0
    server.start()
    connections = [HTTPConnection("127.0.0.1", server.port, timeout=5) for _ in range(2)]
    try:
        connections[0].request("POST", "/v1/models/m:predict", json.dumps({"instances": [1.0, 2.0]}))
        assert writing.wait(5)
        connections[1].request("GET", "/healthz/live")
        assert connections[1].getresponse().read() == b'{"status": "alive"}'
        release.set()
        assert connections[0].getresponse().read() == b"written"
    finally:
        for connection in connections:
            connection.close()
        server.stop(grace_seconds=1)
