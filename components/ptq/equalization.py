"""Cross-layer equalization: scales moved from one layer to the next, so that the channels of both have like ranges.

Nagel et al., "Data-free quantization through weight equalization and bias correction" (arXiv:1906.04721), section 4.1.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers

from models.quantization import FakeQuantize, QuantizedLayer, graph
from models.quantization.specs import activation_name, is_relu

_SWEEPS = 10
"""A layer in the middle of a chain is in two pairs, each of which disturbs the other."""

_CHANNELWISE = (
    layers.AveragePooling2D,
    layers.Dropout,
    layers.GlobalAveragePooling2D,
    layers.MaxPooling2D,
    layers.SpatialDropout2D,
    layers.ZeroPadding2D,
)

Pair = tuple[QuantizedLayer, QuantizedLayer]


def find_pairs(aware: keras.Model) -> list[Pair]:
    """Layers that follow each other with nothing between but what a positive factor for each channel passes through."""
    consumers: dict[int, list[Any]] = {id(tensor): [] for tensor in aware.outputs}
    for node in graph.nodes(aware):
        for tensor in node.input_tensors:
            consumers.setdefault(id(tensor), []).append(node)
    outputs = {id(tensor) for tensor in aware.outputs}

    def follower(node: Any) -> QuantizedLayer | None:
        (tensor,) = node.outputs
        after = consumers.get(id(tensor), [])
        if len(after) != 1 or id(tensor) in outputs or len(after[0].outputs) != 1:
            return None
        operation = after[0].operation
        if isinstance(operation, QuantizedLayer):
            return operation if _takes_factors(operation) else None
        keeps_channels = isinstance(operation, layers.Reshape) and after[0].outputs[0].shape[-1] == tensor.shape[-1]
        passes = is_relu(operation) and activation_name(operation) == "relu"
        if isinstance(operation, FakeQuantize):
            passes = operation.fixed is None and len(operation._inbound_nodes) == 1
        return follower(after[0]) if passes or keeps_channels or type(operation) in _CHANNELWISE else None

    firsts = [n for n in graph.nodes(aware) if isinstance(n.operation, QuantizedLayer) and _gives_factors(n.operation)]
    found = [(node.operation, follower(node)) for node in firsts]
    return [(first, second) for first, second in found if second is not None]


def equalize(pairs: list[Pair]) -> None:
    """Scale the weights of each pair in place; the float model stays the same function."""
    for _ in range(_SWEEPS):
        for first, second in pairs:
            given = _largest(first, _output_axis(first))
            taken = _largest(second, -2)
            has_both = (given > 0) & (taken > 0)
            factors = np.where(has_both, np.sqrt(given / np.where(has_both, taken, 1)), 1)
            _scale_outputs(first, 1 / factors)
            kernel = second.layer.kernel
            kernel.assign(keras.ops.convert_to_numpy(kernel) * factors[:, None])


def _gives_factors(layer: QuantizedLayer) -> bool:
    norm, inner = layer.batch_norm, layer.layer
    has_place = norm is None or (norm.scale and norm.center)
    is_linear = activation_name(inner) in ("linear", "relu")
    return bool(type(inner) in (layers.Conv2D, layers.DepthwiseConv2D) and layer.calls == 1 and has_place and is_linear)


def _takes_factors(layer: QuantizedLayer) -> bool:
    inner = layer.layer
    one_group = type(inner) is layers.DepthwiseConv2D or (type(inner) is layers.Conv2D and inner.groups == 1)
    return one_group and layer.calls == 1


def _output_axis(layer: QuantizedLayer) -> Any:
    return (-2, -1) if type(layer.layer) is layers.DepthwiseConv2D else -1


def _largest(layer: QuantizedLayer, axis: Any) -> np.ndarray:
    """Largest absolute weight of each channel, the batch norm folded in."""
    kernel = layer.folded()[0] if layer.batch_norm is not None else layer.layer.kernel
    values = np.abs(keras.ops.convert_to_numpy(kernel))
    kept = {number % values.ndim for number in np.atleast_1d(axis)}
    return values.max(tuple(number for number in range(values.ndim) if number not in kept)).reshape(-1)


def _scale_outputs(layer: QuantizedLayer, factors: np.ndarray) -> None:
    if layer.batch_norm is not None:
        scaled = [layer.batch_norm.gamma, layer.batch_norm.beta]
    else:
        scaled = [layer.layer.kernel, *([layer.layer.bias] if layer.layer.use_bias else [])]
    for variable in scaled:
        values = keras.ops.convert_to_numpy(variable)
        channels = variable.shape[-2:] if len(variable.shape) > 1 and _output_axis(layer) != -1 else (-1,)
        variable.assign(values * factors.reshape(channels))
