"""What the workers of a run tell each other beside gradients, in collectives that keep every bit.

The chief alone reads and writes files. What it read, and every decision that could differ by rounding from machine to
machine, goes to the others from here, so that all take the same way.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from components.train.cluster import rows_of


class Team:
    """The processes that train together; one process alone is a team, too, and then nothing is sent.

    Args:
        strategy: That of the run.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        together = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        resolver = strategy.cluster_resolver if together else None
        self.index: int = resolver.task_id if resolver else 0
        self.size: int = resolver.cluster_spec().num_tasks("worker") if resolver else 1
        self.is_chief = self.index == 0
        self._strategy = strategy
        self._reduce = tf.function(self._all_reduce, input_signature=[tf.TensorSpec([None], tf.int32)])

    def part_of(self, num_rows: int) -> tuple[int, int]:
        """First row and end of this worker's part of `num_rows`."""
        return rows_of(num_rows, self.size, self.index)

    def say(self, value: Any) -> Any:
        """The chief's `value` (as JSON), in every worker."""
        if self.size == 1:
            return value
        text = np.frombuffer(json.dumps(value).encode() if self.is_chief else b"", np.uint8)
        return json.loads(self._share([text])[0].tobytes())

    def hear(self, value: Any) -> list[Any]:
        """Every worker's `value` (as JSON), in every worker, by index."""
        if self.size == 1:
            return [value]
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        mine = np.zeros(self.size, np.int32)
        mine[self.index] = len(text)
        sizes = self._sum(mine)
        content = np.zeros(-(-sizes.sum() // 4) * 4, np.uint8)
        ends = np.cumsum(sizes)
        content[ends[self.index] - len(text) : ends[self.index]] = text
        parts = np.split(self._sum(content.view(np.int32)).view(np.uint8)[: sizes.sum()], ends[:-1])
        return [json.loads(part.tobytes()) for part in parts]

    def share(self, variables: Sequence[tf.Variable]) -> None:
        """Give every worker the chief's values of these variables."""
        if self.size == 1:
            return
        values = [np.asarray(variable.numpy()) for variable in variables]
        shared = self._share([value.reshape(-1).view(np.uint8) for value in values])
        for variable, value, data in zip(variables, values, shared, strict=True):
            variable.assign(data.view(value.dtype).reshape(value.shape))

    def gather(self, rows: np.ndarray, num_rows: int) -> np.ndarray:
        """`(num_rows, ...)` float32 of which each worker brings its `part_of`."""
        if self.size == 1:
            return rows
        start, stop = self.part_of(num_rows)
        whole = np.zeros((num_rows, *rows.shape[1:]), np.float32)
        whole[start:stop] = rows
        return self._sum(whole.view(np.int32).reshape(-1)).view(np.float32).reshape(whole.shape)

    def any(self, flag: bool) -> bool:
        """Whether any worker's `flag` is set."""
        return flag if self.size == 1 else bool(self._sum(np.array([flag], np.int32))[0])

    def meet(self) -> None:
        """Wait for every worker to come here."""
        if self.size > 1:
            self._sum(np.zeros(1, np.int32))

    def _share(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The chief's bytes; integers are summed with the zeros of the others, so that not a bit changes."""
        sizes = self._sum(np.array([len(part) if self.is_chief else 0 for part in parts], np.int32))
        content = np.concatenate(parts) if self.is_chief else np.zeros(sizes.sum(), np.uint8)
        padded = np.pad(content, (0, -len(content) % 4)).view(np.int32)
        shared = self._sum(padded).view(np.uint8)[: sizes.sum()]
        return [part.copy() for part in np.split(shared, np.cumsum(sizes)[:-1])]

    def _sum(self, values: np.ndarray) -> np.ndarray:
        summed: np.ndarray = self._reduce(tf.constant(values)).numpy()
        return summed

    def _all_reduce(self, values: tf.Tensor) -> tf.Tensor:
        def in_replica(values: tf.Tensor) -> tf.Tensor:
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(values))

        return self._strategy.experimental_local_results(self._strategy.run(in_replica, args=(values,)))[0]
