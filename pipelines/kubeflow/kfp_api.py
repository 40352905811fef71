"""A Kubeflow Pipelines API: connecting to it, reading what it says of a run, errors that say how to mend them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import click

from components.errors import HeadraceError

MAX_FAILED_POLLS = 12
_CONNECT_SECONDS = 10
_READ_SECONDS = 300
_LOGIN_PAGE = (
    "That is no Kubeflow Pipelines API, or a login page in front of one: check --host, and give --token-env, "
    "--token-file or --cookie-env."
)

Answer = TypeVar("Answer")


class NotToldError(HeadraceError):
    """The API has no answer to a question that only some versions of it know."""


@dataclasses.dataclass(frozen=True)
class Access:
    """Where a Kubeflow Pipelines API is, and who asks.

    Attributes:
        host: Address of the API or of Kubeflow's UI in front of it, with http:// or https://.
        namespace: Profile namespace of a multi-user Kubeflow.
        token: Bearer token.
        token_file: File of a bearer token, read again for each request: Kubernetes renews the tokens that it mounts.
        cookie: Session cookie of a login page (Dex with oauth2-proxy, say), as `name=value`.
        ca_file: Certificates (PEM) of the authorities that the server's certificate is from; default: Mozilla's.
    """

    host: str
    namespace: str | None = None
    token: str | None = dataclasses.field(default=None, repr=False)
    token_file: Path | None = None
    cookie: str | None = dataclasses.field(default=None, repr=False)
    ca_file: Path | None = None


def access_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say where the API is; the command gets them as `access`, an `Access` or, without --host, None."""

    @functools.wraps(command)
    def wrapped(*, host: str | None, namespace: str | None, **options: Any) -> Any:
        names = ("token_env", "token_file", "cookie_env", "ca_file")
        token_env, token_file, cookie_env, ca_file = (options.pop(name) for name in names)
        if sum(given is not None for given in (token_env, token_file, cookie_env)) > 1:
            raise click.UsageError("Give one of --token-env, --token-file and --cookie-env.")
        access = None
        if host is not None:
            token, cookie = _secret("--token-env", token_env), _secret("--cookie-env", cookie_env)
            access = Access(host, namespace, token, token_file, cookie, ca_file)
        return command(access=access, **options)

    for option in reversed(_ACCESS_OPTIONS):
        wrapped = option(wrapped)
    return wrapped


def pairs(_: click.Context, __: click.Parameter, given: Sequence[str]) -> dict[str, str]:
    """The callback of an option `NAME=VALUE` that may be given several times."""
    for pair in given:
        if "=" not in pair:
            raise click.BadParameter(f"expected name=value, received '{pair}'.")
    return dict(pair.split("=", 1) for pair in given)


def connect(access: Access) -> Any:
    """A `kfp.Client` of an API that answers.

    Raises:
        HeadraceError: nothing answers there, it is no Kubeflow Pipelines API, it refuses who asks, or it wants a
            namespace.
    """
    import kfp
    from kfp.client import ServiceAccountTokenVolumeCredentials

    with explained(access.host):
        multi_user = _ask_whether_multi_user(access)
        with warnings.catch_warnings():  # of servers older than 2.0
            warnings.simplefilter("ignore", FutureWarning)
            client = kfp.Client(
                host=access.host,
                namespace=access.namespace or "kubeflow",
                existing_token=access.token,
                credentials=ServiceAccountTokenVolumeCredentials(str(access.token_file)) if access.token_file else None,
                cookies=access.cookie,
                ssl_ca_cert=access.ca_file and str(access.ca_file),
            )
    if multi_user and not (access.namespace or client.get_user_namespace()):
        raise HeadraceError(
            f"The Kubeflow Pipelines at {access.host} is for several users. Give --namespace, your profile's."
        )
    return client


def host_of(client: Any) -> str:
    """Address under which a client was connected."""
    return str(client._existing_config.host)


def run_url(host: str, run_id: str) -> str:
    """Where Kubeflow's UI shows a run."""
    return f"{host.rstrip('/')}/#/runs/details/{run_id}"


