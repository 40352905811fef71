"""Start a run on Kubeflow Pipelines: `python -m pipelines.submit [CONFIG] [section.key=value ...] --host URL`."""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import os
import re
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipelines.exits import reported

if TYPE_CHECKING:
    from pipelines.config import PipelineConfig

POLL_SECONDS = 5.0
MAX_FAILED_POLLS = 12
_CONNECT_SECONDS = 10
_LOGIN_PAGE = "That is no Kubeflow Pipelines API, or a login page in front of one: check --host, and give --token-env."
_FINAL_STATES = ("SUCCEEDED", "FAILED", "SKIPPED", "CANCELED")


def connect(host: str, *, namespace: str | None = None, token: str | None = None) -> Any:
    """A `kfp.Client` of an API that answers.

    Args:
        host: Address of the API or of Kubeflow's UI in front of it, with http:// or https://.
        namespace: Profile namespace of a multi-user Kubeflow.
        token: Bearer token.

    Raises:
        HeadraceError: nothing answers there, it is no Kubeflow Pipelines API, it refuses the token, or it wants a
            namespace.
    """
    import kfp

    from components.errors import HeadraceError

    with explained(host):
        multi_user = _ask_whether_multi_user(host, token)
        with warnings.catch_warnings():  # of servers older than 2.0
            warnings.simplefilter("ignore", FutureWarning)
            client = kfp.Client(host=host, namespace=namespace or "kubeflow", existing_token=token)
    if multi_user and not (namespace or client.get_user_namespace()):
        raise HeadraceError(f"The Kubeflow Pipelines at {host} is for several users. Give --namespace, your profile's.")
    return client


def submit(
    client: Any,
    config: PipelineConfig,
    *,
    image: str | None = None,
    experiment: str | None = None,
    run_name: str | None = None,
    namespace: str | None = None,
    parameters: Mapping[str, str] | None = None,
) -> str:
    """Compile a configuration, start a run of it and return the run's id.

    Args:
        client: As made by `connect`.
        config: The whole configuration.
        image: The image that every step runs in; default: headrace:<version>.
        experiment: Experiment of the run, made if it does not exist; default: the name of the configuration.
        run_name: Default: the name of the configuration and the time.
        namespace: Profile namespace of a multi-user Kubeflow.
        parameters: Run-time parameters.

    Raises:
        ConfigError: the pipeline has no such parameter.
        HeadraceError: the API did not take it.
    """
    from pipelines.compile import compile_pipeline

    text = compile_pipeline(config, image=image)
    _check_parameters(parameters or {}, text)
    host = _host_of(client)
    with tempfile.TemporaryDirectory() as folder, explained(host), contextlib.redirect_stdout(io.StringIO()):
        package = Path(folder) / "pipeline.yaml"
        package.write_text(text)
        run = client.create_run_from_pipeline_package(
            str(package),
            arguments=dict(parameters or {}),
            run_name=run_name or f"{config.name} {datetime.datetime.now():%Y-%m-%d %H:%M:%S}",
            experiment_name=experiment or config.name,
            namespace=namespace,
        )
    return str(run.run_id)


def run_url(host: str, run_id: str) -> str:
    """Where Kubeflow's UI shows a run."""
    return f"{host.rstrip('/')}/#/runs/details/{run_id}"


def follow(client: Any, run_id: str, *, poll_seconds: float = POLL_SECONDS) -> None:
    """Wait for the end of a run and print what becomes of its steps.

    `kfp.Client.wait_for_run_completion` would wait for ever for a run that was cancelled, and give up at the first
    answer that is lost on the way.

    Raises:
        NotBlessedError: the run ended well, without a model pushed.
        HeadraceError: the run failed or was cancelled, or the API is gone for a minute.
    """
    from components.errors import HeadraceError, NotBlessedError

    shown: dict[str, str] = {}
    while True:
        run = _get_run(client, run_id, poll_seconds)
        states = _states_of_steps(run)
        for name, state in states.items():
            if shown.get(name) != state:
                click.echo(f"{name:<10} {state.lower()}")
        shown |= states
        if run.state in _FINAL_STATES:
            break
        time.sleep(poll_seconds)
    if run.state != "SUCCEEDED":
        raise HeadraceError(f"Run {run_id} ended as {run.state}.{_why(run)} See {run_url(_host_of(client), run_id)}")
    if "evaluate" in states and states.get("push") != "SUCCEEDED":
        raise NotBlessedError(f"Run {run_id} ended well, but its model was not blessed and so not pushed.")


