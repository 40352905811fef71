"""The gRPC API: PredictionService and ModelService over grpcio.

The service stubs of tensorflow_serving are not used; the handlers are registered by name and take raw bytes, so that a
message that does not parse is a client's error and not a stack trace in the log.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from serving.calls import CallContext, Models, OpenModel
from serving.errors import Code, ServingError, invalid_argument
from serving.inference import CLASSIFY, REGRESS, Inference, infer, infer_all
from serving.model_config import ReloadConfigRequest, ReloadConfigResponse, requested_configs
from serving.protos import (
    ClassificationRequest,
    ClassificationResponse,
    GetModelMetadataRequest,
    GetModelMetadataResponse,
    GetModelStatusRequest,
    GetModelStatusResponse,
    ModelSpec,
    MultiInferenceRequest,
    MultiInferenceResponse,
    PredictRequest,
    PredictResponse,
    RegressionRequest,
    RegressionResponse,
    SignatureDefMap,
)
from serving.served_model import DEFAULT_SIGNATURE, Version
from serving.tensors import decode, encode_values

logger = logging.getLogger(__name__)

PREDICTION_SERVICE = "tensorflow.serving.PredictionService"
MODEL_SERVICE = "tensorflow.serving.ModelService"
_STATUS_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
_OPTIONS = (
    ("grpc.max_receive_message_length", 2**31 - 1),
    ("grpc.max_send_message_length", 2**31 - 1),
    ("grpc.so_reuseport", 0),  # else a second server on a busy port would start, and get half of the requests
)


class GrpcApi:
    """Answers the messages of TF Serving's services from the served models.

    Args:
        models: the models.
    """

    def __init__(self, models: Models) -> None:
        self._models = models

    def predict(self, request: Any, context: CallContext) -> Any:
        """PredictionService.Predict."""
        spec = request.model_spec
        name = spec.signature_name or DEFAULT_SIGNATURE
        with self._open(spec, context) as model:
            inputs = {alias: _decode(alias, tensor) for alias, tensor in request.inputs.items()}
            outputs = model.run(name, inputs, request.output_filter)
            response = PredictResponse()
            _fill_spec(response.model_spec, model.version, name)
        for alias, array in outputs.items():
            encode_values(array, response.outputs[alias])
        return response

    def classify(self, request: Any, context: CallContext) -> Any:
        """PredictionService.Classify."""
        return self._infer(CLASSIFY, request, context, ClassificationResponse(), _fill_classifications)

    def regress(self, request: Any, context: CallContext) -> Any:
        """PredictionService.Regress."""
        return self._infer(REGRESS, request, context, RegressionResponse(), _fill_regressions)

    def _infer(
        self,
        method_name: str,
        request: Any,
        context: CallContext,
        response: Any,
        fill: Callable[[Any, Inference], None],
    ) -> Any:
        if not request.HasField("model_spec"):
            raise invalid_argument("Missing ModelSpec")
        with self._open(request.model_spec, context) as model:
            found = infer(model, method_name, request.model_spec.signature_name, request.input)
            _fill_spec(response.model_spec, model.version, found.signature_name)
        fill(response.result, found)
        return response

    def multi_inference(self, request: Any, context: CallContext) -> Any:
        """PredictionService.MultiInference."""
        response = MultiInferenceResponse()
        spec = request.tasks[0].model_spec if request.tasks else ModelSpec()
        with self._open(spec, context) as model:
            for found in infer_all(model, request.tasks, request.input):
                result = response.results.add()
                _fill_spec(result.model_spec, model.version, found.signature_name)
                if found.method_name == CLASSIFY:
                    _fill_classifications(result.classification_result, found)
                else:
                    _fill_regressions(result.regression_result, found)
        return response

    def get_model_metadata(self, request: Any, context: CallContext) -> Any:
        """PredictionService.GetModelMetadata."""
        if not request.metadata_field:
            raise invalid_argument("GetModelMetadataRequest must specify at least one metadata_field")
        for field in request.metadata_field:
            if field != "signature_def":
                raise invalid_argument(f"Metadata field {field} is not supported")
        if not request.HasField("model_spec"):
            raise invalid_argument("Missing ModelSpec")
        signatures = SignatureDefMap()
        response = GetModelMetadataResponse()
        with self._open(request.model_spec, context) as model:
            for name, signature in model.signatures.items():
                signatures.signature_def[name].CopyFrom(signature.proto)
            _fill_spec(response.model_spec, model.version, "")
        response.metadata["signature_def"].Pack(signatures)
        return response

    def get_model_status(self, request: Any, context: CallContext) -> Any:
        """ModelService.GetModelStatus."""
        spec = request.model_spec
        if not request.HasField("model_spec"):
            raise invalid_argument("Missing ModelSpec")
        response = GetModelStatusResponse()
        for version in self._models.manager.statuses(
            spec.name, spec.version.value if spec.HasField("version") else None
        ):
            status = response.model_version_status.add(version=version.number, state=version.state.value)
            status.status.error_code = version.error.code.value if version.error else 0
            status.status.error_message = version.error.message if version.error else ""
        return response

    def handle_reload_config_request(self, request: Any, context: CallContext) -> Any:
        """ModelService.HandleReloadConfigRequest."""
        self._models.manager.reload(requested_configs(request))
        response = ReloadConfigResponse()
        response.status.SetInParent()
        return response

    def _open(self, spec: Any, context: CallContext) -> OpenModel:
        choice = spec.WhichOneof("version_choice")
        return self._models.open(
            spec.name,
            spec.version.value if choice == "version" else None,
            spec.version_label if choice == "version_label" else None,
            context,
        )


def _decode(alias: str, tensor: Any) -> Any:
    try:
        return decode(tensor)
    except ServingError as error:
        raise invalid_argument(f"tensor parsing error: {alias}: {error.message}") from error


def _fill_classifications(result: Any, found: Inference) -> None:
    try:
        rows = [[label.decode() for label in row] for row in found.labels]
    except UnicodeDecodeError as error:
        raise ServingError(
            Code.INTERNAL, f"signature {found.signature_name} gives a class that is not UTF-8: {error}"
        ) from error
    for labels, scores in zip(rows, found.scores.tolist(), strict=True):
        classes = result.classifications.add().classes
        for label, score in zip(labels, scores, strict=True):
            classes.add(label=label, score=score)


def _fill_regressions(result: Any, found: Inference) -> None:
    for value in found.values.tolist():
        result.regressions.add(value=value)


def _fill_spec(spec: Any, version: Version, signature_name: str) -> None:
    spec.name, spec.signature_name = version.model_name, signature_name
    spec.version.value = version.number


def make_server(api: GrpcApi, address: str) -> tuple[grpc.Server, int]:
    """A gRPC server for the API, not started yet.

    Args:
        api: answers the calls.
        address: `host:port`; port 0 lets the system choose.

    Returns:
        The server and the port it is bound to.

    Raises:
        OSError: the port cannot be had.
    """
    workers = futures.ThreadPoolExecutor(4 * (os.cpu_count() or 1), thread_name_prefix="grpc")
    server = grpc.server(workers, options=_OPTIONS)
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(
                PREDICTION_SERVICE,
                {
                    "Predict": _handler(PredictRequest, api.predict),
                    "GetModelMetadata": _handler(GetModelMetadataRequest, api.get_model_metadata),
                    "Classify": _handler(ClassificationRequest, api.classify),
                    "Regress": _handler(RegressionRequest, api.regress),
                    "MultiInference": _handler(MultiInferenceRequest, api.multi_inference),
                },
            ),
            grpc.method_handlers_generic_handler(
                MODEL_SERVICE,
                {
                    "GetModelStatus": _handler(GetModelStatusRequest, api.get_model_status),
                    "HandleReloadConfigRequest": _handler(ReloadConfigRequest, api.handle_reload_config_request),
                },
            ),
        )
    )
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"gRPC cannot listen on {address}; is the port in use by another process?") from error
    return server, port


def _handler(request_type: Any, method: Callable[[Any, CallContext], Any]) -> grpc.RpcMethodHandler:
    def call(body: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            return method(request_type.FromString(body), _call_context(context)).SerializeToString()
        except ServingError as error:
            return _fail(context, error.code, error.message)
        except DecodeError as error:
            return _fail(context, Code.INVALID_ARGUMENT, f"the request is no {request_type.DESCRIPTOR.name}: {error}")
        except Exception as error:
            logger.exception("gRPC %s failed", request_type.DESCRIPTOR.name)
            return _fail(context, Code.INTERNAL, f"{type(error).__name__}: {error}")

    return grpc.unary_unary_rpc_method_handler(call)


def _call_context(context: grpc.ServicerContext) -> CallContext:
    seconds_left = context.time_remaining()
    found = CallContext(
        deadline=None if seconds_left is None else time.monotonic() + seconds_left,
        header=lambda name: next((value for key, value in context.invocation_metadata() if key == name), None),
    )
    if not context.add_callback(found.cancel):
        found.cancel()
    return found


def _fail(context: grpc.ServicerContext, code: Code, message: str) -> bytes:
    context.set_code(_STATUS_CODES[code])
    context.set_details(message)
    return b""
