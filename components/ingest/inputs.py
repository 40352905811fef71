"""Several paths read as one: their batches one after the other, with columns and types that all of them have room in."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pyarrow as pa

from components.errors import DataError


def alike(streams: Sequence[Iterator[pa.RecordBatch]], names: Sequence[str]) -> list[Iterator[pa.RecordBatch]]:
    """Give the batches of several sources the columns and types of all: missing columns are null, types are widened.

    Every source is begun, since its first batch has its types.

    Args:
        streams: Each of one schema.
        names: What messages call each of them.

    Raises:
        DataError: a column is of types that no type has room for, such as numbers here and text there.
    """
    if len(streams) == 1:
        return list(streams)
    firsts = [next(stream, None) for stream in streams]
    schemas = {
        name: first.schema.remove_metadata() for name, first in zip(names, firsts, strict=True) if first is not None
    }
    schema = _of_all(schemas)
    return [
        iter(()) if first is None else _cast(itertools.chain([first], stream), schemas[name], schema, name)
        for stream, first, name in zip(streams, firsts, names, strict=True)
    ]


def _of_all(schemas: dict[str, pa.Schema]) -> pa.Schema:
    try:
        return pa.unify_schemas(list(schemas.values()), promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise DataError(
            f"data.path: {_difference(schemas)}. Give the column one type, by data.args.types where the source has it."
        ) from error


def _difference(schemas: dict[str, pa.Schema]) -> str:
    """The column that has no common type, and where."""
    seen: dict[str, tuple[str, pa.DataType]] = {}
    for name, schema in schemas.items():
        for field in schema:
            before, kind = seen.setdefault(field.name, (name, field.type))
            one, other = (pa.schema([(field.name, each)]) for each in (kind, field.type))
            try:
                pa.unify_schemas([one, other], promote_options="permissive")
            except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
                return f"column '{field.name}' is {kind} in {before} and {field.type} in {name}"
    return f"the columns of {', '.join(schemas)} differ"


def _cast(batches: Iterator[pa.RecordBatch], own: pa.Schema, schema: pa.Schema, name: str) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        if batch.schema.remove_metadata() != own:
            yield batch  # a source that changes its mind is told so further on
            continue
        try:
            columns = [
                batch.column(field.name).cast(field.type)
                if field.name in own.names
                else pa.nulls(batch.num_rows, field.type)
                for field in schema
            ]
        except pa.ArrowInvalid as error:
            raise DataError(f"data.path: {name} does not fit the types of the other paths: {error}.") from error
        yield pa.RecordBatch.from_arrays(columns, schema=schema)
