"""SavedModels of any Keras model, for TF Serving and for every process that has TensorFlow alone.

| signature | takes | answers with |
| --- | --- | --- |
| `serving_default` | the inputs by name | the outputs by name; with `classify` also `label` `(batch,)` |
| `serve_examples` | `examples`: serialized tf.Example `(batch,)` | the same |
| `classify` | `inputs`: serialized tf.Example `(batch,)` | `classes`, strings, and `scores`: `(batch, num_classes)` each |
| `regress` | `inputs`: serialized tf.Example `(batch,)` | `outputs` `(batch,)` or `(batch, 1)` |
| `features` | the inputs by name | the outputs of layers by their paths |

`classify` and `regress` have the method names of TF Serving's Classify and Regress
(tensorflow_serving/servables/tensorflow/{classifier,regressor}.cc). The batch and the lengths that are free in the model
are free in all signatures.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf
from google.protobuf import text_format
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow_serving.apis.prediction_log_pb2 import PredictionLog

from components.errors import HeadraceError, did_you_mean
from components.formats.checks import largest_difference
from components.formats.errors import ConversionError
from components.formats.graph import layer_of, nodes_of
from components.formats.network import SIGNATURE, Arrays, Network, Tensors
from components.formats.results import Conversion
from components.formats.runners import load_saved_model
from models import hooks

FORM = "saved_model"
EXTRAS = "assets.extra"
MAX_WARMUP_REQUESTS = 1000
_METHODS = {"classify": "tensorflow/serving/classify", "regress": "tensorflow/serving/regress"}
# The functions that cast a weight take 3.5 kB: for one with fewer numbers more than they save.
_SMALLEST_HALF = 2048
_PYTHON_OPS = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc"})

Answer = Callable[[Tensors], Tensors]
Parse = Callable[[tf.Tensor], Tensors]


def convert_saved_model(
    network: Network,
    directory: Path,
    *,
    classify: str | None = None,
    classes: Sequence[str | int] = (),
    regress: str | None = None,
    features: Sequence[str] = (),
    weights_dtype: Literal["float32", "float16", "bfloat16"] = "float32",
    parse: Parse | None = None,
    others: Mapping[str, Answer] | None = None,
    examples: Arrays | None = None,
    warmup: Sequence[Arrays] = (),
) -> Conversion:
    """Convert, run and compare with Keras, and write the folder; the same network gives the same bytes.

    Args:
        network: What to convert.
        directory: Where to; nothing may be there.
        classify: The output with the scores: `(batch, num_classes)`, or `(batch, 1)` with the probability of the second
            of two classes.
        classes: `classify`: names in the order of the ids, which are written to `assets.extra/labels.txt`, too.
        regress: The output `(batch,)` or `(batch, 1)` of the signature `regress`.
        features: Layers, by patterns as `models.hooks` has them, whose outputs the signature `features` gives.
        weights_dtype: In which float32 weights of 2,048 numbers or more are stored; the model computes in float32 with
            the rounded ones.
        parse: Serialized tf.Examples `(batch,)` -> inputs; by default an input is the feature of its name, and a uint8
            tensor the string of its bytes.
        others: Further signatures with the inputs of `serving_default`: name -> what answers.
        examples: What to compare on; made up by default.
        warmup: Batches of inputs with which TF Serving warms up before it serves.

    Raises:
        ConversionError: a weight is too large for `weights_dtype`, the model calls Python, or it answers otherwise.
        HeadraceError: an option does not fit the network, or `directory` is there.

    Example:
        >>> network = Network.of(model)
        >>> convert_saved_model(network, Path("pets/1"), classify="probabilities", classes=["cat", "dog"])
    """
    if directory.exists():
        raise HeadraceError(f"{directory} is there already: delete it, or name another folder.")
    if len(warmup) > MAX_WARMUP_REQUESTS:
        raise HeadraceError(f"TF Serving takes at most {MAX_WARMUP_REQUESTS} warm-up requests, received {len(warmup)}.")
    if missing := next((name for inputs in warmup for name in network.specs if name not in inputs), None):
        raise HeadraceError(f"A warm-up request lacks input '{missing}'.")
    weights = _half_weights(network, weights_dtype)
    notes = (
        [] if weights or weights_dtype == "float32" else [f"no weight is large enough to be stored in {weights_dtype}"]
    )
    core = _trace(network, network.answer, weights)
    _refuse_python(core, network)
    answers = _Answers(core, classify, classes, regress)
    by_name = {SIGNATURE: answers.named, **(others or {})}
    signatures = {name: _trace(network, answer) for name, answer in by_name.items()}
    if parse is None and (misfit := _input_without_column(network)):
        notes.append(f"no signatures for tf.Example, which cannot hold input '{misfit}' with its free sizes")
    else:
        parse = parse or _parser(network)
        signatures |= {name: _by_example(parse, name, answer) for name, answer in answers.of_examples().items()}
    if features:
        signatures["features"] = _trace(network, _features(network, features), weights)
    with _complete_or_absent(directory) as path:
        options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
        tf.saved_model.save(_holder(signatures, weights, network), str(path), signatures=signatures, options=options)
        _rewrite(path)
        _write_extras(path / EXTRAS, network, classes, warmup)
        runner = load_saved_model(path)
        with _stateless([(variable, weight.rounded) for variable, weight in weights]):
            difference = largest_difference(network, runner, FORM, examples, exact=True)
        if weights:
            difference = largest_difference(network, runner, FORM, examples, exact=False)
        size_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return Conversion(FORM, directory, size_bytes, runner.inputs, runner.outputs, difference, tuple(notes))


class _HalfWeight(tf.saved_model.experimental.TrackableResource):
    """A float32 weight that a SavedModel stores in half precision and casts once, when it is loaded.

    It takes memory for both. Cast at every use it would take that of the half alone, and time: 5 % of an answer of small
    convolutional and attention networks at batch 1, but twice the answer of three Dense(1024) at batch 1 and 1.3
    times at batch 32 (one thread).
    """

    def __init__(self, half: tf.Variable, number: int) -> None:
        super().__init__()
        self.half, self._name = half, f"weight_{number}"
        _ = self.resource_handle  # Makes it: one that is made within a trace belongs to that trace.

    @property
    def rounded(self) -> tf.Tensor:
        """The weight as it will be: in float32, rounded."""
        return tf.cast(self.half, tf.float32)

    def read(self) -> tf.Tensor:
        """The weight in a graph."""
        weight = tf.raw_ops.ReadVariableOp(resource=self.resource_handle, dtype=tf.float32)
        weight.set_shape(self.half.shape)
        return weight

    def _create_resource(self) -> tf.Tensor:
        return tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=self.half.shape, shared_name=self._name)

    def _initialize(self) -> None:
        tf.raw_ops.AssignVariableOp(resource=self.resource_handle, value=self.rounded)

    def _destroy_resource(self) -> None:
        tf.raw_ops.DestroyResourceOp(resource=self.resource_handle)


Weights = Sequence[tuple[keras.Variable, _HalfWeight]]


def _half_weights(network: Network, dtype: str) -> Weights:
    if dtype == "float32":
        return []
    weights: list[tuple[keras.Variable, _HalfWeight]] = []
    for weight in network.model().weights:
        if weight.dtype != "float32" or np.prod(weight.shape) < _SMALLEST_HALF:
            continue
        half = tf.cast(weight.value, dtype)
        lost = tf.math.is_finite(weight.value) & ~tf.math.is_finite(half)
        if tf.reduce_any(lost):
            layer, _, name = weight.path.rpartition("/")
            raise ConversionError(
                FORM,
                where=f"weight '{name}' of layer '{layer}'",
                why=f"{dtype} ends at {half.dtype.max:g}, and it holds {weight.value[lost][0]:g}",
                way_round=f"Store weights as float32{' or bfloat16' if dtype == 'float16' else ''}",
            )
        weights.append((weight, _HalfWeight(tf.Variable(half, trainable=False, name=weight.name), len(weights))))
    return weights


class _Answers:
    """What the signatures answer, each from the same trace of the network."""

    def __init__(self, core: Any, classify: str | None, classes: Sequence[str | int], regress: str | None) -> None:
        outputs = core.structured_outputs
        for option, name in (("classify", classify), ("regress", regress)):
            if name is not None and name not in outputs:
                raise HeadraceError(f"{option}: the model has no output '{name}'.{did_you_mean(name, outputs)}")
        if classify is not None:
            _check_scores(classify, outputs[classify].shape, classes)
        elif classes:
            raise HeadraceError("classes are the names of what `classify` scores: give both.")
        if classify is not None and "label" in outputs:
            raise HeadraceError("The model has an output 'label', as the answer of `classify` is called: rename it.")
        if regress is not None and outputs[regress].shape.as_list()[1:] not in ([], [1]):
            raise HeadraceError(
                f"regress: output '{regress}' must have shape (batch,) or (batch, 1), received {outputs[regress].shape}."
            )
        self._core, self._classify, self._classes, self._regress = core, classify, list(classes), regress

    def of_examples(self) -> dict[str, Answer]:
        """Signatures that take tf.Example."""
        answers: dict[str, Answer] = {"serve_examples": self.named}
        if self._classify is not None:
            answers["classify"] = self._classified
        if self._regress is not None:
            answers["regress"] = self._regressed
        return answers

    def named(self, inputs: Tensors) -> Tensors:
        """The outputs by name, and the label."""
        outputs: Tensors = self._core(**inputs)
        if self._classify is not None:
            best = tf.argmax(_per_class(outputs[self._classify]), axis=1)
            outputs = {**outputs, "label": tf.gather(tf.constant(self._classes), best)}
        return outputs

    def _classified(self, inputs: Tensors) -> Tensors:
        scores = tf.cast(_per_class(self._core(**inputs)[self._classify]), tf.float32)
        names = tf.constant([str(name) for name in self._classes])
        return {"classes": tf.tile(names[tf.newaxis], [tf.shape(scores)[0], 1]), "scores": scores}

    def _regressed(self, inputs: Tensors) -> Tensors:
        return {"outputs": tf.cast(self._core(**inputs)[self._regress], tf.float32)}


def _check_scores(name: str, shape: tf.TensorShape, classes: Sequence[str | int]) -> None:
    width = shape.as_list()[1:]
    if width != [len(classes)] and not (width == [1] and len(classes) == 2):
        raise HeadraceError(
            f"classify: output '{name}' must have a score for each of the {len(classes)} classes, (batch, "
            f"{len(classes)}), received {shape}."
        )


def _per_class(scores: tf.Tensor) -> tf.Tensor:
    return tf.concat([1.0 - scores, scores], axis=1) if scores.shape[1] == 1 else scores


def _features(network: Network, patterns: Sequence[str]) -> Answer:
    """What gives the outputs of the layers that match; that of the second call of a layer is `path:2`."""
    try:
        hooks.find(network.model(), patterns)
    except ValueError as error:
        raise HeadraceError(f"features: {error}.") from error

    def answer(inputs: Tensors) -> Tensors:
        calls: Counter[str] = Counter()
        outputs = {}

        def keep(path: str, output: Any) -> None:
            calls[path] += 1
            name = path if calls[path] == 1 else f"{path}:{calls[path]}"
            for place, tensor in keras.tree.flatten_with_path(output):
                outputs["/".join([name, *map(str, place)])] = tensor

        with hooks.observing(network.model(), patterns, keep):
            network.answer(inputs)
        for name, tensor in outputs.items():
            if tensor.graph is not tf.compat.v1.get_default_graph():
                raise ConversionError(
                    FORM,
                    where=f"layer '{name}'",
                    why="it runs in a loop, outside of which its outputs have no meaning",
                    way_round="Leave it out of features, or take the layer around it",
                )
        return outputs

    return answer


def _stateless(values: Sequence[tuple[keras.Variable, tf.Tensor]]) -> contextlib.AbstractContextManager[Any]:
    """The context in which Keras variables have other values."""
    return keras.StatelessScope(state_mapping=values) if values else contextlib.nullcontext()


def _trace(network: Network, function: Answer, weights: Weights = ()) -> Any:
    def traced(**inputs: tf.Tensor) -> Tensors:
        with _stateless([(variable, weight.read()) for variable, weight in weights]):
            return function(inputs)

    with network.converting():
        return tf.function(traced, autograph=False).get_concrete_function(**network.specs)


def _by_example(parse: Parse, signature: str, answer: Answer) -> Any:
    name = "inputs" if signature in _METHODS else "examples"
    function = tf.function(lambda serialized: answer(parse(serialized)), autograph=False)
    return function.get_concrete_function(tf.TensorSpec((None,), tf.string, name))


def _refuse_python(concrete: Any, network: Network) -> None:
    for node in nodes_of(concrete.graph.as_graph_def()):
        if node.op in _PYTHON_OPS:
            layer = layer_of(node.name, network.layer_names)
            raise ConversionError(
                FORM,
                where=f"operation {node.op} of {f'layer {layer!r}' if layer else f'node {node.name!r}'}",
                why="it calls Python, which is not there where the model is served",
                way_round="Write it with keras.ops or TensorFlow, without tf.py_function and tf.numpy_function",
            )


def _input_without_column(network: Network) -> str | None:
    """An input that tf.Example cannot hold: it has no shapes, so that of a list the first size alone can be free."""
    for name, spec in network.specs.items():
        if None in spec.shape.as_list()[1 if spec.dtype == tf.uint8 else 2 :]:
            return name
    return None


def _parser(network: Network) -> Parse:
    columns = {name: _column(spec) for name, spec in network.specs.items()}

    def parse(serialized: tf.Tensor) -> Tensors:
        inputs = {}
        for name, values in tf.io.parse_example(serialized, columns).items():
            spec = network.specs[name]
            if spec.dtype == tf.uint8:
                values = tf.reshape(tf.io.decode_raw(values, tf.uint8), [-1, *spec.shape[1:]])
            inputs[name] = values if spec.dtype == tf.string else tf.cast(values, spec.dtype)
        return inputs

    return parse


def _column(spec: tf.TensorSpec) -> Any:
    shape = spec.shape[1:]
    if spec.dtype == tf.uint8:
        return tf.io.FixedLenFeature((), tf.string)
    dtype = tf.string if spec.dtype == tf.string else tf.float32 if spec.dtype.is_floating else tf.int64
    if shape.is_fully_defined():
        return tf.io.FixedLenFeature(shape, dtype)
    return tf.io.FixedLenSequenceFeature(shape[1:], dtype, allow_missing=True)


def _holder(signatures: Mapping[str, Any], weights: Weights, network: Network) -> tf.Module:
    """What is saved: the variables and tables that the signatures read, and nothing else."""
    owners = {id(variable.handle): variable for each in signatures.values() for variable in each.variables}
    owners |= {id(weight.resource_handle): weight for _, weight in weights}
    captured = [id(tensor) for each in signatures.values() for tensor in each.captured_inputs]
    used = {key: owners[key] for key in captured if key in owners}
    holder = tf.Module(name="model")
    holder.held = [*used.values(), *(each.half for each in used.values() if isinstance(each, _HalfWeight))]
    holder.tables = network.tables_
    return holder


@contextlib.contextmanager
def _complete_or_absent(directory: Path) -> Iterator[Path]:
    temporary = directory.with_name(f".{directory.name}.tmp-{os.getpid()}")
    try:
        yield temporary
        temporary.rename(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _rewrite(path: Path) -> None:
    """Give `classify` and `regress` their method names, and take out what differs from one writing to the next.

    TensorFlow's saver knows one method, Predict. It numbers functions and tables through the whole process, orders
    functions by chance, and draws a random id into `fingerprint.pb`, without which a model loads as well.
    """
    file = path / "saved_model.pb"
    saved = saved_model_pb2.SavedModel.FromString(file.read_bytes())
    graph = saved.meta_graphs[0]
    # Constants are set aside: they may be large, and strings in them may read like the names of functions.
    constants = [constant.SerializeToString() for constant in _constants(graph)]
    for constant in _constants(graph):
        constant.Clear()
    functions = [each.signature.name for each in graph.graph_def.library.function]
    saved = text_format.Parse(_renumbered(text_format.MessageToString(saved), functions), saved_model_pb2.SavedModel())
    graph = saved.meta_graphs[0]
    for constant, content in zip(_constants(graph), constants, strict=True):
        constant.ParseFromString(content)
    graph.graph_def.library.function.sort(key=lambda function: function.signature.name)
    for name in _METHODS.keys() & graph.signature_def.keys():
        graph.signature_def[name].method_name = _METHODS[name]
    file.write_bytes(saved.SerializeToString(deterministic=True))
    (path / "fingerprint.pb").unlink(missing_ok=True)


def _constants(graph: Any) -> list[Any]:
    return [node.attr["value"].tensor for node in nodes_of(graph.graph_def) if node.op == "Const"]


def _renumbered(text: str, functions: Sequence[str]) -> str:
    """The text of a SavedModel with the numbers of each kind of name counted anew, in the order in which they were made."""
    loops = sorted({re.escape(name.rstrip("0123456789")) for name in functions if not name.startswith("__")})
    for numbered in (
        r'("__(?:inference|forward|backward)_[^"]*_)(\d+)(?=")',
        rf"({'|'.join(loops) or '(?!)'})(\d+)",
        r'(key: "(?:shared_name|_user_specified_name)"\s+value \{\s+s: ")(\d+)(?=")',
        r"((?:key_value|text_file)_init)(\d+)(?=[/_](?i:lookuptable|initializetable))",
    ):
        numbers = sorted({number for _, number in re.findall(numbered, text)}, key=int)
        ranks = {number: str(rank) for rank, number in enumerate(numbers)}
        text = re.sub(numbered, lambda found, ranks=ranks: found[1] + ranks[found[2]], text)  # type: ignore[misc]
    return text


def _write_extras(path: Path, network: Network, classes: Sequence[str | int], warmup: Sequence[Arrays]) -> None:
    path.mkdir()
    if classes:
        (path / "labels.txt").write_text("".join(f"{name}\n" for name in classes))
    if not warmup:
        return
    with tf.io.TFRecordWriter(str(path / "tf_serving_warmup_requests")) as writer:
        for inputs in warmup:
            log = PredictionLog()
            log.predict_log.request.model_spec.signature_name = SIGNATURE
            for name, spec in network.specs.items():
                tensor = tf.make_tensor_proto(inputs[name], spec.dtype)
                log.predict_log.request.inputs[name].CopyFrom(tensor)
            writer.write(log.SerializeToString(deterministic=True))
