"""Layers that are several int8 operations, between which there is rounding, as those operations."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import keras
from keras import layers, ops

from models.quantization import graph


def decomposed(flat: keras.Model, skipped: Set[int]) -> keras.Model:
    """A flat graph in which a separable convolution is two convolutions, and attention its products and softmax.

    Args:
        flat: A functional graph.
        skipped: `id`s of layers to leave as they are.
    """
    parts: dict[int, tuple[Any, Any]] = {}

    def call(node: Any, *args: Any, **kwargs: Any) -> Any:
        operation = node.operation
        if id(operation) in skipped:
            return operation(*args, **kwargs)
        if isinstance(operation, layers.SeparableConv1D | layers.SeparableConv2D):
            if id(operation) not in parts:
                parts[id(operation)] = _separate(operation, args[0])
            depthwise, pointwise = parts[id(operation)]
            return pointwise(depthwise(args[0]))
        if type(operation).__name__ == "DotProductAttention" and not operation.is_causal:
            return _attend(*args, **kwargs)
        return operation(*args, **kwargs)

    inputs = graph.new_inputs(flat)
    return keras.Model(inputs, graph.run(flat, inputs, call), name=flat.name)


def _separate(operation: Any, inputs: Any) -> tuple[Any, Any]:
    """The depthwise and the pointwise convolution, with their weights."""
    is_2d = isinstance(operation, layers.SeparableConv2D)
    config = operation.get_config()
    both = {name: config[name] for name in ("data_format", "dtype", "trainable")}
    spatial = ("kernel_size", "strides", "padding", "dilation_rate", "depth_multiplier")
    depthwise = (layers.DepthwiseConv2D if is_2d else layers.DepthwiseConv1D)(
        **both,
        **{name: config[name] for name in (*spatial, "depthwise_regularizer", "depthwise_constraint")},
        use_bias=False,
        name=f"{operation.name}_depthwise",
    )
    pointwise = (layers.Conv2D if is_2d else layers.Conv1D)(
        **both,
        **{name: config[name] for name in ("filters", "use_bias", "activation", "bias_regularizer", "bias_constraint")},
        kernel_size=1,
        kernel_regularizer=config["pointwise_regularizer"],
        kernel_constraint=config["pointwise_constraint"],
        name=operation.name,
    )
    pointwise(depthwise(inputs))
    depthwise_kernel, *rest = operation.get_weights()
    depthwise.set_weights([depthwise_kernel])
    pointwise.set_weights(rest)
    return depthwise, pointwise


def _attend(query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, scale: float | None = None) -> Any:
    """`keras.ops.dot_product_attention` of `(batch, length, heads, dim)` by products that have an int8 form."""
    query, value = (ops.transpose(x, (0, 2, 1, 3)) for x in (query, value))
    scores = ops.matmul(query, ops.transpose(key, (0, 2, 3, 1)))
    scores = ops.multiply(scores, query.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = ops.add(scores, bias)
    if mask is not None:
        scores = ops.where(mask, scores, -1e9 if scores.dtype != "float16" else -6e4)
    return ops.transpose(ops.matmul(ops.softmax(scores), value), (0, 2, 1, 3))
