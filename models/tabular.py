"""Network for tables: embedded ids beside measures, an MLP over both, and optionally a linear part beside it.

Sources: C. Guo and F. Berkhahn, "Entity Embeddings of Categorical Variables" (arXiv:1604.06737); H. Cheng et al.,
"Wide & Deep Learning for Recommender Systems" (arXiv:1606.07792).
"""

from __future__ import annotations

from collections.abc import Sequence

import keras
from keras import layers

from models.checks import check_fraction, check_output_spec, check_positive, check_positives, describe, is_dense
from models.spec import FeatureSpec, InputSpec, OutputSpec

MAX_EMBEDDING_DIM = 32


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
    _check_features(input_spec)
    check_output_spec(output_spec)
    widths = check_positives("hidden_dims", hidden_dims)
    if embedding_dim is not None:
        check_positive("embedding_dim", embedding_dim)
    check_fraction("dropout", dropout)
    check_fraction("batch_norm_momentum", batch_norm_momentum)

    # Layers
    embeddings = {
        name: layers.Embedding(size, embedding_dim or _default_embedding_dim(size), name=f"{name}_embedding")
        for name, size in _categories(input_spec).items()
    }

    # Graph
    inputs = {name: keras.Input(spec.shape, dtype=spec.dtype, name=name) for name, spec in input_spec.items()}
    columns = [
        layers.Flatten(name=f"{name}_flatten")(embeddings[name](tensor)) if name in embeddings else tensor
        for name, tensor in sorted(inputs.items())
    ]
    x = columns[0] if len(columns) == 1 else layers.Concatenate(name="columns")(columns)
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


def _check_features(input_spec: InputSpec) -> None:
    """Raise ValueError unless there are features and each is a vector of measures or of ids."""
    wrong = {name: feature for name, feature in input_spec.items() if not (is_dense(feature) or _is_ids(feature))}
    if wrong or not input_spec:
        raise ValueError(
            "tabular takes float32 features of shape (k,), and int64 ids of shape (k,) with num_categories, received "
            f"{describe(wrong)}: normalize, look up, hash or bucketize each column, or leave it out"
        )


def _is_ids(feature: FeatureSpec) -> bool:
    is_vector = len(feature.shape) == 1 and feature.shape[0] is not None
    return feature.dtype == "int64" and is_vector and not feature.is_sequence and (feature.num_categories or 0) > 0


def _categories(input_spec: InputSpec) -> dict[str, int]:
    """Number of categories of each feature of ids."""
    return {name: spec.num_categories for name, spec in sorted(input_spec.items()) if spec.num_categories is not None}


def _default_embedding_dim(num_categories: int) -> int:
    """Width of an embedding: the rule that fastai found by experiment (`emb_sz_rule`), with a lower limit."""
    return min(MAX_EMBEDDING_DIM, round(1.6 * num_categories**0.56))


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