def read(client: Any, path: str, **query: str) -> Iterator[bytes]:
    """What a GET answers, in pieces; `path` is one that `kfp.Client` has no function for.

    Raises:
        kfp_server_api.ApiException: the answer is no success, or a web page that was not asked for, such as a login page.
    """
    import kfp_server_api  # type: ignore[import-untyped]

    response = client._run_api.api_client.call_api(
        quote(path),
        "GET",
        query_params=list(query.items()),
        auth_settings=["Bearer"],
        _preload_content=False,
        _request_timeout=(_CONNECT_SECONDS, _READ_SECONDS),
    )
    with contextlib.closing(response):
        if "text/html" in response.headers.get("Content-Type", "") and not path.endswith(".html"):
            raise kfp_server_api.ApiException(status=404, reason="Not Found: a web page was the answer")
        yield from response.stream(1 << 20)


def patiently(client: Any, ask: Callable[[], Answer], *, poll_seconds: float) -> Answer:
    """What `ask` gives, past answers lost to the network or to a server that restarts.

    Raises:
        HeadraceError: there is no answer, not at the twelfth time either.
    """
    import kfp_server_api
    import urllib3

    with explained(host_of(client)):
        for _ in range(MAX_FAILED_POLLS - 1):
            try:
                return ask()
            except urllib3.exceptions.HTTPError:
                time.sleep(poll_seconds)
            except kfp_server_api.ApiException as error:
                if error.status < 500:
                    raise
                time.sleep(poll_seconds)
        return ask()


def pipeline_of_run(client: Any, run: Any) -> dict[str, Any]:
    """The compiled pipeline of a run: its own, or that of the uploaded version which it refers to."""
    if run.pipeline_spec:
        return dict(run.pipeline_spec)
    version = run.pipeline_version_reference
    return dict(client.get_pipeline_version(version.pipeline_id, version.pipeline_version_id).pipeline_spec)


def find_pipeline(client: Any, name: str, namespace: str | None) -> str | None:
    """The id of the uploaded pipeline of that name."""
    found = client._pipelines_api.pipeline_service_list_pipelines(filter=named(name), **_in(namespace)).pipelines
    return str(found[0].pipeline_id) if found else None


def make_pipeline(client: Any, name: str, namespace: str | None) -> str:
    """Make a pipeline without a version yet, and return its id."""
    import kfp_server_api

    pipeline = kfp_server_api.V2beta1Pipeline(display_name=name, **_in(namespace))
    return str(client._pipelines_api.pipeline_service_create_pipeline(pipeline).pipeline_id)


def named(name: str) -> str:
    """The filter for things of that name (backend/api/v2beta1/filter.proto)."""
    return json.dumps({"predicates": [{"operation": "EQUALS", "key": "display_name", "stringValue": name}]})


