"""Dynamic batching: calls of a signature wait for each other and run as one.

The rules are those of TF Serving: tensorflow_serving/batching/batching_session.cc, and TensorFlow's
core/kernels/batching_util/shared_batch_scheduler.h, on which it is built. Each signature and set of outputs of a version
has a queue of its own; the queues take turns on one pool of threads. Better than there: requests whose shapes do not fit
run in batches apart, a request that the model refuses fails alone, and nobody is kept past a deadline.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Coroutine, Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from serving.batching.parameters import BatchingParameters
from serving.batching.tensors import Arrays, batch_size, merge, shape_key, split
from serving.errors import Code, ServingError, invalid_argument

if TYPE_CHECKING:
    from serving.calls import CallContext

logger = logging.getLogger(__name__)

# What a model raises for values that it refuses; other errors say nothing of the requests in the batch.
_ERRORS_OF_ONE_REQUEST = (Code.INVALID_ARGUMENT, Code.OUT_OF_RANGE, Code.FAILED_PRECONDITION, Code.NOT_FOUND)


class BatchableModel(Protocol):
    """What batching needs of a model (signatures.SignatureModel has it)."""

    signatures: Any

    def check(self, signature_name: str, inputs: Arrays, outputs: Sequence[str]) -> tuple[Any, Arrays, tuple[str, ...]]:
        """The signature, the complete inputs and the outputs of a call; raises ServingError if they do not fit."""

    def execute(self, signature: Any, feeds: Any, outputs: tuple[str, ...]) -> dict[str, np.ndarray]:
        """Call a signature with what `check` gave."""

    def close(self) -> None:
        """Release the model."""


@dataclass(frozen=True)
class BatchRun:
    """A batch that has run; the names are those of TF Serving's metrics, tensorflow/serving/batching_session/...

    Attributes:
        signature_name: what was called.
        input_batch_size: the rows of each request in it.
        processed_batch_size: the rows it ran with.
        padding_size: those of them that were added.
        queuing_latency_seconds: how long each request had waited.
    """

    signature_name: str
    input_batch_size: tuple[int, ...]
    processed_batch_size: int
    padding_size: int
    queuing_latency_seconds: tuple[float, ...]


# Told of each batch, in the thread that ran it: it must be quick and must not raise.
BatchListener = Callable[[BatchRun], None]


class BatchTask:
    """A call that waits for its batch; awaiting it gives the outputs.

    It is no asyncio future: whoever drives the coroutine that awaits it gets the task itself from `send`, and goes on
    after `wait` or when the callback comes.
    """

    __slots__ = (
        "_callback",
        "_error",
        "_is_done",
        "_lock",
        "_num_left",
        "_pieces",
        "context",
        "enqueued",
        "inputs",
        "size",
    )

    def __init__(self, inputs: Arrays, context: CallContext | None, enqueued: float) -> None:
        self.inputs = inputs
        self.size = batch_size(inputs)
        self.context = context
        self.enqueued = enqueued
        self._lock = threading.Lock()
        self._is_done = False
        self._callback: Callable[[], object] | None = None
        self._error: ServingError | None = None
        self._pieces: list[dict[str, np.ndarray]] = []
        self._num_left = 0

    def cut(self, sizes: Sequence[int]) -> list[_Piece]:
        """The task in pieces of these sizes."""
        self._num_left = len(sizes)
        self._pieces = [{}] * len(sizes)
        if len(sizes) == 1:
            return [_Piece(self, 0, self.size, self.inputs)]
        pieces = []
        start = 0
        for index, size in enumerate(sizes):
            rows = {alias: array[start : start + size] for alias, array in self.inputs.items()}
            pieces.append(_Piece(self, index, size, rows))
            start += size
        return pieces

    @property
    def is_split(self) -> bool:
        """Whether it has more than one piece."""
        return len(self._pieces) > 1

    def is_wanted(self) -> bool:
        """Whether somebody still waits for it; ends the task if not."""
        if self._is_done:
            return False
        try:
            if self.context is not None:
                self.context.check()
        except ServingError as error:
            self.fail(error)
        return not self._is_done

    def complete(self, index: int, outputs: dict[str, np.ndarray]) -> None:
        """Take the outputs of a piece; the last one ends the task."""
        with self._lock:
            self._pieces[index] = outputs
            self._num_left -= 1
        if self._num_left == 0:
            self._end()

    def fail(self, error: ServingError) -> None:
        """End the task."""
        self._end(error)

    def _end(self, error: ServingError | None = None) -> None:
        with self._lock:
            if self._is_done:
                return
            self._error = error
            self._is_done = True
            self.inputs = {}
            callback = self._callback
        if callback is not None:
            _notify(callback)

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Call this once, in the thread that ends the task, or now if that has happened."""
        with self._lock:
            self._callback = callback
            is_done = self._is_done
        if is_done:
            _notify(callback)

    def wait(self) -> None:
        """Block until the task has ended or its deadline passes."""
        ended = threading.Lock()
        ended.acquire()
        self.add_done_callback(ended.release)
        deadline = None if self.context is None else self.context.deadline
        seconds = -1 if deadline is None else min(max(deadline - time.monotonic(), 0), threading.TIMEOUT_MAX)
        ended.acquire(timeout=seconds)

    def __await__(self) -> Generator[BatchTask, None, dict[str, np.ndarray]]:
        yield self
        if not self._is_done:
            raise ServingError(Code.DEADLINE_EXCEEDED, "the deadline passed while the request was in a batch")
        if self._error is not None:
            raise self._error
        if not self.is_split:
            return self._pieces[0]
        return {alias: np.concatenate([piece[alias] for piece in self._pieces]) for alias in self._pieces[0]}


