"""`headrace deploy | promote | rollback`: a new version on trial beside the one that serves.

They change `traffic.json` in the folder of a model's versions, which the embedded server follows, or the folder of manifests
that `headrace manifests` wrote.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from serving.rollout.readings import Source
    from serving.rollout.rollout import Rollout

ROLLED_BACK, UNDECIDED = 3, 4


def _placed(command: Callable[..., Any]) -> Callable[..., Any]:
    """The argument and the options that say what is changed."""
    decorators = (
        click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="FOLDER"),
        click.option("--model", default="", help="Name of the model on the servers.  [default: the folder's]"),
        click.option(
            "--apply", is_flag=True, help="Bring manifests to the cluster, too: kubectl apply, docker compose up."
        ),
        click.option(
            "--overlay",
            type=click.Choice(["production", "dev"]),
            default=None,
            help="Which one --apply brings there.  [default: production]",
        ),
    )
    return _decorated(command, decorators)


def _observed(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say where a canary is watched, and what it may not exceed."""
    decorators = (
        click.option(
            "--server",
            "servers",
            multiple=True,
            metavar="URL",
            help="A server whose metrics are read, such as http://host:8501; give all of them.",
        ),
        click.option(
            "--prometheus",
            metavar="URL",
            help="Ask the Prometheus that scrapes them instead, such as http://prometheus:9090.",
        ),
        click.option(
            "--prometheus_token_file",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="File with the bearer token for it.",
        ),
        click.option(
            "--stable_series",
            metavar="MATCHERS",
            help="For TF Serving, whose metrics name no versions: what the stable version's series have, such as "
            "'track=\"stable\"'.",
        ),
        click.option("--canary_series", metavar="MATCHERS", help="The same of the canary's."),
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
    return _decorated(command, decorators)


def _decorated(command: Callable[..., Any], decorators: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    for decorator in reversed(decorators):
        command = decorator(command)
    return command


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@_placed
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
def deploy(version: int | None, shares: Sequence[float], watch: bool, **options: Any) -> None:
    """Put a version in FOLDER (such as pushed/taxi) on trial, with a share of the requests.

    FOLDER may be one of manifests instead. Exit codes: 0 done, 3 taken back, 4 the watch ended undecided, 1 an error.
    """
    if list(shares) != sorted(shares) or (len(shares) > 1 and not watch):
        raise click.UsageError("several --canary_share go with --watch, in ascending order")
    find_source = _source_finder(options, needed_by="--watch" if watch else None)

    def run() -> int:
        rollout, source = _rollout(options), find_source()
        traffic = rollout.deploy(version, shares[0], source)
        click.echo(rollout.place.describe(traffic))
        return _watch(rollout, source, options, shares[1:]) if watch and source and traffic.canary is not None else 0

    _exit(run)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@_placed
@click.option("--if_healthy", is_flag=True, help="Only if the servers' metrics say so: wait until they do.")
@_observed
def promote(if_healthy: bool, **options: Any) -> None:
    """Give the version on trial all requests.

    Exit codes: 0 promoted, 3 taken back (--if_healthy), 4 undecided (--if_healthy), 1 an error.
    """
    find_source = _source_finder(options, needed_by="--if_healthy" if if_healthy else None)

    def run() -> int:
        rollout, source = _rollout(options), find_source()
        if if_healthy and source:
            return _watch(rollout, source, options, ())
        click.echo(rollout.place.describe(rollout.promote()))
        return 0

    _exit(run)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@_placed
def rollback(**options: Any) -> None:
    """Take back the version on trial; if none is, go back to the version before."""

    def run() -> int:
        rollout = _rollout(options)
        click.echo(rollout.place.describe(rollout.rollback()))
        return 0

    _exit(run)


def _rollout(options: dict[str, Any]) -> Rollout:
    from serving.rollout.places import open_place
    from serving.rollout.rollout import Rollout

    if options["overlay"] is not None and not options["apply"]:
        raise click.UsageError("--overlay says what --apply brings to the cluster: give both")
    overlay = (options["overlay"] or "production") if options["apply"] else None
    return Rollout(open_place(options["folder"], options["model"], overlay))


def _source_finder(options: dict[str, Any], needed_by: str | None) -> Callable[[], Source | None]:
    """Check the options of where a canary is watched; what comes back makes the source, if one is given."""
    servers, url = options["servers"], options["prometheus"]
    series = [options["stable_series"], options["canary_series"]]
    if servers and url:
        raise click.UsageError("--server and --prometheus count the same calls: give one of them")
    if needed_by is not None and not servers and not url:
        raise click.UsageError(f"{needed_by} reads the servers' metrics: give --server or --prometheus")
    if not url and any((*series, options["prometheus_token_file"])):
        raise click.UsageError("--prometheus_token_file, --stable_series and --canary_series go with --prometheus")
    if any(series) and not all(series):
        raise click.UsageError("give both --stable_series and --canary_series, or none")

    def find() -> Source | None:
        from serving.rollout.prometheus import Prometheus, Series
        from serving.rollout.readings import ServerPages

        if url:
            return Prometheus(url, options["prometheus_token_file"], Series(*series) if all(series) else None)
        return ServerPages(servers) if servers else None

    return find


def _watch(rollout: Rollout, source: Source, options: dict[str, Any], shares: Sequence[float]) -> int:
    from serving.rollout.judge import Decision, Thresholds
    from serving.rollout.rollout import Observers

    names = ("min_calls", "max_error_rate_increase", "max_latency_ratio", "latency_quantile")
    decision = rollout.watch(
        Observers(source, options["alarms"], Thresholds(**{name: options[name] for name in names})),
        shares=shares,
        every_seconds=options["every_seconds"],
        timeout_seconds=options["timeout_seconds"],
        report=click.echo,
    )
    return {Decision.PROMOTE: 0, Decision.ROLL_BACK: ROLLED_BACK, Decision.WAIT: UNDECIDED}[decision]


def _exit(run: Callable[[], int]) -> None:
    from serving.errors import ServingError

    try:
        code = run()
    except ServingError as error:
        raise click.ClickException(error.message) from error
    except OSError as error:
        raise click.ClickException(str(error)) from error
    sys.exit(code)
