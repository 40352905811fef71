"""Pictures of graphs: every layer or operation once, each below what it needs."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import keras
import onnx
import pytest
from keras import layers

from components.errors import HeadraceError
from components.formats import Network, convert_onnx, draw_layers, draw_onnx
from components.formats.picture import Box, svg
from tests.components.formats.models import resnet_case, subclassed_case

SVG = "{http://www.w3.org/2000/svg}"


def drawn(text: str) -> tuple[dict[str, tuple[int, int]], list[tuple[int, int, int, int]]]:
    """Details -> left and top of each box, and the ends of each line."""
    root = ElementTree.fromstring(text)
    boxes = {}
    for group in root.iter(f"{SVG}g"):
        title, rectangle = group.find(f"{SVG}title"), group.find(f"{SVG}rect")
        assert title is not None and rectangle is not None
        boxes[title.text or ""] = (int(rectangle.attrib["x"]), int(rectangle.attrib["y"]))
    numbers = [[int(n) for n in re.findall(r"-?\d+", path.attrib["d"])] for path in root.iter(f"{SVG}path")]
    return boxes, [(each[0], each[1], each[-2], each[-1]) for each in numbers]


def test_layers_with_their_shapes(tmp_path: Path) -> None:
    model = resnet_case().model
    draw_layers(model, tmp_path / "m.svg")
    boxes, lines = drawn((tmp_path / "m.svg").read_text())
    assert len(boxes) == len(model.layers)
    assert "stem_conv → (None, 12, 12, 8)" in boxes
    assert len(set(boxes.values())) == len(boxes)
    adds = sum(isinstance(layer, layers.Add) for layer in model.layers)
    assert len(lines) == len(model.layers) - 1 + adds
    assert all(top < bottom for _, top, _, bottom in lines)


def test_a_sequential_model_and_names_with_signs(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((2,), name="x"), layers.Dense(3, name="a_and_b")], name="s")
    draw_layers(model, tmp_path / "m.svg")
    assert set(drawn((tmp_path / "m.svg").read_text())[0]) == {"x → (None, 2)", "a_and_b → (None, 3)"}
    boxes = {"<a>": Box("a & b", "<i>", "x < y", ())}
    assert set(drawn(svg(boxes))[0]) == {"x < y"}


def test_the_operations_of_an_onnx_file(tmp_path: Path) -> None:
    convert_onnx(Network.of(resnet_case().model), tmp_path / "m.onnx")
    draw_onnx(tmp_path / "m.onnx", tmp_path / "m.svg")
    boxes, lines = drawn((tmp_path / "m.svg").read_text())
    graph = onnx.load(tmp_path / "m.onnx").graph
    assert len(boxes) == len(graph.node) + 2
    assert {"image: (batch, 12, 12, 3)", "logits: (batch, 4)"} <= set(boxes)
    weights = {each.name for each in graph.initializer}
    fed = sum(len(set(node.input) - weights - {""}) for node in graph.node)
    assert len(lines) == fed + 1
    once = (tmp_path / "m.svg").read_bytes()
    draw_onnx(tmp_path / "m.onnx", tmp_path / "m.svg")
    assert (tmp_path / "m.svg").read_bytes() == once


def test_boxes_of_one_row_do_not_overlap_and_a_long_line_swings_out() -> None:
    boxes = {
        "a": Box("a", "", "a", ()),
        "b": Box("b", "", "b", ("a",)),
        "c": Box("c", "", "c", ("a",)),
        "d": Box("d", "", "d", ("b", "a")),
    }
    text = svg(boxes)
    places, _ = drawn(text)
    assert places["b"][1] == places["c"][1]
    assert abs(places["b"][0] - places["c"][0]) >= 190
    paths = [path.attrib["d"] for path in ElementTree.fromstring(text).iter(f"{SVG}path")]
    straight = [len({int(n) for n in re.findall(r"[MC ](\d+) \d+", path)}) == 1 for path in paths]
    assert straight == [True, False, True, False]


def test_what_has_no_graph_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadraceError, match="'tagger' is subclassed and has no graph of layers"):
        draw_layers(subclassed_case().model, tmp_path / "m.svg")
    (tmp_path / "m.onnx").write_bytes(b"no model")
    with pytest.raises(HeadraceError, match=r"Cannot read .*m\.onnx as ONNX"):
        draw_onnx(tmp_path / "m.onnx", tmp_path / "m.svg")
