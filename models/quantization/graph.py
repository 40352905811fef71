"""A Keras model of any kind as one flat functional graph."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import keras

from models.hooks import find

Inlines = Callable[[Any], bool]


def flatten(model: keras.Model, inlines: Inlines, inputs: Any = None) -> keras.Model:
    """The functional model of a model's graph, with the same layers, in which submodels are no layers any more.

    Args:
        model: Functional, Sequential or subclassed. The `call` of a subclassed one is run on symbolic tensors.
        inlines: Whether to look into a layer; a layer whose `call` does not take symbolic tensors stays whole.
        inputs: `keras.Input`s as a subclassed model's `call` takes them; others have their own.

    Raises:
        ValueError: a subclassed model that cannot be seen through, or has no `inputs`.
    """
    if inputs is None and not getattr(model, "inputs", None):
        raise ValueError(
            f"model '{model.name}' is a subclass of keras.Model and does not say what it takes: give inputs, such as "
            "inputs=keras.Input((28, 28, 1))"
        )
    if inputs is None:
        inputs = new_inputs(model)
    try:
        outputs = _trace(model, (inputs,), {})
    except _NotTraceableError as error:
        raise ValueError(
            f"cannot see through {type(model).__name__}.call: {error}. Make it of layers and keras.ops alone, without "
            "tensorflow functions and without conditions on `training`"
        ) from error
    opaque: set[int] = set()
    while True:
        flat = keras.Model(inputs, outputs, name=model.name)
        if not any(id(node.operation) not in opaque and inlines(node.operation) for node in nodes(flat)):
            return flat
        outputs = run(flat, inputs, lambda node, *args, **kwargs: _call(node, args, kwargs, inlines, opaque))


def new_inputs(model: keras.Model) -> Any:
    """`keras.Input`s as a model of Keras's own classes takes them."""
    structure = model.inputs[0] if isinstance(model, keras.Sequential) else model._inputs_struct
    return keras.tree.map_structure(
        lambda t: keras.Input(batch_shape=t.shape, dtype=t.dtype, name=t._keras_history.operation.name), structure
    )


def nodes(model: keras.Model) -> Iterator[Any]:
    """The calls of a functional graph, each after those on whose outputs it depends."""
    for depth in sorted(model._nodes_by_depth, reverse=True):
        yield from (node for node in model._nodes_by_depth[depth] if node.operation and not node.is_input)


def run(model: keras.Model, inputs: Any, call: Callable[..., Any]) -> Any:
    """Run a functional graph with `call(node, *args, **kwargs)` in the place of each of its calls."""
    tensors = dict(zip(map(id, model.inputs), keras.tree.flatten(inputs), strict=True))
    for node in nodes(model):
        args, kwargs = node.arguments.fill_in(tensors)
        # Keras notes these for whatever layer may take them.
        kwargs = {name: v for name, v in kwargs.items() if v is not None or name not in ("mask", "training")}
        outputs = keras.tree.flatten(call(node, *args, **kwargs))
        tensors.update(zip(map(id, node.outputs), outputs, strict=True))
    structure = model._outputs_struct
    return keras.tree.pack_sequence_as(structure, [tensors[id(t)] for t in keras.tree.flatten(structure)])


@contextlib.contextmanager
def undone(model: keras.Model) -> Iterator[None]:
    """Let layers forget the symbolic calls within the block, in which those that have one name have others.

    `layer.output` is there for a layer of one call alone, and in a graph each name is there once; layers within several
    layers may share one.
    """
    operations = {id(o): o for o in [*getattr(model, "operations", ()), *model._flatten_layers()]}.values()
    before = [(o, o.name, list(o._inbound_nodes), list(o._outbound_nodes)) for o in operations]
    inside = find(model, ["*"]) if len(operations) > 1 else []
    uses = Counter(layer.name for _, layer in inside)
    for path, layer in inside:
        if uses[layer.name] > 1:
            layer.name = path.replace("/", "_")
    try:
        yield
    finally:
        for operation, name, inbound, outbound in before:
            operation.name = name
            operation._inbound_nodes[:], operation._outbound_nodes[:] = inbound, outbound


def copied(operation: Any, **changes: Any) -> Any:
    """A copy without its weights."""
    try:
        return type(operation).from_config({**operation.get_config(), **changes})
    except NotImplementedError as error:
        raise ValueError(
            f"layer '{operation.name}' cannot be copied: give {type(operation).__name__} a get_config, which saving needs "
            "as well"
        ) from error


def copy_variables(layer: Any, copy: Any) -> None:
    for old, new in zip(layer.variables, copy.variables, strict=True):
        new.assign(keras.ops.reshape(keras.ops.convert_to_tensor(old), new.shape))


class _NotTraceableError(Exception):
    pass


def _call(node: Any, args: Any, kwargs: Any, inlines: Inlines, opaque: set[int]) -> Any:
    operation = node.operation
    if id(operation) not in opaque and inlines(operation):
        try:
            return _trace(operation, args, kwargs)
        except _NotTraceableError:
            opaque.add(id(operation))
    return operation(*args, **kwargs)


def _trace(layer: Any, args: Any, kwargs: Any) -> Any:
    """Outputs of a layer's `call` on symbolic tensors, which is thereby made of the layers within."""
    if isinstance(layer, keras.Sequential):
        layer = layer._functional
    if type(layer).call.__module__.startswith("keras.") and hasattr(layer, "_nodes_by_depth"):
        return run(layer, args[0], lambda node, *a, **k: node.operation(*a, **{**_training_of(node, kwargs), **k}))
    if "training" in kwargs or not getattr(layer, "_call_has_training_arg", False):
        return _outputs_and_calls(layer, args, kwargs)[0]
    # Without a value the layers within are told at run time.
    outputs, calls = _outputs_and_calls(layer, args, {**kwargs, "training": None})
    if calls != _outputs_and_calls(layer, args, {**kwargs, "training": True})[1]:
        raise _NotTraceableError("it computes something else in training than at inference")
    return outputs


def _training_of(node: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """A submodel's `training=False`, for the layers within that ask."""
    takes_training = getattr(node.operation, "_call_has_training_arg", False)
    return {"training": kwargs["training"]} if takes_training and "training" in kwargs else {}


def _outputs_and_calls(layer: Any, args: Any, kwargs: Any) -> tuple[Any, list[str]]:
    try:
        outputs = layer.call(*args, **kwargs)
        inputs = {id(t): t for t in keras.tree.flatten((args, kwargs)) if isinstance(t, keras.KerasTensor)}
        between = keras.Model(list(inputs.values()), outputs)
    except Exception as error:  # whatever a `call` makes of tensors without values
        raise _NotTraceableError(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}") from error
    return outputs, [type(node.operation).__name__ for node in nodes(between)]
