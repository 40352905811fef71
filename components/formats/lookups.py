"""A model in two: the lookups of strings and ids, which TensorFlow alone computes, and the core that any format takes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from components.errors import HeadraceError
from components.formats.network import SIGNATURE, Arrays, Network

MANIFEST = "lookups.json"
FOLDER = "lookups"
LOOKUPS = (
    keras.layers.StringLookup,
    keras.layers.IntegerLookup,
    keras.layers.Hashing,
    keras.layers.HashedCrossing,
    keras.layers.TextVectorization,
)


@dataclass(frozen=True)
class Split:
    """A model in two.

    Attributes:
        lookups: Raw features -> what the lookups answer, named as their layers.
        core: Those answers, and the features that no lookup reads -> the model's answers.
    """

    lookups: Network
    core: Network

    def feed(self, features: Arrays) -> dict[str, np.ndarray]:
        """What the core takes, from what the whole model takes."""
        looked_up = self.lookups.expected({name: features[name] for name in self.lookups.specs})
        return {name: looked_up[name] if name in looked_up else features[name] for name in self.core.specs}

    def save(self, directory: Path) -> None:
        """Write the lookups as a SavedModel `lookups/`, and `lookups.json`, which says what is fed by what."""
        with self.lookups.saved_model() as written:
            written.rename(directory / FOLDER)
            written.mkdir()  # so that the temporary folder can be removed
        answers = list(self.lookups.traced(None, False).structured_outputs)
        manifest = {
            "saved_model": FOLDER,
            "signature": SIGNATURE,
            "inputs": list(self.lookups.specs),
            "outputs": answers,
            "passed_on": [name for name in self.core.specs if name not in answers],
            "reason": "The plain runtimes of TFLite and ONNX have no lookup tables and no hashing as TensorFlow has them.",
        }
        (directory / MANIFEST).write_text(json.dumps(manifest, indent=1))


def split_lookups(model: keras.Model) -> Split:
    """Cut a functional model behind its lookups, the layers of the kinds in `LOOKUPS`.

    Raises:
        HeadraceError: the model is not functional, has no lookups among its layers, or answers with one.

    Example:
        >>> split = split_lookups(model)
        >>> convert_tflite(split.core, folder / "model.tflite", examples=split.feed(features))
        >>> split.save(folder)
    """
    if isinstance(model, keras.Sequential) or not getattr(model, "inputs", None):
        raise HeadraceError(
            f"Only a functional model can be split, and '{model.name}' is {type(model).__name__}: keep the lookups in a "
            "model of their own."
        )
    cuts = {}
    for operation in model.operations:
        if isinstance(operation, LOOKUPS):
            for index, node in enumerate(operation._inbound_nodes):
                name = operation.name if index == 0 else f"{operation.name}_{index}"
                cuts[name] = node.output_tensors[0]
    if not cuts:
        raise HeadraceError(f"Model '{model.name}' has no lookups among its layers: there is nothing to split off.")
    answers = {id(tensor) for tensor in keras.tree.flatten(model.output)}
    if found := [name for name, tensor in cuts.items() if id(tensor) in answers]:
        raise HeadraceError(
            f"Model '{model.name}' answers with '{found[0]}', which is a lookup: look answers up outside of the model."
        )
    structure = keras.tree.flatten_with_path(model.input)
    inputs = {"/".join(k for k in path if isinstance(k, str)) or tensor.name: tensor for path, tensor in structure}
    read = {id(tensor) for tensor in _sources(list(cuts.values()))}
    raw = {name: tensor for name, tensor in inputs.items() if id(tensor) in read}
    needed = {id(tensor) for tensor in _sources(keras.tree.flatten(model.output), stop=list(cuts.values()))}
    passed_on = {name: tensor for name, tensor in inputs.items() if id(tensor) in needed}
    return Split(
        _part(raw, cuts, name=f"{model.name}_lookups"),
        _part({**passed_on, **cuts}, model.output, name=f"{model.name}_core"),
    )


def _part(inputs: dict[str, keras.KerasTensor], outputs: Any, *, name: str) -> Network:
    """The part of a graph between two sets of tensors."""
    # As a list: Keras warns of names in a dictionary that the tensors do not have, and those of a cut are its own.
    part = keras.Model(list(inputs.values()), outputs, name=name)
    specs = {key: tf.TensorSpec(tensor.shape, tensor.dtype) for key, tensor in inputs.items()}
    return Network.of(part, inputs=specs, call=lambda features: part([features[key] for key in inputs], training=False))


def _sources(tensors: list[keras.KerasTensor], stop: list[keras.KerasTensor] | None = None) -> list[keras.KerasTensor]:
    """The tensors without an operation before them from which others follow, without looking behind `stop`."""
    seen: set[int] = {id(tensor) for tensor in stop or ()}
    pending = list(tensors) if stop is None else [tensor for tensor in tensors if id(tensor) not in seen]
    found = []
    while pending:
        tensor = pending.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        operation, index, _ = tensor._keras_history
        node = operation._inbound_nodes[index]
        if node.is_input:
            found.append(tensor)
        pending += node.input_tensors
    return found
