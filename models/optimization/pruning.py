"""Pruning: training while more and more of the smallest weights, or of the smallest channels, become zero.

Zeros follow the schedule of Zhu and Gupta, "To prune, or not to prune" (arXiv:1710.01878, section 3). A masked weight
has no gradient, so it stays out once it is out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import keras
import numpy as np
from keras import layers, ops

from models.checks import check_fraction, check_positive
from models.optimization.channels import Channels
from models.optimization.stage import Reparameterized, Stage, Values, check_choices, copy_of, kernels, split


@dataclass(frozen=True)
class PruningConfig:
    """Settings of pruning; steps are calls in training, of which one with gradient accumulation has several.

    Attributes:
        pattern: What becomes zero. `unstructured`: single weights by their magnitude. `2:4`: two of each four weights
            along the input channels, which sparse tensor cores skip (Mishra et al., arXiv:2104.08378). `channels`: whole
            output channels by the norm of their weights, which are cut out in the end.
        sparsity: Share of the weights, or of the channels, that is zero in the end; 0.5 for `2:4`.
        scope: Within what the smallest are sought: each `layer` (of layers joined by an addition, all of them), or
            `global`, over all layers, for channels relative to the norms of their layer.
        schedule: `polynomial`: fast at first, slower towards the end (Zhu and Gupta, equation 1). `constant`: all at
            `start_step`.
        start_step: Training steps before the first zeros.
        end_step: The step at which the last zeros are chosen; default: after half of the training, so that the rest can
            make up for it.
        frequency: Steps between two choices.
        layers: Patterns of the layers to prune, as `models.hooks.find` takes them.
        skip: Patterns of those among them to leave as they are.
    """

    pattern: Literal["unstructured", "2:4", "channels"] = "unstructured"
    sparsity: float = 0.5
    scope: Literal["layer", "global"] = "layer"
    schedule: Literal["polynomial", "constant"] = "polynomial"
    start_step: int = 0
    end_step: int | None = None
    frequency: int = 100
    layers: tuple[str, ...] = ("*",)
    skip: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_choices(
            pattern=(self.pattern, ("unstructured", "2:4", "channels")),
            scope=(self.scope, ("layer", "global")),
            schedule=(self.schedule, ("polynomial", "constant")),
        )
        check_fraction("sparsity", self.sparsity)
        check_positive("frequency", self.frequency)
        if self.start_step < 0:
            raise ValueError(f"start_step must be 0 or more, received {self.start_step!r}")
        if self.end_step is not None and self.end_step < self.start_step:
            raise ValueError(f"end_step must not come before start_step, received {self.end_step}, {self.start_step}")
        if self.pattern == "2:4" and (self.sparsity, self.scope) != (0.5, "layer"):
            raise ValueError(
                "pattern '2:4' has a sparsity of 0.5 in each group of four: leave out sparsity and scope, received "
                f"{self.sparsity!r} and {self.scope!r}"
            )
        if self.schedule == "constant" and self.end_step is not None:
            raise ValueError(f"nothing reads end_step with schedule 'constant': leave it out, received {self.end_step}")


def prune(model: keras.Model, config: PruningConfig, *, num_steps: int) -> Stage:
    """Prune a copy of a model while it is trained.

    Args:
        model: Built, of any kind; for `channels` functional or Sequential. It stays as it is.
        config: Settings.
        num_steps: Steps of the training that follows.

    Returns:
        The stage; `finish()` gives the model with zeros in its kernels, or a smaller one for `channels`.

    Raises:
        ValueError: no weight can be pruned, or the schedule does not end within `num_steps`.

    Example:
        >>> stage = prune(model, PruningConfig(sparsity=0.8), num_steps=1000)
        >>> stage.model.compile("adam", loss); stage.model.fit(images, labels)
        >>> smaller = stage.finish()
    """
    end_step = config.start_step if config.schedule == "constant" else config.end_step
    if end_step is None:
        end_step = max(config.start_step, num_steps // 2)
    if end_step >= num_steps:
        raise ValueError(
            f"the last weights would be pruned at step {end_step}, but the training has {num_steps} steps, counted from "
            "0: set start_step and end_step below that, or train for longer"
        )
    network = copy_of(model)
    targets: Targets
    if config.pattern == "channels":
        targets = channels = Channels(network, config.layers, config.skip)
    else:
        targets = (_TwoOfFour if config.pattern == "2:4" else _Weights)(network, config.layers, config.skip)
    schedule = _Schedule(targets, config, end_step)
    trained = Reparameterized(network, [schedule])

    def finish() -> keras.Model:
        num_trained = int(ops.convert_to_numpy(schedule.steps))
        if num_trained <= end_step:
            raise ValueError(
                f"pruning ends at step {end_step}, but the model was trained for {num_trained} steps, or its "
                "weights are those of an earlier step (early stopping): train for longer, or set a lower end_step"
            )
        settled = trained.settled()
        if config.pattern == "channels":
            return channels.cut(settled, [ops.convert_to_numpy(mask) > 0 for mask in schedule.masks])
        return settled

    return Stage(trained, finish, targets.left)


class Targets(Protocol):
    """What is pruned: vectors of numbers, of which the smallest go."""

    sizes: list[int]
    left: dict[str, str]

    def scores(self, masks: Sequence[Any]) -> list[Any]:
        """By which the smallest are found, `(size,)` each; zero where a mask is, infinite for what must stay."""

    def values(self, masks: Sequence[Any]) -> Values:
        """The weights, masked."""


class _Weights:
    """Single weights."""

    def __init__(self, model: keras.Model, patterns: Sequence[str], skip: Sequence[str]) -> None:
        self.left: dict[str, str] = {}
        self._kernels = [(layer, v) for layer, v in kernels(model, patterns, skip) if self._takes(layer, v)]
        if not self._kernels:
            raise ValueError(
                "no layer can be pruned: " + "; ".join(f"{name}: {why}" for name, why in self.left.items())
            )
        self.sizes = [math.prod(variable.shape) for _, variable in self._kernels]

    def _takes(self, layer: Any, variable: Any) -> bool:
        return True

    def scores(self, masks: Sequence[Any]) -> list[Any]:
        return [ops.abs(ops.reshape(v, (-1,))) * mask for (_, v), mask in zip(self._kernels, masks, strict=True)]

    def values(self, masks: Sequence[Any]) -> Values:
        return [(v, v * ops.reshape(mask, v.shape)) for (_, v), mask in zip(self._kernels, masks, strict=True)]


class _TwoOfFour(_Weights):
    """Single weights, of which the larger two of each four along the input channels stay."""

    def _takes(self, layer: Any, variable: Any) -> bool:
        axis = _input_axis(layer) if variable.name == "kernel" else None
        if axis is None:
            self.left[layer.name] = f"{type(layer).__name__}: its {variable.name} has no axis of input channels"
        elif variable.shape[axis] % 4:
            self.left[layer.name] = f"its {variable.shape[axis]} input channels are no multiple of 4"
        return layer.name not in self.left

    def scores(self, masks: Sequence[Any]) -> list[Any]:
        scores = []
        for (layer, v), flat in zip(self._kernels, super().scores(masks), strict=True):
            last = ops.moveaxis(ops.reshape(flat, v.shape), axis := _input_axis(layer), -1)
            is_larger = ops.reshape(_ranks(ops.reshape(last, (-1, 4))) >= 2, last.shape)
            scores.append(ops.where(ops.reshape(ops.moveaxis(is_larger, -1, axis), (-1,)), np.inf, flat))
        return scores


def _input_axis(layer: Any) -> Any:
    """The axis of a layer's kernel over which its products are summed and which lies innermost; None if there is none."""
    if isinstance(layer, layers.Conv1DTranspose | layers.Conv2DTranspose | layers.Conv3DTranspose):
        return -1
    if isinstance(layer, layers.Dense | layers.Conv1D | layers.Conv2D | layers.Conv3D):
        return -2
    if isinstance(layer, layers.EinsumDense):
        operands, output = layer.equation.split("->")
        letters = operands.split(",")[1]
        return max((axis for axis, letter in enumerate(letters) if letter not in output), default=None)
    return None


