"""How each kind of layer is quantized: a table, which layers of one's own extend.

The table follows what the operations of TFLite's int8 specification ask for (ai.google.dev/edge/litert, "LiteRT 8-bit
quantization specification"): which inputs and outputs share a scale, which outputs have a fixed one, which operations
take a ReLU into themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import keras
from keras import layers

from models.layers import MaskedMean, PositionEmbedding

Range = tuple[float, float]
SIGMOID_RANGE: Range = (0.0, 255 / 256)
TANH_RANGE: Range = (-1.0, 127 / 128)


@dataclass(frozen=True)
class LayerSpec:
    """How one kind of layer is quantized.

    A layer of one's own has a method `quantization_spec(self)` that returns this.

    Attributes:
        weights: Name of each weight to quantize -> how many of its last axes are channels with a scale each: 1 for the
            kernel of a convolution, 2 for a depthwise one, 0 for one scale.
        output: `own`: the output gets a range of its own. `same`: the layer moves numbers and makes no new ones, so the
            output has the input's range. `rounded`: it has the input's range and new numbers, such as averages. `joint`:
            the inputs and the output share one range. A pair: the range that the int8 operation has by its definition.
            `float`: the layer stays as it is.
        fuses_relu: Whether a ReLU that follows is part of the operation, so that nothing is rounded between.
        folds: Batch norm that follows is folded into the weight named first; its axis of output channels.
    """

    weights: Mapping[str, int] = field(default_factory=dict)
    output: Literal["own", "same", "rounded", "joint", "float"] | Range = "own"
    fuses_relu: bool = False
    folds: int | None = None


FLOAT = LayerSpec(output="float")
OWN = LayerSpec()
SAME = LayerSpec(output="same")
ROUNDED = LayerSpec(output="rounded")
JOINT = LayerSpec(output="joint")
ARITHMETIC = LayerSpec(fuses_relu=True)
CONVOLUTION = LayerSpec({"kernel": 1}, fuses_relu=True, folds=-1)
DEPTHWISE = LayerSpec({"kernel": 2}, fuses_relu=True, folds=-1)
# The converter cannot turn the axis of such a kernel's scales, so there is one.
TRANSPOSED = LayerSpec({"kernel": 0}, fuses_relu=True, folds=-2)

LAYERS: dict[type, LayerSpec] = {
    layers.Conv1D: CONVOLUTION,
    layers.Conv2D: CONVOLUTION,
    layers.DepthwiseConv1D: DEPTHWISE,
    layers.DepthwiseConv2D: DEPTHWISE,
    layers.Conv2DTranspose: TRANSPOSED,
    layers.Dense: CONVOLUTION,
    layers.EinsumDense: LayerSpec({"kernel": 0}, fuses_relu=True),
    layers.BatchNormalization: LayerSpec(fuses_relu=True),
    layers.Embedding: LayerSpec({"embeddings": 0}, output="same"),
    PositionEmbedding: LayerSpec({"positions": 0}),
    MaskedMean: FLOAT,
    layers.Activation: OWN,
    layers.ReLU: OWN,
    layers.LeakyReLU: OWN,
    layers.Softmax: LayerSpec(output=SIGMOID_RANGE),
    layers.Add: ARITHMETIC,
    layers.Subtract: ARITHMETIC,
    layers.Multiply: ARITHMETIC,
    layers.Maximum: JOINT,
    layers.Minimum: JOINT,
    layers.Concatenate: JOINT,
    layers.GlobalAveragePooling1D: OWN,
    layers.GlobalAveragePooling2D: OWN,
    layers.AveragePooling1D: ROUNDED,
    layers.AveragePooling2D: ROUNDED,
    **dict.fromkeys(
        (
            layers.MaxPooling1D,
            layers.MaxPooling2D,
            layers.GlobalMaxPooling1D,
            layers.GlobalMaxPooling2D,
            layers.Reshape,
            layers.Flatten,
            layers.Permute,
            layers.RepeatVector,
            layers.Identity,
            layers.ZeroPadding1D,
            layers.ZeroPadding2D,
            layers.Cropping1D,
            layers.Cropping2D,
            layers.Dropout,
            layers.SpatialDropout1D,
            layers.SpatialDropout2D,
            layers.GaussianDropout,
            layers.GaussianNoise,
            layers.ActivityRegularization,
        ),
        SAME,
    ),
}

# Operations of `keras.ops`, by the name of their class: they are no public classes.
OPERATIONS: dict[str, LayerSpec] = {
    **dict.fromkeys(("Add", "Subtract", "Multiply"), ARITHMETIC),
    **dict.fromkeys(("Matmul", "Einsum", "Mean", "Relu", "Relu6", "LeakyRelu", "Gelu", "Silu", "HardSilu"), OWN),
    **dict.fromkeys(
        ("Reshape", "Transpose", "Squeeze", "ExpandDims", "GetItem", "Cast", "Identity", "MaxPool", "Max"), SAME
    ),
    **dict.fromkeys(("Concatenate", "Stack", "Maximum", "Minimum"), JOINT),
    "AveragePool": ROUNDED,
    "Sigmoid": LayerSpec(output=SIGMOID_RANGE),
    "Softmax": LayerSpec(output=SIGMOID_RANGE),
    "Tanh": LayerSpec(output=TANH_RANGE),
}

_ACTIVATION_RANGES: dict[str, Range] = {"sigmoid": SIGMOID_RANGE, "softmax": SIGMOID_RANGE, "tanh": TANH_RANGE}


def spec_of(operation: Any, own: Mapping[type, LayerSpec]) -> LayerSpec | None:
    """How a layer or operation is quantized; None if nothing says so.

    Args:
        operation: A layer, or an operation of a functional graph.
        own: Specs by class that come before the layer's own method and the table.

    Raises:
        TypeError: `quantization_spec()` returns something else than a LayerSpec.
    """
    for kind in type(operation).__mro__:
        if kind in own:
            return own[kind]
    if hasattr(operation, "quantization_spec"):
        spec = operation.quantization_spec()
        if not isinstance(spec, LayerSpec):
            raise TypeError(f"{_kind(operation)}.quantization_spec() must return a LayerSpec, received {spec!r}")
        return spec
    if type(operation).__module__.startswith("keras.src.ops"):
        return OPERATIONS.get(type(operation).__name__)
    if isinstance(operation, layers.UpSampling2D | layers.UpSampling1D):
        return SAME if getattr(operation, "interpolation", "nearest") == "nearest" else ROUNDED
    # A subclass may compute something else.
    spec = LAYERS.get(type(operation))
    if isinstance(operation, layers.Activation):
        return LayerSpec(output=_ACTIVATION_RANGES.get(activation_name(operation), "own"))
    return spec


def activation_name(operation: Any) -> str:
    """`relu`, `gelu` and so on, of a layer's `activation` or of a layer or operation that is one; `linear` without."""
    if isinstance(operation, layers.ReLU):
        is_plain = not operation.negative_slope and not operation.threshold
        return {None: "relu", 6: "relu6"}.get(operation.max_value, "") if is_plain else ""
    if type(operation).__module__.startswith("keras.src.ops"):
        return type(operation).__name__.lower()
    return getattr(getattr(operation, "activation", None), "__name__", "linear")


def is_relu(operation: Any) -> bool:
    """Whether it is a ReLU or ReLU6 and nothing else."""
    kinds = (layers.ReLU, layers.Activation)
    is_activation = isinstance(operation, kinds) or type(operation).__module__.startswith("keras.src.ops")
    return is_activation and activation_name(operation) in ("relu", "relu6")


def _kind(operation: keras.Operation) -> str:
    return type(operation).__name__
