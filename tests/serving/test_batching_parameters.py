"""BatchingParameters: what TF Serving's files say, and what does not fit together."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from serving.batching.parameters import BatchingParameters, read_parameters
from serving.errors import Code, ServingError

EVERYTHING = """
# as in TF Serving's guide
max_batch_size { value: 128 }
batch_timeout_micros { value: 0 }
max_enqueued_batches { value: 1000000 }
num_batch_threads { value: 8 }
thread_pool_name { value: "pool" }
allowed_batch_sizes: 32
allowed_batch_sizes: [64, 128]
pad_variable_length_inputs: true
enable_large_batch_splitting { value: true }
max_execution_batch_size { value: 64 }
"""


def test_every_parameter_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text(EVERYTHING)
    assert read_parameters(tmp_path / "file") == BatchingParameters(
        max_batch_size=128,
        batch_timeout_micros=0,
        max_enqueued_batches=1_000_000,
        num_batch_threads=8,
        thread_pool_name="pool",
        allowed_batch_sizes=(32, 64, 128),
        pad_variable_length_inputs=True,
        enable_large_batch_splitting=True,
        max_execution_batch_size=64,
    )


def test_what_is_left_out_has_the_schedulers_defaults(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert read_parameters(tmp_path / "file") == BatchingParameters(
        1000, 0, 10, os.cpu_count() or 1, "batch_threads", (), False, False, None
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_batch_size: 128", "1:17 : 'max_batch_size: 128': Expected \"{\"."),
        ("\nmax_batch_sise {}", 'has no field named "max_batch_sise"'),
        (
            "max_batch_size { value: 8 } allowed_batch_sizes: [2, 4]",
            "must match max_batch_size; last entry was 4; expected 8",
        ),
        ("allowed_batch_sizes: 2", "must match max_batch_size; last entry was 2; expected 1000"),
        ("max_batch_size { value: 4 } allowed_batch_sizes: [2, 2, 4]", "positive and increasing; they are [2, 2, 4]"),
        ("max_batch_size { value: 4 } allowed_batch_sizes: [0, 4]", "positive and increasing; they are [0, 4]"),
        ("max_batch_size { value: 0 }", "max_batch_size must be positive; was 0"),
        ("num_batch_threads { }", "num_batch_threads must be positive; was 0"),
        ("batch_timeout_micros { value: -1 }", "batch_timeout_micros must be non-negative; was -1"),
        (
            "max_enqueued_batches {} enable_large_batch_splitting { value: true }",
            "max_enqueued_batches must be positive; was 0",
        ),
        (
            "enable_large_batch_splitting { value: true } max_execution_batch_size { value: 1001 }",
            "greater than or equal to max_execution_batch_size; they are 1000 and 1001",
        ),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(ServingError) as raised:
        read_parameters(tmp_path / "file")
    assert raised.value.code is Code.INVALID_ARGUMENT
    assert message in raised.value.message
    assert raised.value.message.startswith(str(tmp_path / "file"))


def test_the_size_of_a_batch() -> None:
    """TF Serving reads over max_execution_batch_size, and takes no enqueued batches for one, without splitting."""
    assert (
        BatchingParameters(max_batch_size=8, max_execution_batch_size=4, max_enqueued_batches=0).batch_size_limit == 8
    )
    splitting = BatchingParameters(max_batch_size=8, max_execution_batch_size=4, enable_large_batch_splitting=True)
    assert splitting.batch_size_limit == 4
    padding = BatchingParameters(max_batch_size=8, allowed_batch_sizes=(2, 8))
    assert [padding.padded_size(size) for size in (1, 2, 3, 8)] == [2, 2, 8, 8]
    assert BatchingParameters().padded_size(3) == 3
