"""name_and_order: the same graph has the same names and order, however it came."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from components.formats.onnx_graph import name_and_order


def graph(suffix: str, *, swapped: bool) -> onnx.ModelProto:
    """`relu(x @ w) + loop over x`, with names and orders that depend on the arguments."""
    name = f"m_1/hidden_1/MatMul__{suffix}"
    nodes = [
        helper.make_node("MatMul", ["x:0", f"w{suffix}"], [f"{name}:0"], name=name),
        helper.make_node("Shape", ["x:0"], [f"shape{suffix}"], name=f"shape{suffix}"),
        helper.make_node("Gather", [f"shape{suffix}", f"zero{suffix}"], [f"count{suffix}"], name=f"gather{suffix}"),
        helper.make_node("Relu", [f"{name}:0"], [f"relu{suffix}"], name=f"m_1/hidden_1/Relu{suffix}"),
        helper.make_node("Neg", ["x:0"], [f"unused{suffix}"], name=f"unused{suffix}"),
    ]
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["on"], name=f"go{suffix}"),
            # Reads what is made outside.
            helper.make_node("Add", ["state", f"relu{suffix}"], ["next"], name=f"add{suffix}"),
        ],
        f"body{suffix}",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, None),
        ],
    )
    loop = helper.make_node("Loop", [f"count{suffix}", "", f"relu{suffix}"], ["y:0"], name=f"loop{suffix}", body=body)
    order = [1, 2, 4, 0, 3] if swapped else [0, 1, 2, 3, 4]
    constants = [
        onnx.numpy_helper.from_array(np.eye(3, dtype="float32"), f"w{suffix}"),
        onnx.numpy_helper.from_array(np.int64(0), f"zero{suffix}"),
    ]
    made = helper.make_graph(
        [*(nodes[i] for i in order), loop],
        f"graph{suffix}",
        [helper.make_tensor_value_info("x:0", TensorProto.FLOAT, ["n", 3])],
        [helper.make_tensor_value_info("y:0", TensorProto.FLOAT, ["n", 3])],
        constants[:: -1 if swapped else 1],
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_names_and_order_follow_from_the_graph_alone() -> None:
    models = [graph("7", swapped=False), graph("31", swapped=True)]
    for model in models:
        name_and_order(model.graph, {"x:0": "x", "y:0": "y"}, {"hidden"})
        onnx.checker.check_model(model, full_check=True)
    assert models[0].SerializeToString(deterministic=True) == models[1].SerializeToString(deterministic=True)
    nodes = models[0].graph.node
    assert [node.name for node in nodes] == ["Shape_1", "Gather_2", "hidden/MatMul_3", "hidden/Relu_4", "Loop_5"]
    assert list(nodes[2].input) == ["x", "hidden/MatMul_3/weight_1"]
    inner = nodes[4].attribute[0].g
    assert [node.name for node in inner.node] == ["Loop_5/Identity_6", "Loop_5/Add_7"]
    assert list(inner.node[1].input) == ["Loop_5/in_2", "hidden/Relu_4:0"]


def test_the_numbers_stay() -> None:
    import onnxruntime

    x = np.arange(6, dtype="float32").reshape(2, 3) - 2
    answers = []
    for renamed in (False, True):
        model = graph("7", swapped=True)
        if renamed:
            name_and_order(model.graph, {"x:0": "x", "y:0": "y"}, {"hidden"})
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        answers.append(session.run(None, {"x" if renamed else "x:0": x})[0])
    np.testing.assert_array_equal(*answers)
    np.testing.assert_array_equal(answers[0], 3 * np.maximum(x, 0))
