"""How training grows with workers on one machine: 1, 2 and 3 processes that share the same cores.

    python -m benchmarks.workers --models resnet,tabular --output benchmarks/results/workers.json

With the cores the same in total, an efficiency of 1 means that the exchange of gradients and the further processes cost
nothing. Epochs are timed by the lines that the chief prints, so a step's time holds its share of validation and
checkpoints; the first epoch, which holds the tracing, does not count.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.options import names_of

SEED = 0
COLUMNS = ("workers", "steps/s, median", "efficiency", "peak MiB, all", "first epoch after s")


@dataclass(frozen=True)
class Job:
    """What is trained.

    Attributes:
        rows: Examples made, 96 % of which are trained on.
        batch_size: Examples a step, over all workers.
        model: The `model` section of a configuration.
        optimizer: The `train.optimizer` section.
    """

    rows: int
    batch_size: int
    model: Mapping[str, Any]
    optimizer: Mapping[str, Any]

    def arrays(self) -> dict[str, np.ndarray]:
        """Synthetic columns: images `(rows, 32, 32, 3)` for resnet, 16 measures and 4 ids else; and `label`."""
        rng = np.random.default_rng(SEED)
        if self.model["name"] == "resnet":
            image = rng.integers(0, 256, size=(self.rows, 32, 32, 3), dtype=np.uint8)
            return {"image": image, "label": rng.integers(0, 10, size=self.rows)}
        measures = {f"measure{i}": rng.normal(size=self.rows).astype(np.float32) for i in range(16)}
        categories = {f"category{i}": rng.integers(0, 200, size=self.rows).astype(str) for i in range(4)}
        return {**measures, **categories, "label": rng.integers(0, 10, size=self.rows)}


JOBS: dict[str, Job] = {
    "resnet": Job(
        rows=2_700,
        batch_size=128,
        model={"name": "resnet", "args": {"stage_sizes": [3, 3, 3]}},
        optimizer={"name": "sgd", "learning_rate": 0.05},
    ),
    "tabular": Job(
        rows=200_000,
        batch_size=1024,
        model={"name": "tabular", "args": {"hidden_dims": [256, 128]}},
        optimizer={"name": "adamw", "weight_decay": 0.01},
    ),
}


@dataclass
class Watch:
    """Notes when the chief ends its epochs, and how much memory the workers hold; a `Show` of the launcher."""

    started_at: float = field(default_factory=time.monotonic)
    ends: list[float] = field(default_factory=list)
    peaks_mib: dict[int, float] = field(default_factory=dict)

    def __call__(self, worker: int | None, line: str) -> None:
        if found := re.match(r"worker \d+ is process (\d+)", line):
            self.peaks_mib[int(found[1])] = 0.0
        elif worker == 0 and re.match(r"epoch \d+/", line):
            self.ends.append(time.monotonic())
            for pid in self.peaks_mib:
                self.peaks_mib[pid] = machine.peak_rss_mib(pid)

    def result(self, steps_per_epoch: int) -> dict[str, float]:
        """Steps per second after the first epoch (median), end of the first epoch, memory of all workers."""
        epochs_s = np.diff(self.ends)
        return {
            "steps_per_s": steps_per_epoch / float(np.median(epochs_s)),
            "first_epoch_s": self.ends[0] - self.started_at,
            "peak_rss_mib": sum(self.peaks_mib.values()),
        }


def measure(job: Job, folder: Path, *, counts: list[int], rounds: int, epochs: int, xla: str) -> dict[str, Any]:
    """Train with each number of workers in turn.

    Args:
        job: What is trained.
        folder: An empty one.
        counts: Numbers of workers.
        rounds: How often each has its turn.
        epochs: Epochs of a training, 2 or more.
        xla: As `train.xla`.

    Returns:
        What `summarize` gives.
    """
    from components.config import TrainConfig
    from components.train import launch

    steps_per_epoch = make_artifacts(job, folder) // job.batch_size
    runs: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
    for number in range(rounds):
        for count in counts if number % 2 == 0 else reversed(counts):
            config = TrainConfig.model_validate(
                {
                    "epochs": epochs,
                    "global_batch_size": job.batch_size,
                    "optimizer": job.optimizer,
                    "model": job.model,
                    "seed": SEED,
                    "xla": xla,
                    "strategy": "multi_worker",
                    "num_workers": count,
                }
            )
            watch = Watch()
            launch.run_local(
                examples=folder / "examples",
                transform=folder / "transform",
                model=folder / f"model_{number}_{count}",
                config=config,
                show=watch,
            )
            runs[count].append(watch.result(steps_per_epoch))
    return summarize(runs, steps_per_epoch)


def make_artifacts(job: Job, folder: Path) -> int:
    """Ingest, validate and transform the synthetic rows; returns how many of them are trained on."""
    from components.config import DataConfig, TransformConfig, ValidateConfig
    from components.ingest import ingest
    from components.transform import transform
    from components.validate import validate

    arrays: dict[str, Any] = dict(job.arrays())
    np.savez(folder / "rows.npz", **arrays)
    data = {
        "source": "numpy",
        "path": str(folder / "rows.npz"),
        "split": {"validation": 0.02, "test": 0.02},
        "examples_per_shard": job.rows,
    }
    examples, stats = folder / "examples", folder / "statistics"
    result = ingest(examples=examples, config=DataConfig.model_validate(data))
    validate(examples=examples, statistics=stats, config=ValidateConfig())
    transform(examples=examples, statistics=stats, transform=folder / "transform", config=TransformConfig())
    return result.num_examples["train"]


def summarize(runs: Mapping[int, Sequence[Mapping[str, float]]], steps_per_epoch: int) -> dict[str, Any]:
    """Medians over the rounds; the efficiency is that of ratios to the fewest workers within a round."""
    fewest = min(runs)
    base = [run["steps_per_s"] for run in runs[fewest]]
    return {
        "steps_per_epoch": steps_per_epoch,
        "workers": {
            str(count): {
                "steps_per_s": statistics.median(run["steps_per_s"] for run in of_count),
                "efficiency": statistics.median(
                    run["steps_per_s"] / rate for run, rate in zip(of_count, base, strict=True)
                ),
                "peak_rss_mib": max(run["peak_rss_mib"] for run in of_count),
                "first_epoch_s": statistics.median(run["first_epoch_s"] for run in of_count),
                "rounds": [dict(run) for run in of_count],
            }
            for count, of_count in runs.items()
        },
    }


def _cells(model: Mapping[str, Any]) -> list[list[str]]:
    """The cells of a model's table, as text, in the order of COLUMNS."""
    return [
        [
            count,
            f"{entry['steps_per_s']:.2f}",
            f"{entry['efficiency']:.2f}",
            f"{entry['peak_rss_mib']:.0f}",
            f"{entry['first_epoch_s']:.1f}",
        ]
        for count, entry in model["workers"].items()
    ]


