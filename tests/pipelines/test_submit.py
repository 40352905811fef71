"""Submitting to a fake Kubeflow Pipelines API whose answers are kfp_server_api's own models."""

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kfp
import kfp_server_api as api
import pytest
import yaml
from click.testing import CliRunner, Result

from pipelines import submit
from pipelines.compile import compile_pipeline
from pipelines.config import PipelineConfig
from pipelines.submit import main

TINY = {
    "name": "tiny",
    "data": {"path": "data.csv", "task": "binary"},
    "evaluate": {"thresholds": [{"metric": "auc", "min": 0.5}]},
}
TOKEN = "s3cret"


class FakeApi:
    """A Kubeflow Pipelines API in a thread.

    Attributes:
        runs: What it answers for the run, one after the other, the last one for ever.
        answers: `(status, body, content type)` by `METHOD path`, in place of the ordinary answer.
        received: `(method, path, query, body, headers)` of each request.
    """

    def __init__(self) -> None:
        self.experiments: list[api.V2beta1Experiment] = []
        self.runs: list[Any] = []
        self.multi_user = False
        self.answers: dict[str, tuple[int, str, str]] = {}
        self.received: list[tuple[str, str, dict[str, list[str]], Any, Any]] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def bodies(self, method: str, path: str) -> list[Any]:
        """The bodies of the requests of one kind."""
        return [body for verb, where, _, body, _ in self.received if (verb, where) == (method, path)]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(None)

            def do_POST(self) -> None:
                self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _answer(self, body: Any) -> None:
                url = urlsplit(self.path)
                fake.received.append((self.command, url.path, parse_qs(url.query), body, self.headers))
                status, text, kind = fake.answers.get(f"{self.command} {url.path}") or fake.ordinary(url.path, body)
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler

    def ordinary(self, path: str, body: Any) -> tuple[int, str, str]:
        """What a healthy API answers."""
        kind = path.removeprefix("/apis/v2beta1/").split("/")[0]
        if kind == "healthz":
            model: Any = api.V2beta1GetHealthzResponse(multi_user=self.multi_user)
        elif kind == "experiments" and body is None:
            model = api.V2beta1ListExperimentsResponse(experiments=self.experiments)
        elif kind == "experiments":
            model = api.V2beta1Experiment(experiment_id="e-1", display_name=body["display_name"])
        elif body is not None:
            model = api.V2beta1Run(run_id="r-1", display_name=body["display_name"], state="PENDING")
        else:
            model = self.runs.pop(0) if len(self.runs) > 1 else self.runs[0]
        if isinstance(model, tuple):
            return model
        return 200, json.dumps(api.ApiClient().sanitize_for_serialization(model)), "application/json"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApi]:
    """The API; the settings of a kfp that the developer uses play no part."""
    monkeypatch.setattr(kfp.Client, "_LOCAL_KFP_CONTEXT", str(tmp_path / "context.json"))
    monkeypatch.setattr(submit, "POLL_SECONDS", 0.01)
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(yaml.safe_dump(TINY))
    server = FakeApi()
    yield server
    server.server.shutdown()
    server.server.server_close()


