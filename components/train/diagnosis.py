"""Where NaN or Inf first arises in a training step: in the data, a weight, a layer, the loss or a gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from models import hooks

Kind = Literal["feature", "label", "sample_weight", "weight", "layer", "loss", "gradient"]
_DATA: dict[Kind, str] = {"feature": "feature", "label": "label", "sample_weight": "sample weight"}
_FLOAT16_MAX = float(np.finfo(np.float16).max)
_MOST_OTHERS_NAMED = 3


@dataclass(frozen=True)
class Finding:
    """The first place at which a step stops being finite.

    Attributes:
        kind: What it is.
        name: Of the feature, label or output; the path of the weight or layer; or that of the variable whose gradient it
            is. What the model's own `call` does has the name of the model.
        values: Which are there, of `NaN`, `Inf` and `-Inf`.
        num_rows: Rows of the batch that have such a value; of a weight or gradient its entries.
        input_range: Smallest and largest finite input of the layer, `None` where there is none.
        text: All this in one or two sentences.
    """

    kind: Kind
    name: str
    values: tuple[str, ...]
    num_rows: int
    input_range: tuple[float, float] | None
    text: str

    def __str__(self) -> str:
        return self.text


def first_non_finite(model: keras.Model, batch: Sequence[Any], *, loss_scale: float = 1.0) -> Finding | None:
    """Run one training step eagerly, without its update, and look for the first NaN or Inf.

    Features, labels and sample weights are looked at first, then the weights, then the layers in order of execution, the
    loss, and the gradients in the order in which they are computed, from the loss back. What a model copes with is no
    finding, such as a missing feature that it masks: if the weights, the loss and all gradients are finite, there is
    none. The weights, moving statistics, random seeds and metrics of the model stay as they are.

    Args:
        model: Built and compiled.
        batch: `(x, y)` or `(x, y, sample_weight)`, as `fit` takes them.
        loss_scale: By which the loss is multiplied before the gradients are computed, for mixed_float16.

    Raises:
        ValueError: The model is not built or not compiled.

    Example:
        >>> print(first_non_finite(model, (x, y)))
        layer 'block1/log' (Log) gives -Inf in 3 of 256 rows; its inputs lie in [0, 2.5]
    """
    if not model.built or not model.compiled:
        lacking = "compiled; call its compile() first" if model.built else "built; call it on a batch first"
        raise ValueError(f"model '{model.name}' is not {lacking}")
    x, y, sample_weight = (tf.nest.map_structure(_tensor, part) for part in (*batch, None)[:3])
    step = _Step(model, x, y, sample_weight, loss_scale)
    weight = _in_weights(model)
    if weight is None and step.is_finite():
        return None
    return (
        _in_data("feature", x, model)
        or _in_data("label", y, model)
        or _in_data("sample_weight", sample_weight, model)
        or weight
        or _in_layers(step)
        or _in_loss(step)
        or _in_gradients(step)
    )


@dataclass(frozen=True)
class _Call:
    """A call of a layer, with the numbers among its inputs and outputs."""

    path: str
    layer: Any
    inputs: list[tf.Tensor]
    outputs: list[tf.Tensor]

    def __str__(self) -> str:
        return f"layer '{self.path}' ({type(self.layer).__name__})"

    def is_within(self, path: str) -> bool:
        return self.path.startswith(f"{path}/")


class _Step:
    """The calls of a step in order of execution, its loss and its gradients."""

    def __init__(self, model: keras.Model, x: Any, y: Any, sample_weight: Any, loss_scale: float) -> None:
        self.model, self.x, self.y, self.loss_scale = model, x, y, loss_scale
        self.calls: list[_Call] = []
        # The inputs and the outputs of layers as they come, so that an operation between layers is seen, too.
        self.events: list[tuple[Literal["in", "out"], _Call]] = []
        variables = model.trainable_variables
        values = [tf.convert_to_tensor(variable.value) for variable in variables]
        # Within the scope what is assigned to a variable goes into a mapping in its place.
        scope = keras.StatelessScope(list(zip(variables, values, strict=True)), collect_losses=True)
        with scope, tf.GradientTape() as tape:
            tape.watch(values)
            with self._recorded():
                output = model(x, training=True)
            model.reset_metrics()
            self.loss = tf.convert_to_tensor(model.compute_loss(x, y, output, sample_weight, training=True))
            scaled = self.loss * tf.cast(loss_scale, self.loss.dtype)
            self.names_of_bad_losses = list(self._names_of_bad_losses())
        self.outputs = _numbers(output)
        tensors = [tensor for call in self.calls for tensor in (*call.inputs, *call.outputs)]
        tensors = [tensor for tensor in (*tensors, *self.outputs) if tensor.dtype.is_floating]
        gradients = [_dense(gradient) for gradient in tape.gradient(scaled, [*values, *tensors])]
        self.variable_gradients = list(zip(variables, gradients, strict=False))
        self._gradients = dict(zip(map(id, tensors), gradients[len(values) :], strict=True))

    def is_finite(self) -> bool:
        """Whether an update by this step would be."""
        return _all_finite([self.loss, *(gradient for _, gradient in self.variable_gradients)])

    def gradients_of(self, tensors: Iterable[tf.Tensor]) -> list[tf.Tensor | None]:
        """The gradients of the scaled loss with respect to tensors of the calls or outputs of the model."""
        return [self._gradients.get(id(tensor)) for tensor in tensors]

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[None]:
        layers = dict(hooks.find(self.model, ["*"])) if self.model.layers else {}
        running: list[_Call] = []

        def start(path: str, inputs: list[Any]) -> None:
            running.append(_Call(path, layers[path], _numbers(inputs), []))
            self.events.append(("in", running[-1]))

        def end(path: str, output: Any) -> None:
            call = running.pop()
            call.outputs.extend(_numbers(output))
            self.calls.append(call)
            self.events.append(("out", call))

        with hooks.observing(self.model, ["*"], end, before=start) if layers else contextlib.nullcontext():
            yield

    def _names_of_bad_losses(self) -> Iterator[str]:
        """The outputs, and the layers that add a loss, whose loss is not finite."""
        for metric in self.model.metrics:
            # For several outputs Keras keeps the loss of each in a metric of this name.
            is_loss = isinstance(metric, keras.metrics.Mean) and metric.name.endswith("_loss")
            if is_loss and not _all_finite([metric.result()]):
                yield f"of output '{metric.name.removesuffix('_loss')}'"
        if not _all_finite(self.model.losses):
            bad = [call for call in self.calls if not _all_finite(getattr(call.layer, "losses", ()))]
            # What is within a layer was called before it.
            yield f"that {bad[0] if bad else 'the model'} adds (a regularizer or add_loss)"


def _in_data(kind: Kind, data: Any, model: keras.Model) -> Finding | None:
    for path, tensor in keras.tree.flatten_with_path(data):
        if not _all_finite([tensor]):
            names = [each.name for each in getattr(model, "inputs", None) or ()] if kind == "feature" else []
            whole = {"feature": names[0] if len(names) == 1 else "x", "label": "y"}.get(kind, kind)
            name = "/".join(map(str, path)) or whole
            values, num_rows, where = _describe(tensor)
            return Finding(kind, name, values, num_rows, None, f"{_DATA[kind]} '{name}' is {where}")
    return None


def _in_weights(model: keras.Model) -> Finding | None:
    for weight in model.weights:
        value = tf.convert_to_tensor(weight.value)
        if not _all_finite([value]):
            values, number, where = _describe(tf.reshape(value, [-1]), "entries")
            text = f"weight '{weight.path}' is {where} before this step"
            return Finding("weight", weight.path, values, number, None, text)
    return None


def _in_layers(step: _Step) -> Finding | None:
    largest = _largest(_numbers(step.x))
    previous: _Call | None = None
    for when, call in step.events:
        if when == "in" and not _all_finite(call.inputs):
            return _before_layer(step, call, previous, largest)
        if when == "out" and not _all_finite(call.outputs):
            return _of_layer(step, call)
        if when == "out":
            previous, largest = call, max(largest, _largest(call.outputs))
    if not _all_finite(step.outputs):
        model = step.model
        values, num_rows, where = _describe(_bad(step.outputs))
        text = f"model '{model.name}' ({type(model).__name__}) gives {where}"
        text += " by an operation of its own call(): what its layers give is finite"
        return Finding("layer", model.name, values, num_rows, None, text)
    return None


def _of_layer(step: _Step, call: _Call) -> Finding:
    """From finite inputs."""
    output = _bad(call.outputs)
    values, num_rows, where = _describe(output)
    text = f"{call} gives {where}{_limit(output)}"
    if any(other.is_within(call.path) for other in step.calls):
        text += ", by an operation of its own call(): what its layers give is finite"
    if (inputs := _range(call.inputs)) is not None:
        text += f"; its inputs lie in {_interval(inputs)}"
    if (weights := _range(_weights(call.layer))) is not None:
        text += f", its weights in {_interval(weights)}"
    others = {
        other.path: str(other)
        for other in step.calls
        if not call.is_within(other.path) and not _all_finite(other.outputs) and _all_finite(other.inputs)
    }
    others.pop(call.path, None)
    if others:
        text += f". From finite inputs so do {', '.join(list(others.values())[:_MOST_OTHERS_NAMED])}"
        text += ", ..." if len(others) > _MOST_OTHERS_NAMED else ""
    return Finding("layer", call.path, values, num_rows, inputs, text)


def _before_layer(step: _Step, call: _Call, previous: _Call | None, largest: float) -> Finding:
    """Between two layers: a cast, or an operation in the `call` of what holds them."""
    tensor = _bad(call.inputs)
    values, num_rows, where = _describe(tensor)
    if tensor.dtype == tf.float16 and largest > _FLOAT16_MAX:
        text = f"the cast of the inputs of {call} gives {where}{_limit(tensor)}, and they reach {largest:.4g}"
        return Finding("layer", call.path, values, num_rows, None, text)
    holder = call.path.rpartition("/")[0]
    name = holder or step.model.name
    text = f"an operation in the call() of {'layer' if holder else 'model'} '{name}' gives {where}{_limit(tensor)}"
    text += f"; {call} receives it"
    outputs = _range(previous.outputs) if previous else None
    if previous and outputs:
        text += f", and {previous} before gives values in {_interval(outputs)}"
    return Finding("layer", name, values, num_rows, outputs, text)


def _in_loss(step: _Step) -> Finding | None:
    if _all_finite([step.loss]):
        return None
    values, number, _ = _describe(tf.reshape(step.loss, [-1]))
    which = step.names_of_bad_losses
    text = f"the loss {' and '.join(which)}{' ' if which else ''}is {' and '.join(values)}"
    for what, numbers in (("the model's outputs", step.outputs), ("the labels", _numbers(step.y))):
        if (interval := _range(numbers)) is not None:
            text += f"; {what} lie in {_interval(interval)}"
    quoted = which[0].split("'") if which else ()
    return Finding("loss", quoted[1] if len(quoted) > 1 else "loss", values, number, _range(step.outputs), text)


def _in_gradients(step: _Step) -> Finding | None:
    owners: dict[int, Any] = {}
    last_use: dict[int, int] = {}
    for index, call in enumerate(step.calls):
        for variable in getattr(call.layer, "trainable_variables", ()):
            # What is within a layer was called before it, so the first to have a variable is the one that uses it.
            if owners.setdefault(id(variable), call.layer) is call.layer:
                last_use[id(variable)] = index
    bad = [(variable, gradient) for variable, gradient in step.variable_gradients if not _all_finite([gradient])]
    if not bad:
        return None
    variable, gradient = max(bad, key=lambda each: last_use.get(id(each[0]), -1))
    values, number, where = _describe(tf.reshape(gradient, [-1]), "entries")
    scale = f" with a loss scale of {step.loss_scale:g}" if step.loss_scale != 1 else ""
    text = f"the loss is finite ({float(step.loss):.4g}), but the gradient of '{variable.path}' is {where}{scale}"
    owned = [owners.get(id(variable)) for variable, _ in bad]
    arises, inputs = _origin_of_gradient(step, owned)
    return Finding("gradient", variable.path, values, number, inputs, f"{text}; it arises in {arises}")


def _origin_of_gradient(step: _Step, owners: Sequence[Any]) -> tuple[str, tuple[float, float] | None]:
    """What turns finite gradients into others, and the range of its inputs; `owners` have weights with such gradients."""
    if not _all_finite(step.gradients_of(step.outputs)):
        outputs = _range(step.outputs)
        return f"the loss itself, for outputs of the model in {_interval(outputs) if outputs else '[]'}", outputs
    suspects = [
        call
        for call in reversed(step.calls)
        if _all_finite(step.gradients_of(call.outputs))
        and (not _all_finite(step.gradients_of(call.inputs)) or any(call.layer is owner for owner in owners))
    ]
    inner = [call for call in suspects if not any(other.is_within(call.path) for other in suspects)]
    if not inner:
        after = [call for call in step.calls if not _all_finite(step.gradients_of(call.outputs))]
        if after and any(tensor.dtype == tf.float16 for tensor in after[-1].outputs):
            return (
                f"the gradient of the output of {after[-1]}, which is float16 (that ends at {_FLOAT16_MAX:.0f})",
                None,
            )
        return f"an operation of a call(){f' that takes the output of {after[-1]}' if after else ''}", None
    # The gradient with respect to a tensor that goes to several layers is a sum, which does not say whose it is.
    shared = {id(tensor) for tensor in inner[0].inputs}
    possible = [call for call in inner if call is inner[0] or shared & set(map(id, call.inputs))]
    inputs = _range(inner[0].inputs)
    text = " or ".join(dict.fromkeys(map(str, possible)))
    return text + (f", whose inputs lie in {_interval(inputs)}" if inputs else ""), inputs


def _tensor(value: Any) -> Any:
    return value if value is None or tf.is_tensor(value) else tf.convert_to_tensor(value)


def _numbers(structure: Any) -> list[tf.Tensor]:
    """The dense tensors of numbers in it."""
    leaves = [
        keras.ops.convert_to_tensor(leaf) if tf.is_tensor(leaf) else leaf for leaf in keras.tree.flatten(structure)
    ]
    return [
        leaf for leaf in leaves if isinstance(leaf, tf.Tensor) and (leaf.dtype.is_floating or leaf.dtype.is_integer)
    ]


def _weights(layer: Any) -> list[tf.Tensor]:
    return _numbers([tf.convert_to_tensor(weight.value) for weight in getattr(layer, "weights", ())])


def _dense(gradient: Any) -> tf.Tensor | None:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _all_finite(tensors: Iterable[Any]) -> bool:
    """Of those that are float tensors."""
    floats = [tensor for tensor in tensors if isinstance(tensor, tf.Tensor) and tensor.dtype.is_floating]
    return all(bool(tf.reduce_all(tf.math.is_finite(tensor))) for tensor in floats)


def _bad(tensors: Iterable[tf.Tensor]) -> tf.Tensor:
    return next(tensor for tensor in tensors if not _all_finite([tensor]))


def _describe(tensor: tf.Tensor, unit: str = "rows") -> tuple[tuple[str, ...], int, str]:
    """Which values are not finite, in how many rows, and both as text."""
    array = np.atleast_1d(_array(tensor))
    found = {"NaN": np.isnan(array), "Inf": np.isposinf(array), "-Inf": np.isneginf(array)}
    values = tuple(name for name, where in found.items() if where.any())
    rows = ~np.isfinite(array).reshape(len(array), -1).all(axis=1)
    return values, int(rows.sum()), f"{' and '.join(values)} in {rows.sum()} of {len(rows)} {unit}"


def _array(tensor: tf.Tensor) -> np.ndarray:
    return np.asarray(tf.cast(tensor, tf.float64))


def _range(tensors: Iterable[tf.Tensor]) -> tuple[float, float] | None:
    """Smallest and largest finite number."""
    arrays = [array[np.isfinite(array)] for array in map(_array, tensors)]
    arrays = [array for array in arrays if array.size]
    return (float(min(a.min() for a in arrays)), float(max(a.max() for a in arrays))) if arrays else None


def _largest(tensors: Iterable[tf.Tensor]) -> float:
    return max(map(abs, _range(tensors) or (0.0,)))


def _interval(numbers: tuple[float, float]) -> str:
    return f"[{numbers[0]:.4g}, {numbers[1]:.4g}]"


def _limit(tensor: tf.Tensor) -> str:
    return f" (float16 ends at {_FLOAT16_MAX:.0f})" if tensor.dtype == tf.float16 else ""
