"""Deep & Cross Network, second version: products of features, learned, beside or below an MLP.

Source: R. Wang et al., "DCN V2: Improved Deep & Cross Network and Practical Lessons for Web-scale Learning to Rank Systems"
(arXiv:2008.13535).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import keras
from keras import layers

from models.checks import check_fraction, check_output_spec, check_positive, check_positives
from models.columns import check_columns, columns, embeddings_of
from models.spec import InputSpec, OutputSpec


def build(
    input_spec: InputSpec,
    output_spec: OutputSpec,
    *,
    num_cross_layers: int = 3,
    low_rank: int | None = None,
    structure: Literal["stacked", "parallel"] = "parallel",
    hidden_dims: Sequence[int] = (64, 32),
    embedding_dim: int | None = None,
    dropout: float = 0.1,
) -> keras.Model:
    """A Deep & Cross Network: after `n` cross layers, products of up to `n + 1` features.

    Args:
        input_spec: Any number of features of shape `(k,)`: float32 measures, or int64 ids with `num_categories`.
        output_spec: What is predicted.
        num_cross_layers: Number of cross layers.
        low_rank: Rank of the cross layers' matrices, which saves weights where there are many columns; default: full.
        structure: `stacked`: the MLP reads what was crossed; `parallel`: it reads the columns, the logits read both.
        hidden_dims: Widths of the MLP's layers.
        embedding_dim: Width of every embedding; by default `1.6 * num_categories ** 0.56`, at most 32.
        dropout: Fraction dropped after each hidden layer.

    Returns:
        A model from `{feature: (batch, k), ...}` to logits `(batch, num_logits)`.

    Raises:
        ValueError: If a spec or an argument does not fit.

    Example:
        >>> spec = {"fare": FeatureSpec((1,), "float32"), "company": FeatureSpec((1,), "int64", num_categories=60)}
        >>> model = build(spec, OutputSpec("binary", 2), num_cross_layers=2)
    """
    # Checks
    check_columns(input_spec, "dcn")
    check_output_spec(output_spec)
    check_positive("num_cross_layers", num_cross_layers)
    if low_rank is not None:
        check_positive("low_rank", low_rank)
    if structure not in ("stacked", "parallel"):
        raise ValueError(f"structure must be 'stacked' or 'parallel', received {structure!r}")
    widths = check_positives("hidden_dims", hidden_dims)
    if embedding_dim is not None:
        check_positive("embedding_dim", embedding_dim)
    check_fraction("dropout", dropout)

    # Layers
    embeddings = embeddings_of(input_spec, embedding_dim)

    # Graph
    inputs = {name: keras.Input(spec.shape, dtype=spec.dtype, name=name) for name, spec in input_spec.items()}
    first = crossed = columns(inputs, embeddings)
    for index in range(1, num_cross_layers + 1):
        crossed = _cross(first, crossed, low_rank, name=f"cross{index}")
    x = crossed if structure == "stacked" else first
    for index, width in enumerate(widths, start=1):
        x = layers.Dense(width, activation="relu", name=f"hidden{index}")(x)
        x = layers.Dropout(dropout, name=f"hidden{index}_dropout")(x)
    if structure == "parallel":
        x = layers.Concatenate(name="join")([crossed, x])
    logits = layers.Dense(output_spec.num_logits, dtype="float32", name="logits")(x)

    # Config
    return keras.Model(inputs, logits, name="dcn")


def _cross(first: keras.KerasTensor, x: keras.KerasTensor, low_rank: int | None, *, name: str) -> keras.KerasTensor:
    """`first * (W x + b) + x`, with `W = U V` where a rank is given (equations 1 and 2)."""
    inner = x if low_rank is None else layers.Dense(low_rank, use_bias=False, name=f"{name}_project")(x)
    inner = layers.Dense(x.shape[-1], name=name)(inner)
    return layers.Add(name=f"{name}_add")([layers.Multiply(name=f"{name}_product")([first, inner]), x])
