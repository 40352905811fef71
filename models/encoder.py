"""The encoder block that Transformers for text and for images share.

Sources: A. Vaswani et al., "Attention Is All You Need" (arXiv:1706.03762); blocks normalise first (R. Xiong et al.,
arXiv:2002.04745).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import keras
from keras import layers

from models.attention import LinearAttention, LocalAttention, MaskedAttention
from models.layers import gelu_tanh


@dataclass(frozen=True)
class AttentionKind:
    """Which attention a block has.

    Attributes:
        kind: `full`, `local` or `linear`.
        window: local: largest distance of what is attended to, in tokens.
        rotary: Whether queries and keys are turned by their position.
    """

    kind: Literal["full", "local", "linear"] = "full"
    window: int = 64
    rotary: bool = False

    def layer(self, num_heads: int, *, name: str) -> layers.Layer:
        """A layer that is called with query, key, value and what it is to attend to."""
        if self.kind == "local":
            return LocalAttention(num_heads, self.window, rotary=self.rotary, name=name)
        return (LinearAttention if self.kind == "linear" else MaskedAttention)(num_heads, rotary=self.rotary, name=name)


@dataclass(frozen=True)
class EncoderBlock:
    """One pre-norm encoder block: x + attention(norm(x)), then x + mlp(norm(x)).

    Attributes:
        hidden_dim: Width of the sequence.
        num_heads: Number of attention heads; divides `hidden_dim`.
        mlp_dim: Width of the hidden layer.
        dropout: Fraction dropped in each branch.
        name: Prefix of its layers' names.
        attention: Which one.
    """

    hidden_dim: int
    num_heads: int
    mlp_dim: int
    dropout: float
    name: str
    attention: AttentionKind = AttentionKind()

    def __call__(
        self,
        inputs: keras.KerasTensor,
        is_token: keras.KerasTensor | None = None,
        bias: keras.KerasTensor | None = None,
    ) -> keras.KerasTensor:
        """`(batch, length, hidden_dim)` to the same shape; `is_token` and `bias` as the attention takes them."""
        context = {"is_token": is_token, "bias": bias}
        given = {name: tensor for name, tensor in context.items() if tensor is not None}
        x = self._add(inputs, self._attend(self._norm(inputs, "attention_norm"), given), "attention")
        return self._add(x, self._mlp(self._norm(x, "mlp_norm")), "mlp")

    def _attend(self, x: keras.KerasTensor, given: dict[str, keras.KerasTensor]) -> keras.KerasTensor:
        query, key, value = (self._dense(self.hidden_dim, part)(x) for part in ("query", "key", "value"))
        attention = self.attention.layer(self.num_heads, name=f"{self.name}_attention")
        return self._dense(self.hidden_dim, "attention_output")(attention(query, key, value, **given))

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