def _submit(host: str, *options: str, environment: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(main, ["tiny.yaml", "--host", host, *options], env=environment)


def _run(state: str, **tasks: str) -> Any:
    details = [api.V2beta1PipelineTaskDetail(display_name=name, state=value) for name, value in tasks.items()]
    return api.V2beta1Run(run_id="r-1", state=state, run_details=api.V2beta1RunDetails(task_details=details))


def test_what_is_sent(fake: FakeApi) -> None:
    result = _submit(
        fake.url,
        "train.epochs=3",
        "--image",
        "registry/headrace:2",
        "--run-name",
        "nightly",
        "--parameter",
        "data_path=s3://b/d=1.csv",
    )
    assert result.exit_code == 0, result.output
    assert f"Run r-1: {fake.url}/#/runs/details/r-1" in result.output
    (sent,) = fake.bodies("POST", "/apis/v2beta1/runs")
    config = PipelineConfig.model_validate(TINY | {"train": {"epochs": 3}})
    assert sent["pipeline_spec"] == yaml.safe_load(compile_pipeline(config, image="registry/headrace:2"))
    assert sent["runtime_config"]["parameters"] == {"data_path": "s3://b/d=1.csv"}
    assert (sent["display_name"], sent["experiment_id"]) == ("nightly", "e-1")


@pytest.mark.parametrize(("options", "name"), [((), "tiny"), (("--experiment", "spring"), "spring")])
def test_an_experiment_that_does_not_exist_is_made(fake: FakeApi, options: tuple[str, ...], name: str) -> None:
    assert _submit(fake.url, *options).exit_code == 0
    assert [body["display_name"] for body in fake.bodies("POST", "/apis/v2beta1/experiments")] == [name]
    (sent,) = fake.bodies("POST", "/apis/v2beta1/runs")
    assert sent["display_name"].startswith("tiny 20")


def test_an_experiment_that_exists_is_used(fake: FakeApi) -> None:
    fake.experiments = [api.V2beta1Experiment(experiment_id="e-7", display_name="tiny")]
    assert _submit(fake.url).exit_code == 0
    assert fake.bodies("POST", "/apis/v2beta1/experiments") == []
    assert fake.bodies("POST", "/apis/v2beta1/runs")[0]["experiment_id"] == "e-7"


def test_the_token_goes_with_every_request(fake: FakeApi) -> None:
    fake.runs = [_run("SUCCEEDED")]
    assert _submit(fake.url, "--token-env", "KFP_TOKEN", "--wait", environment={"KFP_TOKEN": TOKEN}).exit_code == 0
    assert {headers["Authorization"] for *_, headers in fake.received} == {f"Bearer {TOKEN}"}


def test_without_a_token_no_header_is_sent(fake: FakeApi) -> None:
    assert _submit(fake.url).exit_code == 0
    assert {headers["Authorization"] for *_, headers in fake.received} == {None}


def test_the_namespace_is_that_of_the_experiment(fake: FakeApi) -> None:
    fake.multi_user = True
    assert _submit(fake.url, "--namespace", "team-a").exit_code == 0
    assert fake.bodies("POST", "/apis/v2beta1/experiments")[0]["namespace"] == "team-a"


def test_waiting_shows_each_step_and_ends_with_the_run(fake: FakeApi) -> None:
    fake.runs = [
        _run("PENDING"),
        _run("RUNNING", **{"ingest": "RUNNING", "ingest-driver": "SUCCEEDED"}),
        _run("RUNNING", ingest="SUCCEEDED", validate="RUNNING"),
        (503, "gone for a moment", "text/plain"),
        _run("SUCCEEDED", ingest="SUCCEEDED", validate="SUCCEEDED", evaluate="SUCCEEDED", push="SUCCEEDED"),
    ]
    result = _submit(fake.url, "--wait")
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.output.splitlines()[1:]]
    assert lines[:4] == ["ingest running", "ingest succeeded", "validate running", "validate succeeded"]
    assert "driver" not in result.output


def test_a_failed_run_says_which_step_and_why(fake: FakeApi) -> None:
    run = _run("FAILED", ingest="SUCCEEDED", train="FAILED")
    run.run_details.task_details[1].error = api.GoogleRpcStatus(code=13, message="OOMKilled")
    fake.runs = [run]
    result = _submit(fake.url, "--wait")
    assert result.exit_code == 1
    assert "Run r-1 ended as FAILED.\n  train: OOMKilled\n" in result.stderr
    assert f"{fake.url}/#/runs/details/r-1" in result.stderr


def test_a_cancelled_run_ends_the_wait(fake: FakeApi) -> None:
    fake.runs = [_run("CANCELING"), _run("CANCELED")]
    result = _submit(fake.url, "--wait")
    assert result.exit_code == 1
    assert "ended as CANCELED" in result.stderr


