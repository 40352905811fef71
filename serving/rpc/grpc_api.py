"""The gRPC API: PredictionService and ModelService over grpcio.

The service stubs of tensorflow_serving are not used; the handlers are registered by name and take raw bytes, so that a
message that does not parse is a client's error and not a stack trace in the log.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from serving.access.limits import ConcurrencyLimit
from serving.calls import CallContext, Models, OpenModel
from serving.errors import Code, ServingError, invalid_argument
from serving.inference import CLASSIFY, REGRESS, Inference, infer, infer_all
from serving.model_config import requested_configs
from serving.monitoring.metrics import Metrics
from serving.protos import (
    MODEL_SERVICE,
    PREDICTION_SERVICE,
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
    ReloadConfigRequest,
    ReloadConfigResponse,
    SignatureDefMap,
)
from serving.rpc.grpc_server import fail
from serving.served_model import DEFAULT_SIGNATURE, Version
from serving.tensors import decode, encode_content, encode_values

logger = logging.getLogger(__name__)

_Call = Callable[[bytes, grpc.ServicerContext], bytes]


class GrpcApi:
    """Answers the messages of TF Serving's services from the served models.

    Args:
        models: the models.
        tensor_content: whether Predict answers with `tensor_content` in place of `float_val` and its like.
        check_method_names: whether Classify and Regress refuse signatures that were saved for another method.
        metrics: counts the requests; default: those of this object alone.
    """

    def __init__(
        self,
        models: Models,
        *,
        tensor_content: bool = False,
        check_method_names: bool = False,
        metrics: Metrics | None = None,
    ) -> None:
        self._check_method_names = check_method_names
        self._models = models
        self.metrics = metrics or Metrics(models.manager)
        self._encode = encode_content if tensor_content else encode_values

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
            self._encode(array, response.outputs[alias])
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
            name, check = request.model_spec.signature_name, self._check_method_names
            found = infer(model, method_name, name, request.input, check)
            _fill_spec(response.model_spec, model.version, found.signature_name)
        fill(response.result, found)
        return response

    def multi_inference(self, request: Any, context: CallContext) -> Any:
        """PredictionService.MultiInference."""
        response = MultiInferenceResponse()
        spec = request.tasks[0].model_spec if request.tasks else ModelSpec()
        with self._open(spec, context) as model:
            for found in infer_all(model, request.tasks, request.input, self._check_method_names):
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
        with self._models.manager.lease(*_asked_for(request.model_spec, context)) as version:
            for name, signature in version.loaded.signatures.items():
                signatures.signature_def[name].CopyFrom(signature.proto)
            _fill_spec(response.model_spec, version, "")
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
        before = {name: self.metrics.value(name) for name in request.metric_names}
        self._models.manager.reload(requested_configs(request))
        response = ReloadConfigResponse()
        response.status.SetInParent()
        for name, value in before.items():
            response.metric.add(name=name, int64_value_increase=self.metrics.value(name) - value)
        return response

    def _open(self, spec: Any, context: CallContext) -> OpenModel:
        return self._models.open(*_asked_for(spec, context), context)


def _asked_for(spec: Any, context: CallContext) -> tuple[str, int | None, str | None]:
    """Name, version and label of a ModelSpec."""
    context.model_name = spec.name
    choice = spec.WhichOneof("version_choice")
    return (
        spec.name,
        spec.version.value if choice == "version" else None,
        spec.version_label if choice == "version_label" else None,
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


def make_handlers(api: GrpcApi, concurrency_limit: ConcurrencyLimit | None = None) -> list[grpc.GenericRpcHandler]:
    """TF Serving's services for a gRPC server.

    Args:
        api: answers the calls.
        concurrency_limit: refuses calls while too many requests are under way; None refuses none.
    """
    services = {
        PREDICTION_SERVICE: {
            "Predict": _handler(PredictRequest, api.predict, api.metrics),
            "GetModelMetadata": _handler(GetModelMetadataRequest, api.get_model_metadata),
            "Classify": _handler(ClassificationRequest, api.classify, api.metrics),
            "Regress": _handler(RegressionRequest, api.regress, api.metrics),
            "MultiInference": _handler(MultiInferenceRequest, api.multi_inference),
        },
        MODEL_SERVICE: {
            "GetModelStatus": _handler(GetModelStatusRequest, api.get_model_status),
            "HandleReloadConfigRequest": _handler(ReloadConfigRequest, api.handle_reload_config_request),
        },
    }
    return [
        grpc.method_handlers_generic_handler(
            service,
            {
                name: grpc.unary_unary_rpc_method_handler(
                    call if concurrency_limit is None else _limited(call, concurrency_limit)
                )
                for name, call in calls.items()
            },
        )
        for service, calls in services.items()
    ]


def _limited(call: _Call, limit: ConcurrencyLimit) -> _Call:
    def limited(body: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            limit.enter()
        except ServingError as error:
            return fail(context, error)
        try:
            return call(body, context)
        finally:
            limit.leave()

    return limited


def _handler(request_type: Any, method: Callable[[Any, CallContext], Any], metrics: Metrics | None = None) -> _Call:
    """Bytes in, bytes out; `metrics` counts the requests of the three methods that TF Serving counts."""
    name = method.__name__.title().replace("_", "")

    def call(body: bytes, context: grpc.ServicerContext) -> bytes:
        started = time.perf_counter()
        call_context = _call_context(context, name)
        failure: ServingError | None = None
        try:
            return method(request_type.FromString(body), call_context).SerializeToString()
        except ServingError as error:
            failure = error
        except DecodeError as error:
            failure = invalid_argument(f"the request is no {request_type.DESCRIPTOR.name}: {error}")
        except Exception as error:
            logger.exception("gRPC %s failed", name)
            failure = ServingError(Code.INTERNAL, f"{type(error).__name__}: {error}")
        finally:
            if metrics is not None:
                metrics.answered(call_context, failure.code if failure else Code.OK, time.perf_counter() - started)
        return fail(context, failure)

    return call


def _call_context(context: grpc.ServicerContext, method: str) -> CallContext:
    seconds_left = context.time_remaining()
    found = CallContext(
        deadline=None if seconds_left is None else time.monotonic() + seconds_left,
        header=lambda name: next((value for key, value in context.invocation_metadata() if key == name), None),
        api="grpc",
        method=method,
    )
    if not context.add_callback(found.cancel):
        found.cancel()
    return found
