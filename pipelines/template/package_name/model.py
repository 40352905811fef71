"""The network: replace what is built here by your own."""

from __future__ import annotations

from collections.abc import Sequence

import keras
from keras import layers
from models.spec import InputSpec, OutputSpec


def build(
    input_spec: InputSpec,
    output_spec: OutputSpec,
    *,
    hidden_dims: Sequence[int] = (64, 32),
    embedding_dim: int = 8,
    dropout: float = 0.2,
) -> keras.Model:
    """Embedded ids beside measures, and dense layers over both.

    Args:
        input_spec: What `transform` makes of the data: shape and type of each feature.
        output_spec: What is to be predicted.
        hidden_dims: Widths of the dense layers, `model.args.hidden_dims` in the config.
        embedding_dim: Width of each embedding.
        dropout: Fraction dropped after each dense layer.

    Returns:
        A model from `{feature: (batch, *shape)}` to float32 logits `(batch, output_spec.num_logits)`.
    """
    inputs = {name: keras.Input(spec.shape, dtype=spec.dtype, name=name) for name, spec in input_spec.items()}
    columns = []
    for name, spec in sorted(input_spec.items()):
        column = inputs[name]
        if spec.num_categories is not None:
            column = layers.Flatten()(layers.Embedding(spec.num_categories, embedding_dim)(column))
        columns.append(column)
    x = layers.Concatenate()(columns)
    for width in hidden_dims:
        x = layers.Dense(width, activation="relu")(x)
        x = layers.Dropout(dropout)(x)
    logits = layers.Dense(output_spec.num_logits, dtype="float32", name="logits")(x)
    return keras.Model(inputs, logits, name="package_name")
