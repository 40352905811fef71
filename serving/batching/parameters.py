"""TF Serving's BatchingParameters: how requests are put together into batches.

Sources: tensorflow_serving/servables/tensorflow/session_bundle_config.proto (the fields; tensorflow-serving-api ships no
Python module of it), bundle_factory_util.{h,cc} (rules, messages) and TensorFlow's shared_batch_scheduler.h (defaults).

Example, a file in protobuf's text format:
    max_batch_size { value: 128 }
    batch_timeout_micros { value: 1000 }
    max_enqueued_batches { value: 100 }
    num_batch_threads { value: 4 }
    allowed_batch_sizes: 32
    allowed_batch_sizes: 128
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf import text_format

from serving.errors import ServingError, invalid_argument
from serving.message_class import message_class

# In a version's directory; read with --enable_per_model_batching_parameters.
PARAMETERS_FILE = "batching_params.pbtxt"
_TYPES = {
    "int": "google.protobuf.Int64Value",
    "int | None": "google.protobuf.Int64Value",
    "str": "google.protobuf.StringValue",
    "bool": "google.protobuf.BoolValue",
    "Sequence[int]": "repeated int64",
}


@dataclass(frozen=True)
class BatchingParameters:
    """How requests are put together into batches.

    Attributes:
        max_batch_size: rows that a request may have, and a batch unless `enable_large_batch_splitting` says otherwise.
        batch_timeout_micros: how long a batch waits for more rows, from its first on; 0 takes what is there as soon as
            a thread is free.
        max_enqueued_batches: batches of one queue that may wait, 0 as 1; a request beyond is refused with UNAVAILABLE.
        num_batch_threads: threads that run batches, shared by all models.
        thread_pool_name: the name of these threads, also in metrics.
        allowed_batch_sizes: sizes, ascending, to which batches are padded by repeating a row; the last must be
            `max_batch_size`. Empty means any size.
        pad_variable_length_inputs: whether inputs that differ in shape are padded to the largest in their batch, each
            with its own first value; otherwise they run in batches apart.
        enable_large_batch_splitting: whether a request may be spread over several batches.
        max_execution_batch_size: rows of a batch when splitting is on, else not used; None means `max_batch_size`.

    Raises:
        ServingError: INVALID_ARGUMENT for values that are out of range or do not fit each other.
    """

    max_batch_size: int = 1000
    batch_timeout_micros: int = 0
    max_enqueued_batches: int = 10
    num_batch_threads: int = field(default_factory=lambda: os.cpu_count() or 1)
    thread_pool_name: str = "batch_threads"
    allowed_batch_sizes: Sequence[int] = ()
    pad_variable_length_inputs: bool = False
    enable_large_batch_splitting: bool = False
    max_execution_batch_size: int | None = None

    def __post_init__(self) -> None:
        least = {
            "max_batch_size": 1,
            "batch_timeout_micros": 0,
            "max_enqueued_batches": 1 if self.enable_large_batch_splitting else 0,
            "num_batch_threads": 1,
            "max_execution_batch_size": 1,
        }
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise invalid_argument(f"{name} must be {'positive' if bound else 'non-negative'}; was {value}")
        if self.batch_size_limit > self.max_batch_size:
            raise invalid_argument(
                "When enable_large_batch_splitting is true, max_batch_size must be greater than or equal to "
                f"max_execution_batch_size; they are {self.max_batch_size} and {self.max_execution_batch_size}"
            )
        sizes = list(self.allowed_batch_sizes)
        if sizes and sizes[-1] != self.max_batch_size:
            raise invalid_argument(
                "Last entry in allowed_batch_sizes must match max_batch_size; last entry was "
                f"{sizes[-1]}; expected {self.max_batch_size}"
            )
        if sizes != sorted(set(sizes)) or (sizes and sizes[0] < 1):
            raise invalid_argument(f"allowed_batch_sizes entries must be positive and increasing; they are {sizes}")

    @property
    def batch_size_limit(self) -> int:
        """The rows of a full batch."""
        if self.enable_large_batch_splitting and self.max_execution_batch_size is not None:
            return self.max_execution_batch_size
        return self.max_batch_size

    def padded_size(self, size: int) -> int:
        """The number of rows with which a batch of `size` rows runs."""
        return next((allowed for allowed in self.allowed_batch_sizes if allowed >= size), size)


_fields = {parameter.name: _TYPES[str(parameter.type)] for parameter in dataclasses.fields(BatchingParameters)}
_Message = message_class("BatchingParameters", _fields | {"pad_variable_length_inputs": "bool"})


def read_parameters(path: Path) -> BatchingParameters:
    """Read BatchingParameters in protobuf's text format.

    Args:
        path: the file.

    Raises:
        ServingError: INVALID_ARGUMENT, naming the file, and the line where its syntax is wrong.
        OSError: it cannot be read.
    """
    try:
        message = text_format.Parse(path.read_bytes(), _Message())
    except text_format.ParseError as error:
        raise invalid_argument(
            f"{path} is no BatchingParameters in protobuf's text format: {error}. Most values are wrapped, as in "
            "max_batch_size { value: 128 }"
        ) from error
    values = {descriptor.name: value for descriptor, value in message.ListFields()}
    given = {name: getattr(value, "value", value) for name, value in values.items()}
    if "allowed_batch_sizes" in given:
        given["allowed_batch_sizes"] = tuple(given["allowed_batch_sizes"])
    try:
        return BatchingParameters(**given)
    except ServingError as error:
        raise ServingError(error.code, f"{path}: {error.message}") from error