@contextlib.contextmanager
def explained(host: str) -> Iterator[None]:
    """Turn what the API and the network answer into errors that say how to mend them.

    Raises:
        HeadraceError: always in place of `kfp_server_api.ApiException` and urllib3's errors.
    """
    import kfp_server_api  # type: ignore[import-untyped]
    import urllib3

    from components.errors import HeadraceError

    try:
        yield
    except kfp_server_api.ApiException as error:
        raise HeadraceError(_explain_status(host, error.status, error.reason, error.body)) from error
    except urllib3.exceptions.HTTPError as error:
        raise HeadraceError(
            f"No Kubeflow Pipelines API answers at {host}: {_innermost(error)}. Check --host. From outside the "
            "cluster: kubectl port-forward -n kubeflow svc/ml-pipeline-ui 8080:80, then --host http://localhost:8080."
        ) from error


def _ask_whether_multi_user(host: str, token: str | None) -> bool:
    """One quick question ahead of `kfp.Client`, which asks five times and prints five tracebacks if refused."""
    import kfp_server_api

    from components.errors import HeadraceError

    settings = kfp_server_api.Configuration(host=host.rstrip("/"))
    settings.retries = False
    if token:
        settings.api_key = {"authorization": token}
        settings.api_key_prefix = {"authorization": "Bearer"}
    api = kfp_server_api.HealthzServiceApi(kfp_server_api.ApiClient(settings))
    health, _, headers = api.healthz_service_get_healthz_with_http_info(_request_timeout=_CONNECT_SECONDS)
    if "json" not in headers.get("Content-Type", ""):
        raise HeadraceError(f"{host} answered with a web page. {_LOGIN_PAGE}")
    return bool(health.multi_user)


def _explain_status(host: str, status: int, reason: str, body: str | None) -> str:
    answer = f"{host} answered {status} {reason}{_server_message(body)}."
    if status in (401, 403):
        return (
            f"{answer} It refuses this token or namespace: give a valid token in the environment variable that "
            "--token-env names, and the --namespace in which it may run pipelines."
        )
    if status == 404:
        return (
            f"{answer} There is no Kubeflow Pipelines API (v2) there. Check --host: it is the address of the UI or of "
            "the API server, with the path under which they are served, if any."
        )
    return f"{answer} {_LOGIN_PAGE}" if 300 <= status < 400 else answer


def _server_message(body: str | None) -> str:
    try:
        answer = json.loads(body or "")
        return f": {answer.get('message') or answer['error']}".rstrip(".")
    except (ValueError, KeyError, AttributeError, TypeError):
        return ""


def _innermost(error: BaseException) -> str:
    reason = getattr(error, "reason", None) or error
    text = re.sub(r"^<[^>]*>: |^\w+\([^)]*\): ", "", str(reason))
    return text.rstrip(".")


def _check_parameters(parameters: Mapping[str, str], pipeline: str) -> None:
    import yaml

    from components.errors import ConfigError, did_you_mean

    known = yaml.safe_load(pipeline)["root"]["inputDefinitions"]["parameters"]
    for name in parameters:
        if name not in known:
            raise ConfigError(
                f"--parameter: the pipeline has no run-time parameter '{name}'.{did_you_mean(name, known)} "
                "Everything else is set in the configuration."
            )


