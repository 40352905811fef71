"""A Kubeflow Pipelines API in a thread, with the server of its UI; its answers are kfp_server_api's own models."""

from __future__ import annotations

import json
import mimetypes
import socket
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import kfp_server_api as api

from pipelines.compile import compile_pipeline
from pipelines.config import PipelineConfig

Answer = tuple[int, str | bytes, str]
CUT: Answer = (0, "", "")  # no answer: the connection is cut
_NAMESPACE = "team-a"
_WORKFLOW = "tiny-8rl2b"


class FakeApi:
    """Answers as Kubeflow Pipelines 2.17 does.

    Attributes:
        runs: What it answers for the run, one after the other, the last one for ever; an `Answer` stands for itself.
        experiments, pipelines, versions, recurring: What it has.
        nodes: The nodes of the run's Argo workflow, by `node`; without any its v1beta1 API is not there.
        logs: What the UI's server has of each pod.
        api_logs: What the API itself has.
        store: Folder of the object store, `<bucket>/<key>` below it.
        let_in: Whether it answers a request with these headers, or else 401.
        answers: By `METHOD path`, in place of the ordinary answer.
        received: `(method, path, query, body, headers)` of each request.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.runs: list[Any] = []
        self.experiments: list[api.V2beta1Experiment] = []
        self.pipelines: list[api.V2beta1Pipeline] = []
        self.versions: list[api.V2beta1PipelineVersion] = []
        self.recurring: list[api.V2beta1RecurringRun] = []
        self.nodes: list[dict[str, Any]] = []
        self.logs: dict[str, str] = {}
        self.api_logs: dict[str, str] = {}
        self.store: Path | None = None
        self.multi_user = False
        self.let_in: Callable[[Any], bool] = lambda headers: True
        self.answers: dict[str, Answer] = {}
        self.received: list[tuple[str, str, dict[str, list[str]], Any, Any]] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        if tls is not None:
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        """Stop it."""
        self.server.shutdown()
        self.server.server_close()

    def bodies(self, method: str, path: str) -> list[Any]:
        """The bodies of the requests of one kind."""
        return [body for verb, where, _, body, _ in self.received if (verb, where) == (method, path)]

    def queries(self, path: str) -> list[dict[str, str]]:
        """The queries of the GETs of a path."""
        return [
            {name: value for name, (value,) in query.items()}
            for _, where, query, _, _ in self.received
            if where == path
        ]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(None)

            def do_DELETE(self) -> None:
                self._answer(None)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                self._answer(json.loads(body) if "json" in self.headers["Content-Type"] else body)

            def _answer(self, body: Any) -> None:
                url = urlsplit(self.path)
                fake.received.append((self.command, url.path, parse_qs(url.query), body, self.headers))
                given = fake.answers.get(f"{self.command} {url.path}")
                if not fake.let_in(self.headers):
                    given = 401, "", "text/plain"
                status, data, kind = given or fake.ordinary(self.command, unquote(url.path), parse_qs(url.query), body)
                if (status, data, kind) == CUT:
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                data = data if isinstance(data, bytes) else data.encode()
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler

    def ordinary(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> Answer:
        """What a healthy API answers."""
        if path.startswith("/apis/v2beta1/"):
            model = self._v2beta1(method, path.removeprefix("/apis/v2beta1/").split("/"), query, body)
            if isinstance(model, tuple):
                return model
            return 200, json.dumps(api.ApiClient().sanitize_for_serialization(model)), "application/json"
        if path.startswith("/apis/v1beta1/runs/") and self.nodes:
            workflow = {
                "metadata": {"name": _WORKFLOW, "namespace": _NAMESPACE},
                "status": {"nodes": {node["id"]: node for node in self.nodes}},
            }
            detail = {"run": {}, "pipeline_runtime": {"workflow_manifest": json.dumps(workflow)}}
            return 200, json.dumps(detail), "application/json"
        if path == "/k8s/pod/logs" and (pod := query["podname"][0]) in self.logs:
            return 200, self.logs[pod], "text/plain"
        if path.startswith("/apis/v1alpha1/runs/") and (pod := path.split("/")[6]) in self.api_logs:
            return 200, self.api_logs[pod], "text/plain"
        if path.startswith("/artifacts/") and self.store is not None:
            _, bucket, key = path.removeprefix("/artifacts/").split("/", 2)
            file = self.store / bucket / key
            if file.is_file():
                return 200, file.read_bytes(), mimetypes.guess_type(file.name)[0] or "application/octet-stream"
        return 404, "not found", "text/plain"

    def _v2beta1(self, method: str, path: list[str], query: dict[str, list[str]], body: Any) -> Any:
        match method, *path:
            case "GET", "healthz":
                return api.V2beta1GetHealthzResponse(multi_user=self.multi_user)
            case "GET", "experiments":
                return api.V2beta1ListExperimentsResponse(experiments=self.experiments)
            case "POST", "experiments":
                return api.V2beta1Experiment(experiment_id="e-1", display_name=body["display_name"])
            case "POST", "runs":
                return api.V2beta1Run(run_id="r-1", display_name=body["display_name"], state="PENDING")
            case "GET", "runs", _:
                return self.runs.pop(0) if len(self.runs) > 1 else self.runs[0]
            case "GET", "recurringruns":
                return api.V2beta1ListRecurringRunsResponse(recurring_runs=_chosen(self.recurring, query))
            case "POST", "recurringruns":
                return api.V2beta1RecurringRun(recurring_run_id="s-1", display_name=body["display_name"])
            case "DELETE", "recurringruns", _:
                return {}
            case "GET", "pipelines":
                return api.V2beta1ListPipelinesResponse(pipelines=_chosen(self.pipelines, query))
            case "POST", "pipelines":
                return api.V2beta1Pipeline(pipeline_id="p-1", display_name=body["display_name"])
            case "POST", "pipelines", "upload_version":
                return api.V2beta1PipelineVersion(pipeline_id=query["pipelineid"][0], pipeline_version_id="v-1")
            case "GET", "pipelines", _, "versions":
                return api.V2beta1ListPipelineVersionsResponse(pipeline_versions=_chosen(self.versions, query))
            case "GET", "pipelines", _, "versions", wanted:
                return next(version for version in self.versions if version.pipeline_version_id == wanted)
        return 404, "not found", "text/plain"


def _chosen(models: list[Any], query: dict[str, list[str]]) -> list[Any]:
    """Those of the name that the query's filter asks for."""
    (predicate,) = json.loads(query["filter"][0])["predicates"] if "filter" in query else [{}]
    return [model for model in models if predicate.get("stringValue", model.display_name) == model.display_name]


