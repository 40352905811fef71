"""A loaded SavedModel: its signatures and the quickest call that TensorFlow has for them in Python.

This is the one file of the package that loads TensorFlow.

The call is a TF1 session callable. It costs about 7 us where `signatures[...]` costs 300, does not check static shapes
(nor does TF Serving, whose own tests feed other shapes), and loads models that `tf.saved_model.load` refuses. Its
constructor is private in TensorFlow; `FunctionRunner` is the way that remains when it should go.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tensorflow as tf
from google.protobuf import text_format
from tensorflow.core.protobuf import config_pb2, saved_model_pb2

from serving import dtypes
from serving.backends.signatures import Signature, SignatureModel
from serving.errors import Code, ServingError, invalid_argument
from serving.settings import LoadSettings

SERVE_TAG = "serve"
# Compiled callables a model keeps: one for each signature and each output_filter that clients use.
_MAX_CALLABLES = 64


class Runner(Protocol):
    """A way to execute the signatures of one model; `run` may be called from many threads at once."""

    signatures: dict[str, Signature]

    def prepare(self, signature: Signature) -> None:
        """Do now what the first request would otherwise wait for."""

    def run(self, signature: Signature, inputs: Mapping[str, np.ndarray], outputs: tuple[str, ...]) -> list[Any]:
        """Execute a signature on complete inputs and return the values of `outputs`, in order."""

    def close(self) -> None:
        """Release the model's memory."""


class SessionRunner:
    """Executes signatures through session callables (`_make_callable_from_options`)."""

    def __init__(self, path: Path, tags: Sequence[str], config: Any = None) -> None:
        graph = tf.Graph()
        self._session = tf.compat.v1.Session(graph=graph, config=config)
        try:
            with graph.as_default(), _quiet_tensorflow_log():
                meta_graph = tf.compat.v1.saved_model.load(self._session, list(tags), str(path))
            self.signatures = _signatures(meta_graph)
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
    """Executes signatures through TensorFlow's public API; slower, checks static shapes, and knows no ConfigProto."""

    def __init__(self, path: Path, tags: Sequence[str], config: Any = None) -> None:
        self.signatures = _signatures(_read_meta_graph(path, tags))
        self._model = tf.saved_model.load(str(path), tags=list(tags))

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


class SavedModel(SignatureModel):
    """A SavedModel in memory, ready to be called by signature name.

    Args:
        path: the version directory, with saved_model.pb (or saved_model.pbtxt) in it.
        runner: how signatures are executed; by default the quickest way this TensorFlow offers.
        tags: which of its graphs: the one that has exactly these tags.
        config: a ConfigProto for the session.

    Raises:
        ServingError: the directory holds no SavedModel that TensorFlow can load; the message says why.

    Example:
        >>> model = SavedModel(Path("export/1"))
        >>> model.run("serving_default", {"x": np.ones((1, 4), np.float32)})
    """

    def __init__(
        self,
        path: Path,
        runner: type[SessionRunner] | type[FunctionRunner] | None = None,
        tags: Sequence[str] = (SERVE_TAG,),
        config: Any = None,
    ) -> None:
        with _as_serving_errors(f"cannot load the SavedModel in {path}: "):
            self._runner: Runner = (runner or default_runner())(path, tags, config)
            try:
                super().__init__(self._runner.signatures)
                self._uncallable = {name for name, each in self.signatures.items() if not _is_callable(each)}
                for name in self.signatures.keys() - self._uncallable:
                    self._runner.prepare(self.signatures[name])
            except BaseException:
                self._runner.close()
                raise

    def _execute(self, signature: Signature, feeds: dict[str, np.ndarray], outputs: tuple[str, ...]) -> Sequence[Any]:
        if signature.name in self._uncallable:
            raise ServingError(Code.UNIMPLEMENTED, _why_not_callable(signature))
        for alias, number in signature.inputs.items():
            if number == dtypes.BFLOAT16:
                feeds[alias] = feeds[alias].astype(tf.bfloat16.as_numpy_dtype)
        with _as_serving_errors(""):
            return self._runner.run(signature, feeds, outputs)

    def close(self) -> None:
        """Release the model; a call after this fails."""
        self._runner.close()


def session_config(settings: LoadSettings) -> Any:
    """The ConfigProto that the settings make.

    Raises:
        ServingError: INVALID_ARGUMENT when the file is none.
        OSError: it cannot be read.
    """
    config = config_pb2.ConfigProto()
    if settings.session_config_file is not None:
        try:
            text_format.Parse(settings.session_config_file.read_bytes(), config)
        except text_format.ParseError as error:
            message = f"{settings.session_config_file} is no ConfigProto in protobuf's text format: {error}"
            raise invalid_argument(message) from error
    if settings.intra_op_threads is not None:
        config.intra_op_parallelism_threads = settings.intra_op_threads
    if settings.gpu_memory_fraction is not None:
        config.gpu_options.per_process_gpu_memory_fraction = settings.gpu_memory_fraction
    return config


def _signatures(meta_graph: Any) -> dict[str, Signature]:
    signatures = {name: Signature.from_proto(name, proto) for name, proto in meta_graph.signature_def.items()}
    if not any(map(_is_callable, signatures.values())):
        raise ValueError(
            f"no signature can be called, of {sorted(signatures)}; "
            "export it with tf.saved_model.save(model, path, signatures=...)"
        )
    return signatures


def _is_callable(signature: Signature) -> bool:
    """False for `__saved_model_init_op`, whose output names an operation and no tensor, and for sparse tensors."""
    tensors = [*signature.proto.inputs.values(), *signature.proto.outputs.values()]
    return any(info.dtype != 0 for info in signature.proto.outputs.values()) and all(info.name for info in tensors)


def _why_not_callable(signature: Signature) -> str:
    tensors = {**signature.proto.inputs, **signature.proto.outputs}
    sparse = sorted(alias for alias, info in tensors.items() if not info.name)
    what = f"{', '.join(sparse)} being sparse or ragged; requests hold dense tensors" if sparse else "having no outputs"
    return f"signature {signature.name} cannot be called, {what}: export a signature with dense inputs and outputs"


def _read_meta_graph(path: Path, tags: Sequence[str]) -> Any:
    message = saved_model_pb2.SavedModel()
    file = path / "saved_model.pb"
    if file.is_file():
        message.ParseFromString(file.read_bytes())
    else:
        text_format.Parse(file.with_suffix(".pbtxt").read_bytes(), message)
    for graph in message.meta_graphs:
        if set(graph.meta_info_def.tags) == set(tags):
            return graph
    found = [sorted(graph.meta_info_def.tags) for graph in message.meta_graphs]
    raise ValueError(f"no graph has the tags {sorted(tags)}, only {found}")


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
