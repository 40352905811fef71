"""A client for TF Serving's gRPC API; it loads no TensorFlow (see protos.py)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import numpy as np
from google.protobuf import json_format, text_format

from serving import protos
from serving.client.base import Client, Method, ModelSpec, Results, TlsFiles
from serving.client.inputs import Features
from serving.client.model_info import (
    Classification,
    ModelMetadata,
    Regression,
    SignatureInfo,
    VersionStatus,
    metadata_from_json,
)
from serving.client.retry import Call, RetryPolicy
from serving.errors import Code, ServingError, invalid_argument
from serving.tensors import decode, encode_content

_METHOD_NAMES = {"classify": "tensorflow/serving/classify", "regress": "tensorflow/serving/regress"}
_FEATURE_LISTS = {int: "int64_list", float: "float_list", bytes: "bytes_list"}
# The retries are the client's own, alike for both protocols; the channel has to be connected again by then.
_OPTIONS = (
    ("grpc.max_receive_message_length", 2**31 - 1),
    ("grpc.max_send_message_length", 2**31 - 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


class GrpcClient(Client):
    """Calls a model server over gRPC; Client has the calls. May be shared by threads.

    Args:
        target: `host:port` or `grpc://host:port`; `grpcs://host:port` for TLS.
        token: see Client.
        headers: see Client; sent as metadata.
        tls: files for TLS; without them `grpcs://` takes the system's certificates.
        retry: see Client.

    Raises:
        ImportError: the packages tensorflow and tensorflow-serving-api are not there.
        ValueError: `grpc://` with `tls`.
        OSError: a file of `tls` cannot be read.

    Example:
        >>> with GrpcClient("127.0.0.1:8500") as client:
        ...     client.predict("taxi", {"miles": np.array([[1.5]], np.float32)})
    """

    def __init__(
        self,
        target: str,
        *,
        token: str | None = None,
        headers: Mapping[str, str] | None = None,
        tls: TlsFiles | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        super().__init__(token=token, headers=headers, retry=retry)
        if tls is not None and target.startswith("grpc://"):
            raise ValueError(f"certificates are given, but {target!r} is not encrypted; use grpcs://")
        host = self._headers.pop("host", None)
        self._metadata_pairs = tuple(self._headers.items())
        self._target = target.removeprefix("grpc://").removeprefix("grpcs://").rstrip("/")
        options = _OPTIONS if host is None else (*_OPTIONS, ("grpc.default_authority", host))
        if tls is None and not target.startswith("grpcs://"):
            self._channel = grpc.insecure_channel(self._target, options)
        else:
            self._channel = grpc.secure_channel(self._target, _credentials(tls or TlsFiles()), options)
        self._methods: dict[str, Any] = {}

    def close(self) -> None:
        """Close the channel; the client cannot be used after it."""
        self._channel.close()

    def _predict(
        self,
        spec: ModelSpec,
        signature_name: str,
        signature: SignatureInfo,
        inputs: Mapping[str, np.ndarray],
        output_filter: Sequence[str],
        call: Call,
    ) -> dict[str, np.ndarray]:
        request = protos.PredictRequest(model_spec=_model_spec(spec, signature_name))
        request.output_filter.extend(output_filter)
        for alias, array in inputs.items():
            encode_content(array, request.inputs[alias])
        response = self._request("PredictionService/Predict", request, "PredictResponse", call)
        return {alias: decode(tensor) for alias, tensor in response.outputs.items()}

    def _classify(
        self, spec: ModelSpec, signature_name: str, examples: list[Features], context: Features | None, call: Call
    ) -> list[tuple[Classification, ...]]:
        request = protos.ClassificationRequest(
            model_spec=_model_spec(spec, signature_name), input=_input(examples, context)
        )
        response = self._request("PredictionService/Classify", request, "ClassificationResponse", call)
        return _classifications(response.result)

    def _regress(
        self, spec: ModelSpec, signature_name: str, examples: list[Features], context: Features | None, call: Call
    ) -> list[Regression]:
        request = protos.RegressionRequest(
            model_spec=_model_spec(spec, signature_name), input=_input(examples, context)
        )
        response = self._request("PredictionService/Regress", request, "RegressionResponse", call)
        return _regressions(response.result)

    def _multi_inference(
        self,
        spec: ModelSpec,
        tasks: Mapping[str, Method],
        examples: list[Features],
        context: Features | None,
        call: Call,
    ) -> dict[str, Results]:
        request = protos.MultiInferenceRequest(input=_input(examples, context))
        for signature_name, method in tasks.items():
            request.tasks.add(model_spec=_model_spec(spec, signature_name), method_name=_METHOD_NAMES[method])
        response = self._request("PredictionService/MultiInference", request, "MultiInferenceResponse", call)
        return {
            result.model_spec.signature_name: _classifications(result.classification_result)
            if result.HasField("classification_result")
            else _regressions(result.regression_result)
            for result in response.results
        }

    def _status(self, spec: ModelSpec, call: Call) -> list[VersionStatus]:
        request = protos.GetModelStatusRequest(model_spec=_model_spec(spec))
        response = self._request("ModelService/GetModelStatus", request, "GetModelStatusResponse", call)
        states = protos.ModelVersionStatus.State
        return [
            VersionStatus(
                item.version, states.Name(item.state), Code(item.status.error_code).name, item.status.error_message
            )
            for item in response.model_version_status
        ]

    def _metadata(self, spec: ModelSpec, call: Call) -> ModelMetadata:
        request = protos.GetModelMetadataRequest(model_spec=_model_spec(spec), metadata_field=["signature_def"])
        response = self._request("PredictionService/GetModelMetadata", request, "GetModelMetadataResponse", call)
        signatures = protos.SignatureDefMap()
        response.metadata["signature_def"].Unpack(signatures)
        as_json = json_format.MessageToDict(signatures, preserving_proto_field_name=True)
        return metadata_from_json(response.model_spec.version.value, as_json.get("signature_def", {}))

    def _metadata_if_any(self, spec: ModelSpec, call: Call) -> ModelMetadata | None:
        try:
            return self._metadata(spec, call)
        except ServingError as error:
            if error.code is Code.UNIMPLEMENTED:
                return None
            raise

    def _reload(self, model_config: str, call: Call) -> dict[str, int]:
        request = protos.ReloadConfigRequest()
        try:
            text_format.Parse(model_config, request.config)
        except text_format.ParseError as error:
            raise invalid_argument(f"this is no ModelServerConfig in protobuf's text format: {error}") from error
        response = self._request("ModelService/HandleReloadConfigRequest", request, "ReloadConfigResponse", call)
        if response.status.error_code:
            raise ServingError(Code(response.status.error_code), response.status.error_message)
        return {metric.name: metric.int64_value_increase for metric in response.metric}

    def _request(self, method: str, request: Any, response_name: str, call: Call) -> Any:
        if method not in self._methods:
            self._methods[method] = self._channel.unary_unary(
                f"/tensorflow.serving.{method}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=getattr(protos, response_name).FromString,
            )
        return call.run(lambda seconds: self._attempt(self._methods[method], request, seconds))

    def _attempt(self, method: Any, request: Any, seconds: float) -> Any:
        try:
            return method(request, timeout=seconds, metadata=self._metadata_pairs)
        except grpc.RpcError as error:
            raise self._error(error) from error

    def _error(self, error: Any) -> ServingError:
        code, message = Code(error.code().value[0]), error.details() or ""
        if code in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED):
            message = f"{self._target}: {message}"
        # gRFC A6: how a server says when to try again; what is no number means never.
        for key, value in error.trailing_metadata() or ():
            if key == "grpc-retry-pushback-ms":
                seconds = int(value) / 1000 if value.isdigit() else math.inf
                return ServingError(code, message, retry_after_seconds=seconds)
        return ServingError(code, message)


def _credentials(tls: TlsFiles) -> grpc.ChannelCredentials:
    files = (tls.ca_file, tls.key_file, tls.certificate_file)
    return grpc.ssl_channel_credentials(*(None if file is None else file.read_bytes() for file in files))


def _model_spec(spec: ModelSpec, signature_name: str = "") -> Any:
    message = protos.ModelSpec(name=spec.name, signature_name=signature_name)
    if spec.version is not None:
        message.version.value = spec.version
    elif spec.version_label is not None:
        message.version_label = spec.version_label
    return message


def _input(examples: list[Features], context: Features | None) -> Any:
    message = protos.Input()
    if context is None:
        found = message.example_list
    else:
        found = message.example_list_with_context
        _fill_example(found.context, context)
    found.SetInParent()
    for features in examples:
        _fill_example(found.examples.add(), features)
    return message


def _fill_example(example: Any, features: Features) -> None:
    example.features.SetInParent()
    for name, values in features.items():
        feature = example.features.feature[name]
        if values:
            getattr(feature, _FEATURE_LISTS[type(values[0])]).value.extend(values)


def _classifications(result: Any) -> list[tuple[Classification, ...]]:
    return [tuple(Classification(item.label, item.score) for item in found.classes) for found in result.classifications]


def _regressions(result: Any) -> list[Regression]:
    return [Regression(found.value) for found in result.regressions]
