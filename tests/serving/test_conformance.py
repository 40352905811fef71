"""TF Serving's own answers, case by case, over real connections (conformance/README.md says where they are from)."""

from __future__ import annotations

import http.client
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import text_format

from serving import dtypes, model_config, protos
from serving.errors import HTTP_STATUS, Code
from serving.monitoring import monitoring_config
from serving.rest import json_examples, json_request, json_response
from serving.rest.rest_api import parse_route
from serving.server import ModelServer
from serving.settings import RestSettings
from serving.tensors import decode
from serving.versions import specific
from tests.serving import models

CONFORMANCE = Path(__file__).parent / "conformance"
CASES: list[dict[str, Any]] = json.loads((CONFORMANCE / "tf_serving_cases.json").read_text())
RPCS = {
    "PredictionService/Classify": (protos.ClassificationRequest, protos.ClassificationResponse),
    "PredictionService/Regress": (protos.RegressionRequest, protos.RegressionResponse),
    "PredictionService/MultiInference": (protos.MultiInferenceRequest, protos.MultiInferenceResponse),
    "PredictionService/Predict": (protos.PredictRequest, protos.PredictResponse),
    "PredictionService/GetModelMetadata": (protos.GetModelMetadataRequest, protos.GetModelMetadataResponse),
    "ModelService/GetModelStatus": (protos.GetModelStatusRequest, protos.GetModelStatusResponse),
    "ModelService/HandleReloadConfigRequest": (model_config.ReloadConfigRequest, model_config.ReloadConfigResponse),
}
NUMBER_OF_CASES = 137
NICE_TRY = f"""model_config_list {{ config {{
    name: "default"
    base_path: "{(CONFORMANCE / "models" / "saved_model_half_plus_two_2_versions").absolute()}"
    model_platform: "tensorflow"
    model_version_policy {{ specific {{ versions: [123, 124] }} }}
    version_labels {{ key: "nice try" value: 125 }}
}} }}"""
UNKNOWN_NAMES = {"foo", "modelname", ""}


def is_answered(case: dict[str, Any]) -> bool:
    """All are, but that of a model without a saved_model.pb (TF Serving's old session bundle), which has its own test."""
    return not (isinstance(case["model"], dict) and case["model"].get("dir") == "bad_half_plus_two")


SELECTED = [case for case in CASES if is_answered(case)]


def of_kind(kind: str) -> list[Any]:
    return [pytest.param(case, id=case["id"]) for case in SELECTED if case["kind"] == kind]


def test_number_of_cases() -> None:
    left_out = [case for case in CASES if not is_answered(case)]
    calls = Counter(re.split("[/:]", case["request"].get("rpc") or case["request"]["path"])[-1] for case in left_out)
    assert calls == {"Predict": 1}
    assert len(SELECTED) == NUMBER_OF_CASES == len(CASES) - calls.total()


