"""What a data source must do to run in headrace. Call `check_source` from a test of your own.

Example:
    from components.ingest.contract import check_source

    def test_my_source():
        check_source(my_data.source, path="my_data.db", table="trips")
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from components.errors import DataError
from components.ingest.columns import features_of, flat_values
from components.ingest.sources import record_batches

MAX_BATCHES = 3


def check_source(source: Callable[..., Any], *, path: str | None = None, **args: Any) -> None:
    """Assert that `ingest` can read a source: batches of one schema, types that features hold, the same rows each time.

    Args:
        source: The function, called as `source(path=path, **args)`.
        path: The config's `data.path`.
        args: The config's `data.args`.

    Raises:
        AssertionError: With what the source did, and what it should do.
    """
    first, second = (_read(source, path, args) for _ in range(2))
    assert first, "the source yielded no rows"
    names = first[0].schema.names
    assert len(set(names)) == len(names), f"two columns have one name: {names}"
    for batch in first:
        assert features_of(batch.schema) == _features(first[0]), (
            f"the schema changes from {first[0].schema} to {batch.schema}; every batch must have the same"
        )
        for name, feature in features_of(batch.schema).items():
            assert len(flat_values(name, batch.column(name), feature).lengths) == batch.num_rows
    assert len(first) == len(second), "read a second time, the source yielded another number of batches"
    for one, other in zip(first, second, strict=True):
        assert one.equals(other), "read a second time, the source yielded other rows; same arguments, same rows"


def _read(source: Callable[..., Any], path: str | None, args: dict[str, Any]) -> list[pa.RecordBatch]:
    """The first batches."""
    try:
        inspect.signature(source).bind(path=path, **args)
    except TypeError as error:
        raise AssertionError(f"the source cannot be called as source(path=..., **{args}): {error}") from error
    batches = []
    try:
        for batch in record_batches(source(path=path, **args)):
            batches.append(batch)
            if len(batches) == MAX_BATCHES:
                break
    except DataError as error:
        raise AssertionError(str(error)) from error
    return batches


def _features(batch: pa.RecordBatch) -> Any:
    try:
        return features_of(batch.schema)
    except DataError as error:
        raise AssertionError(str(error)) from error
