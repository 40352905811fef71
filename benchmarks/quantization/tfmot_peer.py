"""The peer: tfmot with tf_keras on the same network, from the same weights, on the same batches.

It runs in an environment of its own, since tfmot refuses Keras 3. The network is built by this project's own builder, to
which tf_keras is given under the name of Keras.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

sys.modules["keras"] = tf_keras
sys.modules["keras.layers"] = tf_keras.layers

import tensorflow_model_optimization as tfmot  # noqa: E402
from tensorflow_model_optimization.python.core.quantization.keras.default_8bit.default_8bit_quantize_configs import (  # noqa: E402
    Default8BitOutputQuantizeConfig,
)

from benchmarks.quantization.task import Task  # noqa: E402
from models import resnet  # noqa: E402
from models.spec import FeatureSpec, OutputSpec  # noqa: E402


def main(folder: Path) -> None:
    """Print a line of JSON: what `benchmarks.quantization` wants to know of the peer."""
    task = Task.load(folder)
    model = _build(task)
    float_accuracy = task.accuracy(model.predict(task.test_x, batch_size=256, verbose=0))
    ptq = _convert(model, task.calibration_x)
    aware = _quantize_aware(model)
    aware.compile(
        optimizer=tf_keras.optimizers.legacy.Adam(task.learning_rate),
        loss=tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    for rows in task.batches():
        aware.train_on_batch(task.train_x[rows], task.train_y[rows])
    qat = _convert(aware, None)
    answers = {"ptq": ptq, "qat": qat}
    results: dict[str, Any] = {"float": float_accuracy}
    for name, content in answers.items():
        results[name] = task.accuracy(_answers(content, task.test_x))
        results[f"{name}_size_bytes"] = len(content)
    print(json.dumps(results))


def _build(task: Task) -> Any:
    shape = task.train_x.shape[1:]
    model = resnet.build({task.feature: FeatureSpec(shape, "float32")}, OutputSpec("multiclass", 10), **task.model_args)
    # tfmot takes no dictionaries of inputs.
    model = tf_keras.Model(model.inputs, model.outputs[0])
    if [w.shape for w in model.get_weights()] != [w.shape for w in task.weights]:
        raise SystemExit("tf_keras holds the weights in another order")
    model.set_weights(task.weights)
    return model


def _quantize_aware(model: Any) -> Any:
    """As `quantize_model`, which refuses a batch norm that follows no convolution: of those, the output is quantized."""
    quantization = tfmot.quantization.keras

    def annotate(layer: Any) -> Any:
        if isinstance(layer, tf_keras.layers.InputLayer):
            return layer
        config = None
        if isinstance(layer, tf_keras.layers.BatchNormalization):
            config = Default8BitOutputQuantizeConfig()
        return quantization.quantize_annotate_layer(layer, quantize_config=config)

    annotated = tf_keras.models.clone_model(model, clone_function=annotate)
    annotated.set_weights(model.get_weights())
    with quantization.quantize_scope({"Default8BitOutputQuantizeConfig": Default8BitOutputQuantizeConfig}):
        return quantization.quantize_apply(annotated)


def _convert(model: Any, calibration_x: np.ndarray | None) -> bytes:
    converter = tf.lite.TFLiteConverter.from_keras_model(model)
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.inference_input_type = converter.inference_output_type = tf.int8
    if calibration_x is not None:
        converter.representative_dataset = lambda: ([row[None]] for row in calibration_x)
        converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
    content: bytes = converter.convert()
    return content


def _answers(content: bytes, x: np.ndarray) -> np.ndarray:
    interpreter = tf.lite.Interpreter(model_content=content)
    (given,), (answer,) = interpreter.get_input_details(), interpreter.get_output_details()
    interpreter.resize_tensor_input(given["index"], x.shape)
    interpreter.allocate_tensors()
    scale, zero_point = given["quantization"]
    interpreter.set_tensor(given["index"], np.clip(np.round(x / scale + zero_point), -128, 127).astype(np.int8))
    interpreter.invoke()
    return interpreter.get_tensor(answer["index"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
