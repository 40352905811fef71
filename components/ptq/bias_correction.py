"""Empirical bias correction: rounding shifts the mean of a layer's outputs, and its bias can take the shift back.

Nagel et al., "Data-free quantization through weight equalization and bias correction" (arXiv:1906.04721), section 4.2 and
appendix D.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from components.formats.network import Arrays
from components.ptq.simulation import Simulation
from models.quantization import QuantizedLayer


def correct_biases(simulation: Simulation, features: Arrays) -> int:
    """Shift each bias by what the mean of the layer's outputs loses in int8, by examples.

    Each layer is corrected before the next one is looked at, which so sees the inputs that it will have.

    Returns:
        How many layers have a bias to correct.
    """
    layers = [layer for layer in simulation.layers if isinstance(layer, QuantizedLayer) and _bias(layer) is not None]
    specs = [tf.TensorSpec((None,)) for _ in layers]

    def means(batch: dict[str, tf.Tensor]) -> list[tf.Tensor]:
        found: dict[str, tf.Tensor] = {}

        def note(layer: QuantizedLayer, outputs: tf.Tensor) -> tf.Tensor:
            found[layer.name] = _mean(outputs)
            return outputs

        simulation.run(batch, note)
        return [found[layer.name] for layer in layers]

    def shifts(batch: dict[str, tf.Tensor], wanted: list[tf.Tensor]) -> list[tf.Tensor]:
        means = {layer.name: mean for layer, mean in zip(layers, wanted, strict=True)}
        found: dict[str, tf.Tensor] = {}

        def correct(layer: QuantizedLayer, outputs: tf.Tensor) -> tf.Tensor:
            if layer.name not in means:
                return outputs
            found[layer.name] = means[layer.name] - _mean(outputs)
            return outputs + tf.cast(found[layer.name], outputs.dtype)

        simulation.run(batch, correct)
        return [found[layer.name] for layer in layers]

    simulation.switch(())
    compiled_means = simulation.compiled(means)
    wanted = [compiled_means(batch) for batch in simulation.batches(features)]
    simulation.switch()
    compiled_shifts = simulation.compiled(shifts, specs)
    found = [compiled_shifts(batch, mean) for batch, mean in zip(simulation.batches(features), wanted, strict=True)]
    for layer, *each in zip(layers, *found, strict=True):
        _bias(layer).assign_add(np.mean(each, axis=0))
    return len(layers)


def _bias(layer: QuantizedLayer) -> Any:
    """The variable that shifts all outputs of a channel, or None."""
    if layer.calls > 1 or not hasattr(layer.layer, "activation"):
        return None
    if layer.batch_norm is not None:
        return layer.batch_norm.beta if layer.batch_norm.center else None
    bias = getattr(layer.layer, "bias", None)
    return bias if bias is not None and len(bias.shape) == 1 else None


def _mean(outputs: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.cast(outputs, tf.float32), tuple(range(len(outputs.shape) - 1)))
