"""TF Serving's messages, in one place.

Importing this module imports TensorFlow (about 7 s): tensorflow_serving's modules import tensorflow.core, and that runs
tensorflow/__init__.py. So only what speaks gRPC or writes the request log imports it, and never at the top of a module
that `serving`, `serving.client` or `--help` load.
"""

from __future__ import annotations

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
from tensorflow_serving.apis.model_pb2 import ModelSpec
from tensorflow_serving.apis.predict_pb2 import PredictRequest, PredictResponse
from tensorflow_serving.apis.prediction_log_pb2 import PredictionLog
from tensorflow_serving.apis.regression_pb2 import RegressionRequest, RegressionResponse

__all__ = [
    "ClassificationRequest",
    "ClassificationResponse",
    "GetModelMetadataRequest",
    "GetModelMetadataResponse",
    "GetModelStatusRequest",
    "GetModelStatusResponse",
    "Input",
    "ModelSpec",
    "ModelVersionStatus",
    "MultiInferenceRequest",
    "MultiInferenceResponse",
    "PredictRequest",
    "PredictResponse",
    "PredictionLog",
    "RegressionRequest",
    "RegressionResponse",
    "SignatureDef",
    "SignatureDefMap",
    "TensorProto",
]
