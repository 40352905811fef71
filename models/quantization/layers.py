"""The layers of a quantization-aware model: fake quantization of activations, and of the weights of a layer."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import keras
from keras import ops
from keras.src.backend import AutocastScope

MIN_RANGE = 2.0**-10
"""Narrowest range of an activation: a layer that answers nothing but zero has a scale, too."""

MIN_WEIGHT_PER_BIAS = 2.0**-6
"""Least range of a channel's weights, as a part of its bias. The int32 bias has the scale of input times weight; where the
weights of a channel are next to zero it would overflow, and the converter does not say so."""


class Scheduled(keras.layers.Layer):
    """Counts its calls in training, and says what is due by then.

    Args:
        start_step: Training steps before anything is rounded.
        freeze_step: Training steps after which statistics stay as they are; None for never.
        calls: How often one step calls the layer.
        always: Rounds from the start and counts nothing, for inference.
    """

    def __init__(
        self,
        *,
        start_step: int = 0,
        freeze_step: int | None = None,
        calls: int = 1,
        always: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.start_step, self.freeze_step, self.calls, self.always = start_step, freeze_step, calls, always
        self.supports_masking = True

    def add_steps(self) -> None:
        """Create the counter: a float, so that whoever averages or undoes statistics treats it alike."""
        if not self.always:
            self.steps = self._add_statistic("steps", ())

    def count(self) -> None:
        """Count one call; stops where nothing depends on it any more, as large floats cannot count."""
        if not self.always:
            self.steps.assign(ops.minimum(ops.round(self.steps) + 1, self._last_step()))

    def switch(self, is_on: bool) -> None:
        """Round as after the last training step, or not at all, as before the first."""
        self.steps.assign(self._last_step() if is_on else 0)

    def _last_step(self) -> int:
        return self.calls * (max(self.start_step, self.freeze_step or 0) + 2)

    def is_active(self) -> Any:
        """Whether the last training step has rounded."""
        return True if self.always else self._is_past(self.start_step)

    def choose(self, rounded: Any, plain: Any) -> Any:
        """The rounded numbers if rounding is active."""
        return rounded if self.always else ops.where(self.is_active(), rounded, plain)

    def is_frozen(self) -> Any:
        """Whether the last training step was past `freeze_step`."""
        return False if self.freeze_step is None else self._is_past(self.freeze_step)

    def _is_past(self, step: int) -> Any:
        return ops.round(self.steps) > step * self.calls

    def _add_statistic(self, name: str, shape: tuple[int, ...], *, trainable: bool = False) -> Any:
        return self.add_weight(
            name=name, shape=shape, initializer="zeros", dtype="float32", autocast=False, trainable=trainable
        )

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        return mask

    def get_config(self) -> dict[str, Any]:
        own = {
            "start_step": self.start_step,
            "freeze_step": self.freeze_step,
            "calls": self.calls,
            "always": self.always,
        }
        return {**super().get_config(), **own}


@keras.saving.register_keras_serializable(package="headrace")
class FakeQuantize(Scheduled):
    """Rounds activations to int8 with one range for all, in float32 under any dtype policy.

    Gradients pass within the range and not beyond it (the straight-through estimator of Jacob et al., arXiv:1712.05877).
    The range holds zero and is nudged so that zero has an integer, as TFLite's are. Until the first training step has
    given it a range the layer passes its inputs on.

    Args:
        ranges: `moving_average` of the batches' minima and maxima (Jacob et al., section 3.1); or `learned`: from the
            averages at `start_step` on, trainable factors of the two ends, whose logarithms are trained for the reason
            given by Jain et al. (arXiv:1903.08066).
        momentum: Of the moving average.
        fixed: A range that nothing changes, `(min, max)`.
    """

    def __init__(
        self,
        *,
        ranges: Literal["moving_average", "learned"] = "moving_average",
        momentum: float = 0.99,
        fixed: Sequence[float] | None = None,
        **kwargs: Any,
    ) -> None:
        # The outputs have the inputs' dtype.
        super().__init__(**{**kwargs, "autocast": False, "dtype": "float32"})
        self.ranges, self.momentum = ranges, momentum
        self.fixed = None if fixed is None else (float(fixed[0]), float(fixed[1]))

    def build(self, input_shape: Any) -> None:
        self.add_steps()
        if self.fixed is not None:
            return
        self.observed = self._add_statistic("observed_range", (2,))
        if self.ranges == "learned":
            self.log_factors = self._add_statistic("range_log_factors", (2,), trainable=True)
            if self.freeze_step is not None:
                self.frozen_range = self._add_statistic("frozen_range", (2,))

    def call(self, inputs: Any, training: bool | None = None, observe: bool = True) -> Any:
        """Round to the range.

        Args:
            inputs: A tensor of floats, or a list of tensors that share the range.
            training: Whether the range follows the inputs.
            observe: False: these are numbers whose range is that of an earlier call in the same step.
        """
        given = keras.tree.flatten(inputs)
        values = [ops.cast(value, "float32") for value in given]
        if training and observe:
            self.count()
            if self.fixed is None:
                self._observe(values)
        low, high = self.range()
        rounded = [
            self.choose(keras.quantizers.fake_quant_with_min_max_vars(value, low, high), value) for value in values
        ]
        outputs = [ops.cast(value, old.dtype) for value, old in zip(rounded, given, strict=True)]
        return keras.tree.pack_sequence_as(inputs, outputs)

    def range(self) -> tuple[Any, Any]:
        """The two ends, as they are rounded to."""
        if self.fixed is not None:
            return self.fixed
        ends = ops.convert_to_tensor(self.observed)
        if self.ranges == "learned":
            ends = ends * ops.exp(self.log_factors)
            if self.freeze_step is not None:
                ends = ops.where(self.is_frozen(), self.frozen_range, ends)
        return ends[0], ops.maximum(ends[1], ends[0] + MIN_RANGE)

    def set_range(self, low: float, high: float) -> None:
        """Set the two ends by something else than training, such as a calibration."""
        self.observed.assign([low, high])
        if self.ranges == "learned":
            self.log_factors.assign([0.0, 0.0])

    def _observe(self, values: list[Any]) -> None:
        low = functools.reduce(ops.minimum, map(ops.min, values), 0.0)
        batch = ops.stack([low, functools.reduce(ops.maximum, map(ops.max, values), 0.0)])
        before = ops.convert_to_tensor(self.observed)
        # Next to nothing is no range either: a branch that starts at zero would come out of it by the average's pace.
        is_first = before[1] - before[0] < MIN_RANGE
        after = ops.where(is_first, batch, before * self.momentum + batch * (1 - self.momentum))
        # A learned range starts where the averages are when it is first rounded to.
        is_over = ops.round(self.steps) > self.start_step + 1 if self.ranges == "learned" else self.is_frozen()
        self.observed.assign(ops.stop_gradient(ops.where(is_over, before, after)))
        if self.ranges == "learned" and self.freeze_step is not None:
            self.frozen_range.assign(ops.stop_gradient(ops.stack(self.range())))

    def compute_output_spec(self, inputs: Any, training: bool | None = None, observe: bool = True) -> Any:
        return keras.tree.map_structure(lambda t: keras.KerasTensor(t.shape, t.dtype), inputs)

    def get_config(self) -> dict[str, Any]:
        own = {"ranges": self.ranges, "momentum": self.momentum, "fixed": self.fixed}
        return {**super().get_config(), **own}


@keras.saving.register_keras_serializable(package="headrace")
class QuantizedLayer(Scheduled):
    """A layer whose weights are rounded to int8, with the batch norm that follows folded into them.

    The weights have symmetric ranges, the largest absolute value of each channel, and 255 levels. In training, a folded
    batch norm is that of Krishnamoorthi (arXiv:1806.08342, section 3.2.2): the weights are scaled by the moving
    statistics, so that rounding does not jump with each batch, and the output is corrected to the batch's statistics,
    which those of the unrounded convolution are. After `freeze_step` the moving statistics stay and are used.

    Args:
        layer: Keras layer of one input.
        weights: Name of each weight to round -> how many of its last axes are channels.
        batch_norm: A BatchNormalization of the last axis, to be folded into the first of `weights`.
        folds: The axis of that weight which holds the output channels.
        moving_statistics: The batch norm was called with `training=False` and trains by its moving statistics.
    """

    def __init__(
        self,
        layer: keras.layers.Layer,
        weights: Mapping[str, int],
        *,
        batch_norm: keras.layers.BatchNormalization | None = None,
        folds: int | None = None,
        moving_statistics: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.layer, self.quantized = layer, dict(weights)
        self.batch_norm: Any = batch_norm
        self.folds, self.moving_statistics = folds, moving_statistics
        # Masks go past it.
        self.layer.supports_masking = True

    def build(self, input_shape: Any) -> None:
        # Not by `build`: layers may make those within them when they are called.
        outputs = self.layer(keras.KerasTensor(input_shape, self.compute_dtype))
        if self.batch_norm is not None:
            self.batch_norm.build(outputs.shape)
        self._variables()
        self.add_steps()

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        if training:
            self.count()
        weights = self._values()
        if self.batch_norm is not None:
            return self._call_folded(inputs, weights, training)
        bias = weights.get("bias")
        rounded = {name: self._round(name, weights[name], bias) for name in self.quantized}
        return self._run(inputs, rounded, training)

    def folded(self) -> tuple[Any, Any]:
        """The kernel and the bias of the convolution that is one with its batch norm at inference, unrounded."""
        weights, norm = self._values(), self._norm_values()
        return self._fold(weights, norm, norm["mean"], norm["std"])

    def _call_folded(self, inputs: Any, weights: dict[str, Any], training: bool | None) -> Any:
        kernel_name = next(iter(self.quantized))
        norm = self._norm_values()
        kernel, inference_bias = self._fold(weights, norm, norm["mean"], norm["std"])
        kernel = self._round(kernel_name, kernel, inference_bias)
        no_bias = {"bias": ops.zeros_like(weights["bias"])} if "bias" in weights else {}
        outputs = ops.cast(self._run(inputs, {kernel_name: kernel, **no_bias}, training), "float32")
        bias = inference_bias
        if training and self.batch_norm.trainable and not self.moving_statistics:
            mean, std = self._batch_statistics(inputs, weights, norm)
            outputs = outputs * (norm["std"] / std)
            _, bias = self._fold(weights, norm, mean, std)
        return ops.cast(outputs + bias, self.compute_dtype)

    def _batch_statistics(self, inputs: Any, weights: dict[str, Any], norm: dict[str, Any]) -> tuple[Any, Any]:
        """Mean and standard deviation of the unrounded outputs, or the moving ones once they are frozen."""
        plain = ops.cast(self._run(inputs, weights, True), "float32")
        axes = tuple(range(len(plain.shape) - 1))
        mean, variance = ops.moments(plain, axes, synchronized=self.batch_norm.synchronized)
        momentum, is_frozen = self.batch_norm.momentum, self.is_frozen()
        for variable, new in ((self.batch_norm.moving_mean, mean), (self.batch_norm.moving_variance, variance)):
            old = ops.convert_to_tensor(variable)
            variable.assign(ops.where(is_frozen, old, old * momentum + new * (1 - momentum)))
        std = ops.sqrt(variance + self.batch_norm.epsilon)
        return ops.where(is_frozen, norm["mean"], mean), ops.where(is_frozen, norm["std"], std)

    def _fold(self, weights: dict[str, Any], norm: dict[str, Any], mean: Any, std: Any) -> tuple[Any, Any]:
        """Kernel scaled by the moving deviation; bias by the statistics given."""
        kernel = weights[next(iter(self.quantized))]
        num_channel_axes = max(1, -(self.folds or -1), self.quantized[next(iter(self.quantized))])
        factor = norm["gamma"] / norm["std"]
        if self.folds == -1:
            factor = ops.reshape(factor, kernel.shape[-num_channel_axes:])
        else:
            factor = ops.reshape(factor, (-1, *(1,) * (num_channel_axes - 1)))
        bias = norm["beta"] + norm["gamma"] * (weights.get("bias", 0.0) - mean) / std
        return kernel * factor, bias

    def _round(self, name: str, weight: Any, bias: Any) -> Any:
        num_channel_axes = self.quantized[name]
        shape = weight.shape
        channels = math.prod(shape[len(shape) - num_channel_axes :])
        flat = ops.reshape(weight, (*shape[: len(shape) - num_channel_axes], *(1,) * (num_channel_axes - 1), channels))
        if num_channel_axes:
            largest = ops.max(ops.abs(flat), axis=tuple(range(len(flat.shape) - 1)))
        else:
            flat, largest = weight, ops.max(ops.abs(weight))
        if bias is not None:
            size = ops.abs(ops.stop_gradient(bias))
            size = size if num_channel_axes and size.shape == largest.shape else ops.max(size)
            largest = ops.maximum(largest, size * MIN_WEIGHT_PER_BIAS)
        # Not stopped: where rounding puts the largest weight just outside, its gradient comes by way of the range.
        largest = ops.maximum(largest, keras.config.epsilon())
        axis = -1 if num_channel_axes else None
        rounded = keras.quantizers.fake_quant_with_min_max_vars(flat, -largest, largest, narrow_range=True, axis=axis)
        rounded = ops.reshape(rounded, shape) if num_channel_axes > 1 else rounded
        return self.choose(rounded, weight)

    def _run(self, inputs: Any, values: Mapping[str, Any], training: bool | None) -> Any:
        """Call the layer with other values in the place of its weights."""
        variables = self._variables()
        mapping = [(variables[name], value) for name, value in values.items()]
        takes_training = getattr(self.layer, "_call_has_training_arg", False)
        with keras.StatelessScope(mapping, initialize_variables=False) as scope:
            outputs = self.layer(inputs, **({"training": training} if takes_training else {}))
        replaced = {id(variable) for variable, _ in mapping}
        for variable in self.layer.variables:
            # Such as the state of a random generator.
            if id(variable) not in replaced and (value := scope.get_current_value(variable)) is not None:
                variable.assign(value)
        return outputs

    def _variables(self) -> dict[str, Any]:
        """The layer's weights by name, those of layers within it by `layer/name`."""
        named = dict(_named_weights(self.layer))
        for name in self.quantized:
            if name not in named:
                raise ValueError(
                    f"layer '{self.layer.name}' has no weight {name!r}: its quantization spec may name {sorted(named)}"
                )
        return named

    def _values(self) -> dict[str, Any]:
        """The weights in float32, whatever the layer computes in."""
        with AutocastScope(None):
            variables = self._variables()
            names = {*self.quantized, "bias"} & set(variables)
            return {name: ops.convert_to_tensor(variables[name]) for name in sorted(names)}

    def _norm_values(self) -> dict[str, Any]:
        norm = self.batch_norm
        with AutocastScope(None):
            mean = ops.convert_to_tensor(norm.moving_mean)
            return {
                "mean": mean,
                "std": ops.sqrt(norm.moving_variance + norm.epsilon),
                "gamma": ops.convert_to_tensor(norm.gamma) if norm.scale else ops.ones_like(mean),
                "beta": ops.convert_to_tensor(norm.beta) if norm.center else ops.zeros_like(mean),
            }

    def compute_output_spec(self, inputs: Any, training: bool | None = None) -> Any:
        return self.layer.compute_output_spec(inputs)

    def get_config(self) -> dict[str, Any]:
        own = {
            "layer": _without_weights(self.layer),
            "weights": self.quantized,
            "batch_norm": None if self.batch_norm is None else _without_weights(self.batch_norm),
            "folds": self.folds,
            "moving_statistics": self.moving_statistics,
        }
        return {**super().get_config(), **own}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizedLayer:
        parts = {
            name: keras.saving.deserialize_keras_object(config[name])
            for name in ("layer", "batch_norm")
            if config[name] is not None
        }
        return cls(**{**config, **parts})


