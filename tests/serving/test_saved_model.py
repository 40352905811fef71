"""The model call: both ways of executing signatures, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from serving import tfrecord
from serving.backends import saved_model
from serving.backends.saved_model import FunctionRunner, SavedModel, SessionRunner
from serving.backends.signatures import Signature
from serving.errors import Code, ServingError
from serving.protos import PredictionLog
from serving.server import load_version
from serving.settings import LoadSettings
from serving.tensors import encode_content
from serving.warmup import WARMUP_FILE, replay
from tests.serving import models

X32 = np.ones((1, 1), np.float32)
TEXTS = np.array([[b"a"], [b"\xff\x00"]], dtype=object)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A TF2 export with two signatures, several types and a default for one input."""

    class Exported(tf.Module):
        @tf.function(
            input_signature=[
                tf.TensorSpec([None, 2], tf.float32, name="x"),
                tf.TensorSpec([None, 1], tf.string, name="text"),
            ]
        )
        def serve(self, x: Any, text: Any) -> Any:
            return {"double": x * 2, "text": tf.strings.join([text, "!"]), "half": tf.cast(x, tf.bfloat16)}

        @tf.function(input_signature=[tf.TensorSpec(None, tf.bfloat16, name="x")])
        def low(self, x: Any) -> Any:
            return {"y": x + 1}

    path = tmp_path_factory.mktemp("exported") / "1"
    module = Exported()
    tf.saved_model.save(module, str(path), signatures={"serving_default": module.serve, "low": module.low})
    return path


@pytest.fixture(scope="module", params=[SessionRunner, FunctionRunner])
def model(request: pytest.FixtureRequest, exported: Path) -> SavedModel:
    return SavedModel(exported, runner=request.param)


def test_tensorflow_still_has_the_quick_call() -> None:
    """When this fails, TensorFlow has dropped it: the server still works, at 300 us a call instead of 10."""
    assert saved_model.default_runner() is SessionRunner


def test_fallback_is_chosen_without_the_quick_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_model.tf.compat.v1, "Session", object)
    assert saved_model.default_runner() is FunctionRunner


def test_signatures_by_name(model: SavedModel) -> None:
    x = np.array([[1, 2], [3, 4]], np.float32)
    outputs = model.run("serving_default", {"x": x, "text": TEXTS})
    assert list(outputs) == ["double", "half", "text"]
    np.testing.assert_array_equal(outputs["double"], x * 2)
    assert outputs["text"].tolist() == [[b"a!"], [b"\xff\x00!"]]
    assert outputs["half"].dtype.name == "bfloat16"
    assert model.run("low", {"x": np.array(1.5, np.float32)})["y"] == 2.5
    assert model.signatures["serving_default"].inputs == {"text": 7, "x": 1}


def test_chosen_outputs_only(model: SavedModel) -> None:
    inputs = {"x": np.ones((1, 2), np.float32), "text": np.array([["é"]])}
    assert set(model.run("serving_default", inputs, ["text"])) == {"text"}
    assert model.run("serving_default", inputs, ["text", "double"])["text"].tolist() == [["é!".encode()]]


@pytest.mark.parametrize(
    ("signature", "inputs", "outputs", "code", "message"),
    [
        ("nope", {}, [], Code.FAILED_PRECONDITION, 'Serving signature key "nope" not found.'),
        ("low", {}, [], Code.INVALID_ARGUMENT, "Sent extra: {}. Missing but required: {x}."),
        ("low", {"x": np.ones(1, np.float32), "z": TEXTS}, [], Code.INVALID_ARGUMENT, "Sent extra: {z}."),
        ("low", {"x": np.ones(1)}, [], Code.INVALID_ARGUMENT, "arg[x] to be bfloat16 but float64 is provided"),
        ("low", {"x": np.ones(1, np.float32)}, ["q"], Code.INVALID_ARGUMENT, "output tensor alias not found"),
        ("low", {"x": np.ones(1, np.float32)}, ["y", "y"], Code.INVALID_ARGUMENT, "duplicate output tensor alias: y"),
        (
            "serving_default",
            {"x": np.ones((1, 2), np.float32), "text": np.array([[3]], object)},
            [],
            Code.INVALID_ARGUMENT,
            "input text: an array of objects is sent as strings, but it holds 3 (int)",
        ),
    ],
)
def test_refusals(model: SavedModel, signature: str, inputs: Any, outputs: Any, code: Code, message: str) -> None:
    with pytest.raises(ServingError) as raised:
        model.run(signature, inputs, outputs)
    assert raised.value.code is code
    assert message in raised.value.message


