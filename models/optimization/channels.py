"""Channels of a functional model: which ones depend on each other, and the model without some of them.

Channels are pruned by the norm of their filters (Li et al., "Pruning filters for efficient convnets", arXiv:1608.08710).
A channel is followed through the layers that treat each channel alone to those that sum over channels; where an addition
joins two channels they go together. A model whose summing layers have zeros for a channel answers as the one without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from models.hooks import find
from models.optimization.stage import Values, split
from models.quantization import graph
from models.quantization.specs import activation_name

# Axes of a layer's weights, counted from the last, that are input channels, and those that are output channels.
Axes = dict[str, tuple[int | None, int | None]]

_CONVOLUTION: Axes = {"kernel": (-2, -1), "bias": (None, -1)}
_TRANSPOSED: Axes = {"kernel": (-1, -2), "bias": (None, -1)}
_SEPARABLE: Axes = {"depthwise_kernel": (-2, None), "pointwise_kernel": (-2, -1), "bias": (None, -1)}
_DEPTHWISE: Axes = {"kernel": (-2, None), "bias": (-1, None)}
_NORM: Axes = dict.fromkeys(("gamma", "beta", "moving_mean", "moving_variance"), (-1, None))

_SUMS: dict[type, Axes] = {
    layers.Dense: _CONVOLUTION,
    layers.Conv1D: _CONVOLUTION,
    layers.Conv2D: _CONVOLUTION,
    layers.Conv3D: _CONVOLUTION,
    layers.Conv1DTranspose: _TRANSPOSED,
    layers.Conv2DTranspose: _TRANSPOSED,
    layers.SeparableConv1D: _SEPARABLE,
    layers.SeparableConv2D: _SEPARABLE,
}
_KEEPS: dict[type, Axes] = {
    layers.DepthwiseConv1D: _DEPTHWISE,
    layers.DepthwiseConv2D: _DEPTHWISE,
    layers.BatchNormalization: _NORM,
}
_WITHOUT_WEIGHTS = (
    *(layers.Activation, layers.ReLU, layers.LeakyReLU, layers.ELU, layers.Identity),
    *(layers.Dropout, layers.SpatialDropout1D, layers.SpatialDropout2D, layers.GaussianDropout, layers.GaussianNoise),
    *(layers.MaxPooling1D, layers.MaxPooling2D, layers.AveragePooling1D, layers.AveragePooling2D),
    *(layers.GlobalMaxPooling1D, layers.GlobalMaxPooling2D),
    *(layers.GlobalAveragePooling1D, layers.GlobalAveragePooling2D),
    *(layers.ZeroPadding1D, layers.ZeroPadding2D, layers.Cropping1D, layers.Cropping2D),
    *(layers.UpSampling1D, layers.UpSampling2D),
)
_JOINS = ("Add", "Subtract", "Multiply", "Average", "Maximum", "Minimum")
_OF_EACH_NUMBER = (
    *("linear", "relu", "relu6", "leaky_relu", "elu", "selu", "gelu", "gelu_tanh", "silu", "hard_silu", "mish"),
    *("sigmoid", "hard_sigmoid", "tanh", "hard_tanh", "softplus", "softsign", "exponential"),
)


@dataclass
class _Slices:
    """The channels, by number, that enter and that leave a layer, and the axes of its weights that they are."""

    axes: Axes
    inputs: np.ndarray
    outputs: np.ndarray

    def of(self, variable: Any) -> Iterator[tuple[int, np.ndarray]]:
        for axis, channels in zip(self.axes.get(variable.name, ()), (self.inputs, self.outputs), strict=False):
            if axis is not None:
                yield axis % len(variable.shape), channels


class Channels:
    """The channels of a model that can be cut out, by sets of layers that additions join.

    Args:
        model: Functional or Sequential, models within models included.
        patterns: Layers whose output channels may go.
        skip: Those among them whose channels stay.

    Attributes:
        sizes: Number of channels in each set.
        left: Layers none of whose channels can go -> why.

    Raises:
        ValueError: no channel can go, or the model is a subclass.
    """

    def __init__(self, model: keras.Model, patterns: Sequence[str], skip: Sequence[str]) -> None:
        if not getattr(model, "inputs", None):
            raise ValueError(
                f"the channels of model '{model.name}' cannot be followed, since it is a subclass of keras.Model: build it "
                "as a functional model"
            )
        self._parents: list[int] = []
        self._fixed: dict[int, str] = {}
        self._slices: dict[int, _Slices] = {}
        self._layers: dict[int, Any] = {}
        self.left: dict[str, str] = {}
        chosen = _within(model, patterns) - (_within(model, skip) if skip else set())
        with graph.undone(model):
            self._follow(graph.flatten(model, _is_model), chosen)
        self._fixed = {self._root(channel): why for channel, why in self._fixed.items()}
        self._sets = self._find_sets(chosen)
        self.sizes = [len(channels) for channels in self._sets]
        if not self._sets:
            raise ValueError(
                f"no channel of model '{model.name}' can be cut out: "
                + ("; ".join(f"{name}: {why}" for name, why in self.left.items()) or "no layer of those chosen sums")
            )
        self._place = np.full(len(self._parents), -1)
        for place, channel in enumerate(np.concatenate(self._sets)):
            self._place[channel] = place
        self._place = self._place[[self._root(channel) for channel in range(len(self._parents))]]

    def scores(self, masks: Sequence[Any]) -> list[Any]:
        """The root mean square of what makes each channel, relative to the channels of its set.

        Layers differ in the size of their weights (Molchanov et al., arXiv:1611.06440, section 2.2). Infinite for the
        largest of each layer, which must stay.
        """
        # The last place is for channels that stay.
        total = sum(self.sizes) + 1
        squares, counts = ops.zeros((total,)), np.zeros(total, np.float32)
        makers = [(v, axis, self._place[channels] % total) for v, axis, channels in self._summing(of_inputs=False)]
        for variable, axis, places in makers:
            others = [a for a in range(len(variable.shape)) if a != axis]
            squares = squares + ops.segment_sum(ops.sum(ops.square(variable), others), places, num_segments=total)
            np.add.at(counts, places, math.prod(variable.shape[a] for a in others))
        squares = squares / np.maximum(counts, 1)
        scores = ops.concatenate([s / (ops.mean(s) + keras.config.epsilon()) for s in split(squares, self.sizes)])
        scores = ops.sqrt(ops.concatenate([scores * ops.concatenate(masks), ops.zeros((1,))]))
        largest = ops.stack([ops.take(places, ops.argmax(ops.take(scores, places))) for _, _, places in makers])
        stays = ops.segment_sum(ops.ones_like(largest), largest, num_segments=total) > 0
        return split(ops.where(stays, np.inf, scores), self.sizes)

    def values(self, masks: Sequence[Any]) -> Values:
        """The kernels that sum over channels, with zeros for those that are masked."""
        # The place -1, of channels that stay.
        mask = ops.concatenate([*masks, ops.ones((1,))])
        values = []
        for variable, axis, channels in self._summing(of_inputs=True):
            places = self._place[channels]
            if (places >= 0).any():
                of_axis = ops.take(mask, places % (sum(self.sizes) + 1))
                values.append((variable, variable * ops.reshape(of_axis, _along(axis, variable))))
        return values

    def cut(self, model: keras.Model, is_kept: Sequence[np.ndarray]) -> keras.Model:
        """The model without the channels that are not kept: a functional one, in which models within are no more.

        Args:
            model: The model of `__init__`.
            is_kept: For each set `(size,)` booleans.
        """
        kept = np.append(np.concatenate(is_kept), True)
        copies: dict[int, Any] = {}

        def call(node: Any, *args: Any, **kwargs: Any) -> Any:
            operation = node.operation
            if id(operation) not in copies:
                copies[id(operation)] = copy = self._cut_layer(operation, kept)
                # Keras counts unnamed operations over all models of a process.
                copy.name = operation.name
            return copies[id(operation)](*args, **kwargs)

        with graph.undone(model):
            flat = graph.flatten(model, _is_model)
            inputs = graph.new_inputs(flat)
            smaller = keras.Model(inputs, graph.run(flat, inputs, call), name=model.name)
            for node in graph.nodes(flat):
                self._copy_weights(node.operation, copies[id(node.operation)], kept)
        return smaller

    def _follow(self, flat: keras.Model, chosen: set[int]) -> None:
        """Number the channels of each tensor, and join those that go together."""
        channels: dict[int, np.ndarray] = {id(t): self._new(t, "they are the model's inputs") for t in flat.inputs}
        for node in graph.nodes(flat):
            given = [channels[id(tensor)] for tensor in node.input_tensors]
            made = self._through(node, given, chosen)
            if made is None:
                why = f"they meet '{node.operation.name}' ({type(node.operation).__name__}), which is not cut"
                self._fix(np.concatenate(given), why)
                channels |= {id(tensor): self._new(tensor, why) for tensor in node.outputs}
            else:
                channels[id(node.outputs[0])] = made
        for tensor in flat.outputs:
            self._fix(channels[id(tensor)], "they are the model's outputs")

    def _through(self, node: Any, given: list[np.ndarray], chosen: set[int]) -> np.ndarray | None:
        """The channels of what an operation makes; None if it is not known to treat each channel alone."""
        operation, kind, shape = node.operation, type(node.operation), node.outputs[0].shape
        arguments = keras.tree.flatten((node.arguments.args, node.arguments.kwargs))
        if any(np.ndim(each) for each in arguments if not isinstance(each, keras.KerasTensor)):
            return None  # a constant, maybe with a number for each channel
        if kind.__name__ in _JOINS and all(len(each) == shape[-1] for each in given):
            for other in given[1:]:
                self._join(given[0], other)
            return given[0]
        if kind.__name__ == "Concatenate":
            return np.concatenate(given) if operation.axis in (-1, len(shape) - 1) else None
        if len(given) != 1 or getattr(operation, "data_format", "channels_last") == "channels_first":
            return None
        if kind is layers.Flatten:
            return np.tile(given[0], shape[-1] // len(given[0])) if shape[-1] else None
        is_of_each = activation_name(operation) in _OF_EACH_NUMBER
        if is_of_each and (kind in _WITHOUT_WEIGHTS or not isinstance(operation, layers.Layer)):
            return given[0]
        if not _is_plain(operation, len(shape)):
            return None
        if kind in _KEEPS:
            return self._note(operation, _Slices(_KEEPS[kind], given[0], given[0]))
        if kind in _SUMS:
            is_chosen = id(operation) in chosen
            why = None if is_chosen else f"they share an addition with '{operation.name}', which is not chosen"
            made = self._new(node.outputs[0], why)
            if not is_of_each:
                self._fix(made, f"the activation of '{operation.name}' mixes them")
            return self._note(operation, _Slices(_SUMS[kind], given[0], made))
        return None

    def _note(self, operation: Any, slices: _Slices) -> np.ndarray:
        """Keep the channels of a layer; those of a second call are those of the first."""
        first = self._slices.setdefault(id(operation), slices)
        self._layers[id(operation)] = operation
        self._join(first.inputs, slices.inputs)
        self._join(first.outputs, slices.outputs)
        return slices.outputs

    def _find_sets(self, chosen: set[int]) -> list[np.ndarray]:
        """Channels that may go, one of each that go together, by the layers that make them."""
        sets: list[np.ndarray] = []
        seen: set[int] = set()
        for key, slices in self._slices.items():
            if type(self._layers[key]) not in _SUMS:
                continue
            roots = np.unique([self._root(channel) for channel in slices.outputs])
            if new := [root for root in roots.tolist() if root not in self._fixed and root not in seen]:
                sets.append(np.array(new))
                seen |= set(new)
            elif key in chosen and all(root in self._fixed for root in roots.tolist()):
                self.left[self._layers[key].name] = self._fixed[int(roots[0])]
        return sets

    def _summing(self, *, of_inputs: bool) -> Iterator[tuple[Any, int, np.ndarray]]:
        """Kernels that sum over channels, their axis of inputs or of outputs, and the channels along it."""
        for key, slices in self._slices.items():
            for variable in self._layers[key].variables:
                axes = list(slices.of(variable))
                if len(axes) == 2:
                    yield (variable, *axes[0 if of_inputs else 1])

    def _cut_layer(self, operation: Any, kept: np.ndarray) -> Any:
        if type(operation) not in _SUMS or id(operation) not in self._slices:
            return graph.copied(operation)
        width = int(kept[self._place[self._slices[id(operation)].outputs]].sum())
        return graph.copied(operation, **{"units" if isinstance(operation, layers.Dense) else "filters": width})

    def _copy_weights(self, operation: Any, copy: Any, kept: np.ndarray) -> None:
        for variable, smaller in zip(getattr(operation, "variables", ()), getattr(copy, "variables", ()), strict=True):
            value = ops.convert_to_numpy(variable)
            if id(operation) in self._slices:
                for axis, channels in self._slices[id(operation)].of(variable):
                    value = np.compress(kept[self._place[channels]], value, axis=axis)
            smaller.assign(value)

    def _new(self, tensor: Any, why: str | None) -> np.ndarray:
        size = (tensor.shape[-1] if len(tensor.shape) > 1 else None) or 1
        made = np.arange(len(self._parents), len(self._parents) + size)
        self._parents.extend(made.tolist())
        if why:
            self._fix(made, why)
        return made

    def _fix(self, channels: np.ndarray, why: str) -> None:
        for channel in channels.tolist():
            self._fixed.setdefault(channel, why)

    def _join(self, some: np.ndarray, others: np.ndarray) -> None:
        for one, other in zip(some.tolist(), others.tolist(), strict=True):
            self._parents[self._root(other)] = self._root(one)

    def _root(self, channel: int) -> int:
        while self._parents[channel] != channel:
            self._parents[channel] = channel = self._parents[self._parents[channel]]
        return channel


def _within(model: keras.Model, patterns: Sequence[str]) -> set[int]:
    found: list[Any] = [getattr(layer, "_flatten_layers", lambda: [])() for _, layer in find(model, patterns)]
    return {id(layer) for each in found for layer in each}


def _is_model(operation: Any) -> bool:
    return isinstance(operation, keras.Model)


def _is_plain(operation: Any, rank: int) -> bool:
    """Whether it is the variant of a layer that can be cut: no groups, one output of each depthwise filter, axis last."""
    has_groups = getattr(operation, "groups", 1) != 1 or getattr(operation, "depth_multiplier", 1) != 1
    return not has_groups and getattr(operation, "axis", -1) in (-1, rank - 1)


def _along(axis: int, variable: Any) -> tuple[int, ...]:
    return tuple(-1 if each == axis else 1 for each in range(len(variable.shape)))
