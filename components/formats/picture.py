"""A picture of a graph as SVG, which any browser shows: of a Keras model's layers, or of the operations of an ONNX file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import keras

from components.errors import HeadraceError

_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 190, 40, 24, 34, 20
_CHARACTERS = 27
_COLOURS = {"input": "#dbe9f6", "output": "#e2f0d9"}


@dataclass(frozen=True)
class Box:
    """One node of a picture.

    Attributes:
        title: What it does, such as `Conv2D`.
        text: A second line: its name.
        details: What a mouse over it shows.
        inputs: Keys of the boxes before it.
        kind: `input`, `output` or `inner`.
    """

    title: str
    text: str
    details: str
    inputs: tuple[str, ...]
    kind: str = "inner"


def draw_layers(model: keras.Model, file: Path) -> None:
    """Draw the layers of a functional or Sequential model, with the shapes that they give.

    Raises:
        HeadraceError: the model is subclassed, so that nobody knows how its layers are connected.
    """
    functional = getattr(model, "_functional", None) or model
    if not getattr(functional, "operations", None):
        raise HeadraceError(
            f"'{model.name}' is subclassed and has no graph of layers: convert it and draw the ONNX file."
        )
    outputs = {id(tensor._keras_history.operation) for tensor in functional.outputs}
    boxes: dict[str, Box] = {}
    within = {id(operation) for operation in functional.operations}
    for operation in functional.operations:
        node = operation._inbound_nodes[0]
        before = [tensor._keras_history.operation for tensor in node.input_tensors]
        kind = "input" if node.is_input else "output" if id(operation) in outputs else "inner"
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in node.output_tensors)
        inputs = tuple(dict.fromkeys(each.name for each in before if id(each) in within))
        boxes[operation.name] = Box(
            type(operation).__name__, operation.name, f"{operation.name} → {shapes}", inputs, kind
        )
    file.write_text(svg(boxes), encoding="utf-8")


def draw_onnx(model: Path, file: Path) -> None:
    """Draw the operations of an ONNX file between its inputs and outputs; weights are left out.

    Raises:
        HeadraceError: the file is no ONNX model.
    """
    import onnx
    from google.protobuf.message import DecodeError

    try:
        graph = onnx.load(model).graph
    except (OSError, DecodeError) as error:
        raise HeadraceError(f"Cannot read {model} as ONNX: {error}") from error
    made_by: dict[str, str] = {}
    boxes: dict[str, Box] = {}
    for value in graph.input:
        made_by[value.name] = key = f"input {value.name}"
        boxes[key] = Box("input", value.name, f"{value.name}: {_onnx_shape(value)}", (), "input")
    for index, node in enumerate(graph.node):
        key = f"{index} {node.name}"
        inputs = tuple(dict.fromkeys(made_by[name] for name in node.input if name in made_by))
        boxes[key] = Box(node.op_type, _short(node.name), f"{node.name} → {', '.join(node.output)}", inputs)
        made_by.update(dict.fromkeys(node.output, key))
    for value in graph.output:
        inputs = (made_by[value.name],) if value.name in made_by else ()
        boxes[f"output {value.name}"] = Box(
            "output", value.name, f"{value.name}: {_onnx_shape(value)}", inputs, "output"
        )
    file.write_text(svg(boxes), encoding="utf-8")


def svg(boxes: Mapping[str, Box]) -> str:
    """The picture: inputs above, each box below all that it needs.

    Args:
        boxes: Key -> box, every one after those before it.
    """
    places = _places(boxes)
    width = max((x for x, _ in places.values()), default=0) + _WIDTH + _MARGIN
    height = max((y for _, y in places.values()), default=0) + _HEIGHT + _MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        *(_edge(places[before], places[key]) for key, box in boxes.items() for before in box.inputs),
        *(_drawn(box, *places[key]) for key, box in boxes.items()),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _places(boxes: Mapping[str, Box]) -> dict[str, tuple[int, int]]:
    """Key -> left and top, in pixels: rows by the longest way from an input, columns near to what comes before."""
    rows: dict[str, int] = {}
    for key, box in boxes.items():
        rows[key] = 1 + max((rows[before] for before in box.inputs), default=-1)
    members: dict[int, list[str]] = defaultdict(list)
    for key, row in rows.items():
        members[row].append(key)
    places: dict[str, tuple[int, int]] = {}
    for row in sorted(members):
        wanted = {key: _mean([places[before][0] for before in boxes[key].inputs]) for key in members[row]}
        left = _MARGIN
        for key in sorted(members[row], key=wanted.__getitem__):
            x = max(left, round(wanted[key]))
            places[key] = (x, _MARGIN + row * (_HEIGHT + _GAP_Y))
            left = x + _WIDTH + _GAP_X
    return places


def _mean(numbers: Sequence[int]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.0


def _edge(start: tuple[int, int], end: tuple[int, int]) -> str:
    (x1, y1), (x2, y2) = (start[0] + _WIDTH // 2, start[1] + _HEIGHT), (end[0] + _WIDTH // 2, end[1])
    bend = _GAP_Y // 2
    # One that passes rows by swings out, or it would be hidden behind the boxes between.
    swing = 0 if y2 - y1 <= _GAP_Y else round(0.8 * _WIDTH)
    bends = f"{x1 + swing} {y1 + bend} {x2 + swing} {y2 - bend}"
    return f'<path d="M{x1} {y1} C{bends} {x2} {y2}" fill="none" stroke="#888"/>'


def _drawn(box: Box, x: int, y: int) -> str:
    colour = _COLOURS.get(box.kind, "#f4f4f4")
    middle = x + _WIDTH // 2
    return (
        f"<g><title>{escape(box.details)}</title>"
        f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="5" fill="{colour}" stroke="#666"/>'
        f'<text x="{middle}" y="{y + 16}" text-anchor="middle" font-weight="bold">{escape(_cut(box.title))}</text>'
        f'<text x="{middle}" y="{y + 32}" text-anchor="middle">{escape(_cut(box.text))}</text></g>'
    )


def _cut(text: str) -> str:
    return text if len(text) <= _CHARACTERS else f"{text[: _CHARACTERS - 1]}…"


def _short(name: str) -> str:
    """The last two parts of a node's name, which say the layer and what it does there."""
    return "/".join(name.split("/")[-2:])


def _onnx_shape(value: Any) -> str:
    dimensions = value.type.tensor_type.shape.dim
    return f"({', '.join(each.dim_param or str(each.dim_value) for each in dimensions)})"