def run(state: str, *, pipeline: Any = None, **tasks: str) -> api.V2beta1Run:
    """A run in a state, with the states of its tasks."""
    details = [api.V2beta1PipelineTaskDetail(display_name=name, state=value) for name, value in tasks.items()]
    spec = pipeline or spec_of(*tasks)
    run_details = api.V2beta1RunDetails(task_details=details)
    return api.V2beta1Run(run_id="r-1", state=state, pipeline_spec=spec, run_details=run_details)


def spec_of(*tasks: str) -> dict[str, Any]:
    """As little of a compiled pipeline as has these tasks; Argo's nodes that are none are left out."""
    names = [name for name in tasks if not name.endswith(("-driver", "executor", "root"))]
    return {
        "components": {f"comp-{name}": {"executorLabel": f"exec-{name}"} for name in names},
        "root": {"dag": {"tasks": {name: {"componentRef": {"name": f"comp-{name}"}} for name in names}}},
    }


_compiled: dict[tuple[str, str | None], str] = {}


def compile_once(config: PipelineConfig, *, image: str | None = None) -> str:
    """As `compile_pipeline`; tests of what is done with a pipeline need no new one each."""
    key = config.model_dump_json(), image
    if key not in _compiled:
        _compiled[key] = compile_pipeline(config, image=image)
    return _compiled[key]


def tasks_of(pipeline: dict[str, Any], name: str) -> dict[str, Any]:
    """The tasks of the group in which a compiled pipeline has that one."""
    dags = [each["dag"] for each in (pipeline["root"], *pipeline["components"].values()) if "dag" in each]
    return next(dag["tasks"] for dag in dags if name in dag["tasks"])


def constants_of(pipeline: dict[str, Any], name: str) -> dict[str, Any]:
    """The parameters of a task that are known when it is compiled."""
    parameters = tasks_of(pipeline, name)[name]["inputs"]["parameters"]
    given = {key: source.get("runtimeValue", {}) for key, source in parameters.items()}
    return {key: value["constant"] for key, value in given.items() if "constant" in value}


def node(
    step: str,
    phase: str,
    message: str = "",
    *,
    number: int,
    executor_input: dict[str, Any] | None = None,
    part: str = "executor",
    group: str = "root",
) -> dict[str, Any]:
    """A node of an Argo workflow as Kubeflow Pipelines 2.17 makes them; `number` is the end of its id, and its place."""
    name, template = {
        "executor": (f"{group}.{step}.executor", "system-container-impl"),
        "retried": (f"{group}.{step}.executor(1)", "system-container-impl"),
        "driver": (f"{group}.{step}-driver", "system-container-driver"),
    }[part]
    command = ["/kfp-launcher/launch", "--executor_input", json.dumps(executor_input or {}), "--"]
    patch = {"containers": [{"name": "main", "image": "registry/headrace:2", "command": command}]}
    return {
        "id": f"{_WORKFLOW}-{number}",
        "name": f"{_WORKFLOW}.{name}",
        "type": "Pod",
        "templateName": template,
        "phase": phase,
        "message": message,
        "startedAt": f"2026-01-01T00:00:{number:02}Z",
        "inputs": {"parameters": [{"name": "pod-spec-patch", "value": json.dumps(patch)}]},
    }


def pod(number: int, *, part: str = "impl") -> str:
    """The name of a node's pod."""
    return f"{_WORKFLOW}-system-container-{part}-{number}"