class Servers:
    """One running server for each model and name that the cases need."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._running: dict[str, ModelServer] = {}

    def get(self, model: Any, name: str) -> ModelServer:
        key = json.dumps([model, name], sort_keys=True)
        if key not in self._running:
            server = self._make(model, name, self._directory / str(len(self._running)))
            server.start()
            self._running[key] = server
        return self._running[key]

    def _make(self, model: Any, name: str, built: Path) -> ModelServer:
        if model == "any":
            model = {"identity": {"default": "int32"}}
        if model == "any classify or regress signature":
            model = {"dir": "saved_model_half_plus_two_2_versions", "versions": [123]}
        if "dir" in model:
            base_path = CONFORMANCE / "models" / model["dir"]
            return ModelServer(
                name,
                base_path,
                version_policy=specific(*model["versions"]),
                version_labels=model.get("labels"),
                rest_settings=RestSettings(metrics_path=monitoring_config.DEFAULT_PATH),
            )
        if "identity" in model:
            models.save_identity(built / "1", model["identity"], model.get("signature", "serving_default"))
        elif "constant_outputs" in model:
            models.save_constants(built / "1", model["constant_outputs"])
        else:
            assert model["build"] == "tf.function y = 3*2*x saved with tf.saved_model"
            models.save_product(built / "1")
        return ModelServer(name, built)

    def stop(self) -> None:
        for server in self._running.values():
            server.stop(grace_seconds=0)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    running = Servers(tmp_path_factory.mktemp("models"))
    yield running
    running.stop()


def name_in_path(case: dict[str, Any]) -> str:
    match = re.match(r"/v1/models/([^/:?]+)", case["request"]["path"], re.IGNORECASE)
    name = match[1] if match else ""
    return "m" if name in UNKNOWN_NAMES or "%" in name else name


def body_of(request: dict[str, Any]) -> bytes:
    if "format" in request:
        return b'{"instances": [1]}' if request["format"] == "row" else b'{"inputs": [1]}'
    if "$generate" in str(request.get("body")):
        return b'{"instances":[1],"nested":' + b"[" * 500_000 + b"]" * 500_000 + b"}"
    return request["raw_body"].encode() if "raw_body" in request else json.dumps(request.get("body", "")).encode()


@pytest.mark.parametrize("case", of_kind("rest"))
def test_rest(case: dict[str, Any], servers: Servers) -> None:
    request, expect = case["request"], case["expect"]
    if "canonical_to_http" in expect:
        assert {code.name: status for code, status in HTTP_STATUS.items()} == expect["canonical_to_http"]
        return
    if "resolved" in expect:
        check_route(request, expect["resolved"])
        return
    if "parsed_examples" in expect:
        check_examples(request["body"], expect["parsed_examples"])
        return
    if "classification_result" in case["model"] or "regression_result" in case["model"]:
        check_body(result_body(case["model"]), expect)
        return
    server = servers.get(case["model"], name_in_path(case))
    connection = http.client.HTTPConnection("127.0.0.1", server.rest_port, timeout=20)
    body = None if request["method"] in ("GET", "OPTIONS") else body_of(request)
    connection.request(request["method"], request["path"], body, request.get("headers", {}))
    response = connection.getresponse()
    content = response.read()
    connection.close()
    assert response.status == expect["http_status"], content
    for header, value in expect.get("headers", {}).items():
        assert response.headers[header] == value
    check_body(content, expect)
    if "parsed_inputs" in expect:
        check_inputs(body or b"", case["model"], expect, content)


def check_route(request: dict[str, Any], resolved: dict[str, Any]) -> None:
    route = parse_route(request["method"], request["path"])
    assert route.model == resolved["model"]
    assert route.version == resolved.get("version")
    assert route.label == resolved.get("label")
    assert route.verb == resolved.get("method", "")


def check_examples(document: dict[str, Any], parsed: list[dict[str, Any]]) -> None:
    request = protos.ClassificationRequest()
    fill_examples(request.input.example_list.examples, parsed)
    assert json_examples.parse_examples(document) == request.input


def result_body(model: dict[str, Any]) -> bytes:
    if "regression_result" in model:
        return json_response.regressions(np.array(list(map(float, model["regression_result"])), np.float32))
    pairs = np.array(model["classification_result"], dtype=object)
    return json_response.classifications(pairs[..., 0], pairs[..., 1].astype(np.float32))


def check_body(content: bytes, expect: dict[str, Any]) -> None:
    if "json_key" in expect:
        assert list(json.loads(content)) == [expect["json_key"]]
    for text in expect.get("error_contains", []):
        assert text in json.loads(content)["error"]
    for text in expect.get("text_contains", []):
        assert text in content.decode()
    if "body" in expect:
        assert json.loads(content) == expect["body"]
    if "body_file" in expect:
        assert json.loads(content) == json.loads((CONFORMANCE / expect["body_file"]).read_text())
    if "number_tokens" in expect:
        tokens = json.loads(content, parse_float=str, parse_int=str, parse_constant=str)
        assert next(iter(tokens.values())) == expect["number_tokens"]


def check_inputs(body: bytes, model: dict[str, Any], expect: dict[str, Any], content: bytes) -> None:
    numbers = {name: number for number, name in dtypes.NAMES.items()} | {
        "float32": dtypes.FLOAT,
        "float64": dtypes.DOUBLE,
    }
    types = {alias: numbers[name] for alias, name in model["identity"].items()}
    inputs, body_format = json_request.parse_inputs(json_request.parse_object(body), types)
    assert body_format == expect["response_format"]
    answer = json.loads(content)["predictions" if body_format == "row" else "outputs"]
    assert set(inputs) == set(expect["parsed_inputs"])
    for alias, wanted in expect["parsed_inputs"].items():
        array = inputs[alias]
        assert list(array.shape) == wanted["shape"]
        values = [value.encode() if wanted["dtype"] == "string" else float(value) for value in wanted["values"]]
        np.testing.assert_array_equal(array.ravel(), np.array(values, dtype=array.dtype))
        if len(inputs) == 1:
            assert list(np.shape(answer)) == wanted["shape"]


@pytest.mark.parametrize("case", of_kind("grpc"))
def test_grpc(case: dict[str, Any], servers: Servers) -> None:
    message, expect = case["request"]["message"], case["expect"]
    spec = message["tasks"][0]["model_spec"] if "tasks" in message else message.get("model_spec", {})
    name = spec.get("name") or "default"
    server = servers.get(case["model"], name)
    rpc = case["request"]["rpc"].removeprefix("tensorflow.serving.")
    request_type, response_type = RPCS[rpc]
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        call = channel.unary_unary(
            f"/tensorflow.serving.{rpc}", request_type.SerializeToString, response_type.FromString
        )
        if expect["code"] == "OK":
            check_response(call(make_request(request_type, message), timeout=20), expect["response"])
            return
        with pytest.raises(grpc.RpcError) as raised:
            call(make_request(request_type, message), timeout=20)
    assert raised.value.code().name == expect["code"], raised.value.details()
    for text in expect.get("message_contains", []):
        assert text in raised.value.details()


def make_request(request_type: Any, message: dict[str, Any]) -> Any:
    request = request_type()
    if "config" in message:
        assert message["config"] == 'same model, label "nice try" -> a version that is not loaded'
        text_format.Parse(NICE_TRY, request.config)
    if "model_spec" in message:
        fill_spec(request.model_spec, message["model_spec"])
    for task in message.get("tasks", []):
        added = request.tasks.add(method_name=task["method_name"])
        fill_spec(added.model_spec, task["model_spec"])
    if "examples" in message:
        request.input.example_list.SetInParent()
        fill_examples(request.input.example_list.examples, message["examples"])
    if "context" in message:
        with_context = request.input.example_list_with_context
        fill_example(with_context.context, message["context"])
        fill_examples(with_context.examples, message["examples_with_context"])
    request_fields = {field: message[field] for field in ("output_filter", "metadata_field") if field in message}
    for field, values in request_fields.items():
        getattr(request, field).extend(values)
    for alias, tensor in message.get("inputs", {}).items():
        fill_tensor(request.inputs[alias], tensor)
    return request


def fill_spec(proto: Any, spec: dict[str, Any]) -> None:
    proto.SetInParent()
    for field, value in spec.items():
        if field == "version":
            proto.version.value = value
        else:
            setattr(proto, field, value)


def fill_examples(protos: Any, examples: list[dict[str, Any]]) -> None:
    for example in examples:
        fill_example(protos.add(), example)


def fill_example(proto: Any, example: dict[str, Any]) -> None:
    for name, feature in example.items():
        [(kind, values)] = feature.items()
        values = [value.encode() for value in values] if kind == "bytes" else values
        getattr(proto.features.feature[name], f"{kind}_list").value.extend(values)


def fill_tensor(proto: Any, tensor: dict[str, Any]) -> None:
    proto.dtype = getattr(dtypes, tensor["dtype"].removeprefix("DT_"))
    for size in tensor["shape"]:
        proto.tensor_shape.dim.add().size = size
    proto.float_val.extend(tensor.get("float_val", []))
    proto.string_val.extend(value.encode() for value in tensor.get("string_val", []))


def check_response(response: Any, expect: dict[str, Any]) -> None:
    for alias, tensor in expect.get("outputs", {}).items():
        proto = response.outputs[alias]
        assert list(proto.float_val) == tensor["float_val"]
        if "shape" in tensor:
            assert list(decode(proto).shape) == tensor["shape"]
        assert proto.dtype == dtypes.FLOAT
    if "outputs" in expect:
        assert set(response.outputs) == set(expect["outputs"])
    if "model_spec" in expect:
        check_spec(response.model_spec, expect["model_spec"])
    if "classifications" in expect or "regressions" in expect:
        check_result(response.result, response.result, expect)
    if "results" in expect:
        assert len(response.results) == len(expect["results"])
        for result, wanted in zip(response.results, expect["results"], strict=True):
            check_result(result.classification_result, result.regression_result, wanted)
            check_spec(result.model_spec, wanted.get("model_spec", {}))
    if "model_version_status" in expect:
        [status], [wanted] = response.model_version_status, expect["model_version_status"]
        assert status.version == wanted["version"]
        assert status.State.Name(status.state) == wanted["state"]
        assert status.status.error_code == wanted["status"]["error_code"]
    if "versions_any_order" in expect:
        assert sorted(item.version for item in response.model_version_status) == sorted(expect["versions_any_order"])
        for item in response.model_version_status:
            assert Code(item.status.error_code).name == expect["each"]["error_code"]
            assert item.status.error_message == expect["each"]["error_message"]


def check_spec(spec: Any, expect: dict[str, Any]) -> None:
    for field, value in expect.items():
        found = getattr(spec, field)
        assert (found.value if field == "version" else found) == value


def check_result(classification: Any, regression: Any, expect: dict[str, Any]) -> None:
    if "regressions" in expect:
        assert [item.value for item in regression.regressions] == expect["regressions"]
    else:
        found = [
            [{"label": item.label, "score": item.score} for item in row.classes]
            for row in classification.classifications
        ]
        wanted = [[{"label": "", **item} for item in row] for row in expect["classifications"]]
        assert found == wanted


def test_model_without_a_saved_model_does_not_start() -> None:
    server = ModelServer("default", CONFORMANCE / "models" / "bad_half_plus_two")
    with pytest.raises(Exception, match="holds no version to serve"):
        server.start()
