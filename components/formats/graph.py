"""What operations a traced network is made of, and which of them keep it from which format."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class UnmappedOp:
    """An operation that a format does not have.

    Attributes:
        op: TensorFlow's name of it, such as `Erfc`.
        node: The node of the graph.
        layer: The layer that it comes from; empty where that cannot be told.
        why: What is missing.
        way_round: What to change in the model.
    """

    op: str
    node: str
    layer: str
    why: str
    way_round: str

    def __str__(self) -> str:
        return f"operation {self.op} of {f'layer {self.layer!r}' if self.layer else f'node {self.node!r}'}"


_SPLIT = "Split the lookups off with split_lookups, convert its core and ship its lookups beside it"
# Operation -> why the plain runtimes of TFLite and ONNX do not compute it as TensorFlow does.
_TEXT_OPS = {
    "StringToHashBucketFast": "there is no operator that hashes strings into the same buckets",
    "StringToHashBucketStrong": "there is no operator that hashes strings into the same buckets",
    "AsString": "there is no operator that writes numbers as text",
    "StringLower": "there is no operator for text",
    "StringSplitV2": "there is no operator for text",
    "StaticRegexReplace": "there is no operator for text",
    "StringStrip": "there is no operator for text",
    "StringJoin": "there is no operator for text",
}
_WAYS_ROUND = {
    "StridedSlice": "Write keras.ops.expand_dims(x, axis) where the layer indexes with None, or convert with batch_size=1",
    "TensorListReserve": "Convert with batch_size=1, or unroll=True where the length is fixed",
    "Erf": "Take the tanh form, keras.ops.gelu(x, approximate=True)",
    "Erfc": "Take the tanh form, keras.ops.gelu(x, approximate=True)",
    "BatchMatMulV3": "Export the model as it was before model.quantize(...)",
    "StatefulPartitionedCall": "Leave jit_compile=True out of the layer's own tf.function",
    "PartitionedCall": "Leave jit_compile=True out of the layer's own tf.function",
}
_WAY_ROUND = "Write that part of the layer with other operations of keras.ops, or leave this form out"


def way_round(op: str) -> str:
    """What to do about an operation that a format lacks."""
    return _SPLIT if op in _TEXT_OPS or op.startswith(("LookupTable", "HashTable")) else _WAYS_ROUND.get(op, _WAY_ROUND)


def nodes_of(graph_def: Any) -> Iterator[Any]:
    """Every node, those inside of functions and loops too."""
    yield from graph_def.node
    for function in graph_def.library.function:
        yield from function.node_def


def text_ops(graph_def: Any, layers: Collection[str]) -> list[UnmappedOp]:
    """Lookups and operations on strings, which TFLite's and ONNX's plain runtimes do not compute as TensorFlow does."""
    found = []
    for node in nodes_of(graph_def):
        why = _TEXT_OPS.get(node.op)
        if node.op.startswith("LookupTableFind"):
            integers = node.attr["Tin"].type != _DT_STRING
            why = (
                "there is no lookup of integers" if integers else "the table is no part of the graph that is converted"
            )
        if why is not None:
            found.append(UnmappedOp(node.op, node.name, layer_of(node.name, layers), why, way_round(node.op)))
    return found


_DT_STRING = 7


def unmapped(graph_def: Any, known: Collection[str], layers: Collection[str], why: str) -> list[UnmappedOp]:
    """Operations that are not among `known`, one entry a node."""
    return [
        UnmappedOp(node.op, node.name, layer_of(node.name, layers), why, way_round(node.op))
        for node in nodes_of(graph_def)
        if node.op not in known
    ]


def layer_of(node: str, layers: Iterable[str]) -> str:
    """The innermost layer in the name of a node; Keras numbers the scopes: `tagger_1/hidden_1/Gelu/Erfc`."""
    names = set(layers)
    for part in reversed(node.split("/")):
        for name in (part, re.sub(r"_\d+$", "", part)):
            if name in names:
                return name
    return ""
