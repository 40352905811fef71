"""Which layer costs the accuracy, and which are therefore left in float."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from components.formats.network import Arrays
from components.ptq.simulation import Simulation, sqnr_db
from models.quantization import FakeQuantize, QuantizedLayer, graph
from models.quantization.layers import Scheduled

Drop = Callable[[list[np.ndarray]], float]


@dataclass(frozen=True)
class Unit:
    """An int8 operation: what lies between the rounding of its inputs and that of its outputs.

    Attributes:
        name: Of the layer that has the weights, else of the one that is rounded.
        members: Names of the layers that round for it.
    """

    name: str
    members: frozenset[str]


@dataclass(frozen=True)
class Sensitivity:
    """What a layer costs when it alone is int8.

    Attributes:
        layer: Its name.
        sqnr_db: Signal-to-quantization-noise ratio of the model's answers, in decibels: the less, the worse.
        drop: What the metric loses; None where none was given.
    """

    layer: str
    sqnr_db: float
    drop: float | None


def units(simulation: Simulation) -> list[Unit]:
    """The int8 operations of a model, in its order."""
    makers = {id(tensor): node for node in graph.nodes(simulation.aware) for tensor in node.outputs}
    found: dict[str, Unit] = {}
    for node in graph.nodes(simulation.aware):
        if not isinstance(node.operation, FakeQuantize):
            continue
        between = list(_back_to_rounding(node, makers))
        weighty = [layer.name for layer in between if isinstance(layer, QuantizedLayer)]
        if not any(not isinstance(layer, FakeQuantize) for layer in between):
            continue  # an input of the model
        name = weighty[0] if weighty else node.operation.name.removesuffix("_range")
        members = {node.operation.name, *(layer.name for layer in between if isinstance(layer, Scheduled))}
        found[name] = Unit(name, found[name].members | members if name in found else frozenset(members))
    covered = {member for unit in found.values() for member in unit.members}
    alone = [
        layer.name for layer in simulation.layers if layer.name not in covered and isinstance(layer, QuantizedLayer)
    ]
    return [*found.values(), *(Unit(name, frozenset({name})) for name in alone)]


def measure(
    simulation: Simulation, features: Arrays, reference: list[np.ndarray], drop: Drop | None
) -> list[Sensitivity]:
    """The model with one layer in int8 and the rest in float, for each layer; the worst comes first."""
    rows = []
    for unit in units(simulation):
        simulation.switch(unit.members)
        answers = simulation.answers(features)
        rows.append(Sensitivity(unit.name, sqnr_db(reference, answers), drop and drop(answers)))
    return sorted(rows, key=lambda row: row.sqnr_db)


def keep_float(simulation: Simulation, names: Collection[str]) -> set[str]:
    """Switch these layers to float and all others to int8.

    Returns:
        What does not round any more, as `models.quantization.strip` takes it: what only the float layers needed.
    """
    rounding = {member for unit in units(simulation) if unit.name not in names for member in unit.members}
    simulation.switch(rounding)
    return {layer.name for layer in simulation.layers} - rounding


def _back_to_rounding(node: Any, makers: dict[int, Any]) -> Iterator[Any]:
    """The layers before a call, nearest first, up to those that round activations."""
    pending, seen = [makers[id(t)] for t in node.input_tensors if id(t) in makers], set()
    while pending:
        maker = pending.pop(0)
        if id(maker) not in seen:
            seen.add(id(maker))
            yield maker.operation
            if not isinstance(maker.operation, FakeQuantize):
                pending += [makers[id(t)] for t in maker.input_tensors if id(t) in makers]
