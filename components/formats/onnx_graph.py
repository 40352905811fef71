"""ONNX graphs with names that say where a node comes from, in an order that follows from the graph alone.

tf2onnx numbers its names on through the life of a process and walks through sets, so that the same model gives other names
and another order each time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from components.formats.graph import layer_of

# Operations that do a layer's own work. Those that only handle shapes are shared by the layers that need the same one, and
# which layer's name they keep is a matter of chance.
_OF_A_LAYER = frozenset(
    {"AveragePool", "BatchNormalization", "Conv", "ConvTranspose", "Erf", "GRU", "Gemm", "GlobalAveragePool", "LSTM"}
    | {"GlobalMaxPool", "Loop", "MatMul", "MaxPool", "Relu", "Sigmoid", "Softmax", "Tanh"}
)


def name_and_order(graph: Any, ends: Mapping[str, str], layers: Collection[str]) -> None:
    """Rename and sort a graph in place.

    Args:
        graph: A `GraphProto`; what no output needs is dropped.
        ends: Name -> new name of each input and output.
        layers: Names of layers, to name nodes after.
    """
    _sort(graph)
    _Names(ends, layers).give(graph, "")


def _sort(graph: Any) -> None:
    """Nodes in the order in which a walk from the outputs backwards, input by input, meets them."""
    for inner in _graphs_in(graph.node):
        _sort(inner)
    made_by = {name: index for index, node in enumerate(graph.node) for name in node.output if name}
    order: dict[int, None] = {}
    # The second visit of a node comes after all that it needs.
    pending = [(made_by[value.name], False) for value in reversed(graph.output) if value.name in made_by]
    while pending:
        index, is_ready = pending.pop()
        if index in order:
            continue
        if is_ready:
            order[index] = None
            continue
        pending.append((index, True))
        needed = [made_by[name] for name in _reads(graph.node[index]) if name in made_by]
        pending += [(each, False) for each in reversed(needed) if each not in order]
    nodes = [type(graph.node[index]).FromString(graph.node[index].SerializeToString()) for index in order]
    del graph.node[:]
    graph.node.extend(nodes)


def _reads(node: Any) -> Iterator[str]:
    """Names that a node reads, those that its inner graphs take from outside too."""
    yield from node.input
    for inner in _graphs_in([node]):
        own = {value.name for value in (*inner.input, *inner.initializer)}
        own |= {name for each in inner.node for name in each.output}
        for each in inner.node:
            yield from (name for name in _reads(each) if name not in own)
        yield from (value.name for value in inner.output if value.name not in own)


def _graphs_in(nodes: Any) -> Iterator[Any]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield attribute.g


class _Names:
    """Old name -> new name, given in order."""

    def __init__(self, ends: Mapping[str, str], layers: Collection[str]) -> None:
        self._new: dict[str, str] = {"": "", **ends}
        self._taken = set(ends.values())
        self._layers, self._count = layers, 0

    def give(self, graph: Any, place: str) -> None:
        """Rename a graph, and those within."""
        for index, value in enumerate(graph.input):
            self._add(value.name, f"{place}in_{index}")
        for node in graph.node:
            self._count += 1
            layer = layer_of(node.name, self._layers) if node.op_type in _OF_A_LAYER else ""
            node.name = f"{place}{f'{layer}/' if layer else ''}{node.op_type}_{self._count}"
            for index, name in enumerate(node.input):
                self._add(name, f"{node.name}/weight_{index}")
            for inner in _graphs_in([node]):
                self.give(inner, f"{node.name}/")
            for index, name in enumerate(node.output):
                self._add(name, f"{node.name}:{index}")
            for names in (node.input, node.output):
                names[:] = [self._new[name] for name in names]
        graph.name = place.rstrip("/") or "network"
        for value in (*graph.input, *graph.output):
            value.name = self._new[value.name]
        for values in (graph.initializer, graph.value_info):
            used = [value for value in values if value.name in self._new]
            for value in used:
                value.name = self._new[value.name]
            copies = [type(value).FromString(value.SerializeToString()) for value in used]
            del values[:]
            values.extend(sorted(copies, key=lambda value: value.name))

    def _add(self, old: str, new: str) -> None:
        if old in self._new:
            return
        while new in self._taken:
            new += "_"
        self._taken.add(new)
        self._new[old] = new
