"""A loaded SavedModel: its signatures and the quickest call that TensorFlow has for them in Python.

This is the one file of the package that uses TensorFlow (protos.py, too, loads it, by importing TF Serving's messages).

The call is a TF1 session callable. It costs about 7 us where `signatures[...]` costs 300, does not check static shapes
(nor does TF Serving, whose own tests feed other shapes), and loads models that `tf.saved_model.load` refuses. Its
constructor is private in TensorFlow; `FunctionRunner` is the way that remains when it should go.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, saved_model_pb2

from serving import dtypes
from serving.errors import Code, ServingError, invalid_argument
from serving.tensors import decode, object_array, to_bytes

SERVE_TAG = "serve"
# Compiled callables a model keeps: one for each signature and each output_filter that clients use.
_MAX_CALLABLES = 64


@dataclass(frozen=True, eq=False)
class Signature:
    """One SignatureDef of a model.

    Attributes:
        name: its key in the model, such as `serving_default`.
        inputs: input alias -> TensorFlow's number of the dtype (see dtypes.py).
        outputs: the output aliases.
        defaults: the values of inputs that a caller may leave out.
        proto: the SignatureDef itself.
    """

    name: str
    inputs: Mapping[str, int]
    outputs: tuple[str, ...]
    defaults: Mapping[str, np.ndarray]
    proto: Any

    @classmethod
    def from_proto(cls, name: str, proto: Any) -> Signature:
        """Read a SignatureDef."""
        inputs = {alias: info.dtype for alias, info in sorted(proto.inputs.items())}
        defaults = {alias: decode(tensor) for alias, tensor in proto.defaults.items()}
        return cls(name, inputs, tuple(sorted(proto.outputs)), defaults, proto)


class Runner(Protocol):
    """A way to execute the signatures of one model; `run` may be called from many threads at once."""

    def prepare(self, signature: Signature) -> None:
        """Do now what the first request would otherwise wait for."""

    def run(self, signature: Signature, inputs: Mapping[str, np.ndarray], outputs: tuple[str, ...]) -> list[Any]:
        """Execute a signature on complete inputs and return the values of `outputs`, in order."""

    def close(self) -> None:
        """Release the model's memory."""


class SessionRunner:
    """Executes signatures through session callables (`_make_callable_from_options`)."""

    def __init__(self, path: Path) -> None:
        graph = tf.Graph()
        self._session = tf.compat.v1.Session(graph=graph)
        try:
            with graph.as_default(), _quiet_tensorflow_log():
                tf.compat.v1.saved_model.load(self._session, [SERVE_TAG], str(path))
        except BaseException:
            self._session.close()
            raise
        self._callable = functools.lru_cache(maxsize=_MAX_CALLABLES)(self._make_callable)

    def prepare(self, signature: Signature) -> None:
        """Prune and optimise the signature's graph."""
        self._callable(signature, signature.outputs)

    def run(self, signature: Signature, inputs: Mapping[str, np.ndarray], outputs: tuple[str, ...]) -> list[Any]:
        return self._callable(signature, outputs)(*[inputs[alias] for alias in signature.inputs])

    def _make_callable(self, signature: Signature, outputs: tuple[str, ...]) -> Callable[..., list[Any]]:
        options = config_pb2.CallableOptions()
        options.feed.extend(signature.proto.inputs[alias].name for alias in signature.inputs)
        options.fetch.extend(signature.proto.outputs[alias].name for alias in outputs)
        options.run_options.inter_op_thread_pool = -1  # run in the calling thread: no hand-over for small models
        return self._session._make_callable_from_options(options)

    def close(self) -> None:
        self._callable.cache_clear()
        self._session.close()


class FunctionRunner:
    """Executes signatures through TensorFlow's public API; slower, and checks static shapes."""

    def __init__(self, path: Path) -> None:
        self._model = tf.saved_model.load(str(path), tags=[SERVE_TAG])

    def prepare(self, signature: Signature) -> None:
        """Nothing to do: the functions of a SavedModel are traced already."""

    def run(self, signature: Signature, inputs: Mapping[str, np.ndarray], outputs: tuple[str, ...]) -> list[Any]:
        function = self._model.signatures[signature.name]
        results = function(**{alias: tf.constant(value) for alias, value in inputs.items()})
        return [results[alias].numpy() for alias in outputs]

    def close(self) -> None:
        del self._model


def default_runner() -> type[SessionRunner] | type[FunctionRunner]:
    """The quick runner where this TensorFlow still has the call it needs, else the public one."""
    return SessionRunner if hasattr(tf.compat.v1.Session, "_make_callable_from_options") else FunctionRunner


