"""What the outputs and the weights of layers look like: moments, zeros, values that are not finite, a histogram."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorboard.plugins.histogram import metadata

from models import hooks

NUM_BINS = 30


@dataclasses.dataclass(frozen=True)
class LayerStatistics:
    """Of all numbers of a tensor; moments, extremes and the histogram are of the finite ones.

    Attributes:
        count: How many numbers there are.
        mean: `None`, as are the next three, where no number is finite.
        std: Of the population, so divided by their number.
        min: The smallest.
        max: The largest.
        zero_share: Share of `count` that are exactly zero: dead units, after a ReLU.
        non_finite_share: Share of `count` that are NaN or infinite.
        histogram_edges: The `NUM_BINS + 1` limits of the bins, from `min` to `max` and half a unit to each side where
            the two are the same; empty where no number is finite.
        histogram_counts: Numbers in each bin; the last bin has its right limit, too.
    """

    count: int
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    zero_share: float
    non_finite_share: float
    histogram_edges: tuple[float, ...]
    histogram_counts: tuple[int, ...]

    @classmethod
    def of(cls, values: Any) -> LayerStatistics:
        """The statistics of an array or tensor of numbers, of any shape: an output, a weight, a gradient."""
        numbers = np.asarray(tf.cast(values, tf.float64)).ravel()
        finite = numbers[np.isfinite(numbers)]
        some = finite.size > 0
        counts, edges = np.histogram(finite, NUM_BINS) if some else (np.zeros(0, int), np.zeros(0))
        return cls(
            count=numbers.size,
            mean=float(finite.mean()) if some else None,
            std=float(finite.std()) if some else None,
            min=float(finite.min()) if some else None,
            max=float(finite.max()) if some else None,
            zero_share=_share(numbers == 0),
            non_finite_share=_share(~np.isfinite(numbers)),
            histogram_edges=tuple(edges.tolist()),
            histogram_counts=tuple(counts.tolist()),
        )

    def as_dict(self) -> dict[str, Any]:
        """What JSON can hold."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}


def measure(model: keras.Model, patterns: Sequence[str], features: Any) -> dict[str, LayerStatistics]:
    """Statistics of the outputs of layers for a batch, in inference.

    Args:
        model: A built model; its state stays as it is.
        patterns: Layers, as `models.hooks` takes them.
        features: The batch, as the model takes it.

    Returns:
        By path of the layer; `path:2` is its second call, `path[name]` or `path[0]` one of several outputs. Outputs that
        are no dense tensors of numbers are left out.

    Raises:
        ValueError: A pattern matches no layer.

    Example:
        >>> measure(model, ["stage*_add"], {"image": images})["stage1_block1_add"].zero_share
        0.12
    """
    extract = hooks.features(model, patterns)
    with keras.StatelessScope():
        outputs = extract(features, training=False)
    found = {}
    for path, output in outputs.items():
        for within, tensor in keras.tree.flatten_with_path(output):
            if isinstance(tensor, tf.Tensor) and (tensor.dtype.is_floating or tensor.dtype.is_integer):
                found[path + "".join(f"[{part}]" for part in within)] = LayerStatistics.of(tensor)
    return found


def measure_weights(model: keras.Model, patterns: Sequence[str]) -> dict[str, LayerStatistics]:
    """Statistics of the weights of layers, by Keras's path of the weight: `block1_conv1/kernel`.

    Args:
        model: A built model.
        patterns: Layers, as `models.hooks` takes them; what lies within a layer that matches is taken, too.

    Raises:
        ValueError: A pattern matches no layer.
    """
    layers = [layer for _, layer in hooks.find(model, patterns)]
    weights = {weight.path: weight for layer in layers for weight in getattr(layer, "weights", ())}
    return {path: LayerStatistics.of(weight.value) for path, weight in weights.items()}


def write_summaries(statistics: Mapping[str, LayerStatistics], step: int) -> None:
    """Write a histogram and scalars of each into the default writer of `tf.summary`, for TensorBoard.

    Example:
        >>> with tf.summary.create_file_writer("logs").as_default():
        ...     write_summaries(measure(model, ["block*"], batch), step=3)
    """
    for name, each in statistics.items():
        for scalar in ("mean", "std", "min", "max", "zero_share", "non_finite_share"):
            if (value := getattr(each, scalar)) is not None:
                tf.summary.scalar(f"layers/{name}/{scalar}", value, step)
        if not each.histogram_counts:
            continue
        # As tf.summary.histogram writes it, which would want the numbers themselves.
        edges = np.array(each.histogram_edges)
        bins = np.stack([edges[:-1], edges[1:], each.histogram_counts], axis=1)
        kind = metadata.create_summary_metadata(display_name=None, description=None)
        tf.summary.write(f"layers/{name}", tf.constant(bins, tf.float64), step, metadata=kind)


def _share(marked: np.ndarray) -> float:
    return float(marked.mean()) if marked.size else 0.0