def _notify(callback: Callable[[], object]) -> None:
    try:
        callback()
    except Exception:
        logger.exception("a request that waited for a batch cannot be answered")


@dataclass(eq=False)
class _Piece:
    """The rows of a task that run in one batch."""

    task: BatchTask
    index: int
    size: int
    inputs: Arrays


class _Batch:
    """Pieces that run together."""

    __slots__ = ("opened", "pieces", "size")

    def __init__(self, opened: float) -> None:
        self.opened = opened
        self.pieces: list[_Piece] = []
        self.size = 0


class BatchQueue:
    """The batches of one kind of call that wait; the last one is open for more. The scheduler's lock guards it.

    Args:
        parameters: sizes and times.
        run: runs a batch.
    """

    def __init__(self, parameters: BatchingParameters, run: Callable[[list[_Piece]], object]) -> None:
        self.run = run
        self._parameters = parameters
        self._limit = parameters.batch_size_limit
        self._batches: deque[_Batch] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def num_enqueued_tasks(self) -> int:
        """Tasks that wait; one that was split counts in each of its batches."""
        return sum(len(batch.pieces) for batch in self._batches)

    def add(self, task: BatchTask) -> None:
        """Put a task into the open batch, and new ones if it is to be split.

        Raises:
            ServingError: INVALID_ARGUMENT for a task that is too large, UNAVAILABLE when the queue is full.
        """
        room = self._limit - self._batches[-1].size if self._batches else self._limit
        self._check_capacity(task.size, room)
        sizes = [task.size]
        if task.size > room and self._parameters.enable_large_batch_splitting:
            sizes = [room] if room else []
            sizes += [min(self._limit, task.size - done) for done in range(room, task.size, self._limit)]
        for piece in task.cut(sizes):
            if not self._batches or self._batches[-1].size + piece.size > self._limit:
                self._batches.append(_Batch(task.enqueued))
            self._batches[-1].pieces.append(piece)
            self._batches[-1].size += piece.size

    def _check_capacity(self, size: int, room: int) -> None:
        parameters, num_batches = self._parameters, max(len(self._batches), 1)
        if size > parameters.max_batch_size:
            raise invalid_argument(
                f"Task size {size} is larger than maximum input batch size {parameters.max_batch_size}"
            )
        full = "The batch scheduling queue to which this task was submitted is full; "
        max_batches = parameters.max_enqueued_batches
        if parameters.enable_large_batch_splitting:
            capacity = (max_batches - num_batches) * self._limit + room
            if size > capacity:
                raise ServingError(
                    Code.UNAVAILABLE,
                    f"{full}task size is {size} but scheduling capacity is only {capacity} (num_enqueued_batches="
                    f"{num_batches}, max_enqueued_batches={max_batches}, open_batch_size={self._limit - room}, "
                    f"max_execution_batch_size={self._limit})",
                )
        elif size > room and num_batches >= max_batches:
            raise ServingError(
                Code.UNAVAILABLE,
                f"{full}currently {num_batches} batches enqueued and max_enqueued_batches is {max_batches}",
            )

    def due(self) -> float:
        """When the first batch may run, on the clock of the tasks' `enqueued`."""
        first = self._batches[0]
        if len(self._batches) > 1 or first.size >= self._limit:
            return first.opened
        return first.opened + self._parameters.batch_timeout_micros / 1e6

    def pop(self) -> list[_Piece]:
        """Take the first batch."""
        return self._batches.popleft().pieces


