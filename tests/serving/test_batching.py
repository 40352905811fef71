"""Dynamic batching over a fake model: what runs together, when, with what, and who hears of a failure."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from serving.batching.parameters import BatchingParameters
from serving.batching.scheduler import BatchingModel, BatchQueue, BatchRun, BatchScheduler, BatchTask
from serving.calls import CallContext
from serving.errors import Code, ServingError, invalid_argument

SECONDS = 20.0  # no test waits so long unless the code is broken
Inputs = dict[str, np.ndarray]


class FakeModel:
    """y = 2 * x; notes its calls, refuses negative numbers, and waits while it is held."""

    def __init__(self) -> None:
        self.signatures = {"s": SimpleNamespace(name="s"), "t": SimpleNamespace(name="t")}
        self.calls: list[np.ndarray] = []
        self.names: list[str] = []
        self.running = threading.Semaphore(0)
        self.free = threading.Event()
        self.free.set()
        self.closed = threading.Event()

    def check(self, signature_name: str, inputs: Inputs, outputs: Sequence[str]) -> tuple[Any, Inputs, tuple[str, ...]]:
        if inputs["x"].dtype != np.float32:
            raise invalid_argument(f"Expects arg[x] to be float but {inputs['x'].dtype} is provided")
        return self.signatures[signature_name], inputs, tuple(outputs) or ("y",)

    def execute(self, signature: Any, feeds: Inputs, outputs: tuple[str, ...]) -> Inputs:
        assert not self.closed.is_set()
        self.calls.append(feeds["x"])
        self.names.append(signature.name)
        self.running.release()
        assert self.free.wait(SECONDS)
        if (feeds["x"] < 0).any():
            raise invalid_argument("a negative number")
        return dict.fromkeys(outputs, feeds["x"] * 2)

    def close(self) -> None:
        self.closed.set()

    @property
    def rows(self) -> list[int]:
        return [len(call) for call in self.calls]


class Server:
    """A fake model behind batching, with requests in threads of their own."""

    def __init__(self, model: FakeModel, parameters: BatchingParameters, listeners: Any) -> None:
        self.model = model
        self.scheduler = BatchScheduler(parameters.num_batch_threads, "test", listeners)
        self.batching = BatchingModel(model, parameters, self.scheduler)
        self.clients = ThreadPoolExecutor(64)

    def submit(self, *values: float, name: str = "s", context: CallContext | None = None) -> BatchTask:
        return self.batching.submit(name, {"x": np.array(values, np.float32)}, (), context)

    def hold(self) -> BatchTask:
        """Keep the batch thread busy, until `model.free` is set."""
        while self.model.running.acquire(blocking=False):
            pass
        self.model.free.clear()
        task = self.submit(1000)
        assert self.model.running.acquire(timeout=SECONDS)
        return task


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def make(model: FakeModel | None = None, listeners: Any = (), **parameters: Any) -> Server:
        given = {"num_batch_threads": 1, **parameters}
        servers.append(Server(model or FakeModel(), BatchingParameters(**given), listeners))
        return servers[-1]

    yield make
    for server in servers:
        server.model.free.set()
        server.batching.close()
        server.scheduler.close()
        for thread in server.scheduler.threads:
            thread.join(SECONDS)
            assert not thread.is_alive()
        assert server.model.closed.wait(SECONDS)
        server.clients.shutdown()


def result(task: BatchTask) -> Inputs:
    steps = task.__await__()
    next(steps)
    task.wait()
    try:
        next(steps)
    except StopIteration as end:
        return end.value
    raise AssertionError("a task gives one result")


def answers(*tasks: BatchTask) -> list[list[float]]:
    return [result(task)["y"].tolist() for task in tasks]


def error_of(task: BatchTask) -> ServingError:
    with pytest.raises(ServingError) as raised:
        result(task)
    return raised.value


def task_of(size: int, enqueued: float = 0.0) -> BatchTask:
    return BatchTask({"x": np.zeros(size, np.float32)}, None, enqueued)


def queue_of(**parameters: Any) -> BatchQueue:
    return BatchQueue(BatchingParameters(**parameters), lambda pieces: None)


# When a batch runs


def test_what_waits_while_the_thread_is_busy_runs_together(serve: Callable[..., Server]) -> None:
    server = serve()
    first = server.hold()
    tasks = [server.submit(1), server.submit(2, 3), server.submit(4)]
    assert server.scheduler.num_enqueued_tasks == 3
    server.model.free.set()
    assert answers(first, *tasks) == [[2000], [2], [4, 6], [8]]
    assert server.model.rows == [1, 4]
    assert server.scheduler.num_enqueued_tasks == 0


def test_a_full_batch_does_not_wait_for_the_timeout(serve: Callable[..., Server]) -> None:
    server = serve(max_batch_size=4, batch_timeout_micros=10**15)
    tasks = [server.submit(1, 2), server.submit(3), server.submit(4)]
    assert answers(*tasks) == [[2, 4], [6], [8]]
    assert server.model.rows == [4]


def test_a_task_that_does_not_fit_closes_the_batch(serve: Callable[..., Server]) -> None:
    server = serve(max_batch_size=4, batch_timeout_micros=10**15)
    first, second = server.submit(1, 2, 3), server.submit(4, 5)
    assert answers(first) == [[2, 4, 6]]
    third = server.submit(6, 7)
    assert answers(second, third) == [[8, 10], [12, 14]]
    assert server.model.rows == [3, 4]


def test_a_batch_is_due_when_its_first_task_has_waited_the_timeout() -> None:
    queue = queue_of(max_batch_size=3, batch_timeout_micros=500_000)
    queue.add(task_of(1, enqueued=10.0))
    queue.add(task_of(1, enqueued=10.4))
    assert queue.due() == 10.5
    queue.add(task_of(1, enqueued=10.45))
    assert queue.due() == 10.0
    queue.add(task_of(1, enqueued=11.0))
    assert [piece.size for piece in queue.pop()] == [1, 1, 1]
    assert queue.due() == 11.5


def test_the_timeout_ends_on_the_schedulers_clock(serve: Callable[..., Server]) -> None:
    now = [100.0]
    model = FakeModel()
    scheduler = BatchScheduler(1, "test", clock=lambda: now[0])
    batching = BatchingModel(model, BatchingParameters(batch_timeout_micros=3_600_000_000), scheduler)
    task = batching.submit("s", {"x": np.ones(1, np.float32)})
    now[0] += 3600
    other = batching.submit("t", {"x": np.ones(1, np.float32)})  # wakes the thread, which finds the first one due
    assert answers(task) == [[2]]
    assert model.names == ["s"]
    scheduler.close()
    assert answers(other) == [[2]]


def test_each_signature_and_output_filter_has_its_batches(serve: Callable[..., Server]) -> None:
    server = serve()
    held = server.hold()
    tasks = [server.submit(1), server.submit(2, name="t"), server.submit(3)]
    filtered = server.batching.submit("s", {"x": np.ones(1, np.float32)}, ("z",))
    server.model.free.set()
    assert answers(held, *tasks) == [[2000], [2], [4], [6]]
    assert list(result(filtered)) == ["z"]
    assert server.model.names == ["s", "s", "t", "s"]


def test_queues_take_turns(serve: Callable[..., Server]) -> None:
    server = serve(max_batch_size=1, max_enqueued_batches=100)
    held = server.hold()
    busy = [server.submit(value) for value in range(5)]
    rare = server.submit(7, name="t")
    server.model.free.set()
    answers(held, *busy, rare)
    assert server.model.names == ["s", "s", "t", "s", "s", "s", "s"]


def test_threads_run_batches_at_the_same_time(serve: Callable[..., Server]) -> None:
    server = serve(num_batch_threads=3, max_batch_size=1)
    server.model.free.clear()
    tasks = [server.submit(value) for value in range(3)]
    for _ in range(3):
        assert server.model.running.acquire(timeout=SECONDS)
    server.model.free.set()
    assert answers(*tasks) == [[0], [2], [4]]


# What it runs with


def test_a_batch_is_padded_to_the_next_allowed_size(serve: Callable[..., Server]) -> None:
    runs: list[BatchRun] = []
    server = serve(max_batch_size=8, allowed_batch_sizes=(2, 4, 8), listeners=[runs.append])
    held = server.hold()
    tasks = [server.submit(1), server.submit(2, 3)]
    server.model.free.set()
    assert answers(held, *tasks) == [[2000], [2], [4, 6]]
    assert [call.tolist() for call in server.model.calls] == [[1000, 1000], [1, 2, 3, 2]]
    assert [(run.input_batch_size, run.processed_batch_size, run.padding_size) for run in runs] == [
        ((1,), 2, 1),
        ((1, 2), 4, 1),
    ]
    assert all(seconds >= 0 for run in runs for seconds in run.queuing_latency_seconds)


def test_other_shapes_run_in_batches_apart(serve: Callable[..., Server]) -> None:
    server = serve()
    held = server.hold()
    inputs = [np.ones(shape, np.float32) for shape in [(1, 2), (2, 3), (1, 2)]]
    tasks = [server.batching.submit("s", {"x": array}) for array in inputs]
    server.model.free.set()
    result(held)
    for task, array in zip(tasks, inputs, strict=True):
        np.testing.assert_array_equal(result(task)["y"], array * 2)
    assert [call.shape for call in server.model.calls[1:]] == [(2, 2), (2, 3)]


def test_variable_lengths_are_padded_with_the_first_value_of_their_request(serve: Callable[..., Server]) -> None:
    server = serve(pad_variable_length_inputs=True, max_batch_size=4, allowed_batch_sizes=(4,))
    held = server.hold()
    tasks = [server.batching.submit("s", {"x": np.array(rows, np.float32)}) for rows in ([[5]], [[1, 2, 3], [4, 5, 6]])]
    other_rank = server.submit(9)
    server.model.free.set()
    result(held)
    assert result(tasks[0])["y"].tolist() == [[10, 10, 10]]
    assert answers(other_rank) == [[18]]
    assert server.model.calls[1].tolist() == [[5, 5, 5], [1, 2, 3], [4, 5, 6], [1, 2, 3]]


def test_rows_without_a_value_run_alone_when_lengths_are_padded(serve: Callable[..., Server]) -> None:
    server = serve(pad_variable_length_inputs=True)
    held = server.hold()
    tasks = [server.batching.submit("s", {"x": np.ones(shape, np.float32)}) for shape in [(1, 0), (1, 2)]]
    server.model.free.set()
    result(held)
    assert [result(task)["y"].shape for task in tasks] == [(1, 0), (1, 2)]


def test_requests_without_rows_are_answered(serve: Callable[..., Server]) -> None:
    server = serve(max_batch_size=4, allowed_batch_sizes=(4,))
    assert answers(server.submit()) == [[]]
    held = server.hold()
    tasks = [server.submit(), server.submit(1), server.submit()]
    server.model.free.set()
    assert answers(held, *tasks) == [[2000], [], [2], []]
    assert server.model.rows == [0, 4, 4]


def test_a_large_request_is_spread_over_batches_and_put_together_in_order(serve: Callable[..., Server]) -> None:
    server = serve(
        max_batch_size=20, enable_large_batch_splitting=True, max_execution_batch_size=4, num_batch_threads=2
    )
    server.model.free.clear()
    held = [server.submit(1000), server.submit(1001)]
    small, large = server.submit(1), server.submit(*range(10))
    server.model.free.set()
    answers(*held)
    assert answers(small, large) == [[2], [2 * value for value in range(10)]]
    assert max(server.model.rows) == 4


def test_the_pieces_fill_the_open_batch_first() -> None:
    queue = queue_of(max_batch_size=20, enable_large_batch_splitting=True, max_execution_batch_size=4)
    queue.add(task_of(3))
    queue.add(task_of(10))
    assert [[piece.size for piece in queue.pop()] for _ in range(len(queue))] == [[3, 1], [4], [4], [1]]


# What is refused


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "Batching Run() must have at least one input tensor"),
        ({"x": np.float32(1)}, "Batching Run() input tensors must have at least one dimension"),
        ({"x": np.ones(2), "z": np.ones(3)}, "Batching Run() input tensors must have equal 0th-dimension size"),
    ],
)
def test_inputs_need_a_common_batch_dimension(inputs: Inputs, message: str) -> None:
    with pytest.raises(ServingError) as raised:
        BatchTask({alias: np.asarray(value) for alias, value in inputs.items()}, None, 0.0)
    assert (raised.value.code, raised.value.message) == (Code.INVALID_ARGUMENT, message)


def test_a_request_that_the_signature_refuses_joins_no_batch(serve: Callable[..., Server]) -> None:
    server = serve()
    with pytest.raises(ServingError, match=r"Expects arg\[x\] to be float but int64"):
        server.batching.run("s", {"x": np.ones(1, np.int64)})
    assert server.scheduler.num_enqueued_tasks == 0


def test_a_full_queue_refuses_and_recovers(serve: Callable[..., Server]) -> None:
    server = serve(max_batch_size=2, max_enqueued_batches=2)
    held = server.hold()
    waiting = [server.submit(1, 2), server.submit(3)]
    with pytest.raises(ServingError) as raised:
        server.submit(4, 5)
    assert raised.value.code is Code.UNAVAILABLE
    assert raised.value.message == (
        "The batch scheduling queue to which this task was submitted is full; currently 2 batches enqueued and "
        "max_enqueued_batches is 2"
    )
    waiting.append(server.submit(6))  # there is room for one row
    other = server.submit(7, name="t")  # another queue is not full
    server.model.free.set()
    assert answers(held, *waiting, other) == [[2000], [2, 4], [6], [12], [14]]
    assert answers(server.submit(4, 5)) == [[8, 10]]


def test_the_capacity_of_a_queue_that_splits() -> None:
    queue = queue_of(
        max_batch_size=10, enable_large_batch_splitting=True, max_execution_batch_size=4, max_enqueued_batches=2
    )
    queue.add(task_of(3))
    with pytest.raises(
        ServingError, match=r"task size is 6 but scheduling capacity is only 5 \(num_enqueued_batches=1"
    ):
        queue.add(task_of(6))
    queue.add(task_of(5))
    assert len(queue) == 2


def test_too_many_rows() -> None:
    for parameters in ({}, {"enable_large_batch_splitting": True, "max_execution_batch_size": 2}):
        with pytest.raises(ServingError) as raised:
            queue_of(max_batch_size=4, **parameters).add(task_of(5))
        assert raised.value.code is Code.INVALID_ARGUMENT
        assert raised.value.message == "Task size 5 is larger than maximum input batch size 4"


# Failures


def test_only_the_request_that_the_model_refuses_fails(serve: Callable[..., Server]) -> None:
    server = serve()
    held = server.hold()
    tasks = [server.submit(1), server.submit(-2), server.submit(3)]
    server.model.free.set()
    result(held)
    assert error_of(tasks[1]).message == "a negative number"
    assert answers(tasks[0], tasks[2]) == [[2], [6]]
    assert server.model.rows == [1, 3, 1, 1, 1]


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (ServingError(Code.RESOURCE_EXHAUSTED, "no memory"), Code.RESOURCE_EXHAUSTED, "no memory"),
        (ValueError("broken"), Code.INTERNAL, "ValueError: broken"),
    ],
)
def test_other_failures_are_those_of_the_whole_batch(
    serve: Callable[..., Server], raised: Exception, code: Code, message: str
) -> None:
    class Broken(FakeModel):
        def execute(self, signature: Any, feeds: Inputs, outputs: tuple[str, ...]) -> Inputs:
            found = super().execute(signature, feeds, outputs)
            if len(feeds["x"]) > 1:
                raise raised
            return found

    server = serve(Broken())
    held = server.hold()
    tasks = [server.submit(1), server.submit(2)]
    server.model.free.set()
    result(held)
    assert [(error_of(task).code, error_of(task).message) for task in tasks] == [(code, message)] * 2
    assert server.model.rows == [1, 2]
    assert answers(server.submit(3)) == [[6]]  # the thread lives


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (np.float32(1), "Batched output tensor has 0 dimensions"),
        (np.ones(3), "Batched output tensor's 0th dimension does not equal the sum of the 0th dimension sizes of the"),
    ],
)
def test_outputs_need_the_batch_dimension(serve: Callable[..., Server], y: Any, message: str) -> None:
    class Reduces(FakeModel):
        def execute(self, signature: Any, feeds: Inputs, outputs: tuple[str, ...]) -> Inputs:
            super().execute(signature, feeds, outputs)
            return {"y": np.asarray(y)}

    error = error_of(serve(Reduces()).submit(1, 2))
    assert error.code is Code.FAILED_PRECONDITION
    assert error.message.startswith(message)


# Those who do not wait any longer


def test_nothing_runs_for_whom_nobody_waits(serve: Callable[..., Server]) -> None:
    server = serve()
    held = server.hold()
    gone, late, there = CallContext(), CallContext(), CallContext(deadline=time.monotonic() + 1000)
    tasks = [server.submit(1, context=gone), server.submit(2, context=late), server.submit(3, context=there)]
    gone.cancel()
    late.deadline = time.monotonic()
    server.model.free.set()
    result(held)
    assert answers(tasks[2]) == [[6]]
    assert [error_of(task).code for task in tasks[:2]] == [Code.CANCELLED, Code.DEADLINE_EXCEEDED]
    assert server.model.rows == [1, 1]


def test_the_waiter_goes_at_its_deadline_while_the_batch_runs(serve: Callable[..., Server]) -> None:
    server = serve()
    held = server.hold()
    with pytest.raises(ServingError) as raised:
        server.batching.run("s", {"x": np.ones(1, np.float32)}, (), CallContext(deadline=time.monotonic() + 0.01))
    assert raised.value.code is Code.DEADLINE_EXCEEDED
    server.model.free.set()
    assert answers(held, server.submit(1)) == [[2000], [2]]


def test_a_callback_that_fails_harms_no_one(serve: Callable[..., Server], caplog: pytest.LogCaptureFixture) -> None:
    server = serve()
    held = server.hold()
    tasks = [server.submit(1), server.submit(2)]
    tasks[0].add_done_callback(lambda: 1 / 0)
    server.model.free.set()
    assert answers(held, tasks[1]) == [[2000], [4]]
    assert "ZeroDivisionError" in caplog.text


def test_close_runs_what_waits_and_then_releases_the_model(serve: Callable[..., Server]) -> None:
    server = serve(batch_timeout_micros=10**15, max_batch_size=2)
    server.model.free.clear()
    running = server.submit(1, 2)
    assert server.model.running.acquire(timeout=SECONDS)
    waiting = server.submit(3)
    other = serve(FakeModel())  # a model of another scheduler, to see that it is left alone
    server.batching.close()
    assert not server.model.closed.is_set()
    server.model.free.set()
    assert answers(running, waiting) == [[2, 4], [6]]
    assert server.model.closed.wait(SECONDS)
    assert answers(other.submit(1)) == [[2]]


def test_close_waits_for_the_last_batch(serve: Callable[..., Server]) -> None:
    server = serve()
    running = server.hold()
    server.batching.close()
    assert not server.model.closed.is_set()
    server.model.free.set()
    assert answers(running) == [[2000]]
    assert server.model.closed.wait(SECONDS)


def test_a_scheduler_that_is_closed_refuses_runs_what_waits_and_ends(serve: Callable[..., Server]) -> None:
    server = serve(batch_timeout_micros=10**15)
    waiting = server.submit(1)
    server.scheduler.close()
    with pytest.raises(ServingError, match="UNAVAILABLE: the server is stopping"):
        server.submit(2)
    assert answers(waiting) == [[2]]


@pytest.mark.parametrize("seed", range(6))
def test_any_mix_of_requests_gets_the_answers_it_would_get_alone(serve: Callable[..., Server], seed: int) -> None:
    """Many threads, sizes, shapes, refused requests and short deadlines, under every kind of parameters."""
    chance = random.Random(seed)
    max_batch_size = chance.choice([4, 16, 64])
    runs: list[BatchRun] = []
    server = serve(
        listeners=[runs.append],
        max_batch_size=max_batch_size,
        max_enqueued_batches=10_000,
        num_batch_threads=chance.choice([1, 3]),
        batch_timeout_micros=chance.choice([0, 200]),
        allowed_batch_sizes=chance.choice([(), (3, max_batch_size)]),
        pad_variable_length_inputs=chance.random() < 0.5,
        enable_large_batch_splitting=seed % 2 == 0,
        max_execution_batch_size=3 if seed % 2 == 0 else None,
    )

    def call(number: int) -> str:
        own = random.Random(1000 * seed + number)
        shape = (own.randint(0, max_batch_size), own.choice([1, 2, 5]))
        x = np.arange(number, number + shape[0] * shape[1], dtype=np.float32).reshape(shape)
        is_bad = shape[0] > 0 and own.random() < 0.1
        if is_bad:
            x[-1, -1] = -1
        context = CallContext(deadline=time.monotonic() if own.random() < 0.1 else None)
        try:
            y = server.batching.run(own.choice(["s", "t"]), {"x": x}, (), context)["y"]
        except ServingError as error:
            expected = {Code.DEADLINE_EXCEEDED} if context.deadline else {Code.INVALID_ARGUMENT} if is_bad else set()
            return "failed" if error.code in expected else f"{number}: {error}"
        np.testing.assert_array_equal(y[:, : shape[1]], x * 2)
        return "ok"

    found = list(server.clients.map(call, range(300)))
    assert set(found) == {"ok", "failed"}
    assert sum(len(run.input_batch_size) for run in runs) >= found.count("ok")
    assert all(run.processed_batch_size <= max_batch_size for run in runs)
