"""TF Serving's messages, in one place, and without loading TensorFlow.

Importing a generated module of tensorflow_serving imports tensorflow.core, and that runs tensorflow/__init__.py: seconds and
hundreds of MB which a client, or a server of LiteRT and ONNX files, has no use for. But the descriptors that such a module
registers are bytes in its source; so they are read from there, with those of the modules it imports, and registered as it
would. protobuf has one class for each descriptor, so whoever imports the generated modules later, or did before, has the
same classes; no module is loaded or replaced. Only a source of another form than protoc writes today is imported.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pool
from google.protobuf.internal import builder

logger = logging.getLogger(__name__)


@functools.cache
def _names(module: str) -> Mapping[str, Any]:
    """The message classes and enums of a generated module, as importing it would define them."""
    tree = ast.parse(_source(module).read_bytes())
    serialized = _serialized(tree)
    if serialized is None:
        if "tensorflow" not in sys.modules:
            logger.warning("%s is not in the form that protoc writes; importing it, which loads TensorFlow", module)
        return vars(importlib.import_module(module))
    for imported in _imported(tree):
        _names(imported)
    names: dict[str, Any] = {}
    file = descriptor_pool.Default().AddSerializedFile(serialized)
    builder.BuildMessageAndEnumDescriptors(file, names)
    builder.BuildTopDescriptorsAndMessages(file, module, names)
    return names


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


def _serialized(tree: ast.Module) -> bytes | None:
    for node in tree.body:
        match node:
            case ast.Assign(
                value=ast.Call(ast.Attribute(attr="AddSerializedFile"), [ast.Constant(bytes() as serialized)])
            ):
                return serialized
    return None


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name.endswith("_pb2"))


def _api(file: str, name: str) -> Any:
    return _names(f"tensorflow_serving.apis.{file}_pb2")[name]


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
ModelServerConfig = _names("tensorflow_serving.config.model_server_config_pb2")["ModelServerConfig"]
ModelType = _names("tensorflow_serving.config.model_server_config_pb2")["ModelType"]
SignatureDef = _names("tensorflow.core.protobuf.meta_graph_pb2")["SignatureDef"]
TensorProto = _names("tensorflow.core.framework.tensor_pb2")["TensorProto"]

for _service in ("prediction_service", "model_service"):  # gRPC reflection shows them
    _names(f"tensorflow_serving.apis.{_service}_pb2")
PREDICTION_SERVICE = "tensorflow.serving.PredictionService"
MODEL_SERVICE = "tensorflow.serving.ModelService"