def test_error_of_tensorflow_keeps_its_code(exported: Path) -> None:
    model = SavedModel(exported)
    x = np.ones((1, 2), np.float32)
    model.close()
    with pytest.raises(ServingError) as raised:
        model.run("serving_default", {"x": x, "text": TEXTS})
    assert raised.value.code is Code.CANCELLED
    assert raised.value.message == "Session has been closed."


def test_static_shape_is_not_checked_as_in_tf_serving() -> None:
    model = SavedModel(models.HALF_PLUS_TWO)
    assert model.run("serving_default", {"x": np.zeros((2, 3), np.float32)})["y"].shape == (2, 3)  # signed as [-1, 1]


def test_input_with_a_default_may_be_left_out(tmp_path: Path) -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x, scale = tf.compat.v1.placeholder(tf.float32), tf.compat.v1.placeholder(tf.float32)
        models.save_graph(tmp_path / "1", {"x": x, "scale": scale}, {"y": x * scale}, session)
    file = tmp_path / "1" / "saved_model.pb"
    message = saved_model.saved_model_pb2.SavedModel.FromString(file.read_bytes())
    encode_content(np.array(3, np.float32), message.meta_graphs[0].signature_def["serving_default"].defaults["scale"])
    file.write_bytes(message.SerializeToString())
    model = SavedModel(tmp_path / "1")
    two = np.array(2, np.float32)
    assert model.run("serving_default", {"x": two})["y"] == 6
    assert model.run("serving_default", {"x": two, "scale": two})["y"] == 4
    with pytest.raises(ServingError, match=r"Missing but required: \{x\}"):
        model.run("serving_default", {"scale": two})


