"""TF Serving's messages, in one place, and without loading TensorFlow.

Importing a generated module of tensorflow_serving imports tensorflow.core, and that runs tensorflow/__init__.py: seconds and
hundreds of MB which a client, or a server of LiteRT and ONNX files, has no use for. But the descriptors that such a module
registers are bytes in its source; so they are read from there, with those of the modules it imports, and registered as it
would. protobuf has one class for each descriptor, so whoever imports the generated modules later, or did before, has the
same classes; no module is loaded or replaced.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.internal import enum_type_wrapper


def _message(module: str, name: str) -> Any:
    _register(module)
    return message_factory.GetMessageClass(descriptor_pool.Default().FindMessageTypeByName(name))


@functools.cache
def _register(module: str) -> None:
    tree = ast.parse(_source(module).read_bytes())
    for imported in _imported(tree):
        _register(imported)
    descriptor_pool.Default().AddSerializedFile(_serialized(tree, module))


def _source(module: str) -> Path:
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    for location in (spec.submodule_search_locations if spec else None) or ():
        path = Path(location, *rest).with_suffix(".py")
        if path.is_file():
            return path
    raise ImportError(
        f"TF Serving's messages are read from {module}, which is not installed; "
        "pip install tensorflow tensorflow-serving-api"
    )


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name.endswith("_pb2"))


def _serialized(tree: ast.Module, module: str) -> bytes:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "AddSerializedFile"
        ):
            return ast.literal_eval(node.args[0])
    raise ImportError(f"{module} has no serialized descriptor where protoc writes it; its protoc is not known")


def _api(file: str, name: str) -> Any:
    return _message(f"tensorflow_serving.apis.{file}_pb2", f"tensorflow.serving.{name}")


ClassificationRequest = _api("classification", "ClassificationRequest")
ClassificationResponse = _api("classification", "ClassificationResponse")
GetModelMetadataRequest = _api("get_model_metadata", "GetModelMetadataRequest")
GetModelMetadataResponse = _api("get_model_metadata", "GetModelMetadataResponse")
GetModelStatusRequest = _api("get_model_status", "GetModelStatusRequest")
GetModelStatusResponse = _api("get_model_status", "GetModelStatusResponse")
Input = _api("input", "Input")
ModelSpec = _api("model", "ModelSpec")
ModelVersionStatus = _api("get_model_status", "ModelVersionStatus")
MultiInferenceRequest = _api("inference", "MultiInferenceRequest")
MultiInferenceResponse = _api("inference", "MultiInferenceResponse")
PredictRequest = _api("predict", "PredictRequest")
PredictResponse = _api("predict", "PredictResponse")
PredictionLog = _api("prediction_log", "PredictionLog")
RegressionRequest = _api("regression", "RegressionRequest")
RegressionResponse = _api("regression", "RegressionResponse")
ReloadConfigRequest = _api("model_management", "ReloadConfigRequest")
ReloadConfigResponse = _api("model_management", "ReloadConfigResponse")
SignatureDefMap = _api("get_model_metadata", "SignatureDefMap")
ModelServerConfig = _message(
    "tensorflow_serving.config.model_server_config_pb2", "tensorflow.serving.ModelServerConfig"
)
ModelType = enum_type_wrapper.EnumTypeWrapper(
    descriptor_pool.Default().FindEnumTypeByName("tensorflow.serving.ModelType")
)
SignatureDef = _message("tensorflow.core.protobuf.meta_graph_pb2", "tensorflow.SignatureDef")
TensorProto = _message("tensorflow.core.framework.tensor_pb2", "tensorflow.TensorProto")

for _service in ("prediction_service", "model_service"):  # gRPC reflection shows them
    _register(f"tensorflow_serving.apis.{_service}_pb2")
PREDICTION_SERVICE = "tensorflow.serving.PredictionService"
MODEL_SERVICE = "tensorflow.serving.ModelService"