def _get_run(client: Any, run_id: str, poll_seconds: float) -> Any:
    """A run, past answers lost to the network or to a server that restarts."""
    import kfp_server_api
    import urllib3

    with explained(_host_of(client)):
        for _ in range(MAX_FAILED_POLLS - 1):
            try:
                return client.get_run(run_id)
            except urllib3.exceptions.HTTPError:
                time.sleep(poll_seconds)
            except kfp_server_api.ApiException as error:
                if error.status < 500:
                    raise
                time.sleep(poll_seconds)
        return client.get_run(run_id)


def _states_of_steps(run: Any) -> dict[str, str]:
    from pipelines.steps import STEPS

    names = {step.name for step in STEPS}
    tasks = run.run_details.task_details or [] if run.run_details else []
    return {task.display_name: task.state for task in tasks if task.display_name in names and task.state}


def _why(run: Any) -> str:
    tasks = run.run_details.task_details or [] if run.run_details else []
    failed = [(task.display_name, task.error) for task in tasks if task.state == "FAILED"]
    said = [f"{name}: {error.message}" if error and error.message else name for name, error in failed]
    if run.error and run.error.message:
        said.insert(0, run.error.message)
    return "".join(f"\n  {line}" for line in said) + "\n" if said else ""


def _host_of(client: Any) -> str:
    return str(client._existing_config.host)


def _token(variable: str | None) -> str | None:
    from components.errors import ConfigError

    if variable is None:
        return None
    if not os.environ.get(variable):
        raise ConfigError(f"--token-env: the environment variable {variable} is not set. Put the token into it.")
    return os.environ[variable]


def _checked_host(_: click.Context, __: click.Parameter, host: str) -> str:
    if not host.startswith(("http://", "https://")):
        raise click.BadParameter(f"'{host}' does not start with http:// or https://.")
    return host.rstrip("/")


def _pairs(_: click.Context, __: click.Parameter, given: Sequence[str]) -> dict[str, str]:
    for pair in given:
        if "=" not in pair:
            raise click.BadParameter(f"expected name=value, received '{pair}'.")
    return dict(pair.split("=", 1) for pair in given)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("arguments", nargs=-1, metavar="[CONFIG] [section.key=value ...]")
@click.option("--host", required=True, callback=_checked_host, help="Address of the Kubeflow Pipelines API or UI.")
@click.option("--image", help="Image that every step runs in.  [default: headrace:<version>]")
@click.option("--experiment", help="Experiment of the run; made if there is none.  [default: name of the config]")
@click.option("--run-name", help="Name of the run.  [default: name of the config and the time]")
@click.option("--namespace", help="Your profile's namespace, where Kubeflow is for several users.")
@click.option("--token-env", metavar="VAR", help="Environment variable that holds the bearer token.")
@click.option(
    "--parameter", "parameters", multiple=True, callback=_pairs, metavar="NAME=VALUE", help="As data_path=URI."
)
@click.option("--wait/--no-wait", default=False, help="Follow the run to its end.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(
    arguments: tuple[str, ...],
    host: str,
    namespace: str | None,
    token_env: str | None,
    wait: bool,
    debug: bool,
    **options: Any,
) -> None:
    """Compile a configuration and start a run of it on Kubeflow Pipelines.

    CONFIG is a YAML file (default: configs/chicago_taxi.yaml); section.key=value overrides one of its settings.

    Exit codes: 0 sent, or with --wait succeeded; 1 failed; 2 the configuration is wrong; 3 the model was not blessed.
    """
    with reported(debug=debug, interrupted="Interrupted. A run that was sent goes on in the cluster."):
        from pipelines.config import load_config, split_arguments

        path, overrides = split_arguments(arguments)
        config = load_config(path, overrides)
        client = connect(host, namespace=namespace, token=_token(token_env))
        run_id = submit(client, config, namespace=namespace, **options)
        click.echo(f"Run {run_id}: {run_url(host, run_id)}")
        if wait:
            follow(client, run_id, poll_seconds=POLL_SECONDS)


if __name__ == "__main__":
    main(prog_name="python -m pipelines.submit")
