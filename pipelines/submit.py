"""Start a run on Kubeflow Pipelines: `python -m pipelines.submit [CONFIG] [section.key=value ...] --host URL`."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import io
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipelines.exits import reported
from pipelines.kubeflow.kfp_api import Access, access_options, pairs

if TYPE_CHECKING:
    from pipelines.config import PipelineConfig

POLL_SECONDS = 5.0
# backend/src/apiserver/server/api_converter.go: toModelJob
_MAX_CONCURRENCY = 10


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When a recurring run runs.

    Attributes:
        cron: Six fields, the first one seconds, or `@daily` and the like; in the time zone of the server, mostly UTC.
        start_time: Not before this time (RFC 3339).
        end_time: Not after this time (RFC 3339).
        catch_up: Run for each time that was missed, not only for the last one.
        max_concurrency: Runs at the same time, 1 to 10.
    """

    cron: str
    start_time: str | None = None
    end_time: str | None = None
    catch_up: bool = False
    max_concurrency: int = 1


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked of Kubeflow Pipelines.

    Attributes:
        pipeline: The compiled pipeline.
        run_name: Name of the run, or of the recurring run.
        experiment: Experiment of the run, made if it does not exist.
        parameters: Run-time parameters.
        pipeline_root: Where artifacts go, as s3://bucket/path; default: the pipeline's, or that of the namespace.
        service_account: Kubernetes service account of the pods; default: that of the installation.
        pipeline_name: Name of an uploaded pipeline, made if it does not exist, of which this becomes a version; None:
            the run carries its pipeline with it.
        version_name: Name of the version.
        schedule: When it runs; None: once, now.
    """

    pipeline: str
    run_name: str
    experiment: str
    parameters: Mapping[str, str] = dataclasses.field(default_factory=dict)
    pipeline_root: str | None = None
    service_account: str | None = None
    pipeline_name: str | None = None
    version_name: str | None = None
    schedule: Schedule | None = None


def make_request(config: PipelineConfig, *, image: str | None = None, **fields: Any) -> Request:
    """Compile a configuration into a request.

    Args:
        config: The whole configuration.
        image: The image that every step runs in; default: `kubeflow.image`, or headrace:<version>.
        fields: Of `Request`; without `run_name` the name of the configuration, with the time if it runs once; without
            `experiment` that name; without `version_name` a digest of the pipeline, so that one that has not changed
            is not uploaded again.

    Raises:
        ConfigError: the pipeline has no such run-time parameter.
    """
    from pipelines.compile import compile_pipeline

    text = compile_pipeline(config, image=image)
    _check_parameters(fields.get("parameters", {}), text)
    time = "" if fields.get("schedule") else f" {datetime.datetime.now():%Y-%m-%d %H:%M:%S}"
    defaults = {"run_name": f"{config.name}{time}", "experiment": config.name}
    if fields.get("pipeline_name"):
        defaults["version_name"] = hashlib.sha256(text.encode()).hexdigest()[:12]
    given = {name: value for name, value in fields.items() if value is not None}
    return Request(text, **defaults | given)


def upload(client: Any, request: Request, *, namespace: str | None = None) -> tuple[str, str]:
    """Upload a pipeline as a version of `request.pipeline_name` and return the ids of both; one that is there is kept.

    Raises:
        HeadraceError: there is such a version with another content, or the API did not take it.
    """
    from components.errors import HeadraceError
    from pipelines.diff import differences, shown
    from pipelines.kubeflow import kfp_api

    with kfp_api.explained(kfp_api.host_of(client)):
        name, version_name = str(request.pipeline_name), str(request.version_name)
        pipeline_id = kfp_api.find_pipeline(client, name, namespace) or kfp_api.make_pipeline(client, name, namespace)
        found = client.list_pipeline_versions(pipeline_id, filter=kfp_api.named(version_name)).pipeline_versions
        if not found:
            with _package(request.pipeline) as file:
                version = client.upload_pipeline_version(file, version_name, pipeline_id=pipeline_id)
            return pipeline_id, str(version.pipeline_version_id)
    if changes := differences(found[0].pipeline_spec, kfp_api.parse_pipeline(request.pipeline) or {}):
        raise HeadraceError(
            f"Pipeline {name} has a version {version_name} with another content. Choose another --version-name, or leave it "
            f"out. What differs:\n{shown(changes)}"
        )
    return pipeline_id, str(found[0].pipeline_version_id)


def submit(client: Any, request: Request, *, namespace: str | None = None, replace: bool = False) -> str:
    """Start a run, or make a recurring run, and return its id.

    Args:
        client: As made by `kfp_api.connect`.
        request: What to run.
        namespace: Profile namespace of a multi-user Kubeflow.
        replace: Let a recurring run take the place of those with its name.

    Raises:
        HeadraceError: the API did not take it, or there is a recurring run of that name.
    """
    from pipelines.kubeflow import kfp_api

    ids = upload(client, request, namespace=namespace) if request.pipeline_name else None
    with kfp_api.explained(kfp_api.host_of(client)), _package(request.pipeline) as file:
        experiment = client.create_experiment(request.experiment, namespace=namespace)
        what: dict[str, Any] = {
            "experiment_id": experiment.experiment_id,
            "job_name": request.run_name,
            "params": dict(request.parameters),
            "pipeline_root": request.pipeline_root,
            "service_account": request.service_account,
        }
        what |= {"pipeline_id": ids[0], "version_id": ids[1]} if ids else {"pipeline_package_path": file}
        if request.schedule is None:
            return str(client.run_pipeline(**what).run_id)
        return _recur(client, request.run_name, request.schedule, what, replace)


def _recur(client: Any, name: str, schedule: Schedule, what: dict[str, Any], replace: bool) -> str:
    from components.errors import HeadraceError
    from pipelines.kubeflow.kfp_api import named

    same = client.list_recurring_runs(experiment_id=what["experiment_id"], filter=named(name)).recurring_runs or []
    if same and not replace:
        raise HeadraceError(
            f"There is a recurring run '{name}' ({same[0].recurring_run_id}) already. Give --replace to put this one in "
            "its place, or another --run-name."
        )
    made = client.create_recurring_run(
        **what,
        cron_expression=schedule.cron,
        start_time=schedule.start_time,
        end_time=schedule.end_time,
        no_catchup=not schedule.catch_up,
        max_concurrency=schedule.max_concurrency,
    )
    for old in same:  # after the new one is there: at no time there is none
        client.delete_recurring_run(old.recurring_run_id)
    return str(made.recurring_run_id)


@contextlib.contextmanager
def _package(text: str) -> Any:
    """The pipeline in a file, as `kfp.Client` wants it, which prints links for notebooks, too."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        file = Path(folder) / "pipeline.yaml"
        file.write_text(text)
        yield str(file)


