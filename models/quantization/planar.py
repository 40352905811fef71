"""Dense layers, one-dimensional convolutions and batch norms as two-dimensional convolutions.

Of these TFLite's converter takes a scale per channel, which it refuses for the same numbers in other shapes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import keras
from keras import layers

from models.quantization.layers import Reshaped

Apply = Callable[[Any], Any]
_RESHAPED = layers.Dense | layers.EinsumDense | layers.Conv1D | layers.DepthwiseConv1D


@dataclass(frozen=True)
class Planar:
    """A layer on images, and how its inputs become images and its outputs what they were."""

    layer: keras.layers.Layer
    before: Apply
    after: Apply


def as_planar(operation: Any, input_shape: tuple[int | None, ...], **changes: Any) -> Planar:
    """The layer, without its weights, that computes on images what `operation` does.

    Args:
        operation: A layer.
        input_shape: Of its inputs, with the batch dimension.
        changes: Of its config.

    Raises:
        ValueError: the layer's kernel has a constraint, which may count axes, and gets other axes.
    """
    config = {**operation.get_config(), **changes}
    if isinstance(operation, _RESHAPED) and config.get("kernel_constraint", config.get("depthwise_constraint")):
        raise ValueError(
            f"layer '{operation.name}' has a constraint on its kernel, which would hold along another axis of a "
            "convolution's: leave the constraint out, or put the layer into skip"
        )
    if isinstance(operation, layers.Conv1D | layers.DepthwiseConv1D):
        return _of_sequence(operation, config, input_shape)
    if isinstance(operation, layers.Dense):
        layer = layers.Conv2D(config.pop("units"), 1, **_shared(config))
        return _reshaped(layer, input_shape, layer.filters)
    if isinstance(operation, layers.EinsumDense) and (contracted := _num_contracted(operation)):
        return _of_projection(operation, config, input_shape, contracted)
    if isinstance(operation, layers.BatchNormalization):
        layer = layers.DepthwiseConv2D(
            1, use_bias=False, depthwise_initializer="ones", trainable=False, name=config["name"], dtype=config["dtype"]
        )
        return _reshaped(layer, input_shape, input_shape[-1])
    return Planar(type(operation).from_config(config), _nothing, _nothing)


def _reshaped(layer: Any, input_shape: tuple[int | None, ...], channels: int | None) -> Planar:
    """A layer that looks at one place alone: it does not matter which axes of the image the places lie on."""
    places = input_shape[1:-1]
    if len(places) == 2:
        return Planar(layer, _nothing, _nothing)
    image = (1, 1) if not places else (places[0] if len(places) == 1 else None, 1)
    return Planar(layer, _to_image((*image, input_shape[-1]), layer), _from_image((*places, channels), layer))


def _of_sequence(operation: Any, config: dict[str, Any], input_shape: tuple[int | None, ...]) -> Planar:
    kind = layers.Conv2D if isinstance(operation, layers.Conv1D) else layers.DepthwiseConv2D
    sizes = {name: (1, *operation.get_config()[name]) for name in ("kernel_size", "strides", "dilation_rate")}
    padding = config["padding"]
    pad = (operation.kernel_size[0] - 1) * operation.dilation_rate[0] if padding == "causal" else 0
    layer = kind(**{**config, **sizes, "padding": "valid" if padding == "causal" else padding})
    shape = operation.compute_output_shape(input_shape)
    length = None if input_shape[1] is None else input_shape[1] + pad
    to_image, from_image = _to_image((1, length, input_shape[-1]), layer), _from_image(shape[1:], layer)
    if not pad:
        return Planar(layer, to_image, from_image)
    padding_layer = layers.ZeroPadding1D((pad, 0), name=f"{layer.name}_padding", dtype=layer.dtype_policy)
    return Planar(layer, lambda inputs: to_image(padding_layer(inputs)), from_image)


def _num_contracted(operation: Any) -> int:
    """Over how many last axes of the inputs an EinsumDense projects, if that is all it does, else 0."""
    inputs, kernel, outputs = re.split(",|->", operation.equation.replace("...", "").replace(" ", ""))
    for count in range(1, len(inputs)):
        if kernel.startswith(inputs[-count:]) and outputs == inputs[:-count] + kernel[count:]:
            return count if (operation.bias_axes or kernel[count:]) == kernel[count:] else 0
    return 0


def _of_projection(
    operation: Any, config: dict[str, Any], input_shape: tuple[int | None, ...], contracted: int
) -> Planar:
    """`abc,cde->abde` and the like: a Dense layer whose input and output axes are several."""
    places, given = input_shape[1:-contracted], cast(tuple[int, ...], input_shape[-contracted:])
    results = operation.compute_output_shape(input_shape)[1 + len(places) :]
    same = {name: value for name, value in config.items() if name.startswith(("kernel_", "bias_", "activity_"))}
    same.pop("bias_axes", None)
    layer = layers.Conv2D(
        math.prod(results),
        1,
        use_bias=operation.bias_axes is not None,
        **{name: config[name] for name in ("name", "dtype", "trainable", "activation")},
        **same,
    )
    rows = places[0] if len(places) == 1 else 1 if not places else None
    to_image = _to_image((rows, 1, math.prod(given)), layer)
    return Planar(layer, to_image, _from_image((*places, *results), layer))


def _shared(config: dict[str, Any]) -> dict[str, Any]:
    """What the config of a Dense layer has in common with that of a convolution."""
    return {
        name: value for name, value in config.items() if name not in ("lora_rank", "lora_alpha", "quantization_config")
    }


def _to_image(shape: tuple[int | None, ...], layer: Any) -> Reshaped:
    return _reshape(shape, layer, "to_image")


def _from_image(shape: tuple[int | None, ...], layer: Any) -> Reshaped:
    return _reshape(shape, layer, "from_image")


def _reshape(shape: tuple[int | None, ...], layer: Any, suffix: str) -> Reshaped:
    target = tuple(-1 if size is None else size for size in shape)
    return Reshaped(target, dtype=layer.dtype_policy, name=f"{layer.name}_{suffix}")


def _nothing(inputs: Any) -> Any:
    return inputs
