"""From a Keras model to a quantization-aware one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import keras
from keras import layers

from models.hooks import find
from models.quantization import graph
from models.quantization.decompose import decomposed
from models.quantization.layers import FakeQuantize, QuantizedLayer, Reshaped
from models.quantization.planar import Planar, as_planar
from models.quantization.specs import (
    CONVOLUTION,
    DEPTHWISE,
    FLOAT,
    LAYERS,
    LayerSpec,
    activation_name,
    is_relu,
    spec_of,
)


@dataclass(frozen=True)
class QuantizationConfig:
    """Settings of quantization-aware training; steps are calls in training, of which one with accumulation has several.

    Attributes:
        ranges: Of activations: `moving_average`, or `learned` from `start_step` on.
        momentum: Of the moving average.
        start_step: Training steps that observe ranges and round nothing.
        freeze_step: Training steps after which ranges and batch-norm statistics stay as they are.
        skip: Patterns of layers that stay float, as `models.hooks.find` takes them.
        specs: How layers of these classes are quantized, before what they say themselves and the table.
    """

    ranges: Literal["moving_average", "learned"] = "moving_average"
    momentum: float = 0.99
    start_step: int = 0
    freeze_step: int | None = None
    skip: tuple[str, ...] = ()
    specs: Mapping[type, LayerSpec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.ranges not in ("moving_average", "learned"):
            raise ValueError(f"ranges must be 'moving_average' or 'learned', received {self.ranges!r}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, received {self.momentum!r}")
        if self.start_step < 0:
            raise ValueError(f"start_step must be 0 or more, received {self.start_step!r}")
        if self.freeze_step is not None and self.freeze_step <= self.start_step:
            raise ValueError(
                f"freeze_step must come after start_step, received {self.freeze_step} and {self.start_step}: nothing "
                "would be trained with the ranges that it freezes"
            )


def quantize_aware(model: keras.Model, config: QuantizationConfig | None = None, *, inputs: Any = None) -> keras.Model:
    """A copy of a model that computes as its int8 form will, to be trained on and converted without calibration.

    Weights are rounded per channel and activations per tensor wherever TFLite's int8 operations round; a batch norm after
    a convolution or Dense is folded into it, any other becomes a depthwise 1x1 convolution. A Dense layer is computed as
    a 1x1 convolution, for whose weights the converter takes a scale per channel. Layers of which nothing is known, such
    as LayerNormalization, stay float between rounded tensors.

    Args:
        model: A built model, trained or not: functional, Sequential or subclassed; it stays as it is. Of a subclassed
            model the graph of its `call` is taken, not its `train_step`.
        config: Settings.
        inputs: What a subclassed model takes, as `keras.Input`s.

    Returns:
        A functional model with the same inputs, outputs and weights, not compiled. It answers as `model` does until its
        first training step past `start_step`.

    Raises:
        ValueError: a subclassed model cannot be seen through, a pattern of `skip` matches nothing, or a spec does not fit.

    Example:
        >>> aware = quantize_aware(model, QuantizationConfig(freeze_step=2000))
        >>> aware.compile("adam", loss); aware.fit(images, labels)
        >>> content = tf.lite.TFLiteConverter.from_keras_model(strip(aware))  # with optimizations=[tf.lite.Optimize.DEFAULT]
    """
    config = config or QuantizationConfig()
    skipped = {id(layer) for _, layer in find(model, config.skip)} if config.skip else set()

    def inlines(operation: Any) -> bool:
        return id(operation) not in skipped and _is_composite(operation) and spec_of(operation, config.specs) is None

    with graph.undone(model):
        flat = decomposed(graph.flatten(model, inlines, inputs), skipped)
        return _Rewriter(flat, config, skipped).rewrite()


def _is_composite(operation: Any) -> bool:
    """Whether it is made of other layers or operations and holds no weights of its own."""
    if not isinstance(operation, keras.layers.Layer):
        return False
    may_be_seen_through = isinstance(operation, keras.Model | layers.MultiHeadAttention)
    if type(operation).__module__.startswith("keras.") and not may_be_seen_through:
        return False
    inner = {id(v) for layer in operation._flatten_layers(include_self=False) for v in layer.weights}
    return all(id(variable) in inner for variable in operation.weights)


def _is_float(tensor: Any) -> bool:
    return isinstance(tensor, keras.KerasTensor) and keras.backend.is_float_dtype(tensor.dtype)


def _is_quantizable(operation: Any, args: Any) -> bool:
    """Whether the int8 form has this variant of the layer."""
    if isinstance(operation, layers.BatchNormalization):
        # With a mask its statistics leave rows out, which a folded one does not.
        has_mask = getattr(args[0], "_keras_mask", None) is not None
        return operation.axis in (-1, len(args[0].shape) - 1) and not operation.renorm and not has_mask
    return getattr(operation, "data_format", "channels_last") != "channels_first"


class _Rewriter:
    """Rebuilds a flat graph with rounding in it.

    A tensor of the new graph is `pending` where an int8 operation made it and it is still to be rounded, `done` where it
    is on the grid of a range, and else float.
    """

    def __init__(self, flat: keras.Model, config: QuantizationConfig, skipped: set[int]) -> None:
        self.flat, self.config, self.skipped = flat, config, skipped
        self.pending: dict[int, str] = {}
        self.done: dict[int, FakeQuantize | None] = {}
        self.rounded: dict[int, Any] = {}
        self.copies: dict[int, Any] = {}
        self.planars: dict[tuple[int, tuple[int | None, ...]], Planar] = {}
        self.origins: list[tuple[Any, Any]] = []
        self.absorbed: set[int] = set()
        self.names: Counter[str] = Counter()
        self.calls: Counter[int] = Counter()
        self.consumers: dict[int, list[Any]] = {}
        self.tensors: list[Any] = []  # kept, as they are told apart by id
        self.outputs = {id(tensor) for tensor in flat.outputs}
        for node in graph.nodes(flat):
            self.calls[id(node.operation)] += 1
            for tensor in node.input_tensors:
                self.consumers.setdefault(id(tensor), []).append(node)

    def rewrite(self) -> keras.Model:
        inputs = graph.new_inputs(self.flat)
        outputs = graph.run(self.flat, inputs, self._node)
        model = keras.Model(inputs, keras.tree.map_structure(self._as_it_is, outputs), name=self.flat.name)
        for layer, copy in self.origins:
            graph.copy_variables(layer, copy)
        return model

    def _node(self, node: Any, *args: Any, **kwargs: Any) -> Any:
        if id(node) in self.absorbed:
            return args[0]
        operation = node.operation
        spec = FLOAT if id(operation) in self.skipped else spec_of(operation, self.config.specs) or FLOAT
        if not _is_quantizable(operation, args):
            spec = FLOAT
        if spec.output == "float":
            args, kwargs = keras.tree.map_structure(self._as_it_is, (args, kwargs))
            return self._copy(operation)(*args, **kwargs)
        if spec.output in ("same", "rounded", "joint"):
            return self._move(node, spec, args, kwargs)
        # What has a fixed range, such as a softmax, may have inputs (masked scores) that no range fits.
        prepare = self._as_it_is if isinstance(spec.output, tuple) else self._round
        args, kwargs = keras.tree.map_structure(prepare, (args, kwargs))
        norm, relu = self._what_follows(node, spec)
        if spec.weights or isinstance(operation, layers.BatchNormalization):
            return self._compute(node, spec, norm, relu, *args, **kwargs)
        outputs = self._copy(operation)(*args, **kwargs)
        return self._made(outputs if relu is None else self._copy(relu)(outputs), (relu or operation).name, spec)

    def _made(self, outputs: Any, name: str, spec: LayerSpec) -> Any:
        for tensor in filter(_is_float, keras.tree.flatten(outputs)):
            self.pending.setdefault(id(tensor), name)
            self.tensors.append(tensor)
            if isinstance(spec.output, tuple):
                self._round(tensor, fixed=spec.output)
        return outputs

    def _move(self, node: Any, spec: LayerSpec, args: Any, kwargs: Any) -> Any:
        """A layer whose output shares the range of its inputs, or of its weights."""
        if spec.weights:
            layer = graph.copied(node.operation, name=self._name(node.operation.name))
            outputs = self._wrapped(node, layer, spec)(*args, **kwargs)
            self._is_done(outputs, None)
            return outputs
        tensors = list(filter(_is_float, keras.tree.flatten((args, kwargs))))
        if not any(id(t) in self.pending or id(t) in self.done for t in tensors):
            return self._copy(node.operation)(*args, **kwargs)
        quantizer: FakeQuantize | None
        if spec.output == "joint":
            args, kwargs, quantizer = self._jointly(node, tensors, args, kwargs)
        else:
            args, kwargs = keras.tree.map_structure(self._round, (args, kwargs))
            quantizer = self.done[id(next(filter(_is_float, keras.tree.flatten((args, kwargs)))))]
        outputs = self._copy(node.operation)(*args, **kwargs)
        if spec.output == "rounded" and quantizer is not None:
            outputs = quantizer(outputs, observe=False)
        self._is_done(outputs, quantizer)
        return outputs

    def _jointly(self, node: Any, tensors: list[Any], args: Any, kwargs: Any) -> tuple[Any, Any, FakeQuantize]:
        """Round all inputs to one range; those that go nowhere else are not rounded before."""
        old = [t for t in node.input_tensors if _is_float(t)]
        alone = [id(o) not in self.outputs and all(c is node for c in self.consumers[id(o)]) for o in old]
        given = [
            t if is_alone and id(t) not in self.rounded else self._apart(self._as_it_is(t))
            for t, is_alone in zip(tensors, alone, strict=True)
        ]
        quantizer = self._quantizer(f"{node.operation.name}_inputs")
        rounded = dict(zip(map(id, tensors), quantizer(given), strict=True))
        self._is_done(list(rounded.values()), quantizer)
        args, kwargs = keras.tree.map_structure(lambda t: rounded.get(id(t), t), (args, kwargs))
        return args, kwargs, quantizer

    def _apart(self, tensor: Any) -> Any:
        """With an operation after its rounding: the converter takes two ranges in a row for one."""
        if id(tensor) not in self.done:
            return tensor  # float
        shape: Any = tensor.shape
        quantizer = self.done[id(tensor)]
        name = self._name(f"{quantizer.name if quantizer else tensor._keras_history.operation.name}_apart")
        if len(shape) == 4:
            tensor = layers.MaxPooling2D(1, name=name)(tensor)
        else:
            tensor = Reshaped((math.prod(shape[1:]),), name=f"{name}_flat")(tensor)
            tensor = Reshaped(shape[1:], name=name)(tensor)
        self._is_done(tensor, quantizer)
        return tensor

    def _is_done(self, outputs: Any, quantizer: FakeQuantize | None) -> None:
        for tensor in keras.tree.flatten(outputs):
            self.done[id(tensor)] = quantizer
            self.tensors.append(tensor)

    def _compute(self, node: Any, spec: LayerSpec, norm: Any, relu: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The outputs of a layer with weights and of what it absorbs."""
        operation = node.operation
        if args or set(kwargs) - {"training"}:
            raise ValueError(
                f"layer '{operation.name}' is called with more than its inputs, and only a layer of one input can have "
                "its weights rounded: leave the weights out of its quantization spec, or put it into skip"
            )
        if isinstance(operation, layers.BatchNormalization):
            # A depthwise 1x1 convolution with a kernel of ones, to fold into.
            norm, spec = node, DEPTHWISE
        activation = getattr(operation, "activation", None) if type(operation) in LAYERS else None
        if activation_name(operation) in ("linear", "relu", "relu6"):
            activation = None
        planar = self._planar(operation, inputs.shape, **({} if activation is None else {"activation": "linear"}))
        if type(planar.layer) is layers.Conv2D:
            spec = CONVOLUTION
        outputs = self._wrapped(node, planar.layer, spec, norm)(planar.before(inputs))
        if relu is not None:
            outputs = self._copy(relu)(outputs)
        outputs = planar.after(outputs)
        if activation is None:
            return self._made(outputs, (relu or operation).name, spec)
        outputs = self._round(self._made(outputs, f"{operation.name}_linear", spec))
        if id(activation) not in self.copies:
            name = self._name(f"{operation.name}_activation")
            self.copies[id(activation)] = layers.Activation(activation, name=name, dtype=operation.dtype_policy)
        apart = self.copies[id(activation)]
        return self._made(apart(outputs), apart.name, spec_of(apart, {}) or spec)

    def _planar(self, operation: Any, shape: tuple[int | None, ...], **changes: Any) -> Planar:
        if (id(operation), shape) not in self.planars:
            self.planars[id(operation), shape] = as_planar(operation, shape, name=self._name(operation.name), **changes)
        return self.planars[id(operation), shape]

    def _what_follows(self, node: Any, spec: LayerSpec) -> tuple[Any, Any]:
        """The batch norm and the ReLU that are one with an operation, or None."""
        norm = relu = None
        is_linear = type(node.operation) not in LAYERS or activation_name(node.operation) == "linear"
        if spec.folds is not None and is_linear and self.calls[id(node.operation)] == 1:
            norm = self._absorb(node, lambda follower: isinstance(follower, layers.BatchNormalization))
        if spec.fuses_relu and is_linear:
            relu = self._absorb(norm or node, is_relu)
        return norm, relu and relu.operation

    def _absorb(self, node: Any, accepts: Callable[[Any], bool]) -> Any:
        """The only call that takes the outputs of this one, if it is a call of an operation that is accepted."""
        if len(node.outputs) != 1 or id(node.outputs[0]) in self.outputs:
            return None
        consumers = self.consumers.get(id(node.outputs[0]), [])
        if len(consumers) != 1 or not accepts(follower := consumers[0].operation):
            return None
        is_free = id(follower) not in self.skipped and self.calls[id(follower)] == 1
        if not is_free or not _is_quantizable(follower, node.outputs):
            return None
        self.absorbed.add(id(consumers[0]))
        return consumers[0]

    def _wrapped(self, node: Any, layer: Any, spec: LayerSpec, norm: Any = None) -> QuantizedLayer:
        """The layer that rounds the weights of `layer`; `norm` is the call of the batch norm to fold."""
        operation = node.operation
        if id(operation) in self.copies:
            return self.copies[id(operation)]
        if getattr(operation, "quantization_mode", None) or getattr(operation, "lora_enabled", False):
            raise ValueError(
                f"layer '{operation.name}' has integer or LoRA weights already: make the model quantization-aware before "
                "that, or put the layer into skip"
            )
        folded = {}
        if norm is not None:
            is_fixed = norm.arguments.kwargs.get("training") is False
            folded = {"batch_norm": graph.copied(norm.operation), "folds": spec.folds, "moving_statistics": is_fixed}
            self.origins.append((norm.operation, folded["batch_norm"]))
        if norm is not node:
            self.origins.append((operation, layer))
        self.copies[id(operation)] = wrapped = QuantizedLayer(
            layer,
            spec.weights,
            **folded,
            start_step=self.config.start_step,
            freeze_step=self.config.freeze_step,
            calls=self.calls[id(operation)],
            name=layer.name,
            dtype=operation.dtype_policy,
        )
        return wrapped

    def _copy(self, operation: Any) -> Any:
        if id(operation) not in self.copies:
            if isinstance(operation, keras.layers.Layer):
                # Layers from within layers may have one name.
                copy = graph.copied(operation, name=self._name(operation.name))
                self.origins.append((operation, copy))
            else:
                copy = graph.copied(operation)
                # Keras counts them over all models of a process.
                copy.name = self._name(f"{self.flat.name}_{type(operation).__name__.lower()}")
            self.copies[id(operation)] = copy
        return self.copies[id(operation)]

    def _round(self, tensor: Any, fixed: Any = None) -> Any:
        if not _is_float(tensor) or id(tensor) in self.done:
            return tensor
        if id(tensor) not in self.rounded:
            name = self.pending.get(id(tensor), tensor._keras_history.operation.name)
            quantizer = self._quantizer(name, fixed)
            self.rounded[id(tensor)] = rounded = quantizer(tensor)
            self._is_done(rounded, quantizer)
            self.tensors.append(tensor)
        return self.rounded[id(tensor)]

    def _as_it_is(self, tensor: Any) -> Any:
        """For a float layer: what the int8 operation before it gives, or a float tensor unrounded."""
        return self._round(tensor) if id(tensor) in self.pending else tensor

    def _quantizer(self, name: str, fixed: Any = None) -> FakeQuantize:
        return FakeQuantize(
            fixed=fixed,
            ranges=self.config.ranges,
            momentum=self.config.momentum,
            start_step=self.config.start_step,
            freeze_step=self.config.freeze_step,
            name=self._name(f"{name}_range"),
        )

    def _name(self, name: str) -> str:
        self.names[name] += 1
        return name if self.names[name] == 1 else f"{name}_{self.names[name]}"