def test_a_model_that_is_not_blessed_is_exit_code_3(fake: FakeApi) -> None:
    fake.runs = [_run("SUCCEEDED", evaluate="SUCCEEDED", push="SKIPPED")]
    result = _submit(fake.url, "--wait")
    assert result.exit_code == 3
    assert "not blessed" in result.stderr


def test_an_api_that_stays_away_ends_the_wait(fake: FakeApi) -> None:
    fake.runs = [(503, "gone", "text/plain")]
    result = _submit(fake.url, "--wait")
    assert result.exit_code == 1
    assert "answered 503" in result.stderr
    assert len([1 for method, path, *_ in fake.received if path == "/apis/v2beta1/runs/r-1"]) == submit.MAX_FAILED_POLLS


HEALTH = "GET /apis/v2beta1/healthz"
RUNS = "POST /apis/v2beta1/runs"
REFUSED = json.dumps({"code": 7, "message": "Failed to authorize: User is not authorized."})


@pytest.mark.parametrize(
    ("request_", "answer", "texts"),
    [
        (HEALTH, (401, "", "text/plain"), ["answered 401 Unauthorized.", "--token-env"]),
        (RUNS, (403, REFUSED, "application/json"), ["Failed to authorize: User is not authorized.", "--namespace"]),
        (
            HEALTH,
            (404, "no", "text/plain"),
            ["answered 404 Not Found.", "There is no Kubeflow Pipelines API", "--host"],
        ),
        (HEALTH, (200, "<html>Log in</html>", "text/html"), ["web page", "--token-env"]),
        (HEALTH, (302, "", "text/html"), ["answered 302", "login page"]),
        (
            RUNS,
            (400, json.dumps({"error": "spec is invalid."}), "application/json"),
            ["400 Bad Request: spec is invalid."],
        ),
    ],
)
def test_answers_that_mean_no(fake: FakeApi, request_: str, answer: tuple[int, str, str], texts: list[str]) -> None:
    fake.answers[request_] = answer
    result = _submit(fake.url, "--wait")
    assert result.exit_code == 1
    for text in [fake.url, *texts]:
        assert text in result.stderr
    assert "Traceback" not in result.output + result.stderr


def test_a_multi_user_kubeflow_asks_for_the_namespace(fake: FakeApi) -> None:
    fake.multi_user = True
    result = _submit(fake.url)
    assert result.exit_code == 1
    assert "Give --namespace" in result.stderr


def test_nothing_listens_there(fake: FakeApi, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        host = f"http://127.0.0.1:{taken.getsockname()[1]}"
        result = _submit(host)
    assert result.exit_code == 1
    assert f"No Kubeflow Pipelines API answers at {host}: " in result.stderr
    assert "Connection refused" in result.stderr
    assert "port-forward" in result.stderr
    assert "Traceback" not in result.stderr
    assert caplog.text == ""


def test_a_traceback_with_debug_only(fake: FakeApi) -> None:
    fake.answers[HEALTH] = (404, "", "text/plain")
    assert "Traceback" in _submit(fake.url, "--debug").stderr


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--parameter", "data_pth=x"], "no run-time parameter 'data_pth'. Did you mean 'data_path'?"),
        (["--parameter", "data_path"], "expected name=value, received 'data_path'"),
        (["--token-env", "HEADRACE_NO_SUCH"], "HEADRACE_NO_SUCH is not set"),
        (["train.epoch=1"], "epochs"),
    ],
)
def test_wrong_usage_is_exit_code_2(fake: FakeApi, options: list[str], text: str) -> None:
    result = _submit(fake.url, *options)
    assert result.exit_code == 2
    assert text in result.stderr
    assert fake.bodies("POST", "/apis/v2beta1/runs") == []


def test_a_host_without_a_scheme_is_refused(fake: FakeApi) -> None:
    result = _submit("localhost:8080")
    assert result.exit_code == 2
    assert "does not start with http" in result.stderr
