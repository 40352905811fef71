"""What the servers are told: files that read back as they were meant, and a server that takes them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest
import yaml

from serving.batching.parameters import BatchingParameters, read_parameters
from serving.manifests import server
from serving.manifests.render import render
from serving.model_config import read_config
from serving.monitoring.monitoring_config import read_monitoring_config
from tests.serving.manifests.configs import make_config

ROOT = Path(__file__).parents[3]
# x / 2 + 2, x / 2 + 3
SAVED_MODELS = {"3": "saved_model_half_plus_two_cpu", "4": "saved_model_half_plus_three"}


@pytest.mark.parametrize(
    ("name", "track", "versions", "labels"),
    [
        ("plain", "stable", [9], {}),
        ("pinned", "stable", [3], {"stable": 3}),
        ("labels", "stable", [3, 4], {"stable": 3, "canary": 4}),
        ("replicas", "stable", [3], {"stable": 3}),
        ("gateway", "canary", [4], {"canary": 4}),
    ],
)
def test_model_config_reads_back(
    name: str, track: str, versions: list[int], labels: dict[str, int], tmp_path: Path
) -> None:
    config = make_config(name)
    (of_track,) = [each for each in server.tracks(config) if each.name == track]
    file = tmp_path / "models.config"
    file.write_text(server.model_config_files(config, of_track)["models.config"])
    (model,) = read_config(file)
    assert (model.name, model.base_path) == ("chicago_taxi", Path("/models/chicago_taxi"))
    assert sorted(model.policy([1, 3, 4, 9])) == versions
    assert model.labels == labels


def test_server_config_reads_back(tmp_path: Path) -> None:
    batching = {"max_batch_size": 64, "allowed_batch_sizes": [8, 64], "pad_variable_length_inputs": True}
    config = make_config(resources={"cpu": 2.5}, batching=batching)
    for name, text in server.server_config_files(config).items():
        (tmp_path / name).write_text(text)
    assert read_monitoring_config(tmp_path / "monitoring.config") == server.METRICS_PATH
    assert read_parameters(tmp_path / "batching.config") == BatchingParameters(
        max_batch_size=64,
        batch_timeout_micros=1000,
        max_enqueued_batches=100,
        num_batch_threads=3,
        allowed_batch_sizes=(8, 64),
        pad_variable_length_inputs=True,
    )
    assert list(server.server_config_files(make_config())) == ["monitoring.config"]


def test_flags_of_tf_serving() -> None:
    flags = dict(flag.removeprefix("--").split("=", 1) for flag in server.flags(make_config("labels")))
    assert flags["enable_batching"] == "true", "TF Serving refuses a batching_parameters_file without it"
    assert flags["allow_version_labels_for_unavailable_models"] == "true", "labels are read before their versions load"
    assert flags["model_config_file_poll_wait_seconds"] == "30"
    assert flags["grpc_channel_arguments"] == "grpc.max_connection_age_ms=60000"
    assert "drain_grace_seconds" not in flags
    assert "enable_batching" not in " ".join(server.flags(make_config("plain")))


class Deployed:
    """The embedded server as the compose file starts it, but in this machine's folders and on free ports."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for version, name in SAVED_MODELS.items():
            saved_model = ROOT / "tests" / "serving" / "conformance" / "models" / name / "00000123"
            shutil.copytree(saved_model, folder / "pushed" / version)
        config = make_config("labels", server="embedded", model_uri=f"file://{folder}/pushed")
        for path, text in render(config, "compose").items():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(text.replace('"/models/chicago_taxi"', f'"{folder}/pushed"'))
        service = yaml.safe_load((folder / "compose.yaml").read_text())["services"]["chicago-taxi"]
        self.health = service["healthcheck"]["test"][1:]
        mounts = {each["target"]: folder / each["source"] for each in service["volumes"]}
        python, *module = service["entrypoint"]
        assert python == "python"
        command = [sys.executable, *module]
        for flag in service["command"]:
            for target, source in mounts.items():
                flag = flag.replace(target, str(source))
            command.append(re.sub(r"(port)=\d+", r"\1=auto", flag))
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        match = re.search(r"gRPC port (\d+) REST port (\d+)", line)
        assert match is not None, line + self.process.communicate()[1]
        self.rest_port = int(match[2])

    def ask(self, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
        """Status and body of the answer to a request."""
        connection = HTTPConnection("127.0.0.1", self.rest_port, timeout=10)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def is_healthy(self) -> bool:
        """Whether the container's health check passes."""
        check = [word.replace("$$", "$").replace("/8501", f"/{self.rest_port}") for word in self.health]
        return subprocess.run(check, env={"PATH": os.environ["PATH"]}, timeout=10, check=False).returncode == 0


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    running = Deployed(tmp_path_factory.mktemp("deployed"))
    with running.process:
        yield running
        running.process.kill()


@pytest.mark.parametrize(("label", "expected"), [("stable", 3.0), ("canary", 4.0)])
def test_labels_answer(deployed: Deployed, label: str, expected: float) -> None:
    status, body = deployed.ask("POST", f"/v1/models/chicago_taxi/labels/{label}:predict", '{"instances": [2]}')
    assert (status, json.loads(body)) == (200, {"predictions": [expected]})


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/models/chicago_taxi/labels/stable/metadata", 200),
        ("/v1/models/chicago_taxi/labels/beta/metadata", 400),
        ("/v1/models/chicago_taxi", 200),
        ("/healthz/ready", 200),
        ("/healthz/live", 200),
        (server.METRICS_PATH, 200),
    ],
)
def test_paths_of_probes_answer(deployed: Deployed, path: str, status: int) -> None:
    assert deployed.ask("GET", path)[0] == status


def test_health_check(deployed: Deployed) -> None:
    assert deployed.is_healthy()
    deployed.health = [word.replace("/labels/stable", "/labels/beta") for word in deployed.health]
    assert not deployed.is_healthy()
