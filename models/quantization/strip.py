"""From a trained quantization-aware model to the one that converters take."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from typing import Any

import keras
from keras import ops

from models.quantization import graph
from models.quantization.layers import FakeQuantize, QuantizedLayer, Scheduled


def strip(model: keras.Model, *, keep_float: Collection[str] = ()) -> keras.Model:
    """The model for converters: float32, ranges fixed, batch norm folded, nothing that trains.

    Its answers are those of `model` at inference. TFLite's converter, with `Optimize.DEFAULT` and no representative
    dataset, makes an int8 model of it whose scales are the trained ones.

    Args:
        model: Of `quantize_aware`, trained past `start_step`, or read from a file.
        keep_float: Names of layers of `model` that do not round: their operations stay float in the int8 model.

    Raises:
        ValueError: `model` is none of `quantize_aware`, or nothing has been rounded yet.
    """
    quantized = [layer for layer in model.layers if isinstance(layer, Scheduled)]
    if not quantized:
        raise ValueError(f"model '{model.name}' has no quantized layer: make it by quantize_aware")
    for layer in quantized:
        if layer.name not in keep_float and not layer.is_active():
            raise ValueError(
                f"layer '{layer.name}' has not been rounded yet, so there are no ranges to convert with: train for more "
                f"than start_step={layer.start_step} steps, or set start_step=0"
            )
    copies: dict[int, Any] = {}

    def call(node: Any, *args: Any, **kwargs: Any) -> Any:
        operation = node.operation
        is_float = isinstance(operation, Scheduled) and operation.name in keep_float
        if is_float and isinstance(operation, FakeQuantize):
            return args[0]
        if id(operation) not in copies:
            copies[id(operation)] = _stripped(operation, is_float)
        return copies[id(operation)](*args, **kwargs)

    inputs = graph.new_inputs(model)
    with graph.undone(model):
        stripped = keras.Model(inputs, graph.run(model, inputs, call), name=model.name)
    for layer in model.layers:
        if id(layer) in copies:
            _copy_stripped_weights(layer, copies[id(layer)])
    return stripped


def in_float(model: keras.Model) -> keras.Model:
    """The model itself, or what a quantization-aware one is when nothing in it is rounded, batch norm folded."""
    rounding = {layer.name for layer in model.layers if isinstance(layer, Scheduled)}
    return strip(model, keep_float=rounding) if rounding else model


def ranges(model: keras.Model) -> dict[str, tuple[float, float]]:
    """`(min, max)` of each rounded activation, by the name of the layer that rounds it."""
    found = {layer.name: layer.range() for layer in model.layers if isinstance(layer, FakeQuantize)}
    return {name: (float(low), float(high)) for name, (low, high) in found.items()}


def _stripped(operation: Any, is_float: bool) -> Any:
    if isinstance(operation, FakeQuantize):
        low, high = operation.range()
        return FakeQuantize(fixed=(float(low), float(high)), always=True, name=operation.name)
    if isinstance(operation, QuantizedLayer):
        has_norm = operation.batch_norm is not None
        layer = _in_float32(operation.layer, **({"use_bias": True} if has_norm else {}))
        return layer if is_float else QuantizedLayer(layer, operation.quantized, always=True, name=operation.name)
    copy = _in_float32(operation)
    if type(operation) is keras.layers.LayerNormalization:
        return SummingLayerNormalization.from_config(copy.get_config())
    return copy


@keras.saving.register_keras_serializable(package="headrace")
class SummingLayerNormalization(keras.layers.LayerNormalization):
    """LayerNormalization whose mean is a sum divided by the number of its terms.

    A mean of rounded numbers would be an int8 operation of TFLite, rounded to the range of its input, while all the rest
    of the layer is float.
    """

    def call(self, inputs: Any) -> Any:
        axes = [self.axis] if isinstance(self.axis, int) else list(self.axis)
        shape = [size if i in axes or i - len(inputs.shape) in axes else 1 for i, size in enumerate(inputs.shape)]
        count = math.prod(inputs.shape[axis] for axis in axes)
        centred = inputs - ops.sum(inputs, axes, keepdims=True) / count
        variance = ops.sum(ops.square(centred), axes, keepdims=True) / count
        outputs = centred * ops.rsqrt(variance + self.epsilon)
        outputs = outputs * ops.reshape(self.gamma, shape) if self.scale else outputs
        return outputs + ops.reshape(self.beta, shape) if self.center else outputs


def _copy_stripped_weights(layer: Any, stripped: Any) -> None:
    if isinstance(layer, FakeQuantize):
        return
    target = stripped.layer if isinstance(stripped, QuantizedLayer) else stripped
    if isinstance(layer, QuantizedLayer) and layer.batch_norm is not None:
        target.set_weights([keras.ops.convert_to_numpy(value) for value in layer.folded()])
        return
    graph.copy_variables(layer.layer if isinstance(layer, QuantizedLayer) else layer, target)


def _in_float32(operation: Any, **changes: Any) -> Any:
    """A copy without its weights that computes in float32, the layers within it, too."""
    serialized = keras.saving.serialize_keras_object(operation)
    serialized["config"] = {**serialized["config"], **changes}
    # Not built: it would have the weights from before the changes.
    serialized.pop("build_config", None)
    plain = json.dumps(serialized).replace('"mixed_float16"', '"float32"').replace('"mixed_bfloat16"', '"float32"')
    return keras.saving.deserialize_keras_object(json.loads(plain))
