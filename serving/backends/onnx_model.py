"""An ONNX file as a served model, by ONNX Runtime on the CPU and without TensorFlow.

Its inputs and outputs, under their names, are `serving_default`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from serving import dtypes
from serving.backends.file_model import FileModel
from serving.backends.signatures import TensorSpec
from serving.errors import Code, ServingError, invalid_argument
from serving.served_model import DEFAULT_SIGNATURE
from serving.tensors import object_array

_DTYPES = {
    "float": dtypes.FLOAT,
    "double": dtypes.DOUBLE,
    "float16": dtypes.HALF,
    "int8": dtypes.INT8,
    "int16": dtypes.INT16,
    "int32": dtypes.INT32,
    "int64": dtypes.INT64,
    "uint8": dtypes.UINT8,
    "uint16": dtypes.UINT16,
    "uint32": dtypes.UINT32,
    "uint64": dtypes.UINT64,
    "bool": dtypes.BOOL,
    "string": dtypes.STRING,
}
_ERRORS_ONLY = 3


class OnnxModel(FileModel):
    """An ONNX file in memory. A session may be called from many threads at once.

    Args:
        path: the file.
        num_threads: the threads that share the work of one operation; None leaves it to ONNX Runtime.
        note: what a client should know whose inputs do not fit, for the end of the message.

    Raises:
        ServingError: INVALID_ARGUMENT when ONNX Runtime cannot load it, or it has inputs or outputs that are no tensors.
    """

    def __init__(self, path: Path, num_threads: int | None = None, note: str = "") -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = _ERRORS_ONLY
        options.intra_op_num_threads = num_threads or 0
        options.add_session_config_entry(
            "session.intra_op.allow_spinning", "0"
        )  # it would burn the CPU between requests
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            inputs, outputs = (
                {node.name: _spec(node) for node in nodes}
                for nodes in (self._session.get_inputs(), self._session.get_outputs())
            )
        except Exception as error:  # ONNX Runtime's own errors have no common base
            message = f"ONNX Runtime cannot load {path}: {_first_line(error)}"
            raise ServingError(Code.INVALID_ARGUMENT, message) from error
        super().__init__({DEFAULT_SIGNATURE: (inputs, outputs)}, note)
        self._texts = {name for name, spec in inputs.items() if spec.dtype == dtypes.STRING}

    def _call(self, name: str, feeds: Mapping[str, np.ndarray], outputs: tuple[str, ...]) -> Sequence[Any]:
        feeds = {alias: _decoded(alias, array) if alias in self._texts else array for alias, array in feeds.items()}
        try:
            values = self._session.run(outputs, feeds)
        except Exception as error:  # as above
            raise invalid_argument(f"ONNX Runtime cannot run these inputs: {_first_line(error)}") from error
        return [_encoded(value) if value.dtype.kind in "OU" else value for value in values]

    def close(self) -> None:
        """Release the model; a call after this fails."""
        del self._session


def _spec(node: Any) -> TensorSpec:
    number = _DTYPES.get(node.type.removeprefix("tensor(").removesuffix(")"))
    if number is None:
        raise TypeError(
            f"{node.name} is a {node.type}, which cannot be served; scikit-learn's models need zipmap=False"
        )
    return TensorSpec(node.name, number, tuple(size if isinstance(size, int) else -1 for size in node.shape))


def _decoded(alias: str, array: np.ndarray) -> np.ndarray:
    """ONNX has text where TensorFlow has bytes."""
    try:
        return object_array([value.decode() for value in array.flat]).reshape(array.shape)
    except UnicodeDecodeError as error:
        raise invalid_argument(f"input {alias}: ONNX takes text, and a value is not UTF-8: {error}") from error


def _encoded(array: np.ndarray) -> np.ndarray:
    return object_array([str(value).encode() for value in array.flat]).reshape(array.shape)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
