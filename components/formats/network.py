"""A Keras model as one function of named tensors, in the shape that converters can take.

Converters fail on things that a model can be relieved of without a change of its numbers. While it is traced, `Network`
has it compute so:

- in float32, under a mixed precision policy too, since no converter takes half-precision convolutions;
- grouped convolutions as the plain operation. Keras wraps them in a function that only XLA may run, for which neither
  ONNX nor Core ML has a form (https://github.com/tensorflow/tensorflow/issues/61760);
- recurrent layers without cuDNN, and unrolled where that is asked for.

The model itself is left as it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from components.errors import HeadraceError
from models.quantization import FakeQuantize

Arrays = Mapping[str, np.ndarray]
Tensors = dict[str, tf.Tensor]
SIGNATURE = "serving_default"


class Network(tf.Module):
    """What is converted: `features by name -> answers by name`.

    Make one of a Keras model by `of`. Conversions of the same network share its traces.

    Args:
        model: The model whose layers `call` runs.
        specs: Name -> TensorSpec of each input; the first dimension is the batch and is `None`.
        call: Gives the named answers for tensors by name.

    Attributes:
        specs: The inputs, sorted by name.
        traced: Gives the concrete function for `(batch_size, unroll)`; a batch size of `None` is free.
        answer: `call`, in float32.
        converting: Gives the context in which layers compute as converters take it; it encloses every tracing.
        model: Gives the model; as an attribute it would be tracked with all that it holds.
        weights_sha256: Gives a digest of all weights, in the order in which the model holds them.
        is_recurrent: Whether a layer runs step by step.
        has_ranges: Whether layers round activations, so that an int8 form needs no calibration (`models.quantization`).
        layer_names: The names of all layers, those inside of others too.
    """

    def __init__(
        self, model: keras.Model, specs: Mapping[str, tf.TensorSpec], call: Callable[[Tensors], Tensors]
    ) -> None:
        super().__init__(name="network")
        self.specs = {name: tf.TensorSpec(specs[name].shape, specs[name].dtype, name) for name in sorted(specs)}
        # The variables alone: tracking the Keras model would store every weight a second time.
        self.variables_ = [variable.value for variable in model.variables]
        layers = list(model._flatten_layers())
        # A SavedModel has to hold the tables of lookups.
        self.tables_ = tables_of(layers)
        traces: dict[tuple[int | None, bool], Any] = {}

        @contextlib.contextmanager
        def converting(*, unroll: bool = False) -> Iterator[None]:
            with in_float32(layers), convertible(layers, unroll=unroll):
                yield

        def traced(batch_size: int | None, unroll: bool) -> Any:
            key = (batch_size, unroll)
            if key not in traces:
                with converting(unroll=unroll):
                    # Sorted as TensorFlow sorts the tensors behind the names.
                    function = tf.function(lambda **features: dict(sorted(call(features).items())), autograph=False)
                    traces[key] = function.get_concrete_function(**self._specs_of_batch(batch_size))
            return traces[key]

        def answer(features: Tensors) -> Tensors:
            with in_float32(layers):
                return call(features)

        def weights_sha256() -> str:
            digest = hashlib.sha256()
            # Not the variables: the states of dropout's random numbers are among them.
            for weight in model.weights:
                values = weight.numpy()
                digest.update(f"{values.dtype} {values.shape}".encode() + values.tobytes())
            return digest.hexdigest()

        self.traced, self.answer, self.weights_sha256 = traced, answer, weights_sha256
        self.converting, self.model = converting, lambda: model
        self.is_recurrent = any(isinstance(layer, keras.layers.RNN) for layer in layers)
        self.has_ranges = any(isinstance(layer, FakeQuantize) for layer in layers)
        self.layer_names = frozenset(layer.name for layer in layers if layer is not model)

    @classmethod
    def of(
        cls,
        model: keras.Model,
        *,
        inputs: Mapping[str, Any] | None = None,
        call: Callable[[Tensors], Any] | None = None,
        outputs: Sequence[str] | None = None,
    ) -> Network:
        """The network of any built Keras model: functional, Sequential or subclassed.

        Names are those of a dictionary's keys, else of the `Input`s and of the layers that answer. A subclassed model
        answers with its dictionary's keys, or with `output`, `output_1`, ....

        Args:
            model: A built model, in any dtype policy.
            inputs: Name -> TensorSpec, or array with a batch of examples. Needed for subclassed models, whose `call`
                gets the inputs by keyword if its parameters have these names, and else as one dictionary.
            call: How to call the model with tensors by name, where it is neither way.
            outputs: Names of the answers, in the order in which `keras.tree.flatten` has them.

        Raises:
            HeadraceError: the model is not built, or its inputs are not known.
        """
        if not model.built:
            raise HeadraceError(f"Model '{model.name}' has no weights yet: call it once on a batch, then convert it.")
        known = graph_inputs(model)
        if inputs is not None:
            specs = {name: _spec(name, given) for name, given in inputs.items()}
        elif known is not None:
            specs = {name: tf.TensorSpec(tensor.shape, tensor.dtype) for name, tensor in known.items()}
        else:
            raise HeadraceError(
                f"Model '{model.name}' is subclassed, so its inputs have no names: give inputs={{name: TensorSpec}}."
            )
        whole = call or (_call_of_graph(model) if known is not None else _call_by_name(model, list(specs)))
        return cls(model, specs, lambda features: _named(whole(features), outputs, model))

    def expected(self, features: Arrays, batch_size: int = 256) -> dict[str, np.ndarray]:
        """What Keras answers, in float32: name -> `(num_examples, ...)`."""
        num_examples = len(next(iter(features.values())))
        parts = []
        for start in range(0, num_examples, batch_size):
            batch = {k: tf.constant(features[k][start : start + batch_size], s.dtype) for k, s in self.specs.items()}
            parts.append({name: keras.ops.convert_to_numpy(value) for name, value in self.answer(batch).items()})
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    @contextlib.contextmanager
    def saved_model(self, *, batch_size: int | None = None, unroll: bool = False) -> Iterator[Path]:
        """A folder with the network as a SavedModel, while the context lasts."""
        concrete = self.traced(batch_size, unroll)
        with tempfile.TemporaryDirectory() as directory:
            tf.saved_model.save(self, directory, signatures={SIGNATURE: concrete})
            yield Path(directory)

    def _specs_of_batch(self, batch_size: int | None) -> dict[str, tf.TensorSpec]:
        if batch_size is None:
            return self.specs
        return {n: tf.TensorSpec([batch_size, *s.shape[1:]], s.dtype, n) for n, s in self.specs.items()}


def tables_of(layers: Iterable[keras.layers.Layer]) -> list[Any]:
    """The lookup tables that layers hold."""
    kind = tf.saved_model.experimental.TrackableResource
    return [value for layer in layers for value in vars(layer).values() if isinstance(value, kind)]


@contextlib.contextmanager
def in_float32(layers: Sequence[keras.layers.Layer]) -> Iterator[None]:
    """Within the context, layers of a mixed precision policy compute in float32; their weights are in it anyway."""
    with contextlib.ExitStack() as undo:
        for layer in layers:
            if layer.dtype_policy.name.startswith("mixed_"):
                undo.enter_context(_attributes(layer, _dtype_policy=keras.DTypePolicy("float32")))
        yield


@contextlib.contextmanager
def convertible(layers: Sequence[keras.layers.Layer], *, unroll: bool = False) -> Iterator[None]:
    """Within the context, layers compute in the way that converters can take; their numbers stay the same."""
    with contextlib.ExitStack() as undo:
        for layer in layers:
            if isinstance(layer, keras.layers.RNN):
                undo.enter_context(_attributes(layer, unroll=unroll or layer.unroll, use_cudnn=False))
            if isinstance(layer, (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)) and layer.groups > 1:
                undo.enter_context(_plain_convolution(layer))
        yield


def _plain_convolution(layer: Any) -> contextlib.AbstractContextManager[None]:
    spatial = "DHW"[-layer.rank :]
    layout = f"N{spatial}C" if layer.data_format == "channels_last" else f"NC{spatial}"

    def convolution(inputs: tf.Tensor, kernel: Any) -> tf.Tensor:
        padding = layer.padding.upper()
        if padding == "CAUSAL":
            inputs, padding = tf.pad(inputs, layer._compute_causal_padding()), "VALID"
        return tf.nn.convolution(
            inputs,
            tf.convert_to_tensor(kernel),
            layer.strides,
            padding,
            data_format=layout,
            dilations=layer.dilation_rate,
        )

    changed = {"convolution_op": convolution}
    if type(layer).call is keras.layers.Conv1D.call:
        # Conv1D does not go by way of `convolution_op`; what it inherits does.
        changed["call"] = super(keras.layers.Conv1D, layer).call
    return _attributes(layer, **changed)


@contextlib.contextmanager
def _attributes(layer: keras.layers.Layer, **changed: Any) -> Iterator[None]:
    """Set attributes of an instance past Keras's tracking of them, and put back what was there."""
    attributes = vars(layer)
    before = {name: attributes[name] for name in changed if name in attributes}
    attributes.update(changed)
    try:
        yield
    finally:
        for name in changed:
            del attributes[name]
        attributes.update(before)


