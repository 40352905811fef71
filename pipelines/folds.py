"""Cross-validation: `headrace folds [CONFIG] [section.key=value ...]` trains and evaluates once for each fold."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from components.environment import set_environment
from pipelines.exits import reported
from pipelines.local import interruptible, run, write_whole
from pipelines.steps import STEPS, Step

if TYPE_CHECKING:
    from rich.console import Console

    from pipelines.config import PipelineConfig

Metrics = dict[str, float | None]


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("arguments", nargs=-1, metavar="[CONFIG] [section.key=value ...]")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), help="Where artifacts are kept.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(arguments: tuple[str, ...], runs_dir: Path, debug: bool) -> None:
    """Train and evaluate a model for each fold of CONFIG, whose `data.split` has method fold, and show their test metrics.

    Each fold is a run of its own, NAME_fold_0 and so on, up to the step evaluate; folds that are done are reused. The
    metrics are written to NAME_folds.json as well.
    """
    interrupted = "Interrupted. Run the same command again: it goes on from the last whole step."
    with reported(debug=debug, interrupted=interrupted), interruptible():
        configs = fold_configs(arguments)
        set_environment()
        metrics = run_folds(configs, runs_dir=runs_dir)
        name = next(iter(configs)).removesuffix("_fold_0")
        write_whole(
            runs_dir / f"{name}_folds.json", json.dumps({"folds": metrics, **summarized(metrics)}, indent=1) + "\n"
        )
        click.echo("\n" + "\n".join(table(metrics)))


def fold_configs(arguments: Sequence[str]) -> dict[str, PipelineConfig]:
    """The configuration of each fold, by its name.

    Args:
        arguments: As of `pipelines.local`: a file, and settings that replace its own.

    Raises:
        ConfigError: anything is wrong with it, or it does not divide its rows into folds.
    """
    from components.errors import ConfigError
    from pipelines.config import load_config, split_arguments

    path, overrides = split_arguments(arguments)
    config = load_config(path, overrides)
    split = config.data.split
    if split.method != "fold":
        raise ConfigError(
            f"data.split.method: is {split.method}, and there are folds with method: fold only. Add "
            "'data.split={method: fold, num_folds: 5}'."
        )
    configs = {}
    for fold in range(split.num_folds):
        name = f"{config.name}_fold_{fold}"
        configs[name] = load_config(path, [*overrides, f"name={name}", f"data.split.fold={fold}"])
    return configs


def run_folds(
    configs: Mapping[str, PipelineConfig],
    *,
    runs_dir: Path,
    steps: Sequence[Step] = STEPS,
    console: Console | None = None,
) -> list[Metrics]:
    """Run each fold up to `evaluate` and return its metrics of the test split.

    Raises:
        HeadraceError: a step failed in a way the user can mend.
    """
    from pipelines.tracking import recorded

    found: list[Metrics] = []
    for name, config in configs.items():
        click.echo(name)
        with recorded(config, runs_dir / name):
            result = run(config, runs_dir=runs_dir, until="evaluate", steps=steps, console=console)
        evaluated = result.result_of("evaluate")
        assert evaluated is not None
        found.append(evaluated["metrics"]["test"])
    return found


def summarized(metrics: Sequence[Metrics]) -> dict[str, Metrics]:
    """Mean and sample standard deviation of each metric over the folds; None where a fold has none."""
    mean: Metrics = {}
    deviation: Metrics = {}
    for name in metrics[0]:
        values = [value for each in metrics if (value := each[name]) is not None]
        whole = len(values) == len(metrics)
        mean[name] = statistics.fmean(values) if whole else None
        deviation[name] = statistics.stdev(values) if whole else None
    return {"mean": mean, "standard_deviation": deviation}


def table(metrics: Sequence[Metrics]) -> list[str]:
    """The metrics of all folds as lines of text."""
    columns = {f"fold {number}": each for number, each in enumerate(metrics)}
    columns |= {name.replace("_", " "): each for name, each in summarized(metrics).items()}
    width = max(len(name) for name in metrics[0])
    lines = ["".join([" " * width, *(f"{head:>{len(head) + 4}}" for head in columns)])]
    for name in sorted(metrics[0]):
        cells = [
            f"{'' if each[name] is None else f'{each[name]:.4f}':>{len(head) + 4}}" for head, each in columns.items()
        ]
        lines.append("".join([f"{name:{width}}", *cells]))
    return lines


if __name__ == "__main__":
    main(prog_name="python -m pipelines.folds")
