"""The way of a request to a model, the same for REST and gRPC: the version it names, its patience, and who is told."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from serving.batching.scheduler import BatchingModel, finish
from serving.errors import Code, ServingError
from serving.manager import ModelManager
from serving.served_model import Version


def _no_header(name: str) -> str | None:
    return None


@dataclass(slots=True)
class CallContext:
    """What is known of a request besides its content.

    Attributes:
        deadline: when its client gives up, on the clock of `time.monotonic`; None means never.
        header: the value of a header (REST) or metadata entry (gRPC) by its lower-case name, or None.
        is_cancelled: whether the client has gone.
        api: `rest` or `grpc`.
        method: what is asked for, as TF Serving's metrics name it: `predict` over REST, `Predict` over gRPC; empty for
            a REST request that calls no model.
        model_name: the model that is asked for; empty as long as it is not known.
        queue_seconds: how long it has waited for a batch; None without batching.
        span: its span, when requests are traced.
    """

    deadline: float | None = None
    header: Callable[[str], str | None] = _no_header
    is_cancelled: bool = False
    api: str = "rest"
    method: str = ""
    model_name: str = ""
    queue_seconds: float | None = None
    span: Any = None

    def cancel(self) -> None:
        """Note that the client has gone."""
        self.is_cancelled = True

    def check(self) -> None:
        """See that somebody still waits for the answer.

        Raises:
            ServingError: CANCELLED or DEADLINE_EXCEEDED.
        """
        if self.is_cancelled:
            raise ServingError(Code.CANCELLED, "the client has gone before the model was called")
        if self.is_late():
            raise ServingError(Code.DEADLINE_EXCEEDED, "the deadline passed before the model was called")

    def is_late(self) -> bool:
        """Whether the deadline has passed: the client takes no answer any more."""
        return self.deadline is not None and time.monotonic() >= self.deadline


@dataclass(slots=True)
class Call:
    """One call of a signature, done.

    Attributes:
        version: whose signature.
        signature_name: its name.
        inputs: input alias -> array, as the client sent them.
        outputs: output alias -> array; empty when the call failed.
        error: why it failed, or None.
        seconds: how long it took, the wait for a batch included.
        context: the request.
    """

    version: Version
    signature_name: str
    inputs: Mapping[str, np.ndarray]
    outputs: Mapping[str, np.ndarray]
    error: ServingError | None
    seconds: float
    context: CallContext


# Told of each call of a signature, in the thread that answers the request: it must be quick and must not raise.
Listener = Callable[[Call], None]


class OpenModel:
    """A version held for one request, as a context manager; its calls are told to the listeners.

    A request that fails before it calls a signature, such as one with the inputs of another version, is told as one
    failed call of the signature "".

    Attributes:
        version: the version.
        signatures: name -> signature.
    """

    __slots__ = ("_context", "_is_called", "_lease", "_listeners", "_model", "signatures", "version")

    def __init__(
        self,
        lease: contextlib.AbstractContextManager[Version],
        context: CallContext,
        listeners: Sequence[Listener],
    ) -> None:
        self._lease = lease
        self._context = context
        self._listeners = listeners
        self._is_called = False

    def __enter__(self) -> OpenModel:
        self.version = self._lease.__enter__()
        self._model = self.version.loaded
        self.signatures = self._model.signatures
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, ServingError) and not self._is_called:
                self._tell(Call(self.version, "", {}, {}, error, 0.0, self._context))
        finally:
            self._lease.__exit__(kind, error, trace)

    def _tell(self, call: Call) -> None:
        for listener in self._listeners:
            listener(call)

    def run(
        self, signature_name: str, inputs: Mapping[str, np.ndarray], outputs: Sequence[str] = ()
    ) -> dict[str, np.ndarray]:
        """Call a signature, and wait in this thread if it runs in a batch; see SignatureModel.run.

        Raises:
            ServingError: as there, and BatchingModel.submit; CANCELLED or DEADLINE_EXCEEDED when nobody waits for the
                answer any more.
        """
        return finish(self.run_later(signature_name, inputs, outputs))

    async def run_later(
        self, signature_name: str, inputs: Mapping[str, np.ndarray], outputs: Sequence[str] = ()
    ) -> dict[str, np.ndarray]:
        """As `run`, but a coroutine that waits for the batch: see BatchTask."""
        self._is_called = True
        started = time.perf_counter()
        found: dict[str, np.ndarray] = {}
        failure: ServingError | None = None
        try:
            self._context.check()
            if isinstance(self._model, BatchingModel):
                found = await self._model.submit(signature_name, inputs, outputs, self._context)
            else:
                found = self._model.run(signature_name, inputs, outputs, self._context)
        except ServingError as error:
            failure = error
            raise
        except BaseException as error:
            failure = ServingError(Code.INTERNAL, f"{type(error).__name__}: {error}")
            raise
        finally:
            seconds = time.perf_counter() - started
            self._tell(Call(self.version, signature_name, inputs, found, failure, seconds, self._context))
        return found


class Models:
    """The served models, as the APIs see them.

    Args:
        manager: loads them.
        listeners: told of each call of a signature.
    """

    def __init__(self, manager: ModelManager, listeners: Sequence[Listener] = ()) -> None:
        self.manager = manager
        self._listeners = tuple(listeners)

    def open(self, name: str, number: int | None, label: str | None, context: CallContext) -> OpenModel:
        """Hold the version that a request names; see ModelManager.lease.

        Raises:
            ServingError: INVALID_ARGUMENT without a name or for an unknown label, NOT_FOUND when nothing is served.
        """
        return OpenModel(self.manager.lease(name, number, label), context, self._listeners)
