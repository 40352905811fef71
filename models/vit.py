"""Vision Transformer: an image as a sequence of patches.

Sources: A. Dosovitskiy et al., "An Image is Worth 16x16 Words" (arXiv:2010.11929); the mean over patches in place of a class
token: L. Beyer et al., "Better plain ViT baselines for ImageNet-1k" (arXiv:2205.01580).
"""

from __future__ import annotations

import keras
from keras import layers

from models.checks import check_divides, check_fraction, check_output_spec, check_positive, image_feature
from models.encoder import EncoderBlock
from models.layers import PositionEmbedding
from models.spec import InputSpec, OutputSpec


def build(
    input_spec: InputSpec,
    output_spec: OutputSpec,
    *,
    patch_size: int = 4,
    num_layers: int = 4,
    hidden_dim: int = 64,
    num_heads: int = 4,
    mlp_dim: int = 128,
    dropout: float = 0.1,
) -> keras.Model:
    """A small Vision Transformer.

    Args:
        input_spec: One float32 feature of shape `(height, width, channels)`, scaled to about unit range.
        output_spec: What is predicted.
        patch_size: Height and width of a patch in pixels; divides the image's.
        num_layers: Number of encoder blocks.
        hidden_dim: Width of the blocks.
        num_heads: Number of attention heads; divides `hidden_dim`.
        mlp_dim: Width of the blocks' hidden layer.
        dropout: Fraction dropped after the embedding, in each residual branch and before the head.

    Returns:
        A model from `{feature: (batch, height, width, channels)}` to logits `(batch, num_logits)`.

    Raises:
        ValueError: If a spec or an argument does not fit.

    Example:
        >>> image = {"image": FeatureSpec((28, 28, 1), "float32")}
        >>> model = build(image, OutputSpec("multiclass", 10), patch_size=7)
    """
    # Checks
    name, shape = image_feature(input_spec, "vit")
    check_output_spec(output_spec)
    sizes = {"patch_size": patch_size, "num_layers": num_layers, "hidden_dim": hidden_dim}
    for argument, value in {**sizes, "num_heads": num_heads, "mlp_dim": mlp_dim}.items():
        check_positive(argument, value)
    check_divides(num_heads, hidden_dim)
    check_fraction("dropout", dropout)
    num_patches = _num_patches(shape, patch_size)

    # Layers
    initializer = keras.initializers.RandomNormal(stddev=0.02)
    patches = layers.Conv2D(
        hidden_dim, patch_size, strides=patch_size, kernel_initializer=initializer, name="patch_embedding"
    )
    blocks = [
        EncoderBlock(hidden_dim, num_heads, mlp_dim, dropout, name=f"block{index}")
        for index in range(1, num_layers + 1)
    ]

    # Graph
    image = keras.Input(shape, dtype="float32", name=name)
    x = layers.Reshape((num_patches, hidden_dim), name="patches")(patches(image))
    x = PositionEmbedding(num_patches, name="position_embedding")(x)
    x = layers.Dropout(dropout, name="embedding_dropout")(x)
    for block in blocks:
        x = block(x)
    x = layers.LayerNormalization(dtype="float32", name="final_norm")(x)
    x = layers.GlobalAveragePooling1D(dtype="float32", name="pool")(x)
    x = layers.Dropout(dropout, name="head_dropout")(x)
    logits = layers.Dense(output_spec.num_logits, dtype="float32", name="logits")(x)

    # Config
    return keras.Model({name: image}, logits, name="vit")


def _num_patches(shape: tuple[int | None, ...], patch_size: int) -> int:
    height, width, _ = shape
    if height is None or width is None:
        raise ValueError("vit needs images of one size, received height or width None: set size in the image op")
    if height % patch_size or width % patch_size:
        raise ValueError(
            f"patch_size must divide height and width, received {patch_size} for {height} x {width}: change it, or set "
            "size in the image op"
        )
    return (height // patch_size) * (width // patch_size)