def markdown(result: Mapping[str, Any]) -> str:
    """All tables of a result, for README.md."""
    parts = []
    for name, model in result["models"].items():
        lines = [COLUMNS, ["---:"] * len(COLUMNS), *_cells(model)]
        parts += [f"**{name}**", "\n".join(f"| {' | '.join(line)} |" for line in lines)]
    return "\n\n".join(parts)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--models", default=",".join(JOBS), callback=names_of(JOBS))
@click.option("--workers", "counts", default="1,2,3", help="Numbers of workers, with commas.")
@click.option("--rounds", type=click.IntRange(1), default=3, help="In each, every number of workers trains once.")
@click.option("--epochs", type=click.IntRange(3), default=5, help="Of each training; the first does not count.")
@click.option(
    "--threads", type=click.IntRange(1), default=machine.usable_cores(), help="Cores, of all workers together."
)
@click.option("--xla", type=click.Choice(["auto", "on", "off"]), default="off", help="As train.xla.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="JSON file to write.")
@click.option("--show", type=click.Path(path_type=Path, exists=True), help="Print such a file as Markdown, and end.")
def main(
    models: list[str],
    counts: str,
    rounds: int,
    epochs: int,
    threads: int,
    xla: str,
    output: Path | None,
    show: Path | None,
) -> None:
    """Steps per second with 1, 2, 3 workers on the same cores."""
    if show is not None:
        click.echo(markdown(json.loads(show.read_text())))
        return
    try:
        numbers = [int(count) for count in counts.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"numbers with commas, received '{counts}'", param_hint="--workers") from error
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    machine.keep_to(threads)
    result: dict[str, Any] = {
        "benchmark": "workers",
        "machine": machine.describe(),
        "rounds": rounds,
        "epochs": epochs,
        "xla": xla,
        "models": {},
    }
    for name in models:
        with tempfile.TemporaryDirectory() as folder:
            result["models"][name] = measure(
                JOBS[name], Path(folder), counts=numbers, rounds=rounds, epochs=epochs, xla=xla
            )
    result["load_average_after"] = os.getloadavg()[0]
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=1) + "\n")
    console = Console()
    for name, model in result["models"].items():
        table = Table(*COLUMNS, title=f"{name}: {model['steps_per_epoch']} steps an epoch", title_justify="left")
        for row in _cells(model):
            table.add_row(*row)
        console.print(table)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.workers")
