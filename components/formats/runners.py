"""Converted models, run: every format by one interface, `features by name -> answers by name`."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from components.artifacts import digest_file
from components.errors import ArtifactError, HeadraceError, did_you_mean
from components.formats.conversion import require, require_coremltools
from components.formats.errors import first_line
from components.formats.network import SIGNATURE, Arrays
from components.formats.results import Quantization, TensorInfo

OPENVINO_SECTION = "headrace"
PLAN, RECIPE = "model.plan", "build.json"
COREML_WEIGHTS = "Data/com.apple.CoreML/weights/weight.bin"
_ONNX_DTYPES = {"float": "float32", "double": "float64"}


class ModelRunner:
    """Runs a converted model on one thread.

    A file with a fixed or a largest batch is asked batch by batch; where it is fixed the last one is padded and the
    padding cut off. Inputs and outputs that are quantized take and give float32.

    Attributes:
        path: The file.
        inputs: What it takes.
        outputs: What it answers.
    """

    def __init__(
        self,
        path: Path,
        inputs: Sequence[TensorInfo],
        outputs: Sequence[TensorInfo],
        run: Callable[[dict[str, np.ndarray]], Mapping[str, np.ndarray]],
        max_batch_size: int | None = None,
    ) -> None:
        self.path, self.inputs, self.outputs, self._run = path, tuple(inputs), tuple(outputs), run
        self._max_batch_size = max_batch_size
        sizes = {info.shape[0] for info in self.inputs if info.shape and isinstance(info.shape[0], int)}
        self._batch_size = sizes.pop() if len(sizes) == 1 else None

    def __call__(self, features: Arrays) -> dict[str, np.ndarray]:
        """Answers `(num_examples, ...)` by name.

        Raises:
            HeadraceError: a feature is missing, or has another shape or kind than the file takes.
        """
        fed = {info.name: self._prepared(info, features) for info in self.inputs}
        num_examples = len(next(iter(fed.values())))
        size = self._batch_size or self._max_batch_size or num_examples
        if num_examples == size:
            return self._answers(fed)
        parts = []
        for start in range(0, num_examples, size):
            batch = {name: values[start : start + size] for name, values in fed.items()}
            if self._batch_size is not None:
                batch = {name: _pad(values, size) for name, values in batch.items()}
            parts.append(self._answers(batch))
        return {name: np.concatenate([part[name] for part in parts])[:num_examples] for name in parts[0]}

    def _answers(self, fed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        answers = self._run(fed)
        return {info.name: _dequantized(answers[info.name], info.quantization) for info in self.outputs}

    def _prepared(self, info: TensorInfo, features: Arrays) -> np.ndarray:
        if info.name not in features:
            raise HeadraceError(f"{self.path.name} takes '{info.name}'.{did_you_mean(info.name, features)}")
        values = np.asarray(features[info.name])
        expected, received = info.shape[1:], values.shape[1:]
        fits = len(expected) == len(received) and all(
            not isinstance(size, int) or size == got for size, got in zip(expected, received, strict=True)
        )
        if values.ndim == 0 or not fits:
            raise HeadraceError(
                f"{self.path.name}: '{info.name}' has shape (batch, {', '.join(map(str, expected))}), "
                f"received {values.shape}."
            )
        if info.quantization is not None and values.dtype.kind == "f":
            return _quantized(values, info.dtype, info.quantization)
        if info.dtype == "string":
            return values.astype(object)
        if not np.can_cast(values.dtype, info.dtype, "same_kind"):
            raise HeadraceError(f"{self.path.name}: '{info.name}' is {info.dtype}, received {values.dtype}.")
        return values.astype(info.dtype, copy=False)


def load_runner(path: Path) -> ModelRunner:
    """The runner of a `.tflite` or `.onnx` file, OpenVINO's `.xml`, TensorRT's `.plan`, or a package of Core ML.

    A folder is that of `convert_tensorrt`, or else taken for a SavedModel.

    Raises:
        ArtifactError: the file is none of them, is damaged, or has operations that the plain runtime lacks; or a plan was
            prepared and not built.
    """
    loaders = {
        ".mlpackage": load_coreml,
        ".tflite": load_tflite,
        ".onnx": load_onnx,
        ".xml": load_openvino,
        ".plan": load_tensorrt,
    }
    if path.suffix in loaders:
        return loaders[path.suffix](path)
    if (path / RECIPE).is_file():
        return load_tensorrt(_built(path))
    if path.is_dir():
        return load_saved_model(path)
    raise ArtifactError(f"Cannot tell what {path} is: a converted model is a folder or a file *{', *'.join(loaders)}.")


def load_tflite(path: Path, content: bytes | None = None) -> ModelRunner:
    """The runner of a TFLite file with a signature, by ai-edge-litert.

    Args:
        path: The file, or what to call it in messages.
        content: What is in it, where it is not written yet.

    Raises:
        ArtifactError: the file is no TFLite model, is damaged, has no signature or needs another runtime.
    """
    content = content if content is not None else _read(path)
    runner = _litert_signature(path, content, with_delegates=True)
    details = {"inputs": runner.get_input_details(), "outputs": runner.get_output_details()}
    infos = {side: [_tflite_tensor(name, each) for name, each in part.items()] for side, part in details.items()}
    current = [runner]

    def run(fed: dict[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        try:
            return current[0](**fed)
        except RuntimeError as error:
            if "XNNPACK" not in str(error):
                raise ArtifactError(f"LiteRT cannot run {path}: {first_line(error)}.") from error
            # Some integer kernels are refused by the accelerated library that LiteRT adds by itself, not by LiteRT.
            current[0] = _litert_signature(path, content, with_delegates=False)
            return current[0](**fed)

    return ModelRunner(path, infos["inputs"], infos["outputs"], run)


def load_onnx(path: Path, content: bytes | None = None) -> ModelRunner:
    """The runner of an ONNX file, by onnxruntime.

    Args:
        path: The file, or what to call it in messages.
        content: What is in it, where it is not written yet.

    Raises:
        ArtifactError: the file is no ONNX model, is damaged, or has operations that onnxruntime lacks.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    content = content if content is not None else _read(path)
    try:
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own errors have no common base
        raise ArtifactError(f"onnxruntime cannot load {path}: {first_line(error)}.") from error
    inputs = [_onnx_tensor(node) for node in session.get_inputs()]
    outputs = [_onnx_tensor(node) for node in session.get_outputs()]
    names = [info.name for info in outputs]
    texts = {info.name for info in inputs if info.dtype == "string"}

    def run(fed: dict[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        fed = {name: _as_text(values) if name in texts else values for name, values in fed.items()}
        try:
            return dict(zip(names, session.run(names, fed), strict=True))
        except Exception as error:
            raise ArtifactError(f"onnxruntime cannot run {path}: {first_line(error)}.") from error

    return ModelRunner(path, inputs, outputs, run)


def load_openvino(path: Path) -> ModelRunner:
    """The runner of an OpenVINO model, on the CPU and in float32 where it is not int8.

    Args:
        path: The `.xml` file; the `.bin` with its weights lies beside it.

    Raises:
        ArtifactError: the pair is no OpenVINO model, is damaged, or its files are not of the same conversion.
        HeadraceError: the package is not installed.
    """
    openvino = require("openvino", "openvino")
    if b"<net" not in _read(path)[:1000]:  # OpenVINO would guess which other format it is
        raise ArtifactError(f"OpenVINO cannot load {path}: it holds no graph of OpenVINO.")
    core = openvino.Core()
    # Processors with bfloat16 would else compute in that.
    options = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    try:
        model = core.read_model(path)
        compiled = core.compile_model(model, "CPU", options)
    except RuntimeError as error:
        raise ArtifactError(f"OpenVINO cannot load {path}: {openvino_reason(error)}.") from error
    recorded = [OPENVINO_SECTION, "bin_sha256"]
    if model.has_rt_info(recorded) and model.get_rt_info(recorded).value != digest_file(path.with_suffix(".bin")):
        raise ArtifactError(f"OpenVINO cannot load {path}: {path.stem}.bin is damaged or of another model.")
    outputs = [_openvino_tensor(port) for port in compiled.outputs]

    def run(fed: dict[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        try:
            return dict(zip([info.name for info in outputs], compiled(fed).to_tuple(), strict=True))
        except RuntimeError as error:
            raise ArtifactError(f"OpenVINO cannot run {path}: {openvino_reason(error)}.") from error

    return ModelRunner(path, [_openvino_tensor(port) for port in compiled.inputs], outputs, run)


def openvino_reason(error: BaseException) -> str:
    """What an error of OpenVINO says, without the places in its source that it comes from."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = [
        line for line in lines if line and not re.match(r"Exception from |Check '|FrontEnd API failed|To facil", line)
    ]
    return first_line(RuntimeError(" ".join(told) or error)).rstrip("!. ")


def load_coreml(path: Path) -> ModelRunner:
    """The runner of a Core ML package with an ML program; off macOS it says what the package takes, and does not run.

    Raises:
        ArtifactError: the folder holds no ML program, or is damaged.
        HeadraceError: the package is not installed.
    """
    coremltools = require_coremltools()
    try:
        spec = coremltools.utils.load_spec(str(path))
    except Exception as error:  # a RuntimeError, or one of protobuf's
        raise ArtifactError(f"coremltools cannot load {path}: {first_line(error)}.") from error
    if spec.WhichOneof("Type") != "mlProgram":
        raise ArtifactError(f"coremltools cannot load {path}: it holds no ML program.")
    recorded = spec.description.metadata.userDefined.get("bin_sha256")
    weights = path / COREML_WEIGHTS
    if recorded is not None and not (weights.is_file() and digest_file(weights) == recorded):
        raise ArtifactError(f"coremltools cannot load {path}: weight.bin is damaged or of another model.")
    inputs = [_coreml_tensor(spec, feature) for feature in spec.description.input]
    first_axes = [feature.type.multiArrayType.shapeRange.sizeRanges for feature in spec.description.input]
    limits = [ranges[0].upperBound for ranges in first_axes if ranges and ranges[0].upperBound > 0]
    models: list[Any] = []

    def run(fed: dict[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        if sys.platform != "darwin":
            raise HeadraceError(f"{path.name} cannot run here: Core ML is a part of macOS.")
        try:
            if not models:
                models.append(coremltools.models.MLModel(str(path), compute_units=coremltools.ComputeUnit.CPU_ONLY))
            return dict(models[0].predict(fed))
        except RuntimeError as error:
            raise ArtifactError(f"Core ML cannot run {path}: {first_line(error)}.") from error

    outputs = [_coreml_tensor(spec, feature) for feature in spec.description.output]
    return ModelRunner(path, inputs, outputs, run, min(limits, default=None))


def _built(folder: Path) -> Path:
    plan = folder / PLAN
    if not plan.is_file():
        command = shlex.join(json.loads((folder / RECIPE).read_text())["command"])
        raise ArtifactError(f"{folder.name} has no {PLAN} yet. Where TensorRT and a GPU are, run there: {command}")
    return plan


def load_tensorrt(path: Path) -> ModelRunner:
    """The runner of a TensorRT plan, on the GPU.

    Raises:
        ArtifactError: the file is no plan, or one of another GPU or version of TensorRT.
        HeadraceError: a package is not installed.
    """
    trt, cuda = require("tensorrt", "tensorrt"), require("cuda.bindings.runtime", "tensorrt")
    engine = trt.Runtime(trt.Logger(trt.Logger.ERROR)).deserialize_cuda_engine(_read(path))
    if engine is None:
        raise ArtifactError(f"TensorRT {trt.__version__} cannot load {path}: build it on this GPU with this version.")
    context = engine.create_execution_context()
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    taken = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
    infos = {name: _tensorrt_tensor(trt, engine, name) for name in names}

    def call(function: Any, *arguments: Any) -> Any:
        status, *values = function(*arguments)
        if int(status) != 0:
            raise ArtifactError(f"TensorRT cannot run {path}: {status}.")
        return values[0] if values else None

    def run(fed: dict[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        arrays = {name: np.ascontiguousarray(fed[name]) for name in taken}
        for name, values in arrays.items():
            if not context.set_input_shape(name, values.shape):
                raise HeadraceError(
                    f"{path.name}: '{name}' has shape {values.shape}, for which the plan was not built."
                )
        for name in names:
            if name not in arrays:
                arrays[name] = np.empty(tuple(context.get_tensor_shape(name)), infos[name].dtype)
        stream, places = call(cuda.cudaStreamCreate), {}
        try:
            for name, values in arrays.items():
                places[name] = call(cuda.cudaMalloc, max(values.nbytes, 1))
                context.set_tensor_address(name, int(places[name]))
            for name in taken:
                there = cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
                call(cuda.cudaMemcpy, places[name], arrays[name].ctypes.data, arrays[name].nbytes, there)
            if not context.execute_async_v3(int(stream)):
                raise ArtifactError(f"TensorRT cannot run {path}.")
            call(cuda.cudaStreamSynchronize, stream)
            answers = {name: values for name, values in arrays.items() if name not in taken}
            for name, values in answers.items():
                back = cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
                call(cuda.cudaMemcpy, values.ctypes.data, places[name], values.nbytes, back)
            return answers
        finally:
            for place in places.values():
                cuda.cudaFree(place)
            cuda.cudaStreamDestroy(stream)

    limit = min(engine.get_tensor_profile_shape(name, 0)[2][0] for name in taken)
    outputs = [info for name, info in infos.items() if name not in taken]
    return ModelRunner(path, [infos[name] for name in taken], outputs, run, limit)


def load_saved_model(path: Path) -> ModelRunner:
    """The runner of a SavedModel's `serving_default` signature.

    Raises:
        ArtifactError: the folder holds no SavedModel, or one without that signature.
    """
    try:
        loaded = tf.saved_model.load(str(path))
    except (OSError, ValueError, IndexError, tf.errors.OpError) as error:
        raise ArtifactError(f"Cannot load the SavedModel {path}: {first_line(error)}.") from error
    if SIGNATURE not in loaded.signatures:
        raise ArtifactError(f"{path} has no signature '{SIGNATURE}', only {list(loaded.signatures)}.")
    signature = loaded.signatures[SIGNATURE]
    kept = (loaded, signature)  # a signature alone does not keep its variables alive
    inputs = [_tf_tensor(name, spec) for name, spec in signature.structured_input_signature[1].items()]
    outputs = [_tf_tensor(name, spec) for name, spec in signature.structured_outputs.items()]

    def run(fed: dict[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        answers = kept[1](**{name: tf.constant(values) for name, values in fed.items()})
        return {name: value.numpy() for name, value in answers.items()}

    return ModelRunner(path, inputs, outputs, run)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"Cannot read {path}: {error.strerror}.") from error


def _litert_signature(path: Path, content: bytes, *, with_delegates: bool) -> Any:
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    plain = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    options = {} if with_delegates else {"experimental_op_resolver_type": plain}
    try:
        interpreter = Interpreter(model_content=content, num_threads=1, **options)
        if SIGNATURE not in interpreter.get_signature_list():
            raise ArtifactError(
                f"{path} has no signature '{SIGNATURE}', so its inputs and outputs have no names: convert it anew."
            )
        interpreter.allocate_tensors()
        return interpreter.get_signature_runner(SIGNATURE)
    except (ValueError, RuntimeError) as error:
        if with_delegates and "XNNPACK" in str(error):
            return _litert_signature(path, content, with_delegates=False)
        raise ArtifactError(f"LiteRT cannot load {path}: {first_line(error)}.") from error


def _tflite_tensor(name: str, details: Mapping[str, Any]) -> TensorInfo:
    signature = details.get("shape_signature", details["shape"])
    shape = signature if len(signature) == len(details["shape"]) else details["shape"]
    dtype = "string" if details["dtype"] in (np.bytes_, np.object_) else np.dtype(details["dtype"]).name
    scale, zero_point = details["quantization"]
    return TensorInfo(
        name,
        dtype,
        tuple(None if size < 0 else int(size) for size in shape),
        Quantization(float(scale), int(zero_point)) if scale and dtype.startswith(("int", "uint")) else None,
    )


def _onnx_tensor(node: Any) -> TensorInfo:
    dtype = node.type.removeprefix("tensor(").removesuffix(")")
    return TensorInfo(node.name, _ONNX_DTYPES.get(dtype, dtype), tuple(node.shape))


def _openvino_tensor(port: Any) -> TensorInfo:
    shape = tuple(None if size.is_dynamic else size.get_length() for size in port.partial_shape)
    return TensorInfo(port.get_any_name(), port.element_type.to_dtype().name, shape)


def _coreml_tensor(spec: Any, feature: Any) -> TensorInfo:
    kind = feature.type.multiArrayType
    dtype = type(kind).ArrayDataType.Name(kind.dataType).lower()
    function = spec.mlProgram.functions["main"]
    block = function.block_specializations[function.opset]
    # The description has no shapes of outputs, only the program has.
    values = [*function.inputs, *(value for operation in block.operations for value in operation.outputs)]
    shape = next(value.type.tensorType.dimensions for value in values if value.name == feature.name)
    sizes = [axis.constant.size if axis.HasField("constant") else None for axis in shape]
    return TensorInfo(feature.name, dtype, tuple(sizes))


def _tensorrt_tensor(trt: Any, engine: Any, name: str) -> TensorInfo:
    shape = tuple(None if size < 0 else size for size in engine.get_tensor_shape(name))
    return TensorInfo(name, np.dtype(trt.nptype(engine.get_tensor_dtype(name))).name, shape)


def _tf_tensor(name: str, spec: Any) -> TensorInfo:
    return TensorInfo(name, spec.dtype.name, tuple(spec.shape.as_list()))


def _quantized(values: np.ndarray, dtype: str, quantization: Quantization) -> np.ndarray:
    limits = np.iinfo(dtype)
    integers = np.round(values / quantization.scale) + quantization.zero_point
    return np.clip(integers, limits.min, limits.max).astype(dtype)


def _dequantized(values: np.ndarray, quantization: Quantization | None) -> np.ndarray:
    if quantization is None:
        return values
    return ((values.astype(np.float32) - quantization.zero_point) * np.float32(quantization.scale)).astype(np.float32)


def _as_text(values: np.ndarray) -> np.ndarray:
    return np.array([v.decode() if isinstance(v, bytes) else v for v in values.flat], object).reshape(values.shape)


def _pad(rows: np.ndarray, batch_size: int) -> np.ndarray:
    if len(rows) == batch_size:
        return rows
    return np.pad(rows, [(0, batch_size - len(rows)), *[(0, 0)] * (rows.ndim - 1)], mode="edge")