def _check_parameters(parameters: Mapping[str, str], pipeline: str) -> None:
    from components.errors import ConfigError, did_you_mean
    from pipelines.kubeflow.kfp_api import parse_pipeline

    if not parameters:
        return
    parsed = parse_pipeline(pipeline) or {}
    known = parsed.get("pipeline_spec", parsed)["root"].get("inputDefinitions", {}).get("parameters", {})
    for name in parameters:
        if name not in known:
            raise ConfigError(
                f"--parameter: the pipeline has no run-time parameter '{name}'.{did_you_mean(name, known)} "
                "Everything else is set in the configuration."
            )


def _described(request: Request, access: Access | None) -> str:
    """What `--dry-run` prints: the request, its pipeline by size and digest."""
    from pipelines import yaml_text

    data = request.pipeline.encode()
    fields = dataclasses.asdict(request)
    fields["pipeline"] = f"{len(data)} bytes, SHA-256 {hashlib.sha256(data).hexdigest()}"
    where = {"host": access.host, "namespace": access.namespace} if access else {}
    return yaml_text.dump({name: value for name, value in (where | fields).items() if value is not None})


def _checked_cron(_: click.Context, __: click.Parameter, cron: str | None) -> str | None:
    """Refuse five fields: Kubeflow would take the minutes for seconds and the hours for minutes, without a word."""
    fields = (cron or "").split()
    if len(fields) == 5:
        raise click.BadParameter(f"'{cron}' has five fields; Kubeflow's first field is seconds: '0 {cron}'.")
    if cron is not None and len(fields) != 6 and not cron.startswith("@"):
        raise click.BadParameter(f"expected six fields, as '0 0 3 * * *' for 03:00 each day, received '{cron}'.")
    return cron


