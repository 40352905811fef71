"""The commands, in processes of their own: what they import, what they refuse, how they drain."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner

from serving.__main__ import main as serve_command
from serving.__main__ import tensorflow_model_server
from serving.client import GrpcClient
from serving.client.commands import main
from serving.flags import IGNORED, NEEDS, NEEDS_AS_TF_SERVING, check_needs
from serving.request_log import log as request_log
from serving.server import ModelServer
from tests.serving import models

ROOT = Path(__file__).parents[2]


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


HEAVY = "tensorflow keras numpy grpc"


@pytest.mark.parametrize(
    ("statement", "forbidden"),
    [
        ("import serving", HEAVY),
        ("from serving.__main__ import main; main(['--help'], standalone_mode=False)", HEAVY),
        ("from serving.client.commands import main; main(['predict', '--help'], standalone_mode=False)", HEAVY),
        ("import serving.server", "tensorflow keras grpc"),
        ("import serving.request_log.log", "tensorflow keras grpc"),
        ("from serving.client import RestClient; RestClient('http://localhost:1')", "tensorflow keras grpc"),
        ("from serving.client import GrpcClient", "tensorflow keras"),
    ],
)
def test_imports(statement: str, forbidden: str) -> None:
    script = f"import sys\n{statement}\nprint('LOADED', sorted({{name.split('.')[0] for name in sys.modules}}))"
    result = run_python("-c", script)
    assert result.returncode == 0, result.stderr
    loaded = set(re.findall(r"'(\w+)'", result.stdout.split("LOADED")[1]))
    assert loaded.isdisjoint(forbidden.split())


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        ([], 2, "give --model_base_path (and --model_name) for one model, or --model_config_file"),
        (["--model_config_file=/nowhere"], 2, "File '/nowhere' does not exist"),
        (["--model_base_path=/nowhere"], 1, "base path /nowhere cannot be listed: No such file or directory. It must"),
        (["--model_base_path=serving"], 1, "serving holds no version to serve, only ['__init__.py', '__main__.py'"),
        (["--model_base_path=/nowhere", "--port=8500", "--rest_api_port=8500"], 2, "are both 8500"),
        (["--model_base_path=/nowhere", "--model_name="], 2, "--model_name is empty"),
        (["--model_base_path=/nowhere", "--request_log_sampling_rate=1.5"], 2, "1.5 is not in the range 0<=x<=1"),
    ],
)
def test_what_the_server_refuses(arguments: list[str], exit_code: int, message: str) -> None:
    result = run_python("-m", "serving", *arguments)
    assert (result.returncode, message in result.stderr) == (exit_code, True), result.stderr
    assert "Traceback" not in result.stderr


def flags_of(*arguments: str) -> dict[str, Any]:
    """What the command makes of its arguments."""
    with serve_command.make_context("serving", list(arguments)) as context:
        return context.params


def refusal_of(*arguments: str) -> str:
    with pytest.raises(click.UsageError) as raised:
        serve_command.main(["--model_base_path=/m", *arguments], standalone_mode=False)
    return raised.value.format_message()


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--enable_model_warmup=false"], "enable_model_warmup", False),
        (["--strict_json"], "strict_json", True),
        (["--strict_json", "--port=1"], "strict_json", True),
        (["--strict_json=true"], "strict_json", True),
        (["--port", "7"], "port", 7),
        (["--port=auto"], "port", "auto"),
        (["--port=0"], "port", 0),
        ([], "rest_api_port", 8501),
        (["--ssl_config_file="], "ssl_config_file", None),
        (
            ["--grpc_channel_arguments=grpc.max_connection_age_ms=2000,grpc.lb_policy_name=grpclb"],
            "grpc_channel_arguments",
            (("grpc.max_connection_age_ms", 2000), ("grpc.lb_policy_name", "grpclb")),
        ),
    ],
)
def test_flags(arguments: list[str], name: str, value: object) -> None:
    assert flags_of(*arguments)[name] == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rest_api_prt=1"], "--rest_api_port"),  # did you mean
        (["--xla_cpu_compilation_enable"], "--xla_cpu_compilation_enabled"),
        (["--port=70000"], "70000 is not in the range 0<=x<=65535"),
        (["--port=0", "--rest_api_port=0"], "give --port, --rest_api_port or --grpc_socket_path"),
        (["--grpc_channel_arguments=grpc.a"], "'grpc.a' is not key=value, such as grpc.max_connection_age_ms=2000"),
        (["--enable_model_warmup=maybe"], "'maybe' is not a valid boolean"),
        (["--use_alts_credentials"], "--use_alts_credentials is not supported: ALTS exists on Google's cloud only"),
        (["--platform_config_file=x"], "--platform_config_file is not supported: give what it says by --batching"),
    ],
)
def test_flags_that_are_refused(arguments: list[str], message: str) -> None:
    assert message in refusal_of(*arguments)


def test_flags_that_mean_nothing_here_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    given = [f"--{name}=1" for name in IGNORED]
    assert flags_of(*given, "--use_alts_credentials=false", "--platform_config_file=") == flags_of()
    lines = capsys.readouterr().err.splitlines()
    assert sorted(lines) == sorted(f"Warning: --{name} is ignored: {why}" for name, why in IGNORED.items())


GIVEN = {
    "batching_parameters_file": __file__,
    "monitoring_config_file": __file__,
    "rest_api_ssl_config_file": __file__,
    "request_log_format": "parquet",
    "enable_per_model_batching_parameters": "true",
    "allow_version_labels_for_unavailable_models": "true",
    "rest_api_enable_cors_support": "true",
    "strict_json": "true",
}
WITH = {
    "enable_batching": "--enable_batching",
    "otlp_traces_endpoint": "--otlp_traces_endpoint=http://x",
    "model_config_file": f"--model_config_file={__file__}",
}
WITHOUT = {"rest_api_port": "--rest_api_port=0", "enable_model_warmup": "--enable_model_warmup=false"}


@pytest.mark.parametrize(("name", "needed"), (NEEDS | NEEDS_AS_TF_SERVING).items())
def test_flags_that_do_nothing_without_another(name: str, needed: str, capsys: pytest.CaptureFixture[str]) -> None:
    def check(*arguments: str) -> str:
        with serve_command.make_context("serving", list(arguments)) as context:
            check_needs(context)
        return capsys.readouterr().err

    without = [WITHOUT[needed]] if needed in WITHOUT else []
    given = f"--{name}={GIVEN.get(name, '1')}"
    if name in NEEDS:
        with pytest.raises(click.UsageError, match=f"^--{name} does nothing without --{needed}; give both$"):
            check(given, *without)
    else:
        assert check(given, *without) == f"Warning: --{name} is ignored without --{needed}\n"
    assert check(*without) == ""
    assert check(given, WITH.get(needed, f"--{needed}=1")) == ""


def test_help_and_versions_are_those_of_the_console_command_too() -> None:
    assert f'{tensorflow_model_server.__name__} = "serving.__main__:' in (ROOT / "pyproject.toml").read_text()
    run = "from serving.__main__ import tensorflow_model_server as main; import sys; sys.argv[1:] = ['{}']; main()"
    result = run_python("-c", run.format("--version"))
    assert re.fullmatch(r"TensorFlow ModelServer: \S+ \(headrace\)\nTensorFlow Library: \d+\.\S+\n", result.stdout)
    shown = run_python("-c", run.format("--help")).stdout
    assert shown.startswith("Usage: tensorflow_model_server [OPTIONS]")
    assert re.search(r"REST port; 0 opens none, auto a free one.\s+\[default:\s+0\]", shown), "off, as in the binary"
    topics = re.findall(r"^(\S.*):$", shown, re.MULTILINE)
    assert [topic for topic in topics if topic in ("Models", "gRPC", "REST", "Limits")] == [
        "Models",
        "gRPC",
        "REST",
        "Limits",
    ]


LABELLED = """model_config_list { config {
    name: "m" base_path: "%s" model_platform: "tensorflow" version_labels { key: "stable" value: 1 }
} }"""


def test_model_config_file(tmp_path: Path) -> None:
    """It wins over --model_base_path, as in TF Serving, whose image always gives both."""
    models.copy_half_plus_two(tmp_path / "m" / "1")
    config = tmp_path / "models.config"
    config.write_text(LABELLED % (tmp_path / "m"))
    flags = [f"--model_config_file={config}", "--model_base_path=/nowhere"]
    with Process(*flags, "--allow_version_labels_for_unavailable_models=true") as server:
        connection = HTTPConnection("127.0.0.1", server.rest_port, timeout=10)
        connection.request("POST", "/v1/models/m/labels/stable:predict", b'{"instances": [2]}')
        assert json.loads(connection.getresponse().read()) == {"predictions": [3.0]}
        connection.close()


def test_sigterm_ends_a_server_that_retries_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "saved_model.pb").write_bytes(b"broken")
    flags = ["--port=auto", "--rest_api_port=auto", "--max_num_load_retries=7", "--load_retry_interval_micros=90000000"]
    command = [sys.executable, "-m", "serving", f"--model_base_path={tmp_path}", *flags]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        assert any("does not load, 7 more tries, the next in 90 s" in line for line in lines)
        process.terminate()
        assert process.wait(timeout=20) == 128 + signal.SIGTERM


def test_port_in_use(tmp_path: Path) -> None:
    models.copy_half_plus_two(tmp_path / "1")
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        result = run_python("-m", "serving", f"--model_base_path={tmp_path}", "--port=auto", f"--rest_api_port={port}")
    assert result.returncode == 1
    assert f"Error: REST cannot listen on *:{port}: Address already in use" in result.stderr
    assert "Traceback" not in result.stderr


class Process:
    """A server in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "serving", "--model_name=m", "--port=auto", "--rest_api_port=auto", *arguments]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        match = re.fullmatch(r"serving model m versions \[1\] gRPC port (\d+) REST port (\d+)\n", self.line)
        assert match is not None, self.line + self.process.communicate()[1]
        self.grpc_port, self.rest_port = int(match[1]), int(match[2])

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        with self.process:  # closes the pipes and waits
            self.process.kill()

    def terminate(self) -> None:
        os.kill(self.process.pid, signal.SIGTERM)

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=20)
        return self.process.returncode, out, err


