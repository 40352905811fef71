"""Measure training steps side by side.

python -m benchmarks.training --models resnet,mlp --torch-python .bench/bin/python --jax-python .bench/bin/python
python -m benchmarks.training --show benchmarks/results/training.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from benchmarks import machine
from benchmarks.options import names_of
from benchmarks.training import driver, report
from benchmarks.training.contenders import CONTENDERS
from benchmarks.training.workloads import WORKLOADS


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--models", default=",".join(WORKLOADS), callback=names_of(WORKLOADS))
@click.option("--contenders", default=",".join(CONTENDERS), callback=names_of(CONTENDERS))
@click.option("--processes", type=click.IntRange(1), default=3, help="Of each contender, one after the other.")
@click.option("--rounds", type=click.IntRange(1), default=3, help="Of each process; in each, every one has a turn.")
@click.option("--steps", type=click.IntRange(1), help="A turn; default: of each model's own.")
@click.option("--threads", type=click.IntRange(1), default=machine.usable_cores(), help="Of each contender.")
@click.option("--torch-python", default=sys.executable, help="Interpreter that has PyTorch.")
@click.option("--jax-python", default=sys.executable, help="Interpreter that has JAX and Keras.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="JSON file to write.")
@click.option("--show", type=click.Path(path_type=Path, exists=True), help="Print such a file as Markdown, and end.")
def main(
    models: list[str],
    contenders: list[str],
    processes: int,
    rounds: int,
    steps: int | None,
    threads: int,
    torch_python: str,
    jax_python: str,
    output: Path | None,
    show: Path | None,
) -> None:
    """Time of a training step, memory and start-up, side by side in one run."""
    if show is not None:
        click.echo(report.markdown(json.loads(show.read_text())))
        return
    interpreters = {"project": sys.executable, "torch": torch_python, "jax": jax_python}
    settings = driver.Settings(processes, rounds, steps, threads, interpreters)
    described = machine.describe()
    if described["load_average"][0] > 0.5:
        click.echo(
            f"The machine is busy (load average {described['load_average'][0]:.1f}). OpenMP, and with it", err=True
        )
        click.echo("PyTorch, suffers from that far more than others: measure when it is quiet.", err=True)
    try:
        measured = driver.measure(models, contenders, settings, lambda line: click.echo(line, err=True))
    except driver.ContenderError as error:
        raise click.ClickException(str(error)) from error
    result: dict[str, Any] = {
        "benchmark": "training",
        "machine": described,
        "processes": processes,
        "rounds": rounds,
        "threads": threads,
        "models": {name: report.summarize(model) for name, model in measured.items()},
    }
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=1) + "\n")
    console = Console(width=None if sys.stdout.isatty() else report.WIDTH)
    for name, model in result["models"].items():
        console.print(report.table(name, model))
        for line in report.target_lines(model):
            console.print(f"  {line}")


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.training")