def _checked_time(_: click.Context, __: click.Parameter, time: str | None) -> str | None:
    try:
        parsed = time and datetime.datetime.fromisoformat(time.replace("Z", "+00:00"))
    except ValueError as error:
        raise click.BadParameter(f"expected a time such as 2026-12-24T03:00:00Z, received '{time}'.") from error
    if parsed and parsed.tzinfo is None:
        raise click.BadParameter(f"'{time}' has no time zone: write '{parsed.isoformat()}Z' for UTC.")
    return parsed.isoformat() if parsed else None


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("arguments", nargs=-1, metavar="[CONFIG] [section.key=value ...]")
@access_options
@click.option("--image", help="Image that every step runs in.  [default: kubeflow.image, or headrace:<version>]")
@click.option("--experiment", help="Experiment of the run; made if there is none.  [default: name of the config]")
@click.option("--run-name", help="Name of the run.  [default: name of the config, and the time]")
@click.option(
    "--parameter", "parameters", multiple=True, callback=pairs, metavar="NAME=VALUE", help="As data_path=URI."
)
@click.option(
    "--pipeline-root",
    help="Where artifacts go, as s3://bucket/path.  [default: kubeflow.pipeline_root, or the namespace's]",
)
@click.option("--service-account", help="Kubernetes service account of the pods.  [default: the installation's]")
@click.option("--pipeline-name", help="Upload a version of this pipeline, made if there is none, and run that.")
@click.option("--version-name", help="Name of the uploaded version.  [default: digest of the pipeline]")
@click.option("--run/--no-run", "start", default=True, help="--no-run: upload the version only.")
@click.option(
    "--cron", callback=_checked_cron, metavar="FIELDS", help="Run again and again: '0 0 3 * * *' (sec min h)."
)
@click.option("--start-time", callback=_checked_time, metavar="TIME", help="Of a recurring run, with its time zone.")
@click.option("--end-time", callback=_checked_time, metavar="TIME", help="Of a recurring run, with its time zone.")
@click.option("--catch-up/--no-catch-up", default=None, help="Run for each missed time, too.  [default: no]")
@click.option("--max-concurrency", type=click.IntRange(1, _MAX_CONCURRENCY), help="Recurring: at once.  [default: 1]")
@click.option("--replace", is_flag=True, help="Take the place of a recurring run of the same name.")
@click.option("--wait/--no-wait", default=False, help="Follow the run to its end.")
@click.option("--dry-run", is_flag=True, help="Say what would be sent, and send nothing.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(
    arguments: tuple[str, ...],
    access: Access | None,
    image: str | None,
    start: bool,
    replace: bool,
    wait: bool,
    dry_run: bool,
    debug: bool,
    **fields: Any,
) -> None:
    """Compile a configuration and start a run of it on Kubeflow Pipelines, or have it run again and again.

    CONFIG is a YAML file (default: the only one in configs/, or chicago_taxi.yaml); section.key=value overrides a setting.

    Exit codes: 0 sent, or with --wait succeeded; 1 failed; 2 the configuration is wrong; 3 the model was not blessed.
    """
    schedule = {name: fields.pop(name) for name in ("cron", "start_time", "end_time", "catch_up", "max_concurrency")}
    given = {name: value for name, value in schedule.items() if value is not None}
    _check_usage(access, fields, given, start=start, replace=replace, wait=wait, dry_run=dry_run)
    with reported(debug=debug, interrupted="Interrupted. A run that was sent goes on in the cluster."):
        from pipelines.config import load_config, split_arguments

        path, overrides = split_arguments(arguments)
        fields["schedule"] = Schedule(**given) if given else None
        request = make_request(load_config(path, overrides), image=image, **fields)
        if dry_run or access is None:
            click.echo(_described(request, access), nl=False)
            return
        _send(access, request, start=start, replace=replace, wait=wait)


def _check_usage(
    access: Access | None,
    fields: Mapping[str, Any],
    schedule: Mapping[str, Any],
    *,
    start: bool,
    replace: bool,
    wait: bool,
    dry_run: bool,
) -> None:
    """Refuse options that nothing would read."""
    if access is None and not dry_run:
        raise click.UsageError("Missing option '--host'.")
    if "cron" not in schedule and (schedule or replace):
        names = [*schedule, *(["replace"] if replace else [])]
        raise click.UsageError(f"Only a recurring run reads --{names[0].replace('_', '-')}: give --cron.")
    if "cron" in schedule and wait:
        raise click.UsageError("A recurring run has no end to --wait for.")
    if fields["pipeline_name"] is None and (fields["version_name"] or not start):
        raise click.UsageError("--version-name and --no-run are for an uploaded version: give --pipeline-name.")
    of_a_run = ("run_name", "experiment", "parameters", "pipeline_root", "service_account")
    if not start and (schedule or wait or any(fields[name] for name in of_a_run)):
        raise click.UsageError("--no-run starts nothing: leave out --wait, --cron, and what else is of a run.")


def _send(access: Access, request: Request, *, start: bool, replace: bool, wait: bool) -> None:
    from pipelines.kubeflow import kfp_api

    client = kfp_api.connect(access)
    if not start:
        ids = upload(client, request, namespace=access.namespace)
        page = "/#/pipelines/details/{}/version/{}".format(*ids)
        click.echo(f"Pipeline {request.pipeline_name}, version {request.version_name}: {access.host}{page}")
        return
    run_id = submit(client, request, namespace=access.namespace, replace=replace)
    if request.schedule is not None:
        click.echo(f"Recurring run {run_id}: {access.host}/#/recurringrun/details/{run_id}")
        return
    click.echo(f"Run {run_id}: {kfp_api.run_url(access.host, run_id)}")
    if wait:
        from rich.console import Console

        from pipelines.kubeflow.follow import follow

        follow(client, run_id, console=Console(highlight=False), poll_seconds=POLL_SECONDS)


if __name__ == "__main__":
    main(prog_name="python -m pipelines.submit")
