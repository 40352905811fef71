"""Clustering: the weights of a kernel share a few values, which training moves.

S. Han et al., "Deep compression" (arXiv:1510.00149), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import keras
import numpy as np
from keras import layers, ops

from models.checks import check_positive
from models.optimization.stage import Reparameterized, Stage, Values, check_choices, copy_of, kernels


@dataclass(frozen=True)
class ClusteringConfig:
    """Settings of clustering.

    Attributes:
        num_clusters: Distinct values of a kernel.
        initial: Where k-means starts: `linear`, evenly between the least and the largest weight, which keeps the large
            ones apart (Han et al., section 3.2); `density`, evenly among the sorted weights; `kmeans++` (Arthur and
            Vassilvitskii, 2007).
        preserve_sparsity: Weights that are zero stay so: zero is one of the values.
        layers: Patterns of the layers to cluster, as `models.hooks.find` takes them.
        skip: Patterns of those among them to leave as they are.
        seed: Of `kmeans++`.
    """

    num_clusters: int = 16
    initial: Literal["linear", "density", "kmeans++"] = "linear"
    preserve_sparsity: bool = True
    layers: tuple[str, ...] = ("*",)
    skip: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive("num_clusters", self.num_clusters)
        if self.num_clusters < 2:
            raise ValueError("num_clusters must be 2 or more, received 1: one value for all weights learns nothing")
        check_choices(initial=(self.initial, ("linear", "density", "kmeans++")))


def cluster(model: keras.Model, config: ClusteringConfig) -> Stage:
    """Cluster the kernels of a copy of a model, and train what the clusters' values are.

    The gradient of a value is the sum of those of its weights, so an optimizer that scales its steps, such as Adam, needs
    no other learning rate.

    Args:
        model: Built and trained, of any kind; it stays as it is.
        config: Settings.

    Returns:
        The stage; `finish()` gives the model with at most `num_clusters` distinct values in each kernel.

    Raises:
        ValueError: no layer has a kernel to cluster.

    Example:
        >>> stage = cluster(model, ClusteringConfig(num_clusters=16))
        >>> stage.model.compile("adam", loss); stage.model.fit(images, labels)
        >>> clustered = stage.finish()
    """
    network, rng = copy_of(model), np.random.default_rng(config.seed)
    parts = []
    for _, variable in kernels(network, config.layers, config.skip):
        weights = ops.convert_to_numpy(variable).ravel()
        has_zero = config.preserve_sparsity and bool((weights == 0).any())
        free = weights[weights != 0] if has_zero else weights
        centroids = _k_means(free, config.num_clusters - has_zero, config.initial, rng)
        parts.append(SharedValues(variable, centroids, has_zero=has_zero))
    trained = Reparameterized(network, parts)
    return Stage(trained, trained.settled)


class SharedValues(layers.Layer):
    """Few values that the weights of a kernel share, in the place of the kernel.

    Args:
        variable: The kernel; it is not trained any more.
        centroids: `(num_clusters,)`, ascending; each weight takes the nearest.
        has_zero: Zeros of the kernel stay zero, beside the centroids.
    """

    def __init__(self, variable: Any, centroids: np.ndarray, *, has_zero: bool) -> None:
        super().__init__(name=f"{variable.path.replace('/', '_')}_values", dtype="float32")
        weights = ops.convert_to_numpy(variable).ravel()
        nearest = _nearest(weights, centroids)
        self._is_free = None
        self._shape = tuple(variable.shape)
        # Keras tracks variables that are attributes; this one is the model's.
        self._kernel = lambda: variable
        variable.trainable = False
        self.centroids = self._add("centroids", centroids, trainable=True)
        self.assignments = self._add("assignments", nearest.astype(np.int32), trainable=False)
        if has_zero:
            self._is_free = self._add("is_free", weights != 0, trainable=False)
        self.built = True

    def _add(self, name: str, value: np.ndarray, *, trainable: bool) -> Any:
        variable = self.add_weight(
            name=name,
            shape=value.shape,
            initializer="zeros",
            dtype=value.dtype.name,
            trainable=trainable,
            autocast=False,
        )
        variable.assign(value)
        return variable

    def values(self, training: bool | None) -> Values:
        flat = ops.take(self.centroids, self.assignments)
        if self._is_free is not None:
            flat = ops.where(self._is_free, flat, 0.0)
        return [(self._kernel(), ops.reshape(flat, self._shape))]


def _nearest(weights: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    return np.searchsorted((centroids[1:] + centroids[:-1]) / 2, weights)


def _k_means(weights: np.ndarray, k: int, initial: str, rng: np.random.Generator) -> np.ndarray:
    """Centroids `(<= k,)`, ascending, by Lloyd's algorithm in one dimension, where clusters are intervals."""
    distinct = np.unique(weights)
    if len(distinct) <= k:
        return distinct if len(distinct) else np.zeros(1, np.float32)
    ordered = np.sort(weights).astype(np.float64)
    sums = np.append(0, np.cumsum(ordered))
    centroids = _initial(ordered, k, initial, rng)
    ends = np.zeros(0)
    while True:
        # Each cluster ends before these, of the sorted weights.
        previous, ends = ends, np.searchsorted(ordered, (centroids[1:] + centroids[:-1]) / 2)
        if np.array_equal(previous, ends):
            return centroids.astype(np.float32)
        limits = np.concatenate([[0], ends, [len(ordered)]])
        counts = np.diff(limits)
        means = np.diff(sums[limits]) / np.maximum(counts, 1)
        centroids = np.sort(np.where(counts > 0, means, centroids))


def _initial(ordered: np.ndarray, k: int, initial: str, rng: np.random.Generator) -> np.ndarray:
    if initial == "linear":
        return np.linspace(ordered[0], ordered[-1], k)
    if initial == "density":
        return np.quantile(ordered, (np.arange(k) + 0.5) / k)
    centroids = [rng.choice(ordered)]
    for _ in range(k - 1):
        near = np.sort(centroids)
        distances = (ordered - near[_nearest(ordered, near)]) ** 2
        centroids.append(rng.choice(ordered, p=distances / distances.sum()))
    return np.sort(centroids)
