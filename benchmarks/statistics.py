"""Seconds and memory of the statistics of a table, from 10,000 to 10,000,000 rows, and beside pandas.

    python -m benchmarks.statistics --output benchmarks/results/statistics.json

The table has 20 columns: 8 float (a tenth missing), 6 integer, 6 string (from 5 to 1,000,000 different values). Each size
has a process of its own, so that its memory can be told. The clock stands still while the next batch of the table is made.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import machine

NUM_COLUMNS = 20
_BATCH = 65_536
_UNIQUE = (5, 50, 500, 5_000, 50_000, 1_000_000)


def make_batches(rows: int) -> Iterator[Any]:
    """Arrow record batches of the table, from one seed."""
    import pyarrow as pa

    rng = np.random.default_rng(0)
    for start in range(0, rows, _BATCH):
        size = min(_BATCH, rows - start)
        columns: dict[str, Any] = {
            f"float_{i}": pa.array(rng.lognormal(size=size).astype(np.float32), mask=rng.random(size) < 0.1)
            for i in range(8)
        }
        columns |= {f"int_{i}": pa.array(rng.integers(0, 10 ** (i + 1), size)) for i in range(6)}
        for i, unique in enumerate(_UNIQUE):
            columns[f"string_{i}"] = pa.array(rng.integers(0, unique, size)).cast(pa.string())
        yield pa.record_batch(columns)


def measure(rows: int, engine: str) -> dict[str, float]:
    """Seconds without those of making the batches, and MiB above what the process held with its first batch.

    Args:
        rows: Of the table.
        engine: `arrow` and `numpy`: the builder, fed with record batches or with arrays; `pandas`: `describe` and
            `value_counts` of each column, which give less, of the whole table at once.
    """
    batches = make_batches(rows)
    first = next(batches)
    work = {"arrow": _arrow, "numpy": _numpy, "pandas": _pandas}[engine]
    steps = work(itertools.chain([first], batches), first.schema)
    next(steps)
    before = machine.peak_rss_mib()
    seconds = sum(steps)
    return {"seconds": seconds, "extra_mib": machine.peak_rss_mib() - before}


def _arrow(batches: Iterator[Any], schema: Any) -> Iterator[float]:
    """Nothing once all is imported, then the seconds of each batch and of the end."""
    builder = _builder(schema)
    yield 0.0
    for batch in batches:
        yield _seconds(lambda: builder.update_arrow(batch))  # noqa: B023
    yield _seconds(builder.finish)


def _numpy(batches: Iterator[Any], schema: Any) -> Iterator[float]:
    builder = _builder(schema)
    yield 0.0
    for batch in batches:
        arrays = _arrays(batch)
        yield _seconds(lambda: builder.update(arrays))  # noqa: B023
    yield _seconds(builder.finish)


def _pandas(batches: Iterator[Any], _schema: Any) -> Iterator[float]:
    import pandas as pd
    import pyarrow as pa

    def describe() -> None:
        for name in frame:
            frame[name].describe()
            frame[name].isna().sum()
            if not name.startswith("float"):
                frame[name].value_counts()

    yield 0.0
    frame: pd.DataFrame = pa.Table.from_batches(list(batches)).to_pandas()
    yield _seconds(describe)


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _builder(schema: Any) -> Any:
    from components.examples import ExamplesInfo, Feature
    from components.statistics import StatisticsBuilder

    features = {name: Feature(name.partition("_")[0]) for name in schema.names}
    info = ExamplesInfo(features, "int_0", "multiclass", None, {})
    return StatisticsBuilder(info, text_features=[], max_top_values=100_000, num_quantiles=1000)


def _arrays(batch: Any) -> dict[str, np.ndarray]:
    import pyarrow as pa

    return {
        name: (column.cast(pa.binary()) if name.startswith("string") else column).to_numpy(zero_copy_only=False)
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--max-rows", type=click.IntRange(10_000), default=10_000_000)
@click.option("--rounds", type=click.IntRange(1), default=1, help="The fastest of them counts.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="JSON file to write.")
@click.option("--one", nargs=2, type=(int, str), hidden=True)
def main(max_rows: int, rounds: int, output: Path | None, one: tuple[int, str] | None) -> None:
    """Seconds and memory of statistics by number of rows."""
    if one is not None:
        click.echo(json.dumps(measure(*one)))
        return
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    described = machine.describe()
    plan = [(10**power, "arrow") for power in range(4, 8)]
    plan += [(10**6, "numpy"), (10**6, "pandas")]
    found = []
    for rows, engine in plan:
        if rows <= max_rows:
            best = min((_in_a_process(rows, engine) for _ in range(rounds)), key=lambda each: each["seconds"])
            found.append({"rows": rows, "engine": engine, **best})
    table = Table(title=f"{NUM_COLUMNS} columns", title_justify="left")
    for column in ("rows", "engine", "seconds", "rows/s", "MiB above the start"):
        table.add_column(column, justify="right")
    for each in found:
        speed = f"{each['rows'] / each['seconds']:,.0f}"
        table.add_row(f"{each['rows']:,}", each["engine"], f"{each['seconds']:.2f}", speed, f"{each['extra_mib']:.0f}")
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    if output is not None:
        result = {"benchmark": "statistics", "machine": described, "columns": NUM_COLUMNS, "results": found}
        output.write_text(json.dumps(result, indent=1) + "\n")


def _in_a_process(rows: int, engine: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.statistics", "--one", str(rows), engine]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.statistics")