def _without_weights(layer: keras.layers.Layer) -> dict[str, Any]:
    """The layer's config, from which it comes unbuilt: its weights are made, and named, within the layer around it."""
    return {name: v for name, v in keras.saving.serialize_keras_object(layer).items() if name != "build_config"}


def _named_weights(layer: keras.layers.Layer, prefix: str = "") -> Iterator[tuple[str, Any]]:
    inner = list(layer._flatten_layers(include_self=False, recursive=False))
    of_inner = {id(variable) for child in inner for variable in child.weights}
    yield from ((prefix + variable.name, variable) for variable in layer.weights if id(variable) not in of_inner)
    for child in inner:
        yield from _named_weights(child, f"{prefix}{child.name}/")


@keras.saving.register_keras_serializable(package="headrace")
class Reshaped(keras.layers.Reshape):
    """A Reshape that hands on the mask as it is, around a Dense layer that is computed as a 1x1 convolution."""

    def __init__(self, target_shape: Sequence[int], **kwargs: Any) -> None:
        super().__init__(tuple(target_shape), **kwargs)
        self.supports_masking = True

    def call(self, inputs: Any) -> Any:
        if -1 in self.target_shape:
            return super().call(inputs)
        # A constant shape, where Keras's own is computed from that of the batch.
        return ops.reshape(inputs, (-1, *self.target_shape))
