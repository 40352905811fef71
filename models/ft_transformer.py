"""FT-Transformer: every column a token.

Source: Y. Gorishniy et al., "Revisiting Deep Learning Models for Tabular Data" (arXiv:2106.11959).
"""

from __future__ import annotations

from typing import Any

import keras
from keras import layers, ops

from models.checks import check_divides, check_fraction, check_output_spec, check_positive
from models.columns import check_columns, embeddings_of
from models.encoder import EncoderBlock
from models.spec import InputSpec, OutputSpec


def build(
    input_spec: InputSpec,
    output_spec: OutputSpec,
    *,
    num_layers: int = 2,
    hidden_dim: int = 32,
    num_heads: int = 4,
    mlp_dim: int = 64,
    dropout: float = 0.1,
) -> keras.Model:
    """A Transformer over the columns of a table, read off at a token of its own.

    Args:
        input_spec: Any number of features of shape `(k,)`: float32 measures, or int64 ids with `num_categories`. Each of the
            `k` numbers or ids is a token.
        output_spec: What is predicted.
        num_layers: Number of encoder blocks.
        hidden_dim: Width of the tokens.
        num_heads: Number of attention heads; divides `hidden_dim`.
        mlp_dim: Width of the blocks' hidden layer.
        dropout: Fraction dropped in each residual branch and before the head.

    Returns:
        A model from `{feature: (batch, k), ...}` to logits `(batch, num_logits)`.

    Raises:
        ValueError: If a spec or an argument does not fit.

    Example:
        >>> spec = {"fare": FeatureSpec((1,), "float32"), "company": FeatureSpec((1,), "int64", num_categories=60)}
        >>> model = build(spec, OutputSpec("binary", 2), num_layers=1)
    """
    # Checks
    check_columns(input_spec, "ft_transformer")
    check_output_spec(output_spec)
    sizes = {"num_layers": num_layers, "hidden_dim": hidden_dim, "num_heads": num_heads, "mlp_dim": mlp_dim}
    for argument, value in sizes.items():
        check_positive(argument, value)
    check_divides(num_heads, hidden_dim)
    check_fraction("dropout", dropout)

    # Layers
    embeddings = embeddings_of(input_spec, hidden_dim)
    blocks = [
        EncoderBlock(hidden_dim, num_heads, mlp_dim, dropout, name=f"block{index}")
        for index in range(1, num_layers + 1)
    ]

    # Graph
    inputs = {name: keras.Input(spec.shape, dtype=spec.dtype, name=name) for name, spec in input_spec.items()}
    tokens = []
    for name, tensor in sorted(inputs.items()):
        if name in embeddings:
            tensor = embeddings[name](tensor)
            tokens.append(TokenBias(name=f"{name}_bias")(tensor))
        else:
            tokens.append(NumberTokens(hidden_dim, name=f"{name}_tokens")(tensor))
    x = SummaryToken(name="summary_token")(
        tokens[0] if len(tokens) == 1 else layers.Concatenate(1, name="columns")(tokens)
    )
    for block in blocks:
        x = block(x)
    x = layers.LayerNormalization(dtype="float32", name="final_norm")(x[:, 0])
    x = layers.Dropout(dropout, name="head_dropout")(layers.ReLU(dtype="float32", name="head_relu")(x))
    logits = layers.Dense(output_spec.num_logits, dtype="float32", name="logits")(x)

    # Config
    return keras.Model(inputs, logits, name="ft_transformer")


def _uniform(dim: int) -> keras.initializers.Initializer:
    """As the source draws what tokens are made of: within 1 / sqrt(dim)."""
    return keras.initializers.RandomUniform(-(dim**-0.5), dim**-0.5)


@keras.saving.register_keras_serializable(package="headrace")
class NumberTokens(layers.Layer):
    """Measures `(batch, k)` to tokens `(batch, k, dim)`: each number times a vector of its own, plus another.

    Args:
        dim: Width of the tokens.
    """

    def __init__(self, dim: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.dim = dim

    def build(self, input_shape: tuple[int, ...]) -> None:
        shape = (input_shape[-1], self.dim)
        self.kernel = self.add_weight(name="kernel", shape=shape, initializer=_uniform(self.dim))
        self.bias = self.add_weight(name="bias", shape=shape, initializer=_uniform(self.dim))

    def call(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        return inputs[:, :, None] * self.kernel + self.bias

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "dim": self.dim}


@keras.saving.register_keras_serializable(package="headrace")
class TokenBias(layers.Layer):
    """Adds a vector of its own to each token of `(batch, k, dim)`: which column it is."""

    def build(self, input_shape: tuple[int, ...]) -> None:
        self.bias = self.add_weight(name="bias", shape=input_shape[1:], initializer=_uniform(input_shape[-1]))

    def call(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        return inputs + self.bias


@keras.saving.register_keras_serializable(package="headrace")
class SummaryToken(layers.Layer):
    """Puts one learned token before those of `(batch, length, dim)`."""

    def build(self, input_shape: tuple[int, ...]) -> None:
        dim = input_shape[-1]
        self.token = self.add_weight(name="token", shape=(dim,), initializer=_uniform(dim))

    def call(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        return ops.concatenate([ops.zeros_like(inputs[:, :1]) + self.token, inputs], axis=1)
