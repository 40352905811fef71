"""What passes through the layers of a Keras model: functional, Sequential or subclassed, submodels included.

Layers are named by patterns as `fnmatch` has them. A pattern without a slash is compared with the name of each layer at
any depth; one with a slash with the whole path from the model, `encoder/dense_1`, where `*` takes slashes too, so that
`encoder/*` is everything within `encoder`. The operations of a functional graph (`keras.ops.log` applied to a
KerasTensor) count as layers.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import keras
from keras.src.backend import in_symbolic_scope

_MOST_NAMES_SHOWN = 20


def find(model: keras.Model, patterns: Sequence[str]) -> list[tuple[str, keras.Operation]]:
    """The layers that match, with their paths, from the outside in and in the order in which the model holds them.

    A layer that is held in several places is there once, under the first path that matches.

    Raises:
        ValueError: `patterns` is no list, is empty, or has a pattern that no layer matches.

    Example:
        >>> [path for path, _ in find(model, ["stage1_*", "head/*"])]
        ['stage1_conv', 'stage1_relu', 'head/pool', 'head/logits']
    """
    if isinstance(patterns, str) or not patterns:
        raise ValueError(f"patterns must be a list of names of layers such as ['block*'], received {patterns!r}")
    places = list(_walk(model))
    found: dict[int, tuple[str, keras.Operation]] = {}
    unmatched = set(patterns)
    for path, layer in places:
        if matching := {pattern for pattern in patterns if _matches(path, pattern)}:
            found.setdefault(id(layer), (path, layer))
            unmatched -= matching
    for pattern in patterns:
        if pattern in unmatched:
            raise ValueError(_nothing_matches(pattern, model, [path for path, _ in places]))
    return list(found.values())


@contextlib.contextmanager
def observing(
    model: keras.Model,
    patterns: Sequence[str],
    function: Callable[[str, Any], None],
    *,
    before: Callable[[str, list[Any]], None] | None = None,
) -> Iterator[None]:
    """Within the context, call `function(path, output)` after each call of a layer that matches, in order of execution.

    A layer that is called several times is reported each time; one within a layer comes before it, as it is done
    first. In the tracing of a `tf.function` the tensors are symbolic, and what the function makes of them becomes part
    of the graph, for as long as there is the graph; a `tf.function` that was traced before knows nothing of the context.
    Keras's own calls for inferring shapes are left out. A layer inside a loop, such as the cell of an RNN, gives
    the tensors of the loop, which have no meaning outside.

    Args:
        model: A built model.
        patterns: As `find` takes them.
        function: Takes the path of the layer and its output as it is: a tensor, or a list or dictionary of them.
        before: Called before the layer with its path and a list of the tensors among its arguments, as they reach
            `call`, which is in the layer's compute dtype.

    Raises:
        ValueError: As `find`.

    Example:
        >>> with observing(model, ["*"], lambda path, output: print(path, output.shape)):
        ...     model(batch)
    """
    around = in_symbolic_scope()

    def observed(path: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if in_symbolic_scope() != around:
                return call(*args, **kwargs)
            if before is not None:
                before(path, [value for value in keras.tree.flatten((args, kwargs)) if keras.ops.is_tensor(value)])
            output = call(*args, **kwargs)
            function(path, output)
            return output

        return wrapper

    with contextlib.ExitStack() as undo:
        for path, layer in find(model, patterns):
            undo.enter_context(_wrapped_call(layer, functools.partial(observed, path)))
        yield


def features(model: keras.Model, patterns: Sequence[str]) -> keras.Model:
    """A model with the same inputs and weights that gives the outputs of the layers that match, `{path: output}`.

    Of a functional or Sequential model it is a functional model that ends at those layers. Where they lie within a
    submodel, are called several times or give more than one tensor, and for subclassed models, it runs the whole model
    and keeps what passes; such a model cannot be saved. There the second call of a layer has the key `path:2`.

    Raises:
        ValueError: As `find`.

    Example:
        >>> features(model, ["pool"]).predict(images)["pool"].shape
        (70000, 64)
    """
    layers = find(model, patterns)
    name = f"{model.name}_features"
    if _runs_as_graph(model) and all(_is_one_tensor_of(model, layer) for _, layer in layers):
        inputs = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
        return keras.Model(inputs, {path: layer.output for path, layer in layers}, name=name)
    return _Features(model, patterns, name=name)


class _Features(keras.Model):
    def __init__(self, model: keras.Model, patterns: Sequence[str], **kwargs: Any) -> None:
        # The model casts its inputs itself, and need not under the policy that is global now.
        super().__init__(autocast=False, **kwargs)
        self.model, self.patterns = model, list(patterns)

    def call(self, inputs: Any, training: bool | None = None) -> dict[str, Any]:
        outputs: dict[str, Any] = {}
        calls: Counter[str] = Counter()

        def keep(path: str, output: Any) -> None:
            calls[path] += 1
            outputs[path if calls[path] == 1 else f"{path}:{calls[path]}"] = output

        with observing(self.model, self.patterns, keep):
            self.model(inputs, training=training)
        return outputs


def _walk(layer: Any, prefix: str = "", within: frozenset[int] = frozenset()) -> Iterator[tuple[str, Any]]:
    """Path and layer of everything inside, the outer before the inner."""
    # `Model.layers` leaves out what a functional model holds beside its graph, and plain layers have no such property.
    held = [*getattr(layer, "operations", ()), *getattr(layer, "_flatten_layers", lambda **_: ())(recursive=False)]
    inside = {
        id(child): child for child in held if child is not layer and not isinstance(child, keras.layers.InputLayer)
    }
    within |= {id(layer)}
    for child in inside.values():
        if id(child) not in within:
            yield prefix + child.name, child
            yield from _walk(child, f"{prefix}{child.name}/", within)


def _matches(path: str, pattern: str) -> bool:
    return fnmatchcase(path if "/" in pattern else path.rpartition("/")[2], pattern)


def _nothing_matches(pattern: str, model: keras.Model, paths: Sequence[str]) -> str:
    known = list(dict.fromkeys(path if "/" in pattern else path.rpartition("/")[2] for path in paths))
    if near := difflib.get_close_matches(pattern, known, n=3, cutoff=0.6):
        hint = f"did you mean {' or '.join(map(repr, near))}?"
    else:
        hint = f"its layers are {', '.join(known[:_MOST_NAMES_SHOWN])}{', ...' if known[_MOST_NAMES_SHOWN:] else ''}"
    return f"no layer of model '{model.name}' matches {pattern!r}: {hint}"


@contextlib.contextmanager
def _wrapped_call(layer: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Hide `layer.call` behind an attribute of the instance, past Keras's own tracking of attributes."""
    name = "quantized_call" if getattr(layer, "quantization_mode", None) else "call"
    attributes = vars(layer)
    missing = object()
    before = attributes.get(name, missing)
    attributes[name] = wrap(getattr(layer, name))
    try:
        yield
    finally:
        if before is missing:
            del attributes[name]
        else:
            attributes[name] = before


def _runs_as_graph(model: keras.Model) -> bool:
    """Whether its call is Keras's own walk through a graph that is there already."""
    return type(model).call.__module__.startswith("keras.") and bool(getattr(model, "inputs", None))


def _is_one_tensor_of(model: keras.Model, layer: Any) -> bool:
    """Whether the layer is called once, in this very graph, and gives a tensor."""
    top = model.layers if isinstance(model, keras.Sequential) else model.operations
    once = any(layer is each for each in top) and len(layer._inbound_nodes) == 1
    return once and isinstance(layer.output, keras.KerasTensor)
