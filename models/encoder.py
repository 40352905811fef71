"""The encoder block that Transformers for text and for images share.

Sources: A. Vaswani et al., "Attention Is All You Need" (arXiv:1706.03762); blocks normalise first (R. Xiong et al.,
arXiv:2002.04745).
"""

from __future__ import annotations

from dataclasses import dataclass

import keras
from keras import layers

from models.layers import MaskedAttention, gelu_tanh


@dataclass(frozen=True)
class EncoderBlock:
    """One pre-norm encoder block: x + attention(norm(x)), then x + mlp(norm(x)).

    Attributes:
        hidden_dim: Width of the sequence.
        num_heads: Number of attention heads; divides `hidden_dim`.
        mlp_dim: Width of the hidden layer.
        dropout: Fraction dropped in each branch.
        name: Prefix of its layers' names.
    """

    hidden_dim: int
    num_heads: int
    mlp_dim: int
    dropout: float
    name: str

    def __call__(self, inputs: keras.KerasTensor, is_token: keras.KerasTensor | None = None) -> keras.KerasTensor:
        """`(batch, length, hidden_dim)` to the same shape; `is_token` is `(batch, length)`, None if all are tokens."""
        x = self._add(inputs, self._attend(self._norm(inputs, "attention_norm"), is_token), "attention")
        return self._add(x, self._mlp(self._norm(x, "mlp_norm")), "mlp")

    def _attend(self, x: keras.KerasTensor, is_token: keras.KerasTensor | None) -> keras.KerasTensor:
        query, key, value = (self._dense(self.hidden_dim, part)(x) for part in ("query", "key", "value"))
        attention = MaskedAttention(self.num_heads, name=f"{self.name}_attention")
        return self._dense(self.hidden_dim, "attention_output")(attention(query, key, value, is_token))

    def _mlp(self, x: keras.KerasTensor) -> keras.KerasTensor:
        x = self._dense(self.mlp_dim, "mlp_hidden", activation=gelu_tanh)(x)
        return self._dense(self.hidden_dim, "mlp_output")(x)

    def _add(self, x: keras.KerasTensor, branch: keras.KerasTensor, part: str) -> keras.KerasTensor:
        branch = layers.Dropout(self.dropout, name=f"{self.name}_{part}_dropout")(branch)
        return layers.Add(name=f"{self.name}_{part}_add")([x, branch])

    def _norm(self, x: keras.KerasTensor, part: str) -> keras.KerasTensor:
        return layers.LayerNormalization(dtype="float32", name=f"{self.name}_{part}")(x)

    def _dense(self, units: int, part: str, activation: object = None) -> layers.Dense:
        return layers.Dense(units, activation=activation, name=f"{self.name}_{part}")
