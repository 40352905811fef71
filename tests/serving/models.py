"""Small models for the tests of the server."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tensorflow as tf
from onnx import TensorProto, helper, numpy_helper

HALF_PLUS_TWO = Path(__file__).parent / "conformance" / "models" / "saved_model_half_plus_two_2_versions" / "00000123"
# One layer, y = relu(x @ KERNEL) + 1, in three formats, and what it answers to X.
KERNEL = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32)
Y = np.maximum(X @ KERNEL, 0) + np.float32(1)


def copy_half_plus_two(version_path: Path) -> None:
    """y = x / 2 + 2 as a version directory; saved_model.pb arrives last, as pushers do it."""
    shutil.copytree(HALF_PLUS_TWO, version_path, ignore=shutil.ignore_patterns("saved_model.pb"))
    shutil.copy(HALF_PLUS_TWO / "saved_model.pb", version_path)


def save_graph(
    path: Path, inputs: Mapping[str, Any], outputs: Mapping[str, Any], session: Any, signature: str = "serving_default"
) -> None:
    """Save TF1 tensors of the session's graph as one signature."""
    v1 = tf.compat.v1.saved_model
    definition = v1.build_signature_def(
        {alias: v1.build_tensor_info(tensor) for alias, tensor in inputs.items()},
        {alias: v1.build_tensor_info(tensor) for alias, tensor in outputs.items()},
        "tensorflow/serving/predict",
    )
    builder = v1.Builder(str(path))
    builder.add_meta_graph_and_variables(session, ["serve"], {signature: definition})
    builder.save()


def save_identity(path: Path, dtypes: Mapping[str, str], signature: str = "serving_default") -> None:
    """A model that gives its inputs back under the same names."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        inputs = {alias: tf.compat.v1.placeholder(dtype) for alias, dtype in dtypes.items()}
        outputs = {alias: tf.identity(tensor) for alias, tensor in inputs.items()}
        save_graph(path, inputs, outputs, session, signature)


def save_constants(path: Path, outputs: Mapping[str, Mapping[str, Any]]) -> None:
    """A model that takes a float x and gives fixed tensors: alias -> {dtype, shape, values}."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.compat.v1.placeholder(tf.float32)
        with tf.control_dependencies([tf.identity(x)]):
            tensors = {
                alias: tf.identity(tf.reshape(tf.constant(spec["values"], spec["dtype"]), spec["shape"]))
                for alias, spec in outputs.items()
            }
        save_graph(path, {"x": x}, tensors, session)


def save_sleeper(path: Path, scale: float) -> None:
    """y = scale * x, after as many seconds as the largest x (a while loop that looks at the clock)."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.compat.v1.placeholder(tf.float32, shape=[None])
        start = tf.timestamp()
        end = start + tf.cast(tf.reduce_max(x), tf.float64)
        rounds = tf.while_loop(
            lambda rounds: tf.timestamp() < end, lambda rounds: rounds + 1, [tf.constant(0)], parallel_iterations=1
        )
        with tf.control_dependencies(tf.nest.flatten(rounds)):
            y = tf.identity(x * scale)
        save_graph(path, {"x": x}, {"y": y}, session)


def save_product(path: Path) -> None:
    """y = 6 * x, saved by TF2's tf.saved_model.save."""
    module = tf.Module()
    spec = tf.TensorSpec(None, tf.float32, name="x")
    module.call = tf.function(lambda x: {"y": 3.0 * 2.0 * x}, input_signature=[spec])
    tf.saved_model.save(module, str(path), signatures=module.call)


def save_mlp(path: Path) -> None:
    """A perceptron 32 -> 256 -> 10 with fixed weights, the model of the timings."""
    generator = np.random.default_rng(0)
    hidden, output = (tf.constant(generator.normal(size=shape), tf.float32) for shape in ((32, 256), (256, 10)))
    module = tf.Module()
    module.call = tf.function(
        lambda x: {"y": tf.nn.softmax(tf.nn.relu(x @ hidden) @ output)},
        input_signature=[tf.TensorSpec([None, 32], tf.float32, name="x")],
    )
    tf.saved_model.save(module, str(path), signatures=module.call)