def graph_inputs(model: keras.Model) -> dict[str, keras.KerasTensor] | None:
    """Inputs of a functional or Sequential model by name; None where there is no graph."""
    if not getattr(model, "inputs", None):
        return None
    structure = model.inputs if isinstance(model, keras.Sequential) else model.input
    return {_input_name(path, tensor): tensor for path, tensor in keras.tree.flatten_with_path(structure)}


def _input_name(path: tuple[Any, ...], tensor: keras.KerasTensor) -> str:
    keys = [str(key) for key in path if isinstance(key, str)]
    return "/".join(keys) or tensor.name


def _spec(name: str, given: Any) -> tf.TensorSpec:
    """The TensorSpec of an input for a TensorSpec or a batch of examples."""
    if isinstance(given, tf.TensorSpec):
        return tf.TensorSpec([None, *given.shape[1:]], given.dtype, name)
    examples = np.asarray(given)
    if examples.ndim == 0:
        raise HeadraceError(f"Input '{name}': a batch of examples has shape (num_examples, ...), received a number.")
    return tf.TensorSpec([None, *examples.shape[1:]], tf.as_dtype(examples.dtype), name)


def _call_of_graph(model: keras.Model) -> Callable[[Tensors], Any]:
    structure = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
    order = [_input_name(path, tensor) for path, tensor in keras.tree.flatten_with_path(structure)]

    def call(features: Tensors) -> Any:
        return model(keras.tree.pack_sequence_as(structure, [features[name] for name in order]), training=False)

    return call


