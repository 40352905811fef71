"""convert_tensorrt: what is prepared where no plan can be built, and what is said to be missing."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from components.artifacts import digest_file
from components.errors import ArtifactError, HeadraceError
from components.formats import ConversionError, Network, convert_tensorrt, load_runner
from components.formats import tensorrt as module
from tests.components.formats.models import CASES, Case, several_case, transformer_case


@pytest.fixture(autouse=True)
def _without_tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on machines that have it."""
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)


def calibration(form: str, case: Case) -> dict[str, np.ndarray] | None:
    return case.features if form == "int8" else None


def test_what_is_missing_is_said(network: Network, resnet: Case, tmp_path: Path) -> None:
    done = convert_tensorrt(network, tmp_path / "trt", examples=resnet.features)
    assert done.notes == (
        "no plan was built: tensorrt is not installed: pip install 'headrace[tensorrt]'; "
        "cuda.bindings.runtime is not installed: pip install 'headrace[tensorrt]'; there is no NVIDIA driver",
    )
    assert done.path == tmp_path / "trt" / "model.onnx"
    with pytest.raises(HeadraceError, match=r"tensorrt is not installed: pip install 'headrace\[tensorrt\]'"):
        load_runner(tmp_path / "trt" / "model.plan")
    with pytest.raises(
        HeadraceError, match=r"trt has no model\.plan yet\. Where TensorRT and a GPU are, run there: trtexec"
    ):
        load_runner(tmp_path / "trt")


def test_the_recipe_has_the_command_and_all_shapes(tmp_path: Path) -> None:
    convert_tensorrt(Network.of(several_case().model), tmp_path / "a", batch_sizes=(2, 4, 16))
    recipe = json.loads((tmp_path / "a" / "build.json").read_text())
    assert recipe["command"] == [
        "trtexec",
        "--onnx=model.onnx",
        "--saveEngine=model.plan",
        "--stronglyTyped",
        "--noTF32",
        "--minShapes=extra:2x3,image:2x8x8x1",
        "--optShapes=extra:4x3,image:4x8x8x1",
        "--maxShapes=extra:16x3,image:16x8x8x1",
    ]
    assert recipe["onnx_sha256"] == digest_file(tmp_path / "a" / "model.onnx")
    assert (recipe["form"], recipe["opset"], recipe["built_by_tensorrt"]) == ("float32", 17, None)
    convert_tensorrt(Network.of(transformer_case(None).model), tmp_path / "b", lengths=(2, 8, 16))
    recipe = json.loads((tmp_path / "b" / "build.json").read_text())
    assert recipe["shapes"] == {"text": {"min": [1, 2], "opt": [8, 8], "max": [32, 16]}}


@pytest.mark.parametrize("form", module.FORMS)
def test_the_types_stand_in_the_file(network: Network, resnet: Case, tmp_path: Path, form: str) -> None:
    for folder in ("a", "b"):
        done = convert_tensorrt(
            network,
            tmp_path / folder,
            form=form,
            calibration=calibration(form, resnet),
            examples=resnet.features,
            metadata={"labels": ["cat", "dog"]},
        )
    contents = [(tmp_path / folder / "model.onnx").read_bytes() for folder in "ab"]
    assert contents[0] == contents[1]
    assert sorted(file.name for file in (tmp_path / "a").iterdir()) == ["build.json", "model.onnx"]
    expected = network.expected(resnet.features)["logits"]
    assert done.max_abs_difference < {"float32": 1e-5, "float16": 2e-3, "int8": 0.03}[form] * np.ptp(expected)
    got = load_runner(done.path)(resnet.features)["logits"]
    assert np.abs(got - expected).max() == pytest.approx(done.max_abs_difference)
    model = onnx.load(done.path)
    onnx.checker.check_model(model, full_check=True)
    assert json.loads({each.key: each.value for each in model.metadata_props}["labels"]) == ["cat", "dog"]
    assert {value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)} == {
        onnx.TensorProto.FLOAT
    }
    kinds = {array.dtype.name for array in map(numpy_helper.to_array, model.graph.initializer) if array.ndim == 4}
    assert kinds == {form}


def test_int8_has_what_tensorrt_takes(network: Network, resnet: Case, tmp_path: Path) -> None:
    convert_tensorrt(network, tmp_path / "a", form="int8", calibration=resnet.features)
    graph = onnx.load(tmp_path / "a" / "model.onnx").graph
    arrays = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
    pairs = [node for node in graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert len(pairs) > 20
    for node in pairs:
        assert not arrays[node.input[2]].any()
        assert arrays[node.input[2]].dtype == np.int8
        if node.input[0] in arrays:
            assert arrays[node.input[0]].dtype == np.int8
    assert any(arrays[node.input[1]].ndim == 1 for node in pairs)  # a scale for each channel


def test_options_that_do_not_fit(network: Network, tmp_path: Path) -> None:
    with pytest.raises(HeadraceError, match=r"TensorRT has no form 'fp16'"):
        convert_tensorrt(network, tmp_path / "a", form="fp16")
    with pytest.raises(HeadraceError, match="TensorRT int8 needs calibration"):
        convert_tensorrt(network, tmp_path / "a", form="int8")
    with pytest.raises(HeadraceError, match=r"batch_sizes are .*received \(4, 2, 8\)"):
        convert_tensorrt(network, tmp_path / "a", batch_sizes=(4, 2, 8))
    with pytest.raises(ConversionError, match="split_lookups"):
        convert_tensorrt(Network.of(CASES["tabular with strings"]().model), tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


class FakeTensorRT:
    """The calls of TensorRT's Python API that building makes, on record."""

    __version__ = "10.16.1"
    NetworkDefinitionCreationFlag = SimpleNamespace(STRONGLY_TYPED=1)
    BuilderFlag = SimpleNamespace(TF32="TF32")

    class Logger:
        ERROR = 0

        def __init__(self, level: int) -> None: ...

    def __init__(self, problem: str = "") -> None:
        self.problem, self.calls = problem, []
        self.num_errors = 1

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, *arguments))
            return {"parse": not self.problem, "build_serialized_network": b"plan", "desc": self.problem}.get(
                name, self
            )

        return call


