"""What the stages share: their result, and training with other values in the place of a model's weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
from keras.src.backend import AutocastScope

from models.hooks import find

Values = list[tuple[Any, Any]]
"""Variables, each with the tensor that is computed with in its place."""

KERNELS = ("kernel", "recurrent_kernel", "depthwise_kernel", "pointwise_kernel", "embeddings")


@dataclass(frozen=True)
class Stage:
    """A model that is being made smaller: compile `model`, train it, then take `finish()`.

    Attributes:
        model: To be trained; inputs and outputs are those of the given model. All that training changes is among its
            variables.
        left: Layers that were to be changed and are left as they are -> why.
    """

    model: keras.Model
    _finish: Callable[[], keras.Model]
    left: Mapping[str, str] = field(default_factory=dict)

    def finish(self) -> keras.Model:
        """The model itself with its final weights, without what the stage put around it.

        Raises:
            ValueError: it was trained for fewer steps than the stage asks for.
        """
        return self._finish()


class Reparameterized(keras.Model):
    """Runs a model with other values in the place of some of its weights; gradients go to what these are made of.

    Works on any model, since it looks into none: Keras hands every layer the values when it asks for its weights.

    Args:
        network: The model.
        parts: Layers with a method `values(training)`, which gives weights of the model with their values.
    """

    def __init__(self, network: keras.Model, parts: Sequence[Any]) -> None:
        # The network casts its inputs itself.
        super().__init__(name=network.name, autocast=False)
        self.network, self.parts = network, list(parts)
        self.built = True

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        with AutocastScope(None):
            values = self.values(training)
        with keras.StatelessScope(values, initialize_variables=False, collect_losses=True) as scope:
            outputs = self.network(inputs, training=training)
        for loss in scope.losses:
            self.add_loss(loss)
        replaced = {id(variable) for variable, _ in values}
        for variable in self.network.variables:
            # Moving statistics, states of random generators.
            if id(variable) not in replaced and (value := scope.get_current_value(variable)) is not None:
                variable.assign(value)
        return outputs

    def values(self, training: bool | None = None) -> Values:
        """The weights that are not computed with, each with what is in its place."""
        return [pair for part in self.parts for pair in part.values(training)]

    def settled(self) -> keras.Model:
        """The network, with the values in its weights."""
        for variable, value in self.values():
            variable.assign(value)
            variable.trainable = True
        return self.network


def copy_of(model: keras.Model) -> keras.Model:
    """A copy with the same names, weights and random states.

    Raises:
        ValueError: it has no weights yet, or is a subclass without `get_config`.
    """
    if not model.built:
        raise ValueError(f"model '{model.name}' has no weights yet: call it on a batch first")
    try:
        copy = keras.models.clone_model(model)
        if not copy.built:
            copy.build_from_config(model.get_build_config())
    except (NotImplementedError, TypeError, ValueError) as error:
        raise ValueError(
            f"model '{model.name}' cannot be copied: make it functional or Sequential, or give {type(model).__name__} a "
            f"get_config ({error})"
        ) from error
    for variable, own in zip(model.variables, copy.variables, strict=True):
        own.assign(variable)
    return copy


def kernels(model: keras.Model, layers: Sequence[str], skip: Sequence[str]) -> list[tuple[Any, Any]]:
    """The layers that hold trainable kernels or embeddings, each with one of these variables, in the model's order.

    Args:
        model: A built model.
        layers: Patterns of layers, as `models.hooks.find` takes them; all within a layer that matches is meant.
        skip: Patterns of layers to leave out.

    Raises:
        ValueError: a pattern matches no layer, or nothing is left.
    """
    chosen = _variables_of(model, layers) - (_variables_of(model, skip) if skip else set())
    found = {
        id(variable): (layer, variable)
        for layer in model._flatten_layers()
        for variable in layer.trainable_variables
        if id(variable) in chosen and variable.name in KERNELS
    }
    if not found:
        raise ValueError(
            f"none of the layers {list(layers)} of model '{model.name}' has a trainable weight named "
            f"{' or '.join(KERNELS)}: choose other layers, or skip fewer"
        )
    return list(found.values())


def check_choices(**choices: tuple[Any, Iterable[Any]]) -> None:
    """Raise ValueError where a setting, `name=(value, allowed)`, is none of those allowed."""
    for name, (value, allowed) in choices.items():
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, received {value!r}")


def split(vector: Any, sizes: Sequence[int]) -> list[Any]:
    """The vector in pieces of these sizes."""
    ends = list(itertools.accumulate(sizes))
    return [vector[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _variables_of(model: keras.Model, patterns: Sequence[str]) -> set[int]:
    # `find` names what is within the model, which may have weights of its own.
    layers = [model] if "*" in patterns else [layer for _, layer in find(model, patterns)]
    return {id(variable) for layer in layers for variable in getattr(layer, "trainable_variables", ())}