@pytest.fixture
def sleeper(tmp_path: Path) -> Path:
    models.save_sleeper(tmp_path / "sleeper" / "1", scale=2)
    return tmp_path / "sleeper"


def wait_until_unready(connection: HTTPConnection) -> bytes:
    """Ask a kept connection until it answers 503; a drained server closes it after that."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        connection.request("GET", "/healthz/ready")
        response = connection.getresponse()
        body = response.read()
        if response.status == 503:
            return body
        time.sleep(0.02)
    raise AssertionError("the server stayed ready")


def test_second_sigterm_ends_at_once(sleeper: Path) -> None:
    with (
        Process(f"--model_base_path={sleeper}", "--drain_grace_seconds=600") as server,
        socket.create_connection(("127.0.0.1", server.rest_port)) as busy,
    ):
        kept = HTTPConnection("127.0.0.1", server.rest_port, timeout=10)
        body = b'{"inputs": [600]}'
        busy.sendall(b"POST /v1/models/m:predict HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        kept.request("GET", "/healthz/ready")
        assert kept.getresponse().read() == b'{"status": "ready"}'
        server.terminate()
        assert wait_until_unready(kept) == b'{"status": "draining"}'
        kept.close()
        server.terminate()
        assert server.end()[0] == 128 + signal.SIGTERM


def is_refused_soon(port: int) -> bool:
    """Whether new connections come to be refused: the server says that it drains a moment before it stops to listen."""
    for _ in range(40):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            return True
        time.sleep(0.025)
    return False


def test_sigterm_drains(sleeper: Path, tmp_path: Path) -> None:
    """What is under way finishes, what outlasts the grace period is cut off, and the exit code is 0."""
    log = tmp_path / "log"
    with Process(f"--model_base_path={sleeper}", f"--request_log_file={log}", "--drain_grace_seconds=3") as server:
        kept = HTTPConnection("127.0.0.1", server.rest_port, timeout=10)
        kept.request("GET", "/healthz/ready")
        assert kept.getresponse().read() == b'{"status": "ready"}'
        answers: dict[str, object] = {}

        def ask(name: str, seconds: float) -> None:
            connection = HTTPConnection("127.0.0.1", server.rest_port, timeout=20)
            try:
                connection.request("POST", "/v1/models/m:predict", json.dumps({"inputs": [seconds]}))
                response = connection.getresponse()
                answers[name] = (response.status, json.loads(response.read()), response.headers["Connection"])
            except OSError as error:
                answers[name] = type(error).__name__
            finally:
                connection.close()

        def ask_over_grpc() -> None:
            with GrpcClient(f"127.0.0.1:{server.grpc_port}") as client:
                answers["grpc"] = client.predict("m", {"x": np.array([2], np.float32)})["y"].tolist()

        threads = [
            threading.Thread(target=ask, args=("rest", 2)),
            threading.Thread(target=ask, args=("endless", 60)),
            threading.Thread(target=ask_over_grpc),
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        server.terminate()
        started = time.monotonic()
        assert wait_until_unready(kept) == b'{"status": "draining"}'
        kept.close()
        assert answers == {}, "the requests were to be under way still"
        assert is_refused_soon(server.rest_port)
        for thread in threads:
            thread.join()
        assert answers.pop("endless") in ("RemoteDisconnected", "ConnectionResetError")
        assert answers == {"rest": (200, {"outputs": [4.0]}, "close"), "grpc": [4.0]}
        exit_code, out, err = server.end()
        assert 2.5 < time.monotonic() - started < 10
        assert (exit_code, out) == (0, ""), err
        assert "Traceback" not in err
        assert [record.inputs["x"].tolist() for record in request_log.read_records(log)] == [[2.0], [2.0]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    path = tmp_path_factory.mktemp("served")
    models.copy_half_plus_two(path / "1")
    with ModelServer("m", path) as running:
        yield running


@pytest.mark.parametrize("scheme", ["rest", "grpc"])
def test_predict_command(server: ModelServer, scheme: str) -> None:
    url = f"http://127.0.0.1:{server.rest_port}" if scheme == "rest" else f"127.0.0.1:{server.grpc_port}"

    def predict(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(main, ["predict", "--url", url, "--model", "m", *arguments])
        return result.exit_code, result.output

    assert predict("--json", '{"instances": [1, NaN]}') == (0, '{\n    "predictions": [2.5, NaN\n    ]\n}\n')
    assert predict("--version", "1", "--json", '{"inputs": {"x": 2}}') == (0, '{\n    "outputs": 3.0\n}\n')
    by_name = predict("--signature", "regress_x2_to_y3", "--json", '{"instances": [2]}')
    assert by_name == (0, '{\n    "predictions": [4.0\n    ]\n}\n')
    for arguments, message in [
        (["--json", "{"], "Error: INVALID_ARGUMENT: JSON Parse error"),
        (["--json", '{"instances": ["a"]}'], "is not of expected type: float"),
        (["--json", '{"inputs": 1}', "--version", "7"], "NOT_FOUND: Servable not found for request: Specific(m, 7)"),
        (["--json", '{"inputs": 1}', "--signature", "no"], "model m has no signature 'no', only ['classify_x"),
    ]:
        exit_code, output = predict(*arguments)
        assert exit_code == 1
        assert message in output


def test_predict_command_without_a_server() -> None:
    result = CliRunner().invoke(main, ["predict", "--url", "http://127.0.0.1:1", "--model", "m", "--json", "{}"])
    assert result.exit_code == 3
    assert "UNAVAILABLE: http://127.0.0.1:1 cannot be reached" in result.output