def test_the_plan_is_built_for_the_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a fake: it shows which calls are made, not that TensorRT takes them."""
    fake = FakeTensorRT()
    monkeypatch.setitem(sys.modules, "tensorrt", fake)
    (tmp_path / "m.onnx").write_bytes(b"onnx")
    shapes = {"x": {"min": [1, 3], "opt": [8, 3], "max": [32, 3]}}
    assert module._build(tmp_path / "m.onnx", shapes, "tensorrt") == b"plan"
    assert ("create_network", 1 << 1) in fake.calls
    assert ("parse", b"onnx") in fake.calls
    assert ("clear_flag", "TF32") in fake.calls
    assert ("set_shape", "x", [1, 3], [8, 3], [32, 3]) in fake.calls
    fake.problem = "no importer registered for op: Foo"
    with pytest.raises(ConversionError, match="no importer registered for op: Foo"):
        module._build(tmp_path / "m.onnx", shapes, "tensorrt")


class FakeGPU:
    """TensorRT and CUDA as far as a plan that doubles its input is run; its memory is the host's."""

    __version__ = "10.16.1"
    TensorIOMode = SimpleNamespace(INPUT="input")
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)  # noqa: N815
    num_io_tensors = 2
    Logger = FakeTensorRT.Logger

    def __init__(self) -> None:
        self.memory: dict[int, Any] = {}
        self.places: dict[str, int] = {}
        self.batches: list[int] = []
        self.Runtime = self.create_execution_context = lambda *arguments: self

    def deserialize_cuda_engine(self, content: bytes) -> FakeGPU | None:
        return self if content == b"plan" else None

    def get_tensor_name(self, index: int) -> str:
        return ("x", "y")[index]

    def get_tensor_mode(self, name: str) -> str:
        return {"x": "input", "y": "output"}[name]

    def get_tensor_dtype(self, name: str) -> type:
        return np.float32

    def nptype(self, dtype: type) -> type:
        return dtype

    def get_tensor_shape(self, name: str) -> tuple[int, int]:
        return (self.batches[-1] if self.batches else -1, 3)

    def get_tensor_profile_shape(self, name: str, profile: int) -> tuple[tuple[int, int], ...]:
        return (1, 3), (2, 3), (4, 3)

    def set_input_shape(self, name: str, shape: tuple[int, int]) -> bool:
        self.batches.append(shape[0])
        return 1 <= shape[0] <= 4

    def set_tensor_address(self, name: str, place: int) -> None:
        self.places[name] = place

    def execute_async_v3(self, stream: int) -> bool:
        source, target = (self.memory[self.places[name]] for name in "xy")
        np.frombuffer(target, np.float32)[:] = 2 * np.frombuffer(source, np.float32)
        return True

    def cudaStreamCreate(self) -> tuple[int, int]:  # noqa: N802
        return 0, 7

    def cudaStreamSynchronize(self, stream: int) -> tuple[int]:  # noqa: N802
        return (0,)

    cudaStreamDestroy = cudaStreamSynchronize  # noqa: N815

    def cudaMalloc(self, size: int) -> tuple[int, int]:  # noqa: N802
        buffer = ctypes.create_string_buffer(size)
        self.memory[ctypes.addressof(buffer)] = buffer
        return 0, ctypes.addressof(buffer)

    def cudaMemcpy(self, target: int, source: int, size: int, kind: int) -> tuple[int]:  # noqa: N802
        ctypes.memmove(target, source, size)
        return (0,)

    def cudaFree(self, place: int) -> None:  # noqa: N802
        del self.memory[place]


def test_a_plan_is_run_in_batches_that_it_was_built_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a fake, as above."""
    gpu = FakeGPU()
    for name in ("tensorrt", "cuda.bindings.runtime"):
        monkeypatch.setitem(sys.modules, name, gpu)
    (tmp_path / "m.plan").write_bytes(b"plan")
    runner = load_runner(tmp_path / "m.plan")
    assert [(info.name, info.dtype, info.shape) for info in runner.inputs] == [("x", "float32", (None, 3))]
    x = np.arange(27, dtype="float32").reshape(9, 3)
    np.testing.assert_array_equal(runner({"x": x})["y"], 2 * x)
    assert gpu.batches == [4, 4, 1]
    assert not gpu.memory
    gpu.cudaMalloc = lambda size: (2, 0)  # type: ignore[method-assign]
    with pytest.raises(ArtifactError, match=r"TensorRT cannot run .*m\.plan: 2"):
        runner({"x": x})
    (tmp_path / "m.plan").write_bytes(b"of another GPU")
    with pytest.raises(ArtifactError, match=r"TensorRT 10\.16\.1 cannot load .*m\.plan: build it on this GPU"):
        load_runner(tmp_path / "m.plan")