def save_session_style(path: Path) -> None:
    """As TF1 exported: variables, a table filled from an asset by an init op, sparse and ragged signatures, and a second
    graph for GPUs, which adds 100. blue scores 3, green 2, red 1, and everything else 0."""
    v1 = tf.compat.v1
    vocabulary = path.with_name("vocabulary.txt")
    vocabulary.write_text("red\ngreen\nblue\n")
    builder = v1.saved_model.Builder(str(path))
    for tags, offset in ((["serve"], 0.0), (["serve", "gpu"], 100.0)):
        with tf.Graph().as_default(), v1.Session() as session:
            asset = tf.constant(str(vocabulary))
            v1.add_to_collection(v1.GraphKeys.ASSET_FILEPATHS, asset)
            rows = tf.lookup.TextFileInitializer(
                asset, tf.string, tf.lookup.TextFileIndex.WHOLE_LINE, tf.int64, tf.lookup.TextFileIndex.LINE_NUMBER
            )
            table = tf.lookup.StaticHashTable(rows, 3)
            weights = v1.get_variable("weights", initializer=[1.0, 2.0, 3.0, 0.0], use_resource=offset == 0)
            text = v1.placeholder(tf.string, [None])
            scores = tf.gather(weights, table.lookup(text)) + offset
            sparse = v1.sparse_placeholder(tf.float32, [None, 3])
            signatures = {
                name: v1.saved_model.build_signature_def(
                    {alias: v1.saved_model.build_tensor_info(tensor) for alias, tensor in inputs.items()},
                    {alias: v1.saved_model.build_tensor_info(tensor) for alias, tensor in outputs.items()},
                    "tensorflow/serving/predict",
                )
                for name, inputs, outputs in (
                    ("serving_default", {"text": text}, {"score": scores}),
                    ("sparse", {"x": sparse}, {"y": tf.sparse.reduce_sum(sparse)}),
                    ("ragged", {"text": text}, {"rows": tf.RaggedTensor.from_row_splits(scores, [0, 1])}),
                )
            }
            fill = v1.tables_initializer()
            session.run([v1.global_variables_initializer(), fill])
            assets = v1.get_collection(v1.GraphKeys.ASSET_FILEPATHS)
            if offset == 0:
                builder.add_meta_graph_and_variables(session, tags, signatures, assets, main_op=fill)
            else:
                builder.add_meta_graph(tags, signatures, assets, main_op=fill)
    builder.save()
    vocabulary.unlink()  # the export has a copy


def layer(batch_size: int | None = None) -> tf.Module:
    """As TensorFlow has it, for any number of rows or for one."""
    module = tf.Module()
    spec = tf.TensorSpec([batch_size, 4], tf.float32, name="x")
    module.call = tf.function(lambda x: {"y": tf.nn.relu(x @ KERNEL) + 1.0}, input_signature=[spec])
    return module


def litert_bytes(batch_size: int | None = None, **options: Any) -> bytes:
    """As a LiteRT file, converted with these attributes of the converter."""
    module = layer(batch_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        converter = tf.lite.TFLiteConverter.from_concrete_functions([module.call.get_concrete_function()], module)
        for name, value in options.items():
            setattr(converter, name, value)
        return converter.convert()


def save_onnx(path: Path, nodes: list[Any], inputs: list[Any], outputs: list[Any], weights: dict[str, Any]) -> None:
    """Save a graph as an ONNX file."""
    initializers = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, initializers)
    path.parent.mkdir(parents=True, exist_ok=True)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), str(path))


def save_layer_as_onnx(path: Path, bias: float = 1.0) -> None:
    """The layer as an ONNX file."""
    nodes = [("MatMul", ["x", "kernel"], ["a"]), ("Relu", ["a"], ["b"]), ("Add", ["b", "bias"], ["y"])]
    save_onnx(
        path,
        [helper.make_node(*node) for node in nodes],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])],
        {"kernel": KERNEL, "bias": np.array(bias, np.float32)},
    )


def save_rich(path: Path) -> None:
    """Two inputs, two outputs; signatures `serving_default` and `explain`."""
    module = tf.Module()
    spec = [
        tf.TensorSpec([None, 2], tf.float32, name="x"),
        tf.TensorSpec([None], tf.string, name="text"),
        tf.TensorSpec([None, 1], tf.int64, name="id"),
    ]
    module.call = tf.function(
        lambda x, text, id: {"sum": tf.reduce_sum(x, 1), "text_bytes": text, "next": id + 1}, input_signature=spec
    )
    module.explain = tf.function(lambda x: {"attributions": 2.0 * x}, input_signature=spec[:1])
    tf.saved_model.save(module, str(path), signatures={"serving_default": module.call, "explain": module.explain})


def write_model_config(folder: Path, base_paths: Mapping[str, str]) -> Path:
    """A model config file in `folder`: model name -> the folder in it that holds its versions."""
    entries = "".join(
        f'config {{ name: "{name}" base_path: "{folder / base}" model_platform: "tensorflow" }}'
        for name, base in base_paths.items()
    )
    config = folder / "models.config"
    config.write_text(f"model_config_list {{ {entries} }}")
    return config