def parse_pipeline(text: str) -> dict[str, Any] | None:
    """A compiled pipeline as the API gives it back: its specification, with a platform's in `pipeline_spec` and
    `platform_spec`; None for a text that is no pipeline.

    Raises:
        yaml.YAMLError: it is no YAML.
    """
    import yaml

    documents = list(yaml.load_all(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    specs = [document for document in documents if isinstance(document, dict) and "root" in document]
    platforms = [document for document in documents if isinstance(document, dict) and "platforms" in document]
    if specs and platforms:
        return {"pipeline_spec": specs[0], "platform_spec": platforms[0]}
    return specs[0] if specs else None


def task_names(pipeline: Mapping[str, Any]) -> dict[str, str]:
    """What the tasks of a compiled pipeline that run something are called, at any depth of its groups, by their keys.

    The key is what the workflow and the API go by; a task of another component may be shown as a step, too.
    """
    spec = pipeline.get("pipeline_spec", pipeline)
    components = spec.get("components", {})
    dags = [component["dag"] for component in (spec["root"], *components.values()) if "dag" in component]
    return {
        key: task.get("taskInfo", {}).get("name", key)
        for dag in dags
        for key, task in dag["tasks"].items()
        if "dag" not in components.get(task["componentRef"]["name"], {})
    }


@dataclasses.dataclass(frozen=True)
class Attempt:
    """A pod in which a step was tried.

    Attributes:
        step: Key of the step's task in the compiled pipeline, mostly its name; see `task_names`.
        pod: Name of the pod.
        namespace: Its namespace.
        failed: Whether it ended in a failure.
        message: What Kubernetes said of its end, as `OOMKilled (exit code 137)`.
        pod_spec: What Kubeflow added to the pod: image, environment and, in the launcher's arguments, the step's inputs.
    """

    step: str
    pod: str
    namespace: str
    failed: bool
    message: str
    pod_spec: dict[str, Any]

    def executor_input(self) -> dict[str, Any]:
        """The step's parameters and artifacts, as Kubeflow's launcher is told them; empty if they are not known."""
        (container,) = self.pod_spec.get("containers") or [{}]
        command = container.get("command", [])
        if "--executor_input" not in command:
            return {}
        return dict(json.loads(command[command.index("--executor_input") + 1]))


def attempts(client: Any, run_id: str) -> list[Attempt]:
    """The pods of a run's steps, in the order of their start.

    The v2beta1 API of Kubeflow Pipelines up to 2.17 knows neither the pods nor the artifacts of a task
    (kubeflow/pipelines#9858); its v1beta1 API has the Argo workflow, which does.

    Raises:
        NotToldError: this API does not give the workflow.
        HeadraceError: it does not answer, or refuses who asks.
    """
    import kfp_server_api

    detail: dict[str, Any] = {}
    with explained(host_of(client)):
        try:
            detail = json.loads(b"".join(read(client, f"/apis/v1beta1/runs/{run_id}")))
        except kfp_server_api.ApiException as error:
            if error.status != 404:
                raise
    if not (manifest := detail.get("pipeline_runtime", {}).get("workflow_manifest")):
        raise NotToldError(
            f"{host_of(client)} does not tell the pods of run {run_id}: its v1beta1 API, which Kubeflow Pipelines up to "
            "2.17 have, does not give the workflow."
        )
    workflow = json.loads(manifest)
    nodes = sorted(workflow["status"].get("nodes", {}).values(), key=lambda node: str(node.get("startedAt")))
    return [attempt for node in nodes if (attempt := _attempt(node, workflow["metadata"])) is not None]


def read_log(client: Any, run: Any, attempt: Attempt) -> str:
    """What a step wrote, by way of the UI's server, or else of the API's.

    Both read the pod's log while there is the pod, and then the archive, if Argo keeps one.

    Raises:
        kfp_server_api.ApiException: neither gives it.
    """
    import kfp_server_api

    query = {"podname": attempt.pod, "podnamespace": attempt.namespace, "runid": run.run_id}
    if run.created_at:
        query["createdat"] = f"{run.created_at:%Y-%m-%d}"
    try:
        log = b"".join(read(client, "/k8s/pod/logs", **query))
    except kfp_server_api.ApiException:
        log = b"".join(read(client, f"/apis/v1alpha1/runs/{run.run_id}/nodes/{attempt.pod}/log"))
    return log.decode(errors="replace")


@contextlib.contextmanager
def explained(host: str) -> Iterator[None]:
    """Turn what the API and the network answer into errors that say how to mend them.

    Raises:
        HeadraceError: always in place of `kfp_server_api.ApiException` and urllib3's errors.
    """
    import kfp_server_api
    import urllib3

    try:
        yield
    except kfp_server_api.ApiException as error:
        raise HeadraceError(_explain_status(host, error)) from error
    except urllib3.exceptions.HTTPError as error:
        raise HeadraceError(_explain_silence(host, _innermost(error))) from error
    except AttributeError as error:  # kfp_server_api decodes the body of a TLS error, which has none
        if not isinstance(error.__context__, kfp_server_api.ApiException):
            raise
        raise HeadraceError(_explain_silence(host, str(error.__context__.reason))) from error


def _ask_whether_multi_user(access: Access) -> bool:
    """One quick question ahead of `kfp.Client`, which asks five times and prints five tracebacks if refused."""
    import kfp_server_api

    settings = kfp_server_api.Configuration(host=access.host)
    settings.retries = False
    settings.ssl_ca_cert = access.ca_file and str(access.ca_file)
    token = access.token_file.read_text().strip() if access.token_file else access.token
    if token:
        settings.api_key = {"authorization": token}
        settings.api_key_prefix = {"authorization": "Bearer"}
    api = kfp_server_api.HealthzServiceApi(kfp_server_api.ApiClient(settings, cookie=access.cookie))
    health, _, headers = api.healthz_service_get_healthz_with_http_info(_request_timeout=_CONNECT_SECONDS)
    if "json" not in headers.get("Content-Type", ""):
        raise HeadraceError(f"{access.host} answered with a web page. {_LOGIN_PAGE}")
    return bool(health.multi_user)


def _in(namespace: str | None) -> dict[str, str]:
    return {"namespace": namespace} if namespace else {}


def _attempt(node: dict[str, Any], workflow: dict[str, Any]) -> Attempt | None:
    """The attempt that a node of an Argo workflow is; None for nodes without a pod, and for drivers that did their work.

    A step is `<groups>.<step>.executor`, with `(0)`, `(1)` at retries; `<step>-driver` looks for its inputs before.
    """
    match = re.search(r"\.([^.]+?)(?:\(\d+:.*\))?(\.executor|-driver)(?:\(\d+\))?$", node["name"])
    failed = node.get("phase") in ("Failed", "Error")
    if node.get("type") != "Pod" or match is None or (match[2] == "-driver" and not failed):
        return None
    given = {each["name"]: each.get("value") for each in node.get("inputs", {}).get("parameters", ())}
    return Attempt(
        step=match[1],
        # backend/src/common/util/workflow.go: RetrievePodName
        pod=f"{workflow['name']}-{node['templateName']}-{node['id'].rpartition('-')[2]}",
        namespace=workflow["namespace"],
        failed=failed,
        message=node.get("message", ""),
        pod_spec=json.loads(given.get("pod-spec-patch") or "{}"),
    )


def _explain_silence(host: str, why: str) -> str:
    if "CERTIFICATE_VERIFY_FAILED" in why:
        mend = "Give the authority that vouches for it by --ca-file."
    else:
        mend = (
            "Check --host. From outside the cluster: kubectl port-forward -n kubeflow svc/ml-pipeline-ui 8080:80, then "
            "--host http://localhost:8080."
        )
    return f"No Kubeflow Pipelines API answers at {host}: {why}. {mend}"


def _explain_status(host: str, error: Any) -> str:
    status = error.status
    answer = f"{host} answered {status} {error.reason}{_server_message(error.body)}."
    if status in (401, 403):
        return (
            f"{answer} It refuses who asks, or the namespace: give a valid token or session cookie by --token-env, "
            "--token-file or --cookie-env, and the --namespace in which it may run pipelines."
        )
    if status == 404:
        return (
            f"{answer} There is no Kubeflow Pipelines API (v2) there, or not what was asked for. Check --host: it is the "
            "address of the UI or of the API server, with the path under which they are served, if any."
        )
    return f"{answer} {_LOGIN_PAGE}" if 300 <= status < 400 else answer


def _server_message(body: str | bytes | None) -> str:
    try:
        answer = json.loads(body or "")
        return f": {answer.get('message') or answer['error']}".rstrip(".")
    except (ValueError, KeyError, AttributeError, TypeError):
        return ""


def _innermost(error: BaseException) -> str:
    reason = getattr(error, "reason", None) or error
    text = re.sub(r"^<[^>]*>: |^\w+\([^)]*\): ", "", str(reason))
    return text.rstrip(".")


def _secret(option: str, variable: str | None) -> str | None:
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise click.UsageError(f"{option}: the environment variable {variable} is not set. Put the secret into it.")
    return os.environ[variable]


def _checked_host(_: click.Context, __: click.Parameter, host: str | None) -> str | None:
    if host is not None and not host.startswith(("http://", "https://")):
        raise click.BadParameter(f"'{host}' does not start with http:// or https://.")
    return host and host.rstrip("/")


_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_ACCESS_OPTIONS = (
    click.option(
        "--host",
        envvar="KF_PIPELINES_ENDPOINT",
        callback=_checked_host,
        help="Address of the Kubeflow Pipelines API or, better, UI.  [default: $KF_PIPELINES_ENDPOINT]",
    ),
    click.option("--namespace", help="Your profile's namespace, where Kubeflow is for several users."),
    click.option("--token-env", metavar="VAR", help="Environment variable that holds the bearer token."),
    click.option("--token-file", type=_FILE, help="File of the bearer token, as Kubernetes mounts one."),
    click.option("--cookie-env", metavar="VAR", help="Environment variable of a session cookie, name=value."),
    click.option("--ca-file", type=_FILE, help="Certificates (PEM) that vouch for the server's."),
)
