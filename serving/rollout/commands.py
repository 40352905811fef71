"""`headrace deploy | promote | rollback`: a new version on trial beside the one that serves.

They change `traffic.json` in the folder of a model's versions, which the embedded server follows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from serving.rollout.rollout import Observers, Rollout

ROLLED_BACK, UNDECIDED = 3, 4

_folder = click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="FOLDER")
_model = click.option("--model", default="", help="Name of the model on the servers.  [default: the folder's]")


def _observed(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say where a canary is watched, and what it may not exceed."""
    options = (
        click.option(
            "--server",
            "servers",
            multiple=True,
            metavar="URL",
            help="A server whose metrics are read, such as http://host:8501; give all of them.",
        ),
        click.option(
            "--alarms",
            multiple=True,
            metavar="PAGE",
            help="metrics.prom of the step monitor, as a file or URL; an alarm speaks against the canary.",
        ),
        click.option("--min_calls", default=200, show_default=True, help="Calls that a canary needs to be promoted."),
        click.option(
            "--max_error_rate_increase",
            type=click.FloatRange(0, 1),
            default=0.01,
            show_default=True,
            help="By how much its share of failed calls may be above the stable version's.",
        ),
        click.option(
            "--max_latency_ratio",
            type=click.FloatRange(min=1),
            default=1.5,
            show_default=True,
            help="How many times as slow its slow calls may be.",
        ),
        click.option(
            "--latency_quantile",
            type=click.FloatRange(0, 1, min_open=True, max_open=True),
            default=0.95,
            show_default=True,
            help="Which calls are the slow ones.",
        ),
        click.option("--every_seconds", default=10.0, show_default=True, help="Time between two looks."),
        click.option(
            "--timeout_seconds", default=3600.0, show_default=True, help="After this the watch ends undecided."
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@_folder
@_model
@click.option("--version", type=int, default=None, help="The version.  [default: the newest in FOLDER]")
@click.option(
    "--canary_share",
    "shares",
    type=click.FloatRange(0, 1),
    multiple=True,
    default=(0.1,),
    show_default=True,
    help="Share of the requests that it gets; 1 means all at once. With --watch, give several to go up in steps.",
)
@click.option("--watch", is_flag=True, help="Stay, and promote it or take it back by what the servers' metrics say.")
@_observed
def deploy(folder: Path, model: str, version: int | None, shares: Sequence[float], watch: bool, **options: Any) -> None:
    """Put a version in FOLDER (such as pushed/taxi) on trial, with a share of the requests.

    Exit codes: 0 done, 3 taken back, 4 the watch ended undecided, 1 an error.
    """
    if list(shares) != sorted(shares) or (len(shares) > 1 and not watch):
        raise click.UsageError("several --canary_share go with --watch, in ascending order")
    if watch and not options["servers"]:
        raise click.UsageError("--watch reads the servers' metrics: give --server")

    def run() -> int:
        rollout = _rollout(folder, model)
        traffic = rollout.deploy(version, shares[0], options["servers"])
        if traffic.canary is None:
            click.echo(f"version {traffic.stable} gets all requests")
            return 0
        click.echo(
            f"version {traffic.canary} gets {traffic.canary_share:.0%} of the requests, {traffic.stable} the rest"
        )
        return _watch(rollout, options, shares[1:]) if watch else 0

    _exit(run)


@click.command()
@_folder
@_model
@click.option("--if_healthy", is_flag=True, help="Only if the servers' metrics say so: wait until they do.")
@_observed
def promote(folder: Path, model: str, if_healthy: bool, **options: Any) -> None:
    """Give the version on trial all requests.

    Exit codes: 0 promoted, 3 taken back (--if_healthy), 4 undecided (--if_healthy), 1 an error.
    """
    if if_healthy and not options["servers"]:
        raise click.UsageError("--if_healthy reads the servers' metrics: give --server")

    def run() -> int:
        rollout = _rollout(folder, model)
        if if_healthy:
            return _watch(rollout, options, ())
        click.echo(f"version {rollout.promote().stable} gets all requests")
        return 0

    _exit(run)


@click.command()
@_folder
@_model
def rollback(folder: Path, model: str) -> None:
    """Take back the version on trial; if none is, go back to the version before."""

    def run() -> int:
        click.echo(f"version {_rollout(folder, model).rollback().stable} gets all requests")
        return 0

    _exit(run)


def _rollout(folder: Path, model: str) -> Rollout:
    from serving.rollout.rollout import Rollout

    return Rollout(folder, model)


def _watch(rollout: Rollout, options: dict[str, Any], shares: Sequence[float]) -> int:
    from serving.rollout.judge import Decision

    decision = rollout.watch(
        _observers(options),
        shares=shares,
        every_seconds=options["every_seconds"],
        timeout_seconds=options["timeout_seconds"],
        report=click.echo,
    )
    return {Decision.PROMOTE: 0, Decision.ROLL_BACK: ROLLED_BACK, Decision.WAIT: UNDECIDED}[decision]


def _observers(options: dict[str, Any]) -> Observers:
    from serving.rollout.judge import Thresholds
    from serving.rollout.rollout import Observers

    names = ("min_calls", "max_error_rate_increase", "max_latency_ratio", "latency_quantile")
    return Observers(options["servers"], options["alarms"], Thresholds(**{name: options[name] for name in names}))


def _exit(run: Callable[[], int]) -> None:
    from serving.errors import ServingError

    try:
        code = run()
    except ServingError as error:
        raise click.ClickException(error.message) from error
    except OSError as error:
        raise click.ClickException(str(error)) from error
    sys.exit(code)
