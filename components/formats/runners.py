"""Converted models, run: every format by one interface, `features by name -> answers by name`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from components.errors import ArtifactError, HeadraceError, did_you_mean
from components.formats.errors import first_line
from components.formats.network import SIGNATURE, Arrays
from components.formats.results import Quantization, TensorInfo

_ONNX_DTYPES = {"float": "float32", "double": "float64"}


class ModelRunner:
    """Runs a converted model on one thread.

    A file with a fixed batch is asked batch by batch; the last one is padded and the padding cut off. Inputs and
    outputs that are quantized take and give float32.

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
    ) -> None:
        self.path, self.inputs, self.outputs, self._run = path, tuple(inputs), tuple(outputs), run
        sizes = {info.shape[0] for info in self.inputs if info.shape and isinstance(info.shape[0], int)}
        self._batch_size = sizes.pop() if len(sizes) == 1 else None

    def __call__(self, features: Arrays) -> dict[str, np.ndarray]:
        """Answers `(num_examples, ...)` by name.

        Raises:
            HeadraceError: a feature is missing, or has another shape or kind than the file takes.
        """
        fed = {info.name: self._prepared(info, features) for info in self.inputs}
        num_examples = len(next(iter(fed.values())))
        if self._batch_size is None or num_examples == self._batch_size:
            return self._answers(fed)
        parts = []
        for start in range(0, num_examples, self._batch_size):
            batch = {name: values[start : start + self._batch_size] for name, values in fed.items()}
            parts.append(self._answers({name: _pad(values, self._batch_size) for name, values in batch.items()}))
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
    """The runner of a `.tflite` or `.onnx` file, or of the folder of a SavedModel.

    Raises:
        ArtifactError: the file is none of them, is damaged, or has operations that the plain runtime lacks.
    """
    if path.is_dir():
        return load_saved_model(path)
    loaders = {".tflite": load_tflite, ".onnx": load_onnx}
    if path.suffix not in loaders:
        raise ArtifactError(f"Cannot tell what {path} is: a converted model is a .tflite or .onnx file, or a folder.")
    return loaders[path.suffix](path)


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


def load_saved_model(path: Path) -> ModelRunner:
    """The runner of a SavedModel's `serving_default` signature.

    Raises:
        ArtifactError: the folder holds no SavedModel, or one without that signature.
    """
    try:
        loaded = tf.saved_model.load(str(path))
    except (OSError, ValueError, tf.errors.OpError) as error:
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
