"""Step `ingest`: raw data to examples, divided into train, validation and test."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from components import artifacts, object_store, plugins, progress
from components.config import DataConfig
from components.errors import DataError, HeadraceError
from components.examples import LEAKAGE_FILE, write_info
from components.external import data_inputs
from components.ingest.inputs import alike
from components.ingest.rows import Rows
from components.ingest.sources import record_batches
from components.spans import Input


@dataclass(frozen=True)
class IngestResult:
    """What was written.

    Attributes:
        num_examples: Rows of each split.
        num_shards: Files of each split.
        features: Type of each column, the label among them.
        label: The column to predict.
        warnings: What was left out, a line each.
        inputs: Path, span, version and split of what was read, where `data.path` or `data.split` leaves it open.
        cut_offs: Of a split by time, where `validation` and `test` begin.
        leakage: What splits share, as anomalies, which `validate` tells of.
    """

    num_examples: dict[str, int]
    num_shards: dict[str, int]
    features: dict[str, str]
    label: str
    warnings: list[str] = field(default_factory=list)
    inputs: list[dict[str, Any]] = field(default_factory=list)
    cut_offs: dict[str, Any] = field(default_factory=dict)
    leakage: list[dict[str, str]] = field(default_factory=list)


def ingest(*, examples: Path, config: DataConfig, encoded: Sequence[Path] = ()) -> IngestResult:
    """Read the source once and write its rows as examples.

    Args:
        examples: Where the artifact will stand (see `components.examples`).
        config: Source, label, splits.
        encoded: Artifacts of `encode`, all of one division; the rows are taken from them, and the source is not read.

    Returns:
        The counts.

    Raises:
        ConfigError: the source does not exist or takes no such argument.
        DataError: the data cannot be read, lacks a column, or leaves a split empty; or it changed while it was encoded.
    """
    with artifacts.writing(examples, step="ingest", inputs={}, config=config) as out:
        rows = Rows(out.path, config)
        if encoded:
            warnings = rows.take(encoded)
        elif config.engine == "spark":
            from components.ingest.on_spark import read_on_spark  # which reads by the functions here

            warnings = read_on_spark(rows, config, out.scratch)
        else:
            warnings = read_rows(rows, config, out.scratch / "data")
        info, num_shards, anomalies = rows.finish()
        write_info(out.path, info)
        leakage = [dataclasses.asdict(anomaly) for anomaly in anomalies]
        (out.path / LEAKAGE_FILE).write_text(json.dumps(leakage, indent=1) + "\n")
        kinds = {name: feature.type for name, feature in info.features.items()}
        read = (warnings, rows.inputs, rows.cut_offs, leakage)
        out.result = IngestResult(info.num_examples, num_shards, kinds, info.label, *read)
    result: IngestResult = out.result
    return result


def read_rows(rows: Rows, config: DataConfig, scratch: Path) -> list[str]:
    """Read the source into `rows`, as far as they have room.

    Args:
        rows: Takes the batches.
        config: Source and limit.
        scratch: Where objects of a store are copied to first.

    Returns:
        What the source told of, such as files that it left out.

    Raises:
        ConfigError, DataError: as `ingest`.
    """
    inputs = find_inputs(rows, config)
    with contextlib.ExitStack() as stack, progress.warnings_kept() as warnings:
        local = [
            stack.enter_context(
                object_store.local_data(config.model_copy(update={"path": each.path}), scratch / str(number))
            )
            for number, each in enumerate(inputs)
        ]
        names = [str(each.path) for each in inputs]
        if rows.needs_times:
            rows.see_times(itertools.chain(*alike([read_source(each) for each in local], names)))
            warnings.clear()  # told again in the second pass
        for each, batches in zip(inputs, alike([read_source(each) for each in local], names), strict=True):
            write_batches(rows, batches, each.split)
            if rows.full:
                break
        return warnings


def find_inputs(rows: Rows, config: DataConfig) -> list[Input]:
    """What is to be read; `rows` keeps a record of it, unless the configuration says it all.

    Raises:
        DataError: as `components.external.data_inputs`.
    """
    inputs = data_inputs(config)
    rows.inputs = [each.record() for each in inputs] if [each.path for each in inputs] != [config.path] else []
    return inputs


def write_batches(rows: Rows, batches: Iterable[pa.RecordBatch], part: str | None = None) -> None:
    """Write batches, of files of the split `part` if files decide, as far as the rows have room."""
    for batch in batches:
        rows.write(batch, part)
        if rows.full:
            break


def read_source(config: DataConfig, files: Sequence[Path] | None = None) -> Iterator[pa.RecordBatch]:
    """The record batches of the configured source.

    Args:
        config: The source.
        files: What a source that takes `files` is to read of `data.path`; by default, all.

    Raises:
        ConfigError: there is no such source, or it takes no such argument.
        DataError: it yields what nobody can make record batches of, or a source of the user's fails.
    """
    source = plugins.resolve(config.source, plugins.SOURCES, "data.source")
    given: dict[str, Any] = {"path": config.path, **({} if files is None else {"files": [str(file) for file in files]})}
    plugins.check_arguments(source, config.args, f"data.args of source '{config.source}'", **given)
    try:
        yield from record_batches(source(**given, **config.args))
    except HeadraceError:
        raise
    except Exception as error:
        if not plugins.is_own(config.source):
            raise
        raise DataError(
            f"data.source: '{config.source}' failed: {plugins.describe(error)}. Correct the source, or what it reads."
        ) from error
