"""Classify, Regress and MultiInference: what a signature must look like, and what its answers may be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest

from serving import dtypes, protos, tfrecord
from serving.calls import CallContext, Models
from serving.errors import Code, ServingError
from serving.inference import CLASSIFY, REGRESS, infer, infer_all
from serving.request_log import log as request_log
from serving.rest import json_examples, json_response
from serving.rpc.grpc_api import GrpcApi
from serving.served_model import Version
from serving.server import ModelServer, load_version
from serving.settings import LoadSettings
from serving.warmup import WARMUP_FILE, replay
from tests.serving import models

LABELS = np.array([[b"cat", b"dog"], [b"cat", b"dog"]], object)
SCORES = np.array([[0.25, 0.75], [1, 0]], np.float32)


class FakeModel:
    """A model of one signature, `serving_default`, that gives fixed outputs and notes its calls."""

    def __init__(self, outputs: Mapping[str, np.ndarray], inputs: tuple[str, ...] = ("inputs",)) -> None:
        proto = protos.SignatureDef()
        for alias in inputs:
            proto.inputs[alias].dtype = dtypes.STRING
        for alias in outputs:
            proto.outputs[alias].name = f"{alias}:0"
        self.signatures = {"serving_default": SimpleNamespace(proto=proto)}
        self.outputs = outputs
        self.calls: list[tuple[str, list[bytes]]] = []

    def run(
        self, signature_name: str, inputs: Mapping[str, np.ndarray], outputs: Any = (), context: Any = None
    ) -> dict[str, np.ndarray]:
        self.calls.append((signature_name, inputs["inputs"].tolist()))
        return {alias: self.outputs[alias] for alias in outputs}

    def close(self) -> None:
        pass


def examples(*values: float) -> Any:
    return json_examples.parse_examples({"examples": [{"x": value} for value in values]})


def test_answers_without_labels_or_without_scores() -> None:
    both = infer(FakeModel({"classes": LABELS, "scores": SCORES}), CLASSIFY, "", examples(1.0, 2.0))
    assert (both.labels.tolist(), both.scores.tolist()) == (LABELS.tolist(), SCORES.tolist())
    assert both.signature_name == "serving_default"
    only_labels = infer(FakeModel({"classes": LABELS}), CLASSIFY, "", examples(1.0, 2.0))
    assert (only_labels.labels.tolist(), only_labels.scores.tolist()) == (LABELS.tolist(), [[0, 0], [0, 0]])
    only_scores = infer(FakeModel({"scores": SCORES}), CLASSIFY, "", examples(1.0, 2.0))
    assert (only_scores.labels.tolist(), only_scores.scores.tolist()) == ([[b"", b""]] * 2, SCORES.tolist())


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_regression_is_flat(shape: tuple[int, ...]) -> None:
    values = np.array([1.5, -2], np.float32).reshape(shape)
    assert infer(FakeModel({"outputs": values}), REGRESS, "", examples(1.0, 2.0)).values.tolist() == [1.5, -2]


@pytest.mark.parametrize(
    ("method", "inputs", "outputs", "code", "message"),
    [
        (CLASSIFY, ("inputs", "more"), {"scores": SCORES}, Code.INVALID_ARGUMENT, "Expected one input Tensor."),
        (CLASSIFY, ("x",), {"scores": SCORES}, Code.FAILED_PRECONDITION, "No classification inputs found"),
        (CLASSIFY, ("inputs",), {}, Code.INVALID_ARGUMENT, "Expected one or two output Tensors, found 0"),
        (CLASSIFY, ("inputs",), {"y": SCORES}, Code.FAILED_PRECONDITION, 'at least one of "classes" or "scores"'),
        (
            CLASSIFY,
            ("inputs",),
            {"scores": SCORES[0]},
            Code.INVALID_ARGUMENT,
            "Expected Tensor shape: [batch_size num_classes] but got [2]",
        ),
        (
            CLASSIFY,
            ("inputs",),
            {"classes": SCORES},
            Code.INVALID_ARGUMENT,
            "Expected classes Tensor of DT_STRING. Got: DT_FLOAT",
        ),
        (
            CLASSIFY,
            ("inputs",),
            {"scores": SCORES.astype(np.float64)},
            Code.INVALID_ARGUMENT,
            "Expected scores Tensor of DT_FLOAT. Got: DT_DOUBLE",
        ),
        (
            CLASSIFY,
            ("inputs",),
            {"scores": SCORES[:1]},
            Code.INVALID_ARGUMENT,
            "Expected scores output batch size of 2. Got: 1",
        ),
        (
            CLASSIFY,
            ("inputs",),
            {"classes": LABELS[:, :1], "scores": SCORES},
            Code.INVALID_ARGUMENT,
            "should match in dim_size(1). Got 1 vs. 2",
        ),
        (REGRESS, ("inputs", "more"), {"outputs": SCORES}, Code.INVALID_ARGUMENT, "Expected one input Tensor."),
        (REGRESS, ("inputs",), {"outputs": SCORES, "y": SCORES}, Code.INVALID_ARGUMENT, "Expected one output Tensor."),
        (REGRESS, ("x",), {"outputs": SCORES}, Code.FAILED_PRECONDITION, "No regression inputs found"),
        (REGRESS, ("inputs",), {"scores": SCORES}, Code.FAILED_PRECONDITION, "No regression outputs found"),
        (
            REGRESS,
            ("inputs",),
            {"outputs": SCORES},
            Code.INVALID_ARGUMENT,
            "either [batch_size] or [batch_size, 1] but got [2,2]",
        ),
        (
            REGRESS,
            ("inputs",),
            {"outputs": SCORES[:1, 0]},
            Code.INVALID_ARGUMENT,
            "Input batch size did not match output batch size: 2 vs. 1",
        ),
        (
            REGRESS,
            ("inputs",),
            {"outputs": np.array([1, 2])},
            Code.INVALID_ARGUMENT,
            "Expected output Tensor of DT_FLOAT.  Got: DT_INT64",
        ),
    ],
)
def test_misfits(
    method: str, inputs: tuple[str, ...], outputs: dict[str, np.ndarray], code: Code, message: str
) -> None:
    with pytest.raises(ServingError) as raised:
        infer(FakeModel(outputs, inputs), method, "", examples(1.0, 2.0))
    assert raised.value.code is code
    assert message in raised.value.message


def task(method_name: str, name: str = "m", signature_name: str = "") -> Any:
    found = protos.MultiInferenceRequest().tasks.add(method_name=method_name)
    found.model_spec.name, found.model_spec.signature_name = name, signature_name
    return found


@pytest.mark.parametrize(
    ("tasks", "code", "message"),
    [
        ([task("tensorflow/serving/predict")], Code.UNIMPLEMENTED, "Unsupported signature method_name: tensorflow/"),
        ([task(CLASSIFY), task(CLASSIFY, name="")], Code.INVALID_ARGUMENT, "an empty model name"),
        (
            [task(CLASSIFY), task(CLASSIFY, signature_name="serving_default")],
            Code.INVALID_ARGUMENT,
            "Duplicate evaluation of signature: serving_default",
        ),
        ([task(CLASSIFY, signature_name="no")], Code.INVALID_ARGUMENT, "signature not found in model graph: no"),
    ],
)
def test_tasks_are_checked_before_any_runs(tasks: list[Any], code: Code, message: str) -> None:
    model = FakeModel({"scores": SCORES})
    with pytest.raises(ServingError) as raised:
        infer_all(model, tasks, examples(1.0, 2.0))
    assert raised.value.code is code
    assert message in raised.value.message
    assert model.calls == []


def test_grpc_answers_with_labels_and_the_version() -> None:
    request = protos.ClassificationRequest(input=examples(1.0, 2.0))
    with pytest.raises(ServingError, match="Missing ModelSpec"):
        api_of(FakeModel({})).classify(request, CallContext())
    request.model_spec.name = "m"
    response = api_of(FakeModel({"classes": LABELS, "scores": SCORES})).classify(request, CallContext())
    found = [[(item.label, item.score) for item in row.classes] for row in response.result.classifications]
    assert found == [[("cat", 0.25), ("dog", 0.75)], [("cat", 1), ("dog", 0)]]
    assert (response.model_spec.signature_name, response.model_spec.version.value) == ("serving_default", 3)
    with pytest.raises(ServingError, match="signature serving_default gives a class that is not UTF-8") as raised:
        api_of(FakeModel({"classes": np.array([[b"\xff"]] * 2, object)})).classify(request, CallContext())
    assert raised.value.code is Code.INTERNAL


def api_of(model: FakeModel) -> GrpcApi:
    manager: Any = SimpleNamespace(lease=lambda *_: nullcontext(Version("m", 3, Path("m/3"), model=model)))
    return GrpcApi(Models(manager))


def test_features_of_json() -> None:
    document = {
        "context": {"country": "é", "empty": []},
        "examples": [
            {"flag": [True, 2], "blob": [{"b64": "/w=="}, "b"], "low": -(2**63), "big": [float(2**64), 1e300]},
            {},
        ],
    }
    message = json_examples.parse_examples(document).example_list_with_context
    context = message.context.features.feature
    assert context["country"].bytes_list.value == ["é".encode()]
    assert context["empty"].WhichOneof("kind") is None
    features = message.examples[0].features.feature
    assert features["flag"].int64_list.value == [1, 2]
    assert features["blob"].bytes_list.value == [b"\xff", b"b"]
    assert features["low"].int64_list.value == [-(2**63)]
    assert features["big"].float_list.value == [2.0**64, float("inf")]
    assert len(message.examples) == 2


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "When method is classify, key 'examples' is expected and was not found"),
        ({"examples": {}}, "Expecting 'examples' value to be an list/array"),
        ({"context": {}, "examples": []}, "'examples' value is an empty array"),
        ({"examples": [{"x": {"a": 1}}]}, "Feature: x has element with unexpected JSON type: Object"),
        ({"examples": [{"x": [True, "a"]}]}, "Unexpected element type in feature: x expecting type: int64"),
        ({"examples": [{"x": ["a", {"b64": "!"}]}]}, "Unable to base64 decode"),
        ({"examples": [{"x\udcff": 1}]}, "Feature name 'x\\udcff' is not UTF-8"),
    ],
)
def test_what_is_no_example(document: dict[str, Any], message: str) -> None:
    with pytest.raises(ServingError) as raised:
        json_examples.parse_examples(document)
    assert raised.value.code is Code.INVALID_ARGUMENT
    assert message in raised.value.message


def test_layout_of_json_answers() -> None:
    assert json_response.classifications(LABELS, SCORES).decode() == (
        '{\n    "results": [[["cat", 0.25], ["dog", 0.75]], [["cat", 1.0], ["dog", 0.0]]\n    ]\n}'
    )
    assert json_response.regressions(SCORES[:, 0]).decode() == '{\n    "results": [0.25, 1.0]\n}'


def warmup_logs(value: float) -> list[Any]:
    """A warm-up record of each kind for half_plus_two."""
    logs = [protos.PredictionLog() for _ in range(3)]
    classify, regress = logs[0].classify_log.request, logs[1].regress_log.request
    for request, name in ((classify, "classify_x_to_y"), (regress, "regress_x_to_y")):
        request.model_spec.signature_name = name
        request.input.CopyFrom(examples(value))
    multi = logs[2].multi_inference_log.request
    multi.tasks.extend([task(CLASSIFY, "m", "classify_x_to_y"), task(REGRESS, "m", "regress_x_to_y2")])
    multi.input.CopyFrom(examples(value))
    return logs


def write_warmup(version_path: Path, logs: list[Any]) -> None:
    file = version_path / WARMUP_FILE
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"".join(tfrecord.frame(log.SerializeToString()) for log in logs))


def test_warmup_replays_each_kind(tmp_path: Path) -> None:
    models.copy_half_plus_two(tmp_path / "1")
    model = load_version(tmp_path / "1")
    calls = []
    run = model.run
    model.run = lambda name, inputs, outputs, *_: calls.append(name) or run(name, inputs, outputs)
    write_warmup(tmp_path / "1", warmup_logs(2.0))
    assert replay(model, tmp_path / "1") == 3
    assert calls == ["classify_x_to_y", "regress_x_to_y", "classify_x_to_y", "regress_x_to_y2"]
    calls.clear()
    assert replay(model, tmp_path / "1", iterations=2) == 3
    assert len(calls) == 8
    model.close()


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_bad_warmup_request_of_each_kind_fails_the_load(tmp_path: Path, kind: int) -> None:
    models.copy_half_plus_two(tmp_path / "1")
    write_warmup(tmp_path / "1", [warmup_logs(2)[kind]])  # an integer, and x is a float
    with pytest.raises(ServingError, match="Data types don't match") as raised:
        load_version(tmp_path / "1")
    assert raised.value.code is Code.INVALID_ARGUMENT
    load_version(tmp_path / "1", LoadSettings(warmup=False)).close()


def test_requests_are_logged_as_calls_of_their_signatures(tmp_path: Path) -> None:
    models.copy_half_plus_two(tmp_path / "m" / "1")
    log = tmp_path / "log"
    request = protos.MultiInferenceRequest(input=examples(2.0, 6.0))
    request.tasks.extend([task(CLASSIFY, "m", "classify_x_to_y"), task(REGRESS, "m", "regress_x_to_y2")])
    with ModelServer("m", tmp_path / "m", request_log_file=log) as server:
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
            call = channel.unary_unary("/tensorflow.serving.PredictionService/MultiInference")
            response = protos.MultiInferenceResponse.FromString(call(request.SerializeToString(), timeout=20))
            regress = protos.RegressionRequest(input=examples(3.0))
            regress.model_spec.name, regress.model_spec.signature_name = "m", "regress_x_to_y"
            channel.unary_unary("/tensorflow.serving.PredictionService/Regress")(
                regress.SerializeToString(), timeout=20
            )
        body = b'{"signature_name": "classify_x_to_y", "examples": [{"x": 5.0}]}'
        connection = HTTPConnection("127.0.0.1", server.rest_port, timeout=20)
        connection.request("POST", "/v1/models/m:classify", body)
        assert json.loads(connection.getresponse().read()) == {"results": [[["", 4.5]]]}
        connection.close()
        assert [item.value for item in response.results[1].regression_result.regressions] == [4, 6]
        assert [result.model_spec.version.value for result in response.results] == [1, 1]
    records = list(request_log.read_records(log))
    assert [(record.signature_name, list(record.outputs)) for record in records] == [
        ("classify_x_to_y", ["scores"]),
        ("regress_x_to_y2", ["outputs"]),
        ("regress_x_to_y", ["outputs"]),
        ("classify_x_to_y", ["scores"]),
    ]
    assert records[0].inputs["inputs"].tolist() == [
        item.SerializeToString() for item in request.input.example_list.examples
    ]
