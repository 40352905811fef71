"""Transformer encoder for token ids: A. Vaswani et al., "Attention Is All You Need" (arXiv:1706.03762).

Blocks normalise first (R. Xiong et al., arXiv:2002.04745). Padding is masked explicitly, by tensors in the graph, and
every operation has a counterpart in TFLite and ONNX.
"""

from __future__ import annotations

from typing import Literal

import keras
from keras import layers

from models.attention import RelativePositionBias
from models.checks import check_divides, check_fraction, check_output_spec, check_positive, describe, is_dense
from models.encoder import AttentionKind, EncoderBlock
from models.layers import MaskedMean, PaddingMask, PositionEmbedding, SinusoidalPositions, gelu_tanh
from models.spec import FeatureSpec, InputSpec, OutputSpec


def build(
    input_spec: InputSpec,
    output_spec: OutputSpec,
    *,
    num_layers: int = 2,
    hidden_dim: int = 64,
    num_heads: int = 4,
    mlp_dim: int = 128,
    dropout: float = 0.1,
    max_length: int | None = None,
    attention: Literal["full", "local", "linear"] = "full",
    window: int = 64,
    positions: Literal["learned", "sinusoidal", "relative", "rotary"] = "learned",
) -> keras.Model:
    """A Transformer encoder with masked mean pooling and a linear head.

    Args:
        input_spec: One feature with `is_sequence`, int64 ids of shape `(length,)` in which 0 is padding. Beside it, any
            float32 features of shape `(k,)`, such as TF-IDF: each passes a Dense layer and joins the pooled tokens.
        output_spec: What is predicted.
        num_layers: Number of encoder blocks.
        hidden_dim: Width of the embeddings and of the blocks.
        num_heads: Number of attention heads; divides `hidden_dim`.
        mlp_dim: Width of the blocks' hidden layer.
        dropout: Fraction dropped after the embedding, in each residual branch and before the head.
        max_length: Longest sequence accepted, in tokens. Needed by learned positions where the feature's length is `None`;
            else its length.
        attention: `full`: to every token; `local`: to those at most `window` away; `linear`: to every token, by weights that
            are products. The last two take time linear in the length.
        window: local: largest distance, in tokens.
        positions: How positions are told: `learned` or `sinusoidal` vectors that are added to the embeddings, `rotary` turns
            of queries and keys, or T5's `relative` numbers that are added to the scores, which linear attention has not.

    Returns:
        A model from `{feature: (batch, length), ...}` to logits `(batch, num_logits)`.

    Raises:
        ValueError: If a spec or an argument does not fit.

    Example:
        >>> text = {"text": FeatureSpec((128,), "int64", num_categories=8000, is_sequence=True)}
        >>> model = build(text, OutputSpec("multiclass", 8), num_layers=1)
    """
    # Checks
    name, tokens = _token_feature(input_spec)
    check_output_spec(output_spec)
    for argument, value in {
        "num_layers": num_layers,
        "hidden_dim": hidden_dim,
        "num_heads": num_heads,
        "mlp_dim": mlp_dim,
    }.items():
        check_positive(argument, value)
    check_divides(num_heads, hidden_dim)
    check_fraction("dropout", dropout)
    check_positive("window", window)
    _check_choices(attention, positions, hidden_dim // num_heads)
    num_positions = _num_positions(name, tokens, max_length) if positions == "learned" else None

    # Layers
    # Sinusoidal positions are of size 1 and so are to be the embeddings, which they multiply by sqrt(hidden_dim).
    initializer = keras.initializers.RandomNormal(stddev=hidden_dim**-0.5 if positions == "sinusoidal" else 0.02)
    embedding = layers.Embedding(tokens.num_categories, hidden_dim, initializer, name="token_embedding")
    kind = AttentionKind(attention, window, rotary=positions == "rotary")
    blocks = [
        EncoderBlock(hidden_dim, num_heads, mlp_dim, dropout, name=f"block{index}", attention=kind)
        for index in range(1, num_layers + 1)
    ]

    # Graph
    inputs = {feature: keras.Input(spec.shape, dtype=spec.dtype, name=feature) for feature, spec in input_spec.items()}
    is_token = PaddingMask(name="padding_mask")(inputs[name])
    x = embedding(inputs[name])
    bias = None
    if num_positions is not None:
        x = PositionEmbedding(num_positions, name="position_embedding")(x)
    elif positions == "sinusoidal":
        x = SinusoidalPositions(name="positions")(x)
    elif positions == "relative":
        bias = RelativePositionBias(num_heads, window if attention == "local" else None, name="position_bias")(x)
    x = layers.Dropout(dropout, name="embedding_dropout")(x)
    for block in blocks:
        x = block(x, is_token, bias)
    x = layers.LayerNormalization(dtype="float32", name="final_norm")(x)
    x = MaskedMean(dtype="float32", name="pool")(x, is_token)
    dense = [
        layers.Dense(hidden_dim, activation=gelu_tanh, name=f"{feature}_dense")(inputs[feature])
        for feature in sorted(inputs)
        if feature != name
    ]
    if dense:
        x = layers.Concatenate(name="join")([x, *dense])
    x = layers.Dropout(dropout, name="head_dropout")(x)
    logits = layers.Dense(output_spec.num_logits, dtype="float32", name="logits")(x)

    # Config
    return keras.Model(inputs, logits, name="transformer")


def _token_feature(input_spec: InputSpec) -> tuple[str, FeatureSpec]:
    """The one sequence of tokens; every other feature must be dense."""
    sequences = [(name, feature) for name, feature in input_spec.items() if feature.is_sequence]
    others = [feature for feature in input_spec.values() if not feature.is_sequence]
    if len(sequences) == 1 and all(map(is_dense, others)):
        name, feature = sequences[0]
        if feature.dtype == "int64" and len(feature.shape) == 1 and (feature.num_categories or 0) > 1:
            return name, feature
    raise ValueError(
        "transformer takes exactly one sequence of token ids, int64 of shape (length,) with num_categories, and beside "
        f"it only float32 features of shape (k,), received {describe(input_spec)}: tokenize one text column, and leave "
        "out or normalize the others"
    )


def _check_choices(attention: str, positions: str, head_dim: int) -> None:
    for argument, value, choices in (
        ("attention", attention, ("full", "local", "linear")),
        ("positions", positions, ("learned", "sinusoidal", "relative", "rotary")),
    ):
        if value not in choices:
            raise ValueError(f"{argument} must be one of {', '.join(choices)}, received {value!r}")
    if attention == "linear" and positions == "relative":
        raise ValueError("linear attention has no scores to add relative positions to: choose other positions")
    if positions == "rotary" and head_dim % 2:
        raise ValueError(
            f"rotary positions turn pairs, received heads of {head_dim}: make hidden_dim / num_heads an even number"
        )


def _num_positions(name: str, tokens: FeatureSpec, max_length: int | None) -> int:
    """Size of the position table."""
    length = tokens.shape[0]
    if max_length is not None:
        check_positive("max_length", max_length)
        if length is not None and max_length < length:
            raise ValueError(
                f"max_length={max_length} is less than the length of {name!r}, {length}: raise it or omit it"
            )
        return max_length
    if length is None:
        raise ValueError(f"feature {name!r} has no fixed length, so the position table has no size: give max_length")
    return length
