"""Pre-activation residual networks for images: ResNet, ResNeXt, and either with squeeze-and-excitation.

Sources: K. He et al., "Identity Mappings in Deep Residual Networks" (arXiv:1603.05027); S. Xie et al., "Aggregated Residual
Transformations for Deep Neural Networks" (arXiv:1611.05431); J. Hu et al., "Squeeze-and-Excitation Networks"
(arXiv:1709.01507). The last convolution of each block starts at zero, so each block starts as the identity (P. Goyal et
al., arXiv:1706.02677, section 5.1, which does it through the last batch norm). Variants are data, at the end of this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import keras
from keras import layers

from models.checks import check_fraction, check_output_spec, check_positive, check_positives, image_feature
from models.spec import InputSpec, OutputSpec


def build(
    input_spec: InputSpec,
    output_spec: OutputSpec,
    *,
    stage_sizes: Sequence[int] = (2, 2, 2),
    stage_widths: Sequence[int] = (16, 32, 64),
    block: Literal["basic", "bottleneck"] = "basic",
    bottleneck_ratio: float = 0.25,
    groups: int = 1,
    squeeze_ratio: float = 0.0,
    stem: Literal["conv3", "conv7_pool"] = "conv3",
    stem_width: int | None = None,
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
        block: `basic`: two 3x3 convolutions; `bottleneck`: 1x1, 3x3, 1x1.
        bottleneck_ratio: Width of a bottleneck's 3x3 convolution, as a share of its stage's.
        groups: Groups of a bottleneck's 3x3 convolution: ResNeXt's cardinality.
        squeeze_ratio: Width of the hidden layer of squeeze-and-excitation, as a share of its stage's; 0: without.
        stem: `conv3`: one 3x3 convolution, for small images; `conv7_pool`: 7x7, then a maximum over 3x3, strides 2.
        stem_width: Number of channels of the stem; default: of the first stage.
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
    name, shape = image_feature(input_spec, "resnet")
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

    inner = _inner_widths(block, widths, bottleneck_ratio, groups)
    check_fraction("squeeze_ratio", squeeze_ratio)
    if stem not in ("conv3", "conv7_pool"):
        raise ValueError(f"stem must be 'conv3' or 'conv7_pool', received {stem!r}")
    if stem_width is not None:
        check_positive("stem_width", stem_width)

    # Layers
    entry = _conv(stem_width or widths[0], 3 if stem == "conv3" else 7, stem_strides, name="stem_conv")
    blocks = [
        _Block(
            width,
            inner_width,
            is_bottleneck=block == "bottleneck",
            groups=groups,
            strides=2 if stage > 1 and number == 1 else 1,
            squeeze_ratio=squeeze_ratio,
            momentum=batch_norm_momentum,
            name=f"stage{stage}_block{number}",
        )
        for stage, (size, width, inner_width) in enumerate(zip(sizes, widths, inner, strict=True), start=1)
        for number in range(1, size + 1)
    ]
    final_norm = _norm(batch_norm_momentum, name="final_norm")

    # Graph
    image = keras.Input(shape, dtype="float32", name=name)
    x = entry(image)
    if stem == "conv7_pool":
        x = layers.MaxPooling2D(3, strides=2, padding="same", name="stem_pool")(x)
    for residual in blocks:
        x = residual(x)
    x = layers.ReLU(name="final_relu")(final_norm(x))
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    x = layers.Dropout(dropout, name="head_dropout")(x)
    logits = layers.Dense(output_spec.num_logits, dtype="float32", name="logits")(x)

    # Config
    return keras.Model({name: image}, logits, name="resnet")


def _inner_widths(block: str, widths: Sequence[int], ratio: float, groups: int) -> list[int]:
    """Width of the convolutions inside the blocks of each stage."""
    if block not in ("basic", "bottleneck"):
        raise ValueError(f"block must be 'basic' or 'bottleneck', received {block!r}")
    check_positive("groups", groups)
    if block == "basic":
        if groups > 1:
            raise ValueError(f"only a bottleneck has groups, received groups={groups}: set block='bottleneck'")
        return list(widths)
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
        raise ValueError(f"bottleneck_ratio must be a number in (0, 1], received {ratio!r}")
    inner = [round(width * ratio) for width in widths]
    for width, narrow in zip(widths, inner, strict=True):
        if narrow < 1 or narrow % groups:
            raise ValueError(
                f"a stage of {width} channels has {narrow} inside its bottlenecks (bottleneck_ratio={ratio}), which "
                f"groups={groups} must divide: change one of the three"
            )
    return inner


@dataclass(frozen=True)
class _Block:
    """A residual branch, each convolution after BN and ReLU, beside a shortcut.

    The shortcut is the input, or a 1x1 convolution of it where height, width or the number of channels change.
    """

    width: int
    inner_width: int
    is_bottleneck: bool
    groups: int
    strides: int
    squeeze_ratio: float
    momentum: float
    name: str

    def __call__(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        """`(batch, height, width, channels)` to `(batch, height / strides, width / strides, self.width)`."""
        activated = x = self._norm_relu(inputs, 1)
        convolutions = self._convolutions()
        for index, convolution in enumerate(convolutions, start=1):
            x = convolution(x if index == 1 else self._norm_relu(x, index))
        if self.squeeze_ratio:
            x = self._excite(x)
        shortcut = inputs
        if self.strides > 1 or inputs.shape[-1] != self.width:
            shortcut = _conv(self.width, 1, self.strides, name=f"{self.name}_projection")(activated)
        return layers.Add(name=f"{self.name}_add")([shortcut, x])

    def _convolutions(self) -> list[layers.Conv2D]:
        names = [f"{self.name}_conv{index}" for index in (1, 2, 3)]
        if not self.is_bottleneck:
            first = _conv(self.inner_width, 3, self.strides, name=names[0])
            return [first, _conv(self.width, 3, 1, name=names[1], initializer="zeros")]
        return [
            _conv(self.inner_width, 1, 1, name=names[0]),
            _conv(self.inner_width, 3, self.strides, name=names[1], groups=self.groups),
            _conv(self.width, 1, 1, name=names[2], initializer="zeros"),
        ]

    def _excite(self, x: keras.KerasTensor) -> keras.KerasTensor:
        """Each channel times a factor in (0, 1) that follows from the means of all channels."""
        hidden = max(1, round(self.width * self.squeeze_ratio))
        factor = layers.GlobalAveragePooling2D(keepdims=True, name=f"{self.name}_squeeze")(x)
        factor = layers.Dense(hidden, activation="relu", name=f"{self.name}_squeeze_hidden")(factor)
        factor = layers.Dense(self.width, activation="sigmoid", name=f"{self.name}_excitation")(factor)
        return layers.Multiply(name=f"{self.name}_scale")([x, factor])

    def _norm_relu(self, inputs: keras.KerasTensor, index: int) -> keras.KerasTensor:
        x = _norm(self.momentum, name=f"{self.name}_norm{index}")(inputs)
        return layers.ReLU(name=f"{self.name}_relu{index}")(x)


def _conv(
    width: int, kernel_size: int, strides: int, *, name: str, initializer: str = "he_normal", groups: int = 1
) -> layers.Conv2D:
    return layers.Conv2D(
        width,
        kernel_size,
        strides=strides,
        padding="same",
        groups=groups,
        use_bias=False,
        kernel_initializer=initializer,
        name=name,
    )


def _norm(momentum: float, *, name: str) -> layers.BatchNormalization:
    return layers.BatchNormalization(momentum=momentum, epsilon=1e-5, name=name)


_imagenet = partial(build, stem="conv7_pool", stem_width=64, stem_strides=2)
resnet18 = partial(_imagenet, stage_sizes=(2, 2, 2, 2), stage_widths=(64, 128, 256, 512))
resnet34 = partial(_imagenet, stage_sizes=(3, 4, 6, 3), stage_widths=(64, 128, 256, 512))
resnet50 = partial(_imagenet, stage_sizes=(3, 4, 6, 3), stage_widths=(256, 512, 1024, 2048), block="bottleneck")
resnext50 = partial(resnet50, bottleneck_ratio=0.5, groups=32)
resnet20 = partial(build, stage_sizes=(3, 3, 3), stage_widths=(16, 32, 64))
