"""What the models for tables share: measures as they are, ids embedded, all side by side.

Source of the embeddings: C. Guo and F. Berkhahn, "Entity Embeddings of Categorical Variables" (arXiv:1604.06737).
"""

from __future__ import annotations

import keras
from keras import layers

from models.checks import describe, is_dense
from models.spec import FeatureSpec, InputSpec

MAX_EMBEDDING_DIM = 32


def check_columns(input_spec: InputSpec, model: str) -> None:
    """Raise ValueError unless there are features and each is a vector of measures or of ids."""
    wrong = {name: feature for name, feature in input_spec.items() if not (is_dense(feature) or _is_ids(feature))}
    if wrong or not input_spec:
        raise ValueError(
            f"{model} takes float32 features of shape (k,), and int64 ids of shape (k,) with num_categories, received "
            f"{describe(wrong)}: normalize, look up, hash or bucketize each column, or leave it out"
        )


def embeddings_of(input_spec: InputSpec, embedding_dim: int | None = None) -> dict[str, layers.Embedding]:
    """An embedding for each feature of ids, in the order of their names.

    Args:
        input_spec: All features.
        embedding_dim: Width of every embedding; by default `1.6 * num_categories ** 0.56`, at most 32.
    """
    return {
        name: layers.Embedding(
            spec.num_categories, embedding_dim or default_embedding_dim(spec.num_categories), name=f"{name}_embedding"
        )
        for name, spec in sorted(input_spec.items())
        if spec.num_categories is not None
    }


def columns(inputs: dict[str, keras.KerasTensor], embeddings: dict[str, layers.Embedding]) -> keras.KerasTensor:
    """All features as one vector `(batch, width)`, in the order of their names."""
    parts = [
        layers.Flatten(name=f"{name}_flatten")(embeddings[name](tensor)) if name in embeddings else tensor
        for name, tensor in sorted(inputs.items())
    ]
    return parts[0] if len(parts) == 1 else layers.Concatenate(name="columns")(parts)


def default_embedding_dim(num_categories: int) -> int:
    """Width of an embedding: the rule that fastai found by experiment (`emb_sz_rule`), with an upper limit."""
    return min(MAX_EMBEDDING_DIM, round(1.6 * num_categories**0.56))


def _is_ids(feature: FeatureSpec) -> bool:
    is_vector = len(feature.shape) == 1 and feature.shape[0] is not None
    return feature.dtype == "int64" and is_vector and not feature.is_sequence and (feature.num_categories or 0) > 0
