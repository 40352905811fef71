"""LiteRT and ONNX files behind the same API: parity with the SavedModel, and what each back end refuses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from onnx import TensorProto, helper
from tensorflow.lite.tools import flatbuffer_utils

from serving.backends import litert_model
from serving.backends.load import load_model
from serving.client import GrpcClient, RestClient
from serving.client.model_info import TensorInfo, VersionStatus
from serving.errors import Code, ServingError
from serving.server import ModelServer, load_version
from serving.settings import LoadSettings
from tests.serving.models import KERNEL, X, Y, layer, litert_bytes, save_layer_as_onnx, save_onnx

BACKENDS = ("saved_model", "litert", "onnx")


@pytest.fixture(scope="module")
def litert_content() -> bytes:
    return litert_bytes()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, litert_content: bytes) -> Path:
    """The same layer, by back end: saved_model/1, litert/1, onnx/1."""
    path = tmp_path_factory.mktemp("backends")
    module = layer()
    tf.saved_model.save(module, str(path / "saved_model" / "1"), signatures=module.call)
    (path / "litert" / "1").mkdir(parents=True)
    (path / "litert" / "1" / "model.tflite").write_bytes(litert_content)
    save_layer_as_onnx(path / "onnx" / "1" / "model.onnx")
    return path


@pytest.fixture(scope="module", params=["rest", "grpc"])
def client(request: pytest.FixtureRequest, exported: Path) -> Iterator[RestClient | GrpcClient]:
    config = exported / "models.config"
    entry = 'config {{ name: "{name}" base_path: "{path}" model_platform: "tensorflow" }}'
    entries = [entry.format(name=name, path=exported / name) for name in BACKENDS]
    config.write_text(f"model_config_list {{ {' '.join(entries)} }}")
    with ModelServer(model_config_file=config) as server:
        found = (
            RestClient(f"http://127.0.0.1:{server.rest_port}")
            if request.param == "rest"
            else GrpcClient(f"127.0.0.1:{server.grpc_port}")
        )
        yield found
        found.close()


@pytest.mark.parametrize("name", BACKENDS)
def test_backends_answer_alike(client: RestClient | GrpcClient, name: str) -> None:
    for rows in (5, 1, 3):
        outputs = client.predict(name, {"x": X[:rows]})
        assert list(outputs) == ["y"]
        np.testing.assert_allclose(outputs["y"], Y[:rows], rtol=1e-5)
    assert client.status(name) == [VersionStatus(1, "AVAILABLE")]
    signature = client.metadata(name).signatures["serving_default"]
    assert signature.inputs == {"x": TensorInfo("DT_FLOAT", (-1, 4))}
    assert signature.outputs == {"y": TensorInfo("DT_FLOAT", (-1, 3))}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    ("inputs", "signature_name", "codes"),
    [
        ({"x": X[:, :3]}, "", {Code.INVALID_ARGUMENT}),
        ({"z": X}, "", {Code.INVALID_ARGUMENT}),
        ({"x": X}, "nope", {Code.FAILED_PRECONDITION, Code.INVALID_ARGUMENT}),
    ],
    ids=["shape", "name", "signature"],
)
def test_backends_refuse_alike(
    client: RestClient | GrpcClient, name: str, inputs: Any, signature_name: str, codes: set[Code]
) -> None:
    with pytest.raises(ServingError) as raised:
        client.predict(name, inputs, signature_name=signature_name or "serving_default")
    assert raised.value.code in codes


@pytest.fixture
def together(tmp_path: Path, exported: Path) -> Path:
    """A version that holds all three; the SavedModel adds 1, the others 2 and 3."""
    path = tmp_path / "1"
    shutil.copytree(exported / "saved_model" / "1", path)
    scaled = flatbuffer_utils.read_model_from_bytearray(bytearray(litert_bytes()))
    for buffer in scaled.buffers:
        if buffer.data is not None and len(buffer.data) == 4:  # the 1
            buffer.data = np.frombuffer(np.float32(2).tobytes(), np.uint8)
    (path / "model.tflite").write_bytes(flatbuffer_utils.convert_object_to_bytearray(scaled))
    save_layer_as_onnx(path / "model.onnx", bias=3)
    return path


def test_choice_of_the_backend(together: Path) -> None:
    def bias(**settings: Any) -> float:
        model = load_version(together, LoadSettings(**settings))
        return float(model.run("serving_default", {"x": np.zeros((1, 4), np.float32)})["y"][0, 0])

    assert bias() == bias(backend="saved_model") == 1
    assert bias(prefer_tflite_model=True) == bias(backend="litert") == 2
    assert bias(backend="onnx") == bias(backend="onnx", prefer_tflite_model=True) == 3
    (together / "model.tflite").unlink()
    assert bias(prefer_tflite_model=True) == 1
    (together / "saved_model.pb").unlink()
    assert bias() == 3
    with pytest.raises(
        ServingError, match=r"holds no model\.tflite, and no other file for the back end litert"
    ) as raised:
        bias(backend="litert")
    assert raised.value.code is Code.NOT_FOUND


@pytest.mark.parametrize("inputs", ["raw", "transformed"])
def test_files_that_the_pipeline_pushed(tmp_path: Path, inputs: str, caplog: pytest.LogCaptureFixture) -> None:
    save_layer_as_onnx(tmp_path / "onnx" / "model.onnx")
    forms = [
        {"path": "saved_model", "inputs": "raw"},
        {"path": "tflite/model_float32.tflite", "inputs": inputs},
        {"path": "onnx/model.onnx", "inputs": inputs},
    ]
    (tmp_path / "assets.extra").mkdir()
    (tmp_path / "assets.extra" / "formats.json").write_text(json.dumps(forms))
    model = load_model(tmp_path, LoadSettings(backend="onnx"))
    np.testing.assert_allclose(model.run("serving_default", {"x": X})["y"], Y, rtol=1e-5)
    hint = "onnx/model.onnx takes what the signature transform of its SavedModel gives, not raw features"
    assert (hint in caplog.text) == (inputs == "transformed")
    with pytest.raises(ServingError) as raised:
        model.run("serving_default", {"fare": X})
    assert (hint in raised.value.message) == (inputs == "transformed")


def load_litert(path: Path, content: bytes) -> Any:
    (path / "model.tflite").write_bytes(content)
    return load_version(path)


def test_quantized_inputs_and_outputs_are_floats_to_the_client(tmp_path: Path) -> None:
    content = litert_bytes(
        optimizations=[tf.lite.Optimize.DEFAULT],
        representative_dataset=lambda: ([X[row : row + 1]] for row in range(5)),
        inference_input_type=tf.int8,
        inference_output_type=tf.int8,
    )
    model = load_litert(tmp_path, content)
    assert model.signatures["serving_default"].proto.inputs["x"].dtype == 1
    y = model.run("serving_default", {"x": X})["y"]
    assert y.dtype == np.float32
    np.testing.assert_allclose(y, Y, atol=0.05)
    assert len(np.unique(y)) < 256


def test_litert_file_without_signatures_has_the_names_of_its_tensors(tmp_path: Path, litert_content: bytes) -> None:
    model = flatbuffer_utils.read_model_from_bytearray(bytearray(litert_content))
    model.signatureDefs = None
    served = load_litert(tmp_path, bytes(flatbuffer_utils.convert_object_to_bytearray(model)))
    signature = served.signatures["serving_default"]
    [taken], [given] = signature.inputs, signature.outputs
    assert taken == signature.proto.inputs[taken].name
    np.testing.assert_allclose(served.run("serving_default", {taken: X})[given], Y, rtol=1e-5)


def test_litert_does_without_the_accelerated_library_where_that_fails(
    tmp_path: Path, litert_content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolvers = []

    class Picky(litert_model.Interpreter):
        def __init__(self, **options: Any) -> None:
            resolvers.append(options["experimental_op_resolver_type"])
            super().__init__(**options)

        def get_signature_runner(self, name: str) -> Any:
            runner = super().get_signature_runner(name)
            if resolvers == [litert_model.OpResolverType.AUTO]:
                runner._interpreter_wrapper = Failing()
            return runner

    class Failing:
        def ResizeInputTensor(self, *arguments: Any) -> None:  # noqa: N802
            raise RuntimeError("failed to create XNNPACK runtime")

    monkeypatch.setattr(litert_model, "Interpreter", Picky)
    model = load_litert(tmp_path, litert_content)
    for _ in range(2):
        np.testing.assert_allclose(model.run("serving_default", {"x": X})["y"], Y, rtol=1e-5)
    plain = litert_model.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    assert resolvers == [litert_model.OpResolverType.AUTO, plain]


def test_file_for_one_example_is_called_for_each(tmp_path: Path) -> None:
    model = load_litert(tmp_path, litert_bytes(batch_size=1))
    assert [dim.size for dim in model.signatures["serving_default"].proto.inputs["x"].tensor_shape.dim] == [1, 4]
    np.testing.assert_allclose(model.run("serving_default", {"x": X})["y"], Y, rtol=1e-5)
    with pytest.raises(ServingError, match=r"input x must have shape \[1, 4\], got \[5, 3\]"):
        model.run("serving_default", {"x": X[:, :3]})


def test_fixed_batch_of_more_is_kept(tmp_path: Path) -> None:
    model = load_litert(tmp_path, litert_bytes(batch_size=5))
    np.testing.assert_allclose(model.run("serving_default", {"x": X})["y"], Y, rtol=1e-5)
    with pytest.raises(ServingError, match=r"input x must have shape \[5, 4\], got \[2, 4\]"):
        model.run("serving_default", {"x": X[:2]})


@pytest.mark.parametrize("name", ["litert", "onnx"])
def test_many_threads_get_each_their_own_answer(exported: Path, name: str) -> None:
    model = load_version(exported / name / "1")

    def call(index: int) -> bool:
        rows = index % 5 + 1
        y = model.run("serving_default", {"x": X[:rows] * index})["y"]
        return np.allclose(y, np.maximum(X[:rows] * index @ KERNEL, 0) + 1, rtol=1e-4)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(call, range(400)))


@pytest.mark.parametrize("name", ["litert", "onnx"])
def test_nothing_to_compute_and_closed(exported: Path, name: str) -> None:
    model = load_version(exported / name / "1")
    with pytest.raises(ServingError, match=r"input x has shape \[0, 4\], which holds nothing"):
        model.run("serving_default", {"x": X[:0]})
    model.close()
    with pytest.raises(ServingError):
        model.run("serving_default", {"x": X})


def test_onnx_texts_and_numbers(tmp_path: Path) -> None:
    kinds = {"text": TensorProto.STRING, "ids": TensorProto.INT64, "flags": TensorProto.BOOL, "x": TensorProto.DOUBLE}
    save_onnx(
        tmp_path / "model.onnx",
        [helper.make_node("Identity", [name], [f"same_{name}"]) for name in kinds],
        [helper.make_tensor_value_info(name, kind, ["batch", "width"]) for name, kind in kinds.items()],
        [helper.make_tensor_value_info(f"same_{name}", kind, ["batch", "width"]) for name, kind in kinds.items()],
        {},
    )
    model = load_version(tmp_path)
    inputs = {
        "text": np.array([["é".encode(), b""]], object),
        "ids": np.array([[2**60, -1]]),
        "flags": np.array([[True, False]]),
        "x": np.array([[0.1, np.nan]]),
    }
    outputs = model.run("serving_default", inputs)
    for name, array in inputs.items():
        np.testing.assert_array_equal(outputs[f"same_{name}"], array)
        assert outputs[f"same_{name}"].dtype == array.dtype
    assert list(model.run("serving_default", inputs, ["same_ids"])) == ["same_ids"]
    with pytest.raises(ServingError, match="input text: ONNX takes text, and a value is not UTF-8") as raised:
        model.run("serving_default", inputs | {"text": np.array([[b"\xff", b""]], object)})
    assert raised.value.code is Code.INVALID_ARGUMENT


def test_onnx_error_of_the_data_is_the_clients(tmp_path: Path) -> None:
    save_onnx(
        tmp_path / "model.onnx",
        [helper.make_node("Gather", ["table", "ids"], ["y"])],
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch"])],
        {"table": np.arange(3, dtype=np.float32)},
    )
    model = load_version(tmp_path)
    assert model.run("serving_default", {"ids": np.array([2])})["y"].tolist() == [2]
    with pytest.raises(ServingError, match=r"ONNX Runtime cannot run these inputs: .*out of data bounds") as raised:
        model.run("serving_default", {"ids": np.array([3])})
    assert raised.value.code is Code.INVALID_ARGUMENT


def test_onnx_output_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    kind = helper.make_sequence_type_proto(helper.make_map_type_proto(TensorProto.INT64, _float_tensor()))
    save_onnx(
        tmp_path / "model.onnx",
        [helper.make_node("ZipMap", ["x"], ["y"], domain="ai.onnx.ml", classlabels_int64s=[0, 1])],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 2])],
        [helper.make_value_info("y", kind)],
        {},
    )
    with pytest.raises(ServingError, match=r"y is a seq\(map\(int64,tensor\(float\)\)\), .* need zipmap=False"):
        load_version(tmp_path)


def _float_tensor() -> Any:
    return helper.make_tensor_type_proto(TensorProto.FLOAT, ())


@pytest.mark.parametrize(
    ("name", "message"), [("model.tflite", "LiteRT cannot load"), ("model.onnx", "ONNX Runtime cannot load")]
)
@pytest.mark.parametrize("content", [b"", b"garbage" * 10], ids=["empty", "garbage"])
def test_damaged_file(tmp_path: Path, name: str, message: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ServingError, match=f"{message} {tmp_path / name}: .") as raised:
        load_version(tmp_path)
    assert raised.value.code is Code.INVALID_ARGUMENT


def test_missing_package_is_named(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "serving.backends.onnx_model", raising=False)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ServingError, match="pip install onnxruntime") as raised:
        load_version(exported / "onnx" / "1")
    assert raised.value.code is Code.FAILED_PRECONDITION


def test_server_of_files_loads_no_tensorflow_and_its_messages_are_tensorflows(exported: Path) -> None:
    code = f"""
import sys
import numpy as np
import serving.rpc.grpc_api
from pathlib import Path
from serving.protos import TensorProto
from serving.server import ModelServer
for name in ("litert", "onnx"):
    with ModelServer(name, Path({str(exported)!r}) / name):
        pass
assert "tensorflow" not in sys.modules
import tensorflow as tf
from tensorflow.core.framework import tensor_pb2
assert tensor_pb2.TensorProto is TensorProto
assert tf.make_ndarray(tf.make_tensor_proto([3.0])).tolist() == [3.0]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
