"""Measure what a request costs, side by side.

python -m benchmarks.serving --prepare .serving-bench
python -m benchmarks.serving --peers .serving-bench --output benchmarks/results/serving.json
python -m benchmarks.serving --scenario slow_clients
python -m benchmarks.serving --show benchmarks/results/serving.json
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from benchmarks import machine
from benchmarks.options import names_of
from benchmarks.serving import driver, environments, report, scenarios
from benchmarks.serving.contenders import CONTENDERS
from benchmarks.serving.load import LoadError
from benchmarks.serving.processes import ServerError
from benchmarks.serving.workloads import WORKLOADS


def _numbers(_context: click.Context, _parameter: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in value.split(","))
    except ValueError:
        numbers = (0,)
    if min(numbers) < 1:
        raise click.BadParameter(f"numbers with commas, received '{value}'")
    return numbers


def _log(line: str) -> None:
    click.echo(line, err=True)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--models", default=",".join(WORKLOADS), callback=names_of(WORKLOADS))
@click.option("--contenders", default=",".join(CONTENDERS), callback=names_of(CONTENDERS))
@click.option("--clients", default="1,8,32,64", callback=_numbers, help="Numbers of clients.")
@click.option("--rounds", type=click.IntRange(1), default=5, help="In each, every contender has its turns.")
@click.option("--seconds", type=click.FloatRange(0.1), default=2.0, help="Of a turn.")
@click.option(
    "--peers",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(".serving-bench"),
    help="Folder of the peers' environments.",
)
@click.option(
    "--prepare",
    type=click.Path(path_type=Path, file_okay=False),
    help="Install the peers into environments in this folder, and end.",
)
@click.option(
    "--scenario",
    callback=lambda context, parameter, value: value and names_of(scenarios.SCENARIOS)(context, parameter, value),
    help=f"Try {', '.join(scenarios.SCENARIOS)}, instead of measuring.",
)
@click.option("--requests", type=click.IntRange(1000), default=100_000, help="Of memory, over each protocol.")
@click.option("--slow-clients", type=click.IntRange(1), default=10_000)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="JSON file to write.")
@click.option("--show", type=click.Path(path_type=Path, exists=True), help="Print such a file as Markdown, and end.")
def main(
    models: list[str],
    contenders: list[str],
    clients: tuple[int, ...],
    rounds: int,
    seconds: float,
    peers: Path,
    prepare: Path | None,
    scenario: list[str] | None,
    requests: int,
    slow_clients: int,
    output: Path | None,
    show: Path | None,
) -> None:
    """CPU per request, requests per second and latencies of servers, side by side in one run."""
    if show is not None:
        shown = json.loads(show.read_text())
        click.echo(report.scenario_lines(shown) if "scenarios" in shown else report.markdown(shown))
        return
    if prepare is not None:
        try:
            environments.prepare(prepare, environments.PEERS, _log)
        except (OSError, subprocess.CalledProcessError) as error:
            raise click.ClickException(f"--prepare: {error}") from error
        return
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if scenario:
        _try_scenarios(scenario, scenarios.Limits(requests, slow_clients), output)
        return
    described = machine.describe()
    measured = driver.measure(models, contenders, driver.Settings(peers, clients, rounds, seconds), _log)
    result: dict[str, Any] = {
        "benchmark": "serving",
        "machine": described,
        "rounds": rounds,
        "seconds": seconds,
        **report.summarize(measured),
    }
    _write(result, output)
    console = Console(width=None if sys.stdout.isatty() else report.WIDTH)
    for table in report.tables(result):
        console.print(table)
    for line in report.notes(result):
        console.print(f"  {line}")


def _try_scenarios(names: list[str], limits: scenarios.Limits, output: Path | None) -> None:
    """Exits with 1 if one of them fails."""
    result: dict[str, Any] = {"benchmark": "serving scenarios", "machine": machine.describe(), "scenarios": {}}
    for name in names:
        try:
            result["scenarios"][name] = {"status": "ok", **scenarios.SCENARIOS[name](limits, _log)}
        except (LoadError, ServerError, OSError) as error:
            result["scenarios"][name] = {"status": f"failed: {error}"}
    _write(result, output)
    click.echo(report.scenario_lines(result))
    if any(found["status"] != "ok" for found in result["scenarios"].values()):
        sys.exit(1)


def _write(result: dict[str, Any], output: Path | None) -> None:
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.serving")