class BatchScheduler:
    """The threads that run the batches of all queues, in turn.

    Args:
        num_batch_threads: how many.
        thread_pool_name: what they are called.
        listeners: told of each batch.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        num_batch_threads: int,
        thread_pool_name: str,
        listeners: Sequence[BatchListener] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.listeners = tuple(listeners)
        self.clock = clock
        self._changed = threading.Condition()
        # Only queues that hold a batch, the one that ran longest ago first; a key is a model and what is called of it.
        self._queues: OrderedDict[tuple[Hashable, Hashable], BatchQueue] = OrderedDict()
        self._num_running: Counter[Hashable] = Counter()  # model -> its batches that run
        self._when_idle: dict[Hashable, Callable[[], object]] = {}  # of models that are being closed
        self._is_draining = self._is_closed = False
        self.threads = [
            threading.Thread(target=self._work, name=f"{thread_pool_name}_{index}", daemon=True)
            for index in range(num_batch_threads)
        ]
        for thread in self.threads:
            thread.start()

    @property
    def num_enqueued_tasks(self) -> int:
        """Tasks that wait for a thread; one that was split counts in each of its batches."""
        with self._changed:
            return sum(queue.num_enqueued_tasks for queue in self._queues.values())

    def schedule(self, model: Hashable, call: Hashable, task: BatchTask, new_queue: Callable[[], BatchQueue]) -> None:
        """Put a task into a queue.

        Args:
            model: whose task.
            call: what is called of the model; tasks of the same call may run together.
            task: the task.
            new_queue: makes the queue, when there is none.

        Raises:
            ServingError: as BatchQueue.add; UNAVAILABLE after `close`.
        """
        with self._changed:
            if self._is_closed:
                raise ServingError(Code.UNAVAILABLE, "the server is stopping")
            queue = self._queues.get((model, call))
            due = None if queue is None else queue.due()
            queue = queue or new_queue()
            queue.add(task)
            self._queues[model, call] = queue
            if queue.due() != due:
                self._changed.notify()

    def close_model(self, model: Hashable, then: Callable[[], object]) -> None:
        """Run what waits of a model at once; it must get no new tasks.

        Args:
            model: the model.
            then: called after its last batch, here when nothing waits or runs.
        """
        with self._changed:
            self._when_idle[model] = then
            self._changed.notify_all()
            then = self._idle_callback(model)
        then()

    def drain(self) -> None:
        """From now on run what comes as soon as a thread is free."""
        with self._changed:
            self._is_draining = True
            self._changed.notify_all()

    def close(self) -> None:
        """Take no more tasks; the threads end when those that wait have run."""
        with self._changed:
            self._is_draining = self._is_closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            model, queue, pieces = taken
            queue.run(pieces)
            with self._changed:
                self._num_running[model] -= 1
                then = self._idle_callback(model)
            then()
            del taken, model, queue, pieces, then  # else a thread that waits would hold on to them

    def _idle_callback(self, model: Hashable) -> Callable[[], object]:
        """What is left to do when a model that is being closed has become idle."""
        if model not in self._when_idle or self._num_running[model] or any(key[0] is model for key in self._queues):
            return _nothing
        del self._num_running[model]
        return self._when_idle.pop(model)

    def _take(self) -> tuple[Hashable, BatchQueue, list[_Piece]] | None:
        """Wait for a batch; None when there will be no more."""
        with self._changed:
            while (key := self._next()) is None:
                if self._is_closed:
                    return None
                due = min((queue.due() for queue in self._queues.values()), default=None)
                self._changed.wait(None if due is None else min(due - self.clock(), threading.TIMEOUT_MAX))
            queue = self._queues.pop(key)
            pieces = queue.pop()
            if queue:
                self._queues[key] = queue
            if self._queues:
                self._changed.notify()  # this thread is busy now: another one has to look after the rest
            self._num_running[key[0]] += 1
            return key[0], queue, pieces

    def _next(self) -> tuple[Hashable, Hashable] | None:
        now = self.clock()
        for key, queue in self._queues.items():
            if queue.due() <= now or self._is_draining or key[0] in self._when_idle:
                return key
        return None


def _nothing() -> None:
    pass


class BatchingModel:
    """A model whose calls run in batches.

    Args:
        model: the model.
        parameters: sizes and times; the threads are the scheduler's.
        scheduler: runs the batches.

    Attributes:
        signatures: those of the model.
    """

    def __init__(self, model: BatchableModel, parameters: BatchingParameters, scheduler: BatchScheduler) -> None:
        self.signatures = model.signatures
        self._model = model
        self._parameters = parameters
        self._scheduler = scheduler

    def submit(
        self, signature_name: str, inputs: Arrays, outputs: Sequence[str] = (), context: CallContext | None = None
    ) -> BatchTask:
        """Let a call wait for its batch.

        Raises:
            ServingError: as SavedModel.run for what is seen without running it; INVALID_ARGUMENT for inputs that have
                no common 0th dimension or too many rows, UNAVAILABLE when too many batches wait.
        """
        signature, feeds, wanted = self._model.check(signature_name, inputs, outputs)
        task = BatchTask(feeds, context, self._scheduler.clock())

        def new_queue() -> BatchQueue:
            return BatchQueue(self._parameters, lambda pieces: self._run_batch(signature, wanted, pieces))

        self._scheduler.schedule(self, (signature_name, wanted), task, new_queue)
        return task

    def run(
        self, signature_name: str, inputs: Arrays, outputs: Sequence[str] = (), context: CallContext | None = None
    ) -> dict[str, np.ndarray]:
        """Call a signature, and wait for the batch in this thread.

        Raises:
            ServingError: as `submit` and the model; DEADLINE_EXCEEDED or CANCELLED as the context says.
        """
        return finish(self.submit(signature_name, inputs, outputs, context).__await__())

    def close(self) -> None:
        """Release the model, after the calls that wait or run."""
        self._scheduler.close_model(self, self._model.close)

    def _run_batch(self, signature: Any, outputs: tuple[str, ...], pieces: list[_Piece]) -> None:
        try:
            fitting: dict[Any, list[_Piece]] = {}
            for piece in pieces:
                if piece.task.is_wanted():
                    # Pieces of one request must not differ in length: their outputs will be put together.
                    may_pad = self._parameters.pad_variable_length_inputs and not piece.task.is_split
                    fitting.setdefault(shape_key(piece.inputs, may_pad), []).append(piece)
            for group in fitting.values():
                self._run_group(signature, outputs, group)
        except Exception as error:
            logger.exception("a batch of signature %s failed", signature.name)
            _fail(pieces, ServingError(Code.INTERNAL, f"{type(error).__name__}: {error}"))

    def _run_group(self, signature: Any, outputs: tuple[str, ...], pieces: list[_Piece]) -> None:
        sizes = [piece.size for piece in pieces]
        size = sum(sizes)
        padded_size = self._parameters.padded_size(size) if size else 0
        started = self._scheduler.clock()
        try:
            merged = merge([piece.inputs for piece in pieces], padded_size)
            results = self._model.execute(signature, merged, outputs)
        except ServingError as error:
            if len(pieces) > 1 and error.code in _ERRORS_OF_ONE_REQUEST:
                for piece in pieces:
                    self._run_group(signature, outputs, [piece])
            else:
                _fail(pieces, error)
            return
        latencies = tuple(started - piece.task.enqueued for piece in pieces)
        for piece, seconds in zip(pieces, latencies, strict=True):
            if piece.task.context is not None:
                piece.task.context.queue_seconds = seconds
        batch = BatchRun(signature.name, tuple(sizes), padded_size, padded_size - size, latencies)
        for listener in self._scheduler.listeners:
            listener(batch)
        try:
            for piece, part in zip(pieces, split(results, sizes, padded_size), strict=True):
                piece.task.complete(piece.index, part)
        except ServingError as error:
            _fail(pieces, error)


def _fail(pieces: Sequence[_Piece], error: ServingError) -> None:
    for piece in pieces:
        piece.task.fail(error)


T = TypeVar("T")


class LongWork:
    """Awaited before work that takes long and waits for nothing: whoever drives the coroutine may change the thread."""

    def wait(self) -> None:
        """See BatchTask."""

    def __await__(self) -> Generator[LongWork, None, None]:
        yield self


# What a coroutine that answers a request gives to whoever drives it.
Pause = BatchTask | LongWork


def finish(steps: Generator[Pause, None, T] | Coroutine[Pause, None, T]) -> T:
    """Drive a coroutine that awaits Pauses to its end, waiting for them in this thread."""
    try:
        while True:
            steps.send(None).wait()
    except StopIteration as end:
        return end.value