class SavedModel:
    """A SavedModel in memory, ready to be called by signature name.

    Args:
        path: the version directory, with saved_model.pb in it.
        runner: how signatures are executed; by default the quickest way this TensorFlow offers.

    Raises:
        ServingError: the directory holds no SavedModel that TensorFlow can load; the message says why.

    Example:
        >>> model = SavedModel(Path("export/1"))
        >>> model.run("serving_default", {"x": np.ones((1, 4), np.float32)})
    """

    def __init__(self, path: Path, runner: type[SessionRunner] | type[FunctionRunner] | None = None) -> None:
        with _as_serving_errors(f"cannot load the SavedModel in {path}: "):
            self.signatures = _read_signatures(path)
            self._runner = (runner or default_runner())(path)
            for signature in filter(_is_callable, self.signatures.values()):
                self._runner.prepare(signature)

    def run(
        self, signature_name: str, inputs: Mapping[str, np.ndarray], outputs: Sequence[str] = (), context: Any = None
    ) -> dict[str, np.ndarray]:
        """Call a signature.

        Args:
            signature_name: such as `serving_default` or `serve_examples`.
            inputs: one array for each input alias; those with a default may be left out.
            outputs: the aliases to compute; none means all.
            context: not used: the call is made at once.

        Returns:
            Output alias -> array; strings are object arrays of bytes.

        Raises:
            ServingError: FAILED_PRECONDITION without such a signature, INVALID_ARGUMENT for inputs or outputs that do
                not fit it, else the code with which TensorFlow failed.
        """
        signature = self.signatures.get(signature_name)
        if signature is None:
            raise ServingError(Code.FAILED_PRECONDITION, f'Serving signature key "{signature_name}" not found.')
        feeds = _complete_inputs(signature, inputs)
        wanted = _wanted_outputs(signature, outputs)
        with _as_serving_errors(""):
            values = self._runner.run(signature, feeds, wanted)
        return {alias: np.asarray(value) for alias, value in zip(wanted, values, strict=True)}

    def close(self) -> None:
        """Release the model; a call after this fails."""
        self._runner.close()


def _read_signatures(path: Path) -> dict[str, Signature]:
    message = saved_model_pb2.SavedModel()
    message.ParseFromString((path / "saved_model.pb").read_bytes())
    for graph in message.meta_graphs:
        if SERVE_TAG in graph.meta_info_def.tags:
            return {name: Signature.from_proto(name, proto) for name, proto in graph.signature_def.items()}
    tags = [list(graph.meta_info_def.tags) for graph in message.meta_graphs]
    raise ValueError(f"no graph is tagged {SERVE_TAG!r}; the tags are {tags}. Export it with tf.saved_model.save")


def _is_callable(signature: Signature) -> bool:
    """False for `__saved_model_init_op`, whose output names an operation and no tensor."""
    return any(info.dtype != 0 for info in signature.proto.outputs.values())


def _complete_inputs(signature: Signature, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    extra = sorted(set(inputs) - set(signature.inputs))
    missing = sorted(set(signature.inputs) - set(inputs) - set(signature.defaults))
    if extra or missing:
        raise invalid_argument(
            f"input size does not match signature: {len(inputs)}!={len(signature.inputs)} "
            f"len({{{','.join(sorted(inputs))}}}) != len({{{','.join(signature.inputs)}}}). "
            f"Sent extra: {{{','.join(extra)}}}. Missing but required: {{{','.join(missing)}}}."
        )
    given = {**signature.defaults, **inputs} if signature.defaults else inputs
    return {alias: _checked(alias, given[alias], number) for alias, number in signature.inputs.items()}


def _checked(alias: str, array: np.ndarray, number: int) -> np.ndarray:
    expected = dtypes.DECODED.get(number)
    if expected is None or (array.dtype != expected and not (number == dtypes.STRING and array.dtype.kind in "SU")):
        raise invalid_argument(f"Expects arg[{alias}] to be {dtypes.name(number)} but {array.dtype} is provided")
    if number == dtypes.STRING:
        return _checked_strings(alias, array)
    return array.astype(tf.bfloat16.as_numpy_dtype) if number == dtypes.BFLOAT16 else array


def _checked_strings(alias: str, array: np.ndarray) -> np.ndarray:
    try:
        return object_array([to_bytes(value) for value in array.flat]).reshape(array.shape)
    except TypeError as error:
        raise invalid_argument(f"input {alias}: {error}") from error


def _wanted_outputs(signature: Signature, outputs: Sequence[str]) -> tuple[str, ...]:
    for index, alias in enumerate(outputs):
        if alias not in signature.outputs:
            raise invalid_argument(
                f"output tensor alias not found in signature: {alias} Outputs expected to be in the set "
                f"{{{','.join(signature.outputs)}}}."
            )
        if alias in outputs[:index]:
            raise invalid_argument(f"duplicate output tensor alias: {alias}")
    return tuple(sorted(outputs)) or signature.outputs


@contextlib.contextmanager
def _as_serving_errors(prefix: str) -> Iterator[None]:
    """Turn whatever TensorFlow raises into a ServingError, with TensorFlow's own code where it has one."""
    try:
        yield
    except ServingError:
        raise
    except tf.errors.OpError as error:
        raise ServingError(Code(error.error_code), prefix + error.message) from error
    except Exception as error:
        raise ServingError(Code.INTERNAL, f"{prefix}{type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _quiet_tensorflow_log() -> Iterator[None]:
    """Keep the notice that the TF1 loader is deprecated out of the server's log; we know, and have a fallback."""

    def keep(record: logging.LogRecord) -> bool:
        return "deprecated" not in record.getMessage()

    logger = tf.get_logger()
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
