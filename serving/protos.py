"""TF Serving's messages, in one place, and without loading TensorFlow.

tensorflow_serving's modules import tensorflow.core, and that runs tensorflow/__init__.py: seconds and hundreds of MB which
a client, or a server of LiteRT and ONNX files, has no use for. The messages themselves need only protobuf. So they are
imported from a bare package by the name of tensorflow, which is taken away again: a later `import tensorflow` is the real
one, and finds the messages loaded, so that both have the same classes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType


@contextlib.contextmanager
def _bare_tensorflow() -> Iterator[None]:
    spec = None if "tensorflow" in sys.modules else importlib.util.find_spec("tensorflow")
    if spec is None or spec.submodule_search_locations is None:
        yield
        return
    bare = ModuleType("tensorflow")
    bare.__path__ = list(spec.submodule_search_locations)
    sys.modules["tensorflow"] = bare
    try:
        yield
    finally:
        for name in [name for name in sys.modules if f"{name}.".startswith("tensorflow.")]:
            if not name.endswith("_pb2"):
                del sys.modules[name]


with _bare_tensorflow():
    from tensorflow.core.framework.tensor_pb2 import TensorProto
    from tensorflow.core.protobuf.meta_graph_pb2 import SignatureDef
    from tensorflow_serving.apis.classification_pb2 import ClassificationRequest, ClassificationResponse
    from tensorflow_serving.apis.get_model_metadata_pb2 import (
        GetModelMetadataRequest,
        GetModelMetadataResponse,
        SignatureDefMap,
    )
    from tensorflow_serving.apis.get_model_status_pb2 import (
        GetModelStatusRequest,
        GetModelStatusResponse,
        ModelVersionStatus,
    )
    from tensorflow_serving.apis.inference_pb2 import MultiInferenceRequest, MultiInferenceResponse
    from tensorflow_serving.apis.input_pb2 import Input
    from tensorflow_serving.apis.model_management_pb2 import ReloadConfigRequest, ReloadConfigResponse
    from tensorflow_serving.apis.model_pb2 import ModelSpec
    from tensorflow_serving.apis.model_service_pb2 import DESCRIPTOR as _MODEL_SERVICE_FILE
    from tensorflow_serving.apis.predict_pb2 import PredictRequest, PredictResponse
    from tensorflow_serving.apis.prediction_log_pb2 import PredictionLog
    from tensorflow_serving.apis.prediction_service_pb2 import DESCRIPTOR as _PREDICTION_SERVICE_FILE
    from tensorflow_serving.apis.regression_pb2 import RegressionRequest, RegressionResponse
    from tensorflow_serving.config.model_server_config_pb2 import ModelServerConfig, ModelType

PREDICTION_SERVICE = _PREDICTION_SERVICE_FILE.services_by_name["PredictionService"].full_name
MODEL_SERVICE = _MODEL_SERVICE_FILE.services_by_name["ModelService"].full_name

__all__ = [
    "MODEL_SERVICE",
    "PREDICTION_SERVICE",
    "ClassificationRequest",
    "ClassificationResponse",
    "GetModelMetadataRequest",
    "GetModelMetadataResponse",
    "GetModelStatusRequest",
    "GetModelStatusResponse",
    "Input",
    "ModelServerConfig",
    "ModelSpec",
    "ModelType",
    "ModelVersionStatus",
    "MultiInferenceRequest",
    "MultiInferenceResponse",
    "PredictRequest",
    "PredictResponse",
    "PredictionLog",
    "RegressionRequest",
    "RegressionResponse",
    "ReloadConfigRequest",
    "ReloadConfigResponse",
    "SignatureDef",
    "SignatureDefMap",
    "TensorProto",
]
