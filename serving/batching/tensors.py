"""Requests to one batch and back: the arithmetic of dynamic batching, without threads.

Rules and messages are those of tensorflow_serving/batching: batching_util.h (batch size), batching_session.cc
(MergeInputTensors, SplitOutputTensors) and batching_util.cc (padding of variable lengths).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from serving.errors import Code, ServingError, invalid_argument

Arrays = Mapping[str, np.ndarray]


def batch_size(inputs: Arrays) -> int:
    """The rows of a request: the 0th dimension, which all inputs share.

    Raises:
        ServingError: INVALID_ARGUMENT when they do not.
    """
    if not inputs:
        raise invalid_argument("Batching Run() must have at least one input tensor")
    if any(array.ndim == 0 for array in inputs.values()):
        raise invalid_argument("Batching Run() input tensors must have at least one dimension")
    sizes = {len(array) for array in inputs.values()}
    if len(sizes) > 1:
        raise invalid_argument("Batching Run() input tensors must have equal 0th-dimension size")
    return sizes.pop()


def shape_key(inputs: Arrays, pad_variable_length: bool) -> Any:
    """What requests must have in common to run in one batch: the shape of a row, or with padding its rank."""
    return tuple((alias, array.ndim if pad_variable_length else array.shape[1:]) for alias, array in inputs.items())


def merge(requests: Sequence[Arrays], padded_size: int) -> Arrays:
    """The inputs of several requests as those of one.

    Rows that are shorter than others are padded with the first value of their request; rows beyond the last one repeat
    the first of the last request, which is known to be valid.

    Args:
        requests: alias -> array `(rows, ...)`, of one `shape_key`.
        padded_size: rows of the result, not less than the requests have together.

    Raises:
        ServingError: INVALID_ARGUMENT for rows without a value to pad them with.
    """
    if len(requests) == 1 and padded_size == batch_size(requests[0]):
        return requests[0]
    return {alias: _concatenate([request[alias] for request in requests], padded_size) for alias in requests[0]}


def _concatenate(arrays: Sequence[np.ndarray], padded_size: int) -> np.ndarray:
    if len({array.shape[1:] for array in arrays}) > 1:
        longest = tuple(np.max([array.shape[1:] for array in arrays], axis=0))
        arrays = [_padded(array, longest) for array in arrays]
    missing = padded_size - sum(map(len, arrays))
    if missing:
        row = next(array[:1] for array in reversed(arrays) if len(array))
        arrays = [*arrays, np.repeat(row, missing, axis=0)]
    return np.concatenate(arrays)


def _padded(array: np.ndarray, row_shape: tuple[int, ...]) -> np.ndarray:
    if array.shape[1:] == row_shape:
        return array
    if len(array) and not array.size:
        raise invalid_argument("Got empty tensor in batch of non-empty tensors.")
    padded = np.full((len(array), *row_shape), array.flat[0] if len(array) else 0, array.dtype)
    padded[tuple(map(slice, array.shape))] = array
    return padded


def split(outputs: Arrays, sizes: Iterable[int], padded_size: int) -> list[dict[str, np.ndarray]]:
    """The outputs of a batch as those of its requests, in order.

    Args:
        outputs: alias -> array.
        sizes: the rows of each request.
        padded_size: the rows the batch ran with.

    Raises:
        ServingError: FAILED_PRECONDITION for outputs without the batch as their 0th dimension.
    """
    for array in outputs.values():
        if array.ndim == 0:
            raise ServingError(Code.FAILED_PRECONDITION, "Batched output tensor has 0 dimensions")
        if len(array) != padded_size:
            raise ServingError(
                Code.FAILED_PRECONDITION,
                "Batched output tensor's 0th dimension does not equal the sum of the 0th dimension sizes of the input "
                "tensors",
            )
    parts = []
    start = 0
    for size in sizes:
        parts.append({alias: array[start : start + size] for alias, array in outputs.items()})
        start += size
    return parts
