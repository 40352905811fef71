"""A LiteRT (TFLite) file as a served model, without TensorFlow.

Its signatures are served under their names. A file without any gets `serving_default` with the names of its tensors,
which is all that TF Serving knows (tensorflow_serving/servables/tensorflow/tflite_session.cc). Quantized inputs and
outputs are float32 to the client, as they are in the SavedModel.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert.interpreter import Interpreter, OpResolverType

from serving import dtypes
from serving.backends.file_model import FileModel, Specs
from serving.backends.signatures import TensorSpec
from serving.errors import Code, ServingError, invalid_argument
from serving.served_model import DEFAULT_SIGNATURE

# What LiteRT's interpreter tells of a tensor.
Details = Mapping[str, Any]
# One call of a signature, by name -> array.
Call = Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]


class LiteRtModel(FileModel):
    """A LiteRT file in memory.

    An interpreter serves one call at a time, so there are as many as calls run at once, up to one for each CPU; they
    share the file, and each has its own activations and packed weights.

    Args:
        path: the file. It is read whole, so that it may be replaced while it is served.
        num_threads: the threads of each interpreter.
        note: what a client should know whose inputs do not fit, for the end of the message.

    Raises:
        ServingError: INVALID_ARGUMENT when LiteRT cannot load it.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path, num_threads: int = 1, note: str = "") -> None:
        self._path = path
        self._content = path.read_bytes()
        self._num_threads = num_threads
        self._resolver = OpResolverType.AUTO
        self._slots = threading.Semaphore(os.cpu_count() or 1)
        self._free: list[_Signatures] = []
        with self._signatures() as found:
            self._details = found.details
        super().__init__({name: (_specs(taken), _specs(given)) for name, (taken, given) in self._details.items()}, note)

    def _call(self, name: str, feeds: Mapping[str, np.ndarray], outputs: tuple[str, ...]) -> Sequence[Any]:
        taken, given = self._details[name]
        fed = {alias: _quantized(array, taken[alias]) for alias, array in feeds.items()}
        try:
            with self._signatures() as signatures:
                values = signatures.calls[name](fed)
        except (RuntimeError, ValueError) as error:
            if not self._do_without_xnnpack(error):
                raise invalid_argument(f"LiteRT cannot run these inputs: {_first_line(error)}") from error
            return self._call(name, feeds, outputs)
        return [_dequantized(values[alias], given[alias]) for alias in outputs]

    @contextlib.contextmanager
    def _signatures(self) -> Iterator[_Signatures]:
        """Interpreters that no other thread uses; those in which a call failed are not used again."""
        with self._slots:
            try:
                signatures = self._free.pop()
            except IndexError:
                signatures = self._load()
            yield signatures
            self._free.append(signatures)

    def _load(self) -> _Signatures:
        try:
            interpreter = Interpreter(
                model_content=self._content,
                num_threads=self._num_threads,
                experimental_op_resolver_type=self._resolver,
            )
            interpreter.allocate_tensors()
            return _Signatures(interpreter)
        except (RuntimeError, ValueError) as error:
            if self._do_without_xnnpack(error):
                return self._load()
            message = f"LiteRT cannot load {self._path}: {_first_line(error)}"
            raise ServingError(Code.INVALID_ARGUMENT, message) from error

    def _do_without_xnnpack(self, error: Exception) -> bool:
        """Whether it was the accelerated library that failed, which lacks some integer kernels, and is not used any more."""
        if "XNNPACK" not in str(error):
            return False
        self._resolver = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
        self._free = []
        return True

    def close(self) -> None:
        """Release the model; a call after this fails."""
        self._free, self._content = [], b""


class _Signatures:
    """The signatures of one interpreter.

    Attributes:
        details: signature name -> what it takes and what it gives, by alias.
        calls: signature name -> its call.
    """

    def __init__(self, interpreter: Interpreter) -> None:
        self.details: dict[str, tuple[dict[str, Details], dict[str, Details]]] = {}
        self.calls: dict[str, Call] = {}
        for name in interpreter.get_signature_list():
            runner = interpreter.get_signature_runner(name)
            self.details[name] = runner.get_input_details(), runner.get_output_details()
            self.calls[name] = _keywords(runner)
        if not self.details:
            taken, given = (
                {each["name"]: each for each in details}
                for details in (interpreter.get_input_details(), interpreter.get_output_details())
            )
            self.details[DEFAULT_SIGNATURE] = taken, given
            self.calls[DEFAULT_SIGNATURE] = _by_tensor_name(interpreter, taken, given)


def _keywords(runner: Callable[..., Any]) -> Call:
    return lambda feeds: runner(**feeds)


def _by_tensor_name(interpreter: Interpreter, taken: Mapping[str, Details], given: Mapping[str, Details]) -> Call:
    def call(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        for name, array in feeds.items():
            interpreter.resize_tensor_input(taken[name]["index"], array.shape)
        interpreter.allocate_tensors()
        for name, array in feeds.items():
            interpreter.set_tensor(taken[name]["index"], array)
        interpreter.invoke()
        return {name: interpreter.get_tensor(details["index"]) for name, details in given.items()}

    return call


def _specs(tensors: Mapping[str, Details]) -> Specs:
    return {alias: _spec(details) for alias, details in tensors.items()}


def _spec(details: Details) -> TensorSpec:
    signature = details.get("shape_signature", details["shape"])
    shape = signature if len(signature) == len(details["shape"]) else details["shape"]
    number = dtypes.FLOAT if _is_quantized(details) else dtypes.number_of(np.empty(0, details["dtype"]))
    return TensorSpec(details["name"], number, tuple(int(size) for size in shape))


def _is_quantized(details: Details) -> bool:
    return bool(details["quantization"][0]) and np.dtype(details["dtype"]).kind in "iu"


def _quantized(array: np.ndarray, details: Details) -> np.ndarray:
    if not _is_quantized(details):
        return array
    scale, zero_point = details["quantization"]
    limits = np.iinfo(details["dtype"])
    return np.clip(np.round(array / scale) + zero_point, limits.min, limits.max).astype(details["dtype"])


def _dequantized(array: np.ndarray, details: Details) -> np.ndarray:
    if not _is_quantized(details):
        return array
    scale, zero_point = details["quantization"]
    return (array.astype(np.float32) - np.float32(zero_point)) * np.float32(scale)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
