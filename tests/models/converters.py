"""Runs a Keras model as TFLite and as ONNX, by the converters that the export step stands on."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import onnxruntime
import tensorflow as tf
import tf2onnx
from ai_edge_litert.interpreter import Interpreter

ONNX_OPSET = 17


def run_tflite(model: keras.Model, inputs: dict[str, np.ndarray], folder: Path) -> np.ndarray:
    """Logits by the plain LiteRT interpreter (no Flex operators), converted from the SavedModel."""
    model.export(folder, format="tf_saved_model", verbose=False)
    content = tf.lite.TFLiteConverter.from_saved_model(str(folder)).convert()
    interpreter = Interpreter(model_content=content, num_threads=1)
    outputs = interpreter.get_signature_runner("serving_default")(**inputs)
    (logits,) = outputs.values()
    return logits


def run_onnx(model: keras.Model, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """Logits by ONNX Runtime, converted by tf2onnx.

    Not by its `from_keras`, which passes the inputs as a list, and Keras takes a list for a dictionary only if that
    dictionary is in alphabetical order.
    """
    names = sorted(inputs)
    signature = [tf.TensorSpec((None, *inputs[name].shape[1:]), inputs[name].dtype, name=name) for name in names]

    @tf.function(input_signature=signature)
    def core(*tensors: tf.Tensor) -> tf.Tensor:
        return model(dict(zip(names, tensors, strict=True)), training=False)

    proto, _ = tf2onnx.convert.from_function(core, input_signature=signature, opset=ONNX_OPSET)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, inputs)
    return logits
