"""A trial as a Prometheus tells of it: what it is asked over HTTP, and what becomes of its answers, good and bad."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from click.testing import CliRunner

from serving.errors import Code, ServingError
from serving.rollout import commands
from serving.rollout.judge import CallCounts
from serving.rollout.prometheus import Prometheus, Series
from serving.rollout.readings import Observation, Trial
from serving.traffic import Traffic, read_traffic

TRIAL = Trial("m", Traffic(3, 4, 0.1), began_seconds=1000.0, baseline={})
Answer = tuple[int, Any]


def vector(*series: tuple[dict[str, str], float]) -> Answer:
    """What /api/v1/query answers."""
    result = [{"metric": labels, "value": [1060.0, f"{value:g}"]} for labels, value in series]
    return 200, {"status": "success", "data": {"resultType": "vector", "result": result}}


class FakePrometheus:
    """The HTTP API, with answers by the metric that a query names.

    Attributes:
        answers: metric -> what is answered; others give an empty vector.
        queries: what was asked.
        tokens: the Authorization headers.
    """

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.queries: list[str] = []
        self.tokens: list[str | None] = []
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                url = urlsplit(self.path)
                (query,) = parse_qs(url.query)["query"]
                api.queries.append(query)
                api.tokens.append(self.headers["Authorization"])
                status, body = 404, "404 page not found\n"
                if url.path == "/prefix/api/v1/query":
                    status, body = next((found for metric, found in api.answers.items() if metric in query), vector())
                text = body if isinstance(body, str) else json.dumps(body)
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self.url = f"http://127.0.0.1:{self._server.server_port}/prefix/"
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def api() -> Iterator[FakePrometheus]:
    fake = FakePrometheus()
    yield fake
    fake.stop()


def observe(api: FakePrometheus, **settings: Any) -> Observation:
    return Prometheus(api.url, clock=lambda: 1059.2, **settings).observe(TRIAL)


def test_servers_that_name_versions(api: FakePrometheus) -> None:
    api.answers["headrace_signature_calls_total"] = vector(
        ({"version": "3", "code": "OK"}, 900.5),
        ({"version": "3", "code": "CANCELLED"}, 9.5),
        ({"version": "4", "code": "OK"}, 90),
        ({"version": "4", "code": "INTERNAL"}, 7),
        ({"version": "4", "code": "INVALID_ARGUMENT"}, 3),
    )
    api.answers["headrace_signature_seconds_bucket"] = vector(
        ({"version": "3", "le": "0.1"}, 900),
        ({"version": "3", "le": "+Inf"}, 900),
        ({"version": "4", "le": "+Inf"}, 90),
        ({"version": "4", "le": "0.05"}, 80.2),
        ({"version": "4", "le": "0.1"}, 80.1),
    )
    api.answers["headrace_version_state"] = vector(
        ({"instance": "10.0.0.7:8501", "version": "4", "state": "END", "code": "DATA_LOSS"}, 1)
    )
    assert observe(api) == Observation(
        CallCounts(910, 0, {0.1: 900, math.inf: 900}),
        CallCounts(100, 10, {0.05: 80.2, 0.1: 80.2, math.inf: 90}),
        ["10.0.0.7:8501 could not load version 4: DATA_LOSS"],
    )
    of_both = '{model="m",version=~"3|4"}[60s]'
    assert api.queries == [
        f"sum by (version, code) (increase(headrace_signature_calls_total{of_both}))",
        f"sum by (version, le) (increase(headrace_signature_seconds_bucket{of_both}))",
        'headrace_version_state{model="m",version="4",code!="OK"}',
    ]
    assert api.tokens == [None] * 3


def test_tf_serving_whose_metrics_name_no_versions(api: FakePrometheus) -> None:
    api.answers['request_count{model_name="m",status!~"OK|CANCELLED",track="canary"}[60s]'] = vector(({}, 6))
    api.answers['bucket{model_name="m",API!="",track="canary"}[60s]'] = vector(
        ({"le": "18000"}, 40), ({"le": "+Inf"}, 54)
    )
    api.answers['bucket{model_name="m",API!="",pod!~".*canary.*"}[60s]'] = vector(({"le": "+Inf"}, 500))
    assert observe(api, series=Series('pod!~".*canary.*"', 'track="canary"')) == Observation(
        CallCounts(500, 0, {math.inf: 500}), CallCounts(60, 6, {0.018: 40, math.inf: 54})
    )
    assert api.queries[2:] == [
        'sum(increase(:tensorflow:serving:request_count{model_name="m",status!~"OK|CANCELLED",track="canary"}[60s]))',
        'sum by (le) (increase(:tensorflow:serving:request_latency_bucket{model_name="m",API!="",track="canary"}[60s]))',
    ]


def test_a_trial_without_calls(api: FakePrometheus) -> None:
    assert observe(api) == observe(api, series=Series("a='b'", "a='c'")) == Observation(CallCounts(), CallCounts())


def test_token(api: FakePrometheus, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    observe(api, token_file=token)
    assert api.tokens == ["Bearer secret"] * 3


def test_servers_that_it_does_not_know(api: FakePrometheus) -> None:
    with pytest.raises(ServingError, match=r"has no headrace_version_state of model m\"2: let it scrape the servers"):
        Prometheus(api.url).baseline('m"2')
    assert api.queries == [r'headrace_version_state{model="m\"2"}']
    api.answers["vector(1)"] = vector(({}, 1))
    assert Prometheus(api.url, series=Series("a='b'", "a='c'")).baseline("m") == {}


def _refuse(status: int, kind: str, error: str) -> Answer:
    return status, {"status": "error", "errorType": kind, "error": error}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            _refuse(400, "bad_data", "1:5: parse error"),
            r'refuses the query headrace_version_state\{model="m"\}: bad_data: 1:5: parse error',
        ),
        (_refuse(503, "timeout", "query timed out"), "timeout: query timed out"),
        ((200, "<html>a proxy</html>"), "answers 200 and not as Prometheus does; give the URL of a Prometheus"),
        ((502, ""), "answers 502 and not as Prometheus does"),
        ((200, ["status"]), "answers 200 and not as Prometheus does"),
        ((401, "who are you?"), "answers 401; give --prometheus_token_file"),
        ((200, {"status": "success", "data": {"resultType": "scalar", "result": [1, "1"]}}), "else than a vector"),
        ((200, {"status": "success", "data": {"result": [{"metric": {}, "value": [1, "x"]}]}}), "else than a vector"),
    ],
)
def test_what_it_cannot_answer_is_said(api: FakePrometheus, answer: Answer, message: str) -> None:
    api.answers["headrace_version_state"] = answer
    with pytest.raises(ServingError, match=message) as raised:
        Prometheus(api.url).baseline("m")
    assert raised.value.code is Code.UNAVAILABLE
    assert raised.value.message.startswith(f"Prometheus {api.url} ")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (lambda api: api.url.removesuffix("prefix/"), "answers 404 and not as Prometheus does"),
        (lambda api: "http://127.0.0.1:1", "cannot be asked: .*refused"),
        (lambda api: "prometheus:9090", "cannot be asked: "),
    ],
    ids=["path", "port", "scheme"],
)
def test_a_wrong_url(api: FakePrometheus, url: Callable[[FakePrometheus], str], message: str) -> None:
    with pytest.raises(ServingError, match=message):
        Prometheus(url(api)).observe(TRIAL)


@pytest.fixture
def base_path(tmp_path: Path) -> Path:
    for number in ("3", "4"):
        (tmp_path / "m" / number).mkdir(parents=True)
        (tmp_path / "m" / number / "saved_model.pb").touch()
    return tmp_path / "m"


def deploy(base_path: Path, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(commands.deploy, [str(base_path), "--every_seconds=0", *arguments])
    return result.exit_code, result.output


def test_the_command_decides_by_it(api: FakePrometheus, base_path: Path) -> None:
    api.answers['{model="m"}'] = vector(({"version": "3", "state": "AVAILABLE", "code": "OK"}, 1))
    api.answers["headrace_signature_calls_total"] = vector(
        ({"version": "3", "code": "OK"}, 900),
        ({"version": "4", "code": "OK"}, 10),
        ({"version": "4", "code": "UNKNOWN"}, 9),
    )
    code, output = deploy(base_path, "--watch", "--prometheus", api.url)
    assert (code, read_traffic(base_path)) == (commands.ROLLED_BACK, Traffic(3))
    assert "roll back: 47.37% of the canary's 19 calls failed" in output
    api.answers["headrace_signature_calls_total"] = vector(
        ({"version": "3", "code": "OK"}, 900), ({"version": "4", "code": "OK"}, 400)
    )
    assert deploy(base_path, "--watch", "--prometheus", api.url)[0] == 0
    assert read_traffic(base_path) == Traffic(4)


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["--watch"], 2, "--watch reads the servers' metrics: give --server or --prometheus"),
        (["--server=a", "--prometheus=b"], 2, "--server and --prometheus count the same calls: give one of them"),
        (["--canary_series=a"], 2, "--canary_series go with --prometheus"),
        (["--prometheus=a", "--canary_series=a"], 2, "give both --stable_series and --canary_series"),
        (["--prometheus=http://127.0.0.1:1"], 1, "Error: Prometheus http://127.0.0.1:1 cannot be asked"),
        (["--overlay=dev"], 2, "--overlay says what --apply brings to the cluster"),
        (["--apply"], 1, "holds no manifests to apply"),
    ],
)
def test_options_that_do_not_go_together(base_path: Path, arguments: list[str], exit_code: int, message: str) -> None:
    code, output = deploy(base_path, *arguments)
    assert (code, message in output) == (exit_code, True), output
    assert read_traffic(base_path) is None