@pytest.fixture(scope="module")
def session_style(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("session_style") / "1"
    models.save_session_style(path)
    return path


def test_session_style_export_with_table_and_asset(session_style: Path) -> None:
    model = SavedModel(session_style)
    texts = np.array([b"blue", b"red", b"pink"], object)
    assert model.run("serving_default", {"text": texts})["score"].tolist() == [3, 1, 0]


def test_tags_choose_the_graph(session_style: Path) -> None:
    texts = np.array([b"blue"], object)
    model = load_version(session_style, LoadSettings(tags=["gpu", "serve"]))
    assert model.run("serving_default", {"text": texts})["score"].tolist() == [103]
    with pytest.raises(ServingError, match=r"tags .*tpu.* could not be found in SavedModel, with available tags .*gpu"):
        load_version(session_style, LoadSettings(tags=["serve", "tpu"]))


@pytest.mark.parametrize(("name", "alias", "value"), [("sparse", "x", X32), ("ragged", "text", TEXTS[:, 0])])
def test_sparse_and_ragged_tensors_are_refused_and_the_rest_works(
    session_style: Path, name: str, alias: str, value: np.ndarray
) -> None:
    model = SavedModel(session_style)
    with pytest.raises(ServingError, match=f"signature {name} cannot be called, .* being sparse or ragged") as raised:
        model.run(name, {alias: value})
    assert raised.value.code is Code.UNIMPLEMENTED


@pytest.mark.parametrize("runner", [SessionRunner, FunctionRunner])
def test_text_form(tmp_path: Path, runner: Any) -> None:
    models.copy_half_plus_two(tmp_path / "1")
    file = tmp_path / "1" / "saved_model.pb"
    message = saved_model.saved_model_pb2.SavedModel.FromString(file.read_bytes())
    file.unlink()
    file.with_suffix(".pbtxt").write_text(str(message))
    assert SavedModel(tmp_path / "1", runner).run("serving_default", {"x": X32})["y"][0, 0] == 2.5


def test_export_without_signatures_says_how_to_get_them(tmp_path: Path) -> None:
    module = tf.Module()
    module.weights = tf.Variable([1.0])
    tf.saved_model.save(module, str(tmp_path / "1"))
    with pytest.raises(ServingError, match=r"no signature can be called, of .*; export it with tf.saved_model.save"):
        SavedModel(tmp_path / "1")


def test_operation_that_this_tensorflow_lacks_is_named(tmp_path: Path) -> None:
    models.copy_half_plus_two(tmp_path / "1")
    file = tmp_path / "1" / "saved_model.pb"
    message = saved_model.saved_model_pb2.SavedModel.FromString(file.read_bytes())
    for node in message.meta_graphs[0].graph_def.node:
        node.op = "MyOwnMul" if node.op == "Mul" else node.op
    del message.meta_graphs[0].meta_info_def.stripped_op_list.op[:]
    file.write_bytes(message.SerializeToString())
    with pytest.raises(ServingError, match="MyOwnMul"):
        SavedModel(tmp_path / "1")


def test_session_config(tmp_path: Path) -> None:
    file = tmp_path / "session.config"
    file.write_text("inter_op_parallelism_threads: 3")
    config = saved_model.session_config(
        LoadSettings(session_config_file=file, intra_op_threads=2, gpu_memory_fraction=0.5)
    )
    assert (config.inter_op_parallelism_threads, config.intra_op_parallelism_threads) == (3, 2)
    assert config.gpu_options.per_process_gpu_memory_fraction == 0.5
    file.write_text("threads: 3")
    with pytest.raises(ServingError, match=f"{file} is no ConfigProto in protobuf's text format: 1:1"):
        load_version(models.HALF_PLUS_TWO, LoadSettings(session_config_file=file))


def test_signature_does_not_keep_the_graph_in_memory() -> None:
    """A message that lies in another keeps that one's memory, which for a graph with constants is the model's size."""
    message = saved_model.saved_model_pb2.SavedModel()
    graph = message.meta_graphs.add()
    graph.signature_def["s"].inputs["x"].dtype = 1
    signature = Signature.from_proto("s", graph.signature_def["s"])
    graph.signature_def["s"].inputs["x"].dtype = 2
    assert signature.proto.inputs["x"].dtype == 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "saved_model.pb").write_bytes(b"\x00garbage"), "Error parsing message"),
        (
            lambda path: (path / "saved_model.pb").write_bytes(b""),
            "could not be found in SavedModel, with available tags '[]'",
        ),
        (lambda path: (path / "saved_model.pb").unlink(), "SavedModel file does not exist"),
        (lambda path: (path / "variables" / "variables.index").unlink(), "variables"),
    ],
)
def test_what_does_not_load(tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    models.copy_half_plus_two(tmp_path / "1")
    damage(tmp_path / "1")
    with pytest.raises(ServingError) as raised:
        SavedModel(tmp_path / "1")
    assert raised.value.message.startswith(f"cannot load the SavedModel in {tmp_path / '1'}: ")
    assert message in raised.value.message


def write_warmup(version_path: Path, value: np.ndarray, count: int = 1) -> None:
    log = PredictionLog()
    log.predict_log.request.model_spec.signature_name = "serving_default"
    encode_content(value, log.predict_log.request.inputs["x"])
    file = version_path / WARMUP_FILE
    file.parent.mkdir()
    file.write_bytes(tfrecord.frame(log.SerializeToString()) * count)


class Recorder:
    """Notes the requests it gets."""

    def __init__(self) -> None:
        self.signatures: dict[str, Any] = {}
        self.calls: list[Any] = []

    def run(self, signature_name: str, inputs: Any, outputs: Any = ()) -> Any:
        self.calls.append((signature_name, inputs["x"].tolist()))
        return {}

    def close(self) -> None:
        pass


def test_warmup_requests_are_replayed(tmp_path: Path) -> None:
    recorder = Recorder()
    assert replay(recorder, tmp_path) == 0
    write_warmup(tmp_path, np.array([1, 2], np.float32), count=3)
    assert replay(recorder, tmp_path) == 3
    assert recorder.calls == [("serving_default", [1.0, 2.0])] * 3


def test_more_than_a_thousand_warmup_records_are_refused(tmp_path: Path) -> None:
    write_warmup(tmp_path, np.array([1], np.float32), count=1001)
    with pytest.raises(ServingError, match="more than 1000 warm-up records"):
        replay(Recorder(), tmp_path)


def test_bad_warmup_request_fails_the_load(tmp_path: Path) -> None:
    models.copy_half_plus_two(tmp_path / "1")
    load_version(tmp_path / "1").close()
    write_warmup(tmp_path / "1", np.array([1], np.float64))
    with pytest.raises(ServingError, match="float64 is provided"):
        load_version(tmp_path / "1")
