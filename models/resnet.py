"""Pre-activation residual network for images.

Source: K. He et al., "Identity Mappings in Deep Residual Networks" (arXiv:1603.05027). The last convolution of each
block starts at zero, so each block starts as the identity (P. Goyal et al., arXiv:1706.02677, section 5.1, which does
it through the last batch norm). Variants are data, at the end of this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import keras
from keras import layers

from models.checks import check_fraction, check_output_spec, check_positive, check_positives, describe
from models.spec import InputSpec, OutputSpec


def build(
    input_spec: InputSpec,
    output_spec: OutputSpec,
    *,
    stage_sizes: Sequence[int] = (2, 2, 2),
    stage_widths: Sequence[int] = (16, 32, 64),
    stem_strides: int = 1,
    dropout: float = 0.0,
    batch_norm_momentum: float = 0.9,
) -> keras.Model:
    """A pre-activation ResNet.

    Args:
        input_spec: One float32 feature of shape `(height, width, channels)`, scaled to about unit range; height and
            width may be `None`.
        output_spec: What is predicted.
        stage_sizes: Number of residual blocks per stage; each stage after the first halves height and width.
        stage_widths: Number of channels per stage.
        stem_strides: Strides of the first convolution; 2 or more saves time on large images.
        dropout: Fraction of pooled features dropped before the head.
        batch_norm_momentum: Of the moving statistics; Keras's own 0.99 lags behind in runs of a few hundred steps.

    Returns:
        A model from `{feature: (batch, height, width, channels)}` to logits `(batch, num_logits)`.

    Raises:
        ValueError: If a spec or an argument does not fit.

    Example:
        >>> image = {"image": FeatureSpec((28, 28, 1), "float32")}
        >>> model = build(image, OutputSpec("multiclass", 10), stage_sizes=(1, 1))
    """
    # Checks
    name, shape = _image_feature(input_spec)
    check_output_spec(output_spec)
    sizes = check_positives("stage_sizes", stage_sizes)
    widths = check_positives("stage_widths", stage_widths)
    if len(sizes) != len(widths):
        raise ValueError(
            f"stage_sizes and stage_widths describe the same stages, received {len(sizes)} sizes {list(sizes)} and "
            f"{len(widths)} widths {list(widths)}: give one width per size"
        )
    check_positive("stem_strides", stem_strides)
    check_fraction("dropout", dropout)
    check_fraction("batch_norm_momentum", batch_norm_momentum)

    # Layers
    stem = _conv(widths[0], 3, stem_strides, name="stem_conv")
    blocks = [
        _Block(
            width,
            downsample=stage > 1 and block == 1,
            momentum=batch_norm_momentum,
            name=f"stage{stage}_block{block}",
        )
        for stage, (size, width) in enumerate(zip(sizes, widths, strict=True), start=1)
        for block in range(1, size + 1)
    ]
    final_norm = _norm(batch_norm_momentum, name="final_norm")

    # Graph
    image = keras.Input(shape, dtype="float32", name=name)
    x = stem(image)
    for block in blocks:
        x = block(x)
    x = layers.ReLU(name="final_relu")(final_norm(x))
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    x = layers.Dropout(dropout, name="head_dropout")(x)
    logits = layers.Dense(output_spec.num_logits, dtype="float32", name="logits")(x)

    # Config
    return keras.Model({name: image}, logits, name="resnet")


def _image_feature(input_spec: InputSpec) -> tuple[str, tuple[int | None, ...]]:
    """Name and shape of the one feature, which must be an image."""
    features = list(input_spec.items())
    if len(features) == 1:
        name, feature = features[0]
        is_image = len(feature.shape) == 3 and feature.shape[2] is not None
        if is_image and feature.dtype == "float32" and feature.num_categories is None:
            return name, feature.shape
    raise ValueError(
        "resnet takes exactly one float32 feature of shape (height, width, channels), received "
        f"{describe(input_spec)}: let the transform make one image feature, or choose another model"
    )


@dataclass(frozen=True)
class _Block:
    """BN-ReLU-Conv-BN-ReLU-Conv beside a shortcut, which is the input, or a 1x1 convolution where it downsamples."""

    width: int
    downsample: bool
    momentum: float
    name: str

    def __call__(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        """`(batch, height, width, channels)` to `(batch, height, width, self.width)`, or half that height and width."""
        strides = 2 if self.downsample else 1
        activated = self._norm_relu(inputs, 1)
        x = _conv(self.width, 3, strides, name=f"{self.name}_conv1")(activated)
        x = self._norm_relu(x, 2)
        x = _conv(self.width, 3, 1, name=f"{self.name}_conv2", initializer="zeros")(x)
        shortcut = inputs
        if self.downsample:
            shortcut = _conv(self.width, 1, strides, name=f"{self.name}_projection")(activated)
        return layers.Add(name=f"{self.name}_add")([shortcut, x])

    def _norm_relu(self, inputs: keras.KerasTensor, index: int) -> keras.KerasTensor:
        x = _norm(self.momentum, name=f"{self.name}_norm{index}")(inputs)
        return layers.ReLU(name=f"{self.name}_relu{index}")(x)


def _conv(width: int, kernel_size: int, strides: int, *, name: str, initializer: str = "he_normal") -> layers.Conv2D:
    return layers.Conv2D(
        width,
        kernel_size,
        strides=strides,
        padding="same",
        use_bias=False,
        kernel_initializer=initializer,
        name=name,
    )


def _norm(momentum: float, *, name: str) -> layers.BatchNormalization:
    return layers.BatchNormalization(momentum=momentum, epsilon=1e-5, name=name)


resnet20 = partial(build, stage_sizes=(3, 3, 3), stage_widths=(16, 32, 64))
resnet18 = partial(build, stage_sizes=(2, 2, 2, 2), stage_widths=(64, 128, 256, 512), stem_strides=2)
