"""Network for tables: embedded ids beside measures, an MLP over both, and optionally a linear part beside it.

Sources: C. Guo and F. Berkhahn, "Entity Embeddings of Categorical Variables" (arXiv:1604.06737); H. Cheng et al.,
"Wide & Deep Learning for Recommender Systems" (arXiv:1606.07792).
"""

from __future__ import annotations

from collections.abc import Sequence

import keras
from keras import layers

from models.checks import check_fraction, check_output_spec, check_positive, check_positives
from models.columns import check_columns, columns, embeddings_of
from models.spec import InputSpec, OutputSpec


def build(
    input_spec: InputSpec,
    output_spec: OutputSpec,
    *,
    hidden_dims: Sequence[int] = (64, 32),
    embedding_dim: int | None = None,
    dropout: float = 0.1,
    batch_norm: bool = False,
    batch_norm_momentum: float = 0.9,
    wide: bool = False,
) -> keras.Model:
    """A multi-layer perceptron over measures and embedded ids.

    Args:
        input_spec: Any number of features of shape `(k,)`: float32 measures, or int64 ids with `num_categories`. One
            dense vector alone, such as TF-IDF, will do.
        output_spec: What is predicted.
        hidden_dims: Widths of the hidden layers.
        embedding_dim: Width of every embedding; by default `1.6 * num_categories ** 0.56`, at most 32.
        dropout: Fraction dropped after each hidden layer.
        batch_norm: Whether each hidden layer is normalised before its ReLU.
        batch_norm_momentum: Of the moving statistics, where `batch_norm` is true.
        wide: Whether a linear model of all features is added to the logits.

    Returns:
        A model from `{feature: (batch, k), ...}` to logits `(batch, num_logits)`.

    Raises:
        ValueError: If a spec or an argument does not fit.

    Example:
        >>> spec = {"fare": FeatureSpec((1,), "float32"), "company": FeatureSpec((1,), "int64", num_categories=60)}
        >>> model = build(spec, OutputSpec("binary", 2), hidden_dims=(32,))
    """
    # Checks
    check_columns(input_spec, "tabular")
    check_output_spec(output_spec)
    widths = check_positives("hidden_dims", hidden_dims)
    if embedding_dim is not None:
        check_positive("embedding_dim", embedding_dim)
    check_fraction("dropout", dropout)
    check_fraction("batch_norm_momentum", batch_norm_momentum)

    # Layers
    embeddings = embeddings_of(input_spec, embedding_dim)

    # Graph
    inputs = {name: keras.Input(spec.shape, dtype=spec.dtype, name=name) for name, spec in input_spec.items()}
    x = columns(inputs, embeddings)
    for index, width in enumerate(widths, start=1):
        x = layers.Dense(width, use_bias=not batch_norm, name=f"hidden{index}")(x)
        if batch_norm:
            x = layers.BatchNormalization(momentum=batch_norm_momentum, name=f"hidden{index}_norm")(x)
        x = layers.ReLU(name=f"hidden{index}_relu")(x)
        x = layers.Dropout(dropout, name=f"hidden{index}_dropout")(x)
    logits = layers.Dense(output_spec.num_logits, dtype="float32", name="deep_logits" if wide else "logits")(x)
    if wide:
        linear = _linear(input_spec, inputs, output_spec.num_logits)
        logits = layers.Add(dtype="float32", name="logits")([logits, *linear])

    # Config
    return keras.Model(inputs, logits, name="tabular")


def _linear(input_spec: InputSpec, inputs: dict[str, keras.KerasTensor], num_logits: int) -> list[keras.KerasTensor]:
    """One term `(batch, num_logits)` per feature of a linear model that starts at zero."""
    terms = []
    for name in sorted(inputs):
        size = input_spec[name].num_categories
        if size is None:
            term = layers.Dense(
                num_logits, use_bias=False, kernel_initializer="zeros", dtype="float32", name=f"{name}_wide"
            )(inputs[name])
        else:
            weights = layers.Embedding(size, num_logits, "zeros", dtype="float32", name=f"{name}_wide")(inputs[name])
            term = layers.GlobalAveragePooling1D(dtype="float32", name=f"{name}_wide_mean")(weights)
        terms.append(term)
    return terms
