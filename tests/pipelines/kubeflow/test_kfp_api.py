"""Reaching a Kubeflow Pipelines API: who asks, and what its refusals mean."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
from pathlib import Path

import pytest
import trustme
from click.testing import CliRunner, Result

from pipelines.kubeflow import kfp_api
from pipelines.kubeflow.kfp_api import Access
from pipelines.submit import main
from tests.pipelines import fake_kfp
from tests.pipelines.fake_kfp import FakeApi

TOKEN = "s3cret"
SESSION = "oauth2_proxy_kubeflow=abc"
HEALTH = "GET /apis/v2beta1/healthz"
RUNS = "POST /apis/v2beta1/runs"
REFUSED = json.dumps({"code": 7, "message": "Failed to authorize: User is not authorized."})


def _submit(host: str, *options: str, environment: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(main, ["tiny.yaml", "--host", host, *options], env=environment)


@pytest.mark.parametrize(
    ("options", "header", "value"),
    [
        (("--token-env", "KFP_TOKEN"), "Authorization", f"Bearer {TOKEN}"),
        (("--token-file", "token"), "Authorization", f"Bearer {TOKEN}"),
        (("--cookie-env", "KFP_COOKIE"), "Cookie", SESSION),
    ],
)
def test_who_asks_is_told_with_every_request(
    kfp_server: FakeApi, options: tuple[str, ...], header: str, value: str
) -> None:
    Path("token").write_text(f"{TOKEN}\n")
    kfp_server.let_in = lambda headers: headers[header] == value
    kfp_server.runs = [fake_kfp.run("FAILED", train="FAILED")]
    kfp_server.nodes = [fake_kfp.node("train", "Failed", number=1)]
    kfp_server.logs = {fake_kfp.pod(1): "out of luck\n"}
    environment = {"KFP_TOKEN": TOKEN, "KFP_COOKIE": SESSION}
    result = _submit(kfp_server.url, *options, "--wait", environment=environment)
    assert "out of luck" in result.stderr
    assert {headers[header] for *_, headers in kfp_server.received} == {value}


def test_a_token_file_is_read_again_for_each_request(kfp_server: FakeApi) -> None:
    file = Path("token")
    file.write_text("first")
    client = kfp_api.connect(Access(kfp_server.url, token_file=file))
    file.write_text("second")
    client.list_experiments()
    *_, headers = kfp_server.received[-1]
    assert headers["Authorization"] == "Bearer second"


def test_without_credentials_none_are_sent(kfp_server: FakeApi) -> None:
    assert _submit(kfp_server.url).exit_code == 0
    assert {(headers["Authorization"], headers["Cookie"]) for *_, headers in kfp_server.received} == {(None, None)}


def test_secrets_are_not_in_what_access_shows() -> None:
    assert TOKEN not in repr(Access("http://x", token=TOKEN, cookie=TOKEN))


def test_the_host_may_be_in_the_environment_as_kfp_has_it(kfp_server: FakeApi) -> None:
    result = CliRunner().invoke(main, ["tiny.yaml"], env={"KF_PIPELINES_ENDPOINT": kfp_server.url})
    assert result.exit_code == 0, result.output
    assert len(kfp_server.bodies("POST", "/apis/v2beta1/runs")) == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--token-env", "HEADRACE_NO_SUCH"], "HEADRACE_NO_SUCH is not set"),
        (["--cookie-env", "HEADRACE_NO_SUCH"], "HEADRACE_NO_SUCH is not set"),
        (["--token-env", "PATH", "--cookie-env", "PATH"], "one of --token-env, --token-file and --cookie-env"),
        (["--token-file", "nowhere"], "'nowhere' does not exist"),
    ],
)
def test_wrong_credentials_are_exit_code_2(kfp_server: FakeApi, options: list[str], text: str) -> None:
    result = _submit(kfp_server.url, *options)
    assert result.exit_code == 2
    assert text in result.stderr
    assert kfp_server.received == []


@pytest.mark.parametrize(
    ("request_", "answer", "texts"),
    [
        (HEALTH, (401, "", "text/plain"), ["answered 401 Unauthorized.", "--token-env", "--cookie-env"]),
        (RUNS, (403, REFUSED, "application/json"), ["Failed to authorize: User is not authorized.", "--namespace"]),
        (
            HEALTH,
            (404, "no", "text/plain"),
            ["answered 404 Not Found.", "There is no Kubeflow Pipelines API", "--host"],
        ),
        (HEALTH, (200, "<html>Log in</html>", "text/html"), ["web page", "--cookie-env"]),
        (HEALTH, (302, "", "text/html"), ["answered 302", "login page"]),
        (RUNS, (400, json.dumps({"error": "spec is bad."}), "application/json"), ["400 Bad Request: spec is bad."]),
    ],
)
def test_answers_that_mean_no(
    kfp_server: FakeApi, request_: str, answer: tuple[int, str, str], texts: list[str]
) -> None:
    kfp_server.answers[request_] = answer
    result = _submit(kfp_server.url, "--wait")
    assert result.exit_code == 1
    for text in [kfp_server.url, *texts]:
        assert text in result.stderr
    assert "Traceback" not in result.output + result.stderr


def test_a_multi_user_kubeflow_asks_for_the_namespace(kfp_server: FakeApi) -> None:
    kfp_server.multi_user = True
    result = _submit(kfp_server.url)
    assert result.exit_code == 1
    assert "Give --namespace" in result.stderr


def test_nothing_listens_there(kfp_server: FakeApi, caplog: pytest.LogCaptureFixture) -> None:
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


def test_an_authority_of_ones_own(kfp_server: FakeApi) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path("ca.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with contextlib.closing(FakeApi(context)) as server:
        unknown = _submit(server.url)
        assert unknown.exit_code == 1
        assert "CERTIFICATE_VERIFY_FAILED" in unknown.stderr
        assert "by --ca-file" in unknown.stderr
        assert server.received == []
        known = _submit(server.url, "--ca-file", "ca.pem")
        assert known.exit_code == 0, known.stderr


def test_a_traceback_with_debug_only(kfp_server: FakeApi) -> None:
    kfp_server.answers[HEALTH] = (404, "", "text/plain")
    assert "Traceback" in _submit(kfp_server.url, "--debug").stderr


def test_a_host_without_a_scheme_is_refused() -> None:
    result = _submit("localhost:8080")
    assert result.exit_code == 2
    assert "does not start with http" in result.stderr


def test_the_pods_of_the_steps_are_read_from_the_workflow(kfp_server: FakeApi) -> None:
    executor_input = {"inputs": {"parameterValues": {"config": "{}"}}}
    kfp_server.nodes = [
        fake_kfp.node("export", "Succeeded", number=3, group="root.condition-1"),
        fake_kfp.node("train", "Failed", "OOMKilled (exit code 137)", number=2, executor_input=executor_input),
        fake_kfp.node("train", "Succeeded", number=1, part="driver"),
        fake_kfp.node("verify", "Error", "no such image", number=4, part="driver"),
        fake_kfp.node("trial", "Succeeded", number=5, part="retried", group="root.for-loop-2.iteration(0:0)"),
        {"id": "tiny-8rl2b", "name": "tiny-8rl2b", "type": "DAG", "startedAt": None},
    ]
    found = kfp_api.attempts(kfp_api.connect(Access(kfp_server.url)), "r-1")
    assert [(each.step, each.failed) for each in found] == [
        ("train", True),
        ("export", False),
        ("verify", True),
        ("trial", False),
    ]
    train, *_, trial = found
    assert (train.pod, train.namespace, train.message) == (
        "tiny-8rl2b-system-container-impl-2",
        "team-a",
        "OOMKilled (exit code 137)",
    )
    assert train.executor_input() == executor_input
    assert found[2].pod == "tiny-8rl2b-system-container-driver-4"
    assert trial.pod == "tiny-8rl2b-system-container-impl-5"