def _call_by_name(model: keras.Model, names: Sequence[str]) -> Callable[[Tensors], Any]:
    parameters = inspect.signature(model.call).parameters
    options = {"training": False} if "training" in parameters else {}
    if set(names) <= set(parameters):
        return lambda features: model(**features, **options)
    return lambda features: model(dict(features), **options)


def _named(answers: Any, given: Sequence[str] | None, model: keras.Model) -> Tensors:
    """The answers as one flat dictionary: by `given`, else by their own keys, else by the layers, else numbered."""
    leaves = keras.tree.flatten_with_path(answers)
    of_layers = _numbered([tensor._keras_history.operation.name for tensor in getattr(model, "outputs", None) or []])
    if given is not None:
        names = list(given)
    elif all(any(isinstance(key, str) for key in path) for path, _ in leaves):
        names = ["/".join(map(str, path)) for path, _ in leaves]
    elif len(of_layers) == len(leaves):
        names = of_layers
    else:
        names = _numbered(["output"] * len(leaves))
    if len(names) != len(leaves) or len(set(names)) < len(names):
        raise HeadraceError(
            f"Model '{model.name}' gives {len(leaves)} answers, which need as many different names, received {names}: "
            "give outputs=[...]."
        )
    return {name: tensor for name, (_, tensor) in zip(names, leaves, strict=True)}


def _numbered(names: Sequence[str]) -> list[str]:
    """`["a", "b", "a"]` as `["a", "b", "a_1"]`."""
    return [f"{name}_{n}" if (n := list(names[:index]).count(name)) else name for index, name in enumerate(names)]