class _Schedule(layers.Layer):
    """Masks of targets, chosen in training at the steps of a schedule."""

    def __init__(self, targets: Targets, config: PruningConfig, end_step: int) -> None:
        super().__init__(name="pruning", dtype="float32")
        # Floats, so that whoever averages or undoes statistics treats them alike.
        self.masks = [self._add(f"mask_{i}", (size,), "ones") for i, size in enumerate(targets.sizes)]
        self.steps = self._add("steps", (), "zeros")
        self.targets, self.config, self.end_step = targets, config, end_step
        self.built = True

    def _add(self, name: str, shape: tuple[int, ...], initializer: str) -> Any:
        return self.add_weight(name=name, shape=shape, initializer=initializer, trainable=False, autocast=False)

    def values(self, training: bool | None) -> Values:
        masks = [ops.convert_to_tensor(mask) for mask in self.masks]
        if training:
            step = ops.round(self.steps)
            masks = ops.cond(self._is_due(step), lambda: self._chosen(masks, step), lambda: masks)
            for mask, chosen in zip(self.masks, masks, strict=True):
                mask.assign(chosen)
            # Stops where nothing depends on it any more, as large floats cannot count.
            self.steps.assign(ops.minimum(step + 1, self.end_step + 1))
        return self.targets.values(masks)

    def _is_due(self, step: Any) -> Any:
        since_start = step - self.config.start_step
        is_regular = (since_start >= 0) & (step < self.end_step) & (since_start % self.config.frequency == 0)
        return is_regular | (step == self.end_step)

    def _chosen(self, masks: Sequence[Any], step: Any) -> list[Any]:
        scores = [ops.stop_gradient(score) for score in self.targets.scores(masks)]
        if self.config.scope == "layer":
            return [self._largest(score, step) for score in scores]
        chosen = self._largest(ops.concatenate(scores), step)
        return split(chosen, self.targets.sizes)

    def _largest(self, scores: Any, step: Any) -> Any:
        """1 for all but the smallest, whose number the schedule says."""
        total, length = scores.shape[0], max(self.end_step - self.config.start_step, 1)
        left = 1 - ops.minimum(ops.maximum(step - self.config.start_step, 0) / length, 1)
        count = ops.round(self.config.sparsity * total * (1 - left**3))
        # The last number is not left to the precision of a float.
        count = ops.where(step < self.end_step, ops.cast(count, "int32"), round(self.config.sparsity * total))
        is_kept = (_ranks(scores) >= count) | ops.isinf(scores)
        return ops.cast(is_kept, "float32")


def _ranks(values: Any) -> Any:
    """The place of each number along the last axis, from 0 for the smallest; of equal ones the first has the lower."""
    return ops.argsort(ops.argsort(values))
