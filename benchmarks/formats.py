"""How fast each form of a trained model answers, beside Keras, and how long its conversion takes.

    python -m pipelines.local configs/fashion_mnist.yaml
    python -m benchmarks.formats runs/fashion_mnist runs/chicago_taxi --output benchmarks/results/formats.json

All forms of a run's export answer the same test examples in one process on the same cores, in turn: rounds of some calls
each, in an order that differs from round to round. A ratio is the median over the rounds of the ratios within a round.
The Keras model is asked in two ways, `predict` and a call inside `tf.function`, and takes transformed features, as do
the forms that are marked so; the SavedModel takes raw ones and looks strings up itself.
"""

from __future__ import annotations

import functools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import machine

BATCH_SIZES = (1, 32)
PREDICT, CALL, SAVED_MODEL = "keras predict", "keras call", "saved_model"
_CALLS_A_TURN = {1: 30, 32: 8}
_WARM_UP_CALLS = 3

Ask = Callable[[], Any]


def measure(run: Path, rounds: int) -> dict[str, Any]:
    """Latencies and conversion times of one run of the pipeline.

    Args:
        run: Its folder, with `examples`, `transform`, `model` and `exported`.
        rounds: In each, every form has its turn.

    Returns:
        `latency: {batch size: {form: {ms, speed: {PREDICT, CALL, SAVED_MODEL}}}}` (a speed above 1: faster than that) and
        `conversion_s: {form: seconds}`.
    """
    import tensorflow as tf

    from components import formats, model_files
    from components.examples import read_arrays
    from components.preprocessing import Preprocessing

    preprocessing = Preprocessing.load(run / "transform")
    test = read_arrays(run / "examples", "test")
    raw = {name: test[name][: max(BATCH_SIZES)] for name in preprocessing.raw_inputs}
    feeds = {"raw": raw, "transformed": preprocessing.transform_in_batches(raw)}
    network = model_files.load_model(run / "model")
    call = tf.function(lambda features: network(features, training=False))
    output = formats.output_name(preprocessing.output_spec)
    forms = [
        (form, formats.make_runner(form, run / "exported", output)) for form in formats.read_formats(run / "exported")
    ]
    latency = {}
    for size in BATCH_SIZES:
        batch = {kind: {name: values[:size] for name, values in feed.items()} for kind, feed in feeds.items()}
        tensors = {name: tf.constant(values) for name, values in batch["transformed"].items()}
        asks: dict[str, Ask] = {
            PREDICT: functools.partial(network.predict, batch["transformed"], verbose=0),
            CALL: lambda tensors=tensors: call(tensors).numpy(),
            **{form.name: functools.partial(runner, batch[form.inputs]) for form, runner in forms},
        }
        latency[size] = summarize(_take_turns(asks, rounds, _CALLS_A_TURN[size]))
    core = formats.Core(preprocessing, network)
    return {"latency": latency, "conversion_s": _conversions(core, core.feed(preprocessing, raw))}


def _take_turns(asks: Mapping[str, Ask], rounds: int, calls: int) -> dict[str, list[float]]:
    """Milliseconds a call, by form and round."""
    for ask in asks.values():
        for _ in range(_WARM_UP_CALLS):
            ask()
    taken: dict[str, list[float]] = {name: [] for name in asks}
    for number in range(rounds):
        names = list(asks)
        random.Random(number).shuffle(names)
        for name in names:
            started = time.perf_counter()
            for _ in range(calls):
                asks[name]()
            taken[name].append(1000 * (time.perf_counter() - started) / calls)
    return taken


def summarize(taken: Mapping[str, list[float]]) -> dict[str, Any]:
    """Median milliseconds, and how many times as fast a form is as Keras and as the SavedModel."""
    return {
        name: {
            "ms": statistics.median(times),
            "speed": {
                other: statistics.median(theirs / ours for theirs, ours in zip(taken[other], times, strict=True))
                for other in (PREDICT, CALL, SAVED_MODEL)
            },
        }
        for name, times in taken.items()
    }


def _conversions(core: Any, examples: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Seconds of each conversion, its check against Keras included; the first of a kind traces the model."""
    from components import formats
    from components.formats import onnx, tflite

    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind, forms, convert in (
            ("tflite", tflite.FORMS, formats.convert_tflite),
            ("onnx", onnx.FORMS, formats.convert_onnx),
        ):
            for form in forms:
                options: dict[str, Any] = {}
                if form in ("int8", "int16x8", "static_int8"):
                    options["calibration"] = examples
                if form in ("int8", "int16x8"):
                    options["float_fallback"] = True
                started = time.perf_counter()
                try:
                    convert(core, Path(folder) / f"{form}.{kind}", form=form, examples=examples, **options)
                except formats.ConversionError as error:
                    click.echo(f"{kind} {form}: {error}", err=True)
                    continue
                seconds[f"{kind}_{form}"] = time.perf_counter() - started
    return seconds


def table(name: str, measured: Mapping[str, Any], batch_size: int) -> Table:
    """For a terminal."""
    result = Table(title=f"{name}, batch {batch_size}", title_justify="left")
    for index, column in enumerate(
        ("form", "ms, median", *(f"speed vs {other}" for other in (PREDICT, CALL, SAVED_MODEL)))
    ):
        result.add_column(column, justify="right" if index else "left")
    for form, entry in measured["latency"][batch_size].items():
        result.add_row(form, f"{entry['ms']:.3f}", *(f"{ratio:.2f}" for ratio in entry["speed"].values()))
    return result


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--rounds", type=click.IntRange(1), default=15)
@click.option("--threads", type=click.IntRange(1), default=1, help="Of every form.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="JSON file to write.")
def main(runs: tuple[Path, ...], rounds: int, threads: int, output: Path | None) -> None:
    """Latency of every form in the exports of RUNS beside Keras, and conversion times."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    machine.keep_to(threads)
    described = machine.describe()
    console = Console(width=None if sys.stdout.isatty() else 120)
    result: dict[str, Any] = {
        "benchmark": "formats",
        "machine": described,
        "rounds": rounds,
        "threads": threads,
        "runs": {},
    }
    for run in runs:
        measured = result["runs"][run.name] = measure(run, rounds)
        for size in BATCH_SIZES:
            console.print(table(run.name, measured, size))
        console.print({form: f"{seconds:.1f} s" for form, seconds in measured["conversion_s"].items()})
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.formats")
