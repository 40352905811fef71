"""Quantization-aware training that keeps the zeros and the shared values of the stages before it."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from models.optimization.clustering import SharedValues
from models.optimization.stage import Reparameterized, Stage, Values, kernels
from models.quantization import QuantizationConfig, quantize_aware

# What int8 can tell apart.
_MOST_CLUSTERS = 256


def quantize(
    model: keras.Model,
    config: QuantizationConfig | None = None,
    *,
    preserve_sparsity: bool = True,
    preserve_clusters: bool = True,
    inputs: Any = None,
) -> Stage:
    """Make a model quantization-aware, in which zeros stay zero and equal weights stay equal.

    A zero is an int8 zero, and weights of one value are one int8 number within an output channel, each of which has a
    scale.

    Args:
        model: As `quantize_aware` takes it.
        config: As `quantize_aware` takes it.
        preserve_sparsity: Weights that are zero are not trained.
        preserve_clusters: Where the weights of a kernel share at most 256 values, these are trained in their place.
        inputs: As `quantize_aware` takes it.

    Returns:
        The stage; `finish()` gives the trained quantization-aware model, for `strip`.

    Example:
        >>> stage = quantize(clustered)
        >>> stage.model.compile("adam", loss); stage.model.fit(images, labels)
        >>> content = tf.lite.TFLiteConverter.from_keras_model(strip(stage.finish()))
    """
    aware = quantize_aware(model, config, inputs=inputs)
    parts: list[Any] = []
    for _, variable in kernels(aware, ["*"], []):
        weights = ops.convert_to_numpy(variable).ravel()
        is_zero, distinct = weights == 0, np.unique(weights)
        has_zero = preserve_sparsity and bool(is_zero.any())
        # Of one value are the kernels in which batch norms are computed.
        if preserve_clusters and 1 < len(distinct) <= min(_MOST_CLUSTERS, len(weights) // 2):
            centroids = distinct[distinct != 0] if has_zero else distinct
            parts.append(SharedValues(variable, centroids, has_zero=has_zero))
        elif has_zero:
            parts.append(_Masked(variable))
    if not parts:
        return Stage(aware, lambda: aware)
    trained = Reparameterized(aware, parts)
    return Stage(trained, trained.settled)


class _Masked(layers.Layer):
    """A kernel whose zeros stay."""

    def __init__(self, variable: Any) -> None:
        super().__init__(name=f"{variable.path.replace('/', '_')}_mask", dtype="float32")
        # Keras tracks variables that are attributes; this one is the model's.
        self._kernel = lambda: variable
        self.mask = self.add_weight(
            name="mask", shape=variable.shape, initializer="zeros", dtype="bool", trainable=False, autocast=False
        )
        self.mask.assign(ops.convert_to_numpy(variable) != 0)
        self.built = True

    def values(self, training: bool | None) -> Values:
        variable = self._kernel()
        return [(variable, ops.where(self.mask, variable, 0.0))]
