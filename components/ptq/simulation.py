"""A model that computes as its int8 form, layer by layer at will, in one compiled function."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from components.errors import DataError
from components.formats.errors import ConversionError
from components.formats.network import Arrays, graph_inputs
from components.ptq.histograms import NUM_BINS, Histogram
from models.quantization import FakeQuantize, QuantizationConfig, QuantizedLayer, graph, quantize_aware
from models.quantization.layers import Scheduled

BATCH_SIZE = 64


class Simulation:
    """A quantization-aware copy of a model, each layer of which can be switched between float and int8.

    The switches are variables, so that no choice of layers costs another trace.

    Args:
        model: Any model that `quantize_aware` takes.

    Attributes:
        aware: The copy, its ranges frozen.
        layers: What rounds in it.
        student: The copy as a model from features by name to its outputs in a row.

    Raises:
        ConversionError: `quantize_aware` cannot take the model, or leaves layers with kernels in float.
    """

    def __init__(self, model: keras.Model) -> None:
        self.aware = _quantize_aware(model)
        self.layers = [layer for layer in self.aware.layers if isinstance(layer, Scheduled)]
        self._quantizers = [q for q in self.layers if isinstance(q, FakeQuantize) and q.fixed is None]
        self._named = graph_inputs(self.aware) or {}
        self.student = keras.Model(self._named, self.aware.outputs)
        self._answer = self.compiled(lambda features: keras.tree.flatten(self.student(features, training=False)))
        observed = keras.Model(self._named, {q.name: list(q._inbound_nodes[0].input_tensors) for q in self._quantizers})

        def ends(features: Any) -> list[tf.Tensor]:
            values = observed(features, training=False)
            return [_ends(values[q.name]) for q in self._quantizers]

        def counts(features: Any, ends: tf.Tensor) -> list[tf.Tensor]:
            values = observed(features, training=False)
            return [_counts(values[q.name], ends[i]) for i, q in enumerate(self._quantizers)]

        self._ends = self.compiled(ends)
        self._counts = self.compiled(counts, tf.TensorSpec((len(self._quantizers), 2)))

    def compiled(self, function: Callable[..., Any], *more: tf.TensorSpec) -> Callable[..., Any]:
        """A function of features by name, traced once for any number of examples."""
        specs = {name: tf.TensorSpec((None, *t.shape[1:]), t.dtype) for name, t in self._named.items()}
        return tf.function(function, input_signature=[specs, *more], autograph=False)

    def switch(self, int8: Collection[str] | None = None) -> None:
        """Let the layers of these names round, and no others; by default all."""
        for layer in self.layers:
            layer.switch(int8 is None or layer.name in int8)

    def batches(self, features: Arrays) -> Iterator[dict[str, tf.Tensor]]:
        """The examples, some at a time."""
        for start in range(0, len(next(iter(features.values()))), BATCH_SIZE):
            rows = slice(start, start + BATCH_SIZE)
            yield {name: tf.constant(features[name][rows], tensor.dtype) for name, tensor in self._named.items()}

    def answers(self, features: Arrays) -> list[np.ndarray]:
        """Each output of the model as it is switched, `(num_examples, ...)`."""
        parts = [self._answer(batch) for batch in self.batches(features)]
        return [np.concatenate([part[i] for part in parts]) for i in range(len(self.aware.outputs))]

    def histograms(self, features: Arrays) -> dict[str, Histogram]:
        """Of every activation that gets a range, in float, by the name of the layer that rounds it.

        The examples pass twice, for the ends and for the counts, so that memory holds one batch.

        Raises:
            DataError: an activation is not finite.
        """
        self.switch(())
        ends = np.zeros((len(self._quantizers), 2), np.float32)
        for batch in self.batches(features):
            new = np.array(self._ends(batch))
            ends = np.stack([np.minimum(ends[:, 0], new[:, 0]), np.maximum(ends[:, 1], new[:, 1])], axis=1)
        for quantizer, (low, high) in zip(self._quantizers, ends, strict=True):
            if not np.isfinite([low, high]).all():
                raise DataError(
                    f"Calibration: what '{quantizer.name}' rounds is from {low} to {high} on these examples. Look for NaN "
                    "and infinite numbers among the features."
                )
        counts = sum(np.array(self._counts(batch, ends), np.int64) for batch in self.batches(features))
        return {
            quantizer.name: Histogram(float(low), float(high), each)
            for quantizer, (low, high), each in zip(self._quantizers, ends, np.asarray(counts), strict=True)
        }

    def set_ranges(self, ranges: dict[str, tuple[float, float]]) -> None:
        """Set the ranges of activations by the names of the layers that round them."""
        for quantizer in self._quantizers:
            quantizer.set_range(*ranges[quantizer.name])

    def run(self, features: dict[str, tf.Tensor], change: Callable[[QuantizedLayer, tf.Tensor], tf.Tensor]) -> None:
        """Run the model with `change(layer, outputs)` in the place of the outputs of each layer with rounded weights.

        An activation within such a layer comes after the change.
        """

        def call(node: Any, *args: Any, **kwargs: Any) -> Any:
            layer = node.operation
            if not isinstance(layer, QuantizedLayer) or not hasattr(layer.layer, "activation"):
                return layer(*args, **kwargs)
            activation, layer.layer.activation = layer.layer.activation, keras.activations.linear
            try:
                outputs = layer(*args, **kwargs)
            finally:
                layer.layer.activation = activation
            return activation(change(layer, outputs))

        order = {id(tensor): name for name, tensor in self._named.items()}
        graph.run(self.aware, [features[order[id(tensor)]] for tensor in self.aware.inputs], call)


def sqnr_db(reference: list[np.ndarray], answers: list[np.ndarray]) -> float:
    """Signal-to-quantization-noise ratio of the answers in decibels, each output alike."""
    noise = [_power(wanted - got) / max(_power(wanted), 1e-30) for wanted, got in zip(reference, answers, strict=True)]
    return -10 * math.log10(max(sum(noise) / len(noise), 1e-30))


def _quantize_aware(model: keras.Model) -> keras.Model:
    try:
        aware = quantize_aware(model, QuantizationConfig(freeze_step=1))
    except ValueError as error:
        raise _cannot(f"model '{model.name}'", str(error)) from error
    for layer in aware.layers:
        # Those of one axis, of normalizations, are no loss.
        if not isinstance(layer, Scheduled) and any(len(weight.shape) > 1 for weight in layer.weights):
            raise _cannot(f"layer '{layer.name}'", f"it is not known how {type(layer).__name__} is quantized")
    if not any(isinstance(layer, FakeQuantize) for layer in aware.layers):
        raise _cannot(f"model '{model.name}'", "no layer of it has an int8 form")
    return aware


def _cannot(where: str, why: str) -> ConversionError:
    way_round = "Give the layer a quantization_spec (models.quantization.LayerSpec), or let the converter calibrate"
    return ConversionError("int8", where=where, why=why, way_round=way_round)


def _power(values: np.ndarray) -> float:
    return float(np.square(values, dtype=np.float64).mean())


def _ends(values: list[tf.Tensor]) -> tf.Tensor:
    values = [tf.cast(value, tf.float32) for value in values]
    return tf.stack(
        [tf.reduce_min([tf.reduce_min(v) for v in values]), tf.reduce_max([tf.reduce_max(v) for v in values])]
    )


def _counts(values: list[tf.Tensor], ends: tf.Tensor) -> tf.Tensor:
    flat = tf.concat([tf.reshape(tf.cast(value, tf.float32), [-1]) for value in values], axis=0)
    flat = tf.boolean_mask(flat, flat != 0)
    # Ends of equal size have no bins.
    ends = tf.stack([ends[0], tf.maximum(ends[1], ends[0] + 1e-20)])
    return tf.histogram_fixed_width(flat, ends, NUM_BINS)
