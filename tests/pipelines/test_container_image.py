"""The image, for real: built by a Docker engine, it runs the compiled pipeline step by step and serves what comes out."""

from __future__ import annotations

import functools
import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from components import artifacts
from components.errors import DataError
from components.examples import read_arrays
from pipelines import local, training
from pipelines.config import PipelineConfig, load_config
from pipelines.kubeflow import containers, image
from serving.client import RestClient
from tests.conftest import PROJECT
from tests.pipelines.docker_engine import debian_base, docker_engine
from tests.pipelines.fakes import UNTUNED as STEPS
from tests.pipelines.test_end_to_end import SMALL_TAXI

pytestmark = pytest.mark.container

TAG = "headrace-test:latest"
LARGEST_BYTES = 3_000_000_000


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the packages of the lock file, most of which pip has kept from setting up this environment."""
    folder = tmp_path_factory.mktemp("wheels")
    lock = PROJECT / "requirements.lock"
    options = ["--quiet", "--no-deps", "--require-hashes", f"--dest={folder}", f"--requirement={lock}"]
    subprocess.run([sys.executable, "-m", "pip", "download", *options], check=True)
    handler = functools.partial(_Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def built(wheels: str) -> Iterator[image.Image]:
    """The image, and while the tests run, the engine that has it."""
    with docker_engine(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_BUILDKIT", "0")  # Debian's docker.io has no buildx
        settings = {"PIP_FIND_LINKS": wheels, "PIP_NO_INDEX": "1"}
        arguments = ["--network=host", *(f"--build-arg={name}={value}" for name, value in settings.items())]
        yield image.build_image(PROJECT, base=debian_base(), tag=TAG, builder="docker", builder_arguments=arguments)


def docker(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_image_is_small_compiled_and_not_root_and_keeps_no_setting_of_its_build(built: image.Image) -> None:
    (found,) = json.loads(docker("image", "inspect", TAG))
    assert found["Id"] == built.image_id
    assert found["Size"] < LARGEST_BYTES
    history = docker("history", "--no-trunc", TAG)
    assert not [line for line in [*history.splitlines(), *found["Config"]["Env"]] if "PIP_" in line]
    code = (
        "import importlib.util, os, pathlib, sys\n"
        "for name in ('tensorflow', 'kfp', 'pipelines.local', 'components.train.engine', 'serving.server'):\n"
        "    cached = importlib.util.find_spec(name).cached\n"
        "    assert pathlib.Path(cached).is_file(), cached\n"
        "assert importlib.util.find_spec('pytest') is None\n"
        "print(os.getuid(), sys.executable)\n"
    )
    assert docker("run", "--rm", "--network=none", TAG, "python", "-c", code) == "1000 /opt/headrace/bin/python\n"


@pytest.mark.parametrize(
    "command",
    ["headrace --version", "tensorflow_model_server --version", "python -m components.train.launch --help"],
)
def test_steps_trainer_and_server_start_from_it(built: image.Image, command: str) -> None:
    docker("run", "--rm", "--network=none", "--read-only", TAG, *command.split())


def test_a_container_that_fails_at_once_is_seen_to_fail_every_time(built: image.Image) -> None:
    import docker as sdk

    client = sdk.from_env()
    try:
        codes = [
            containers.run_container(client, TAG, ["sh", "-c", "exit 3"], {}, network_mode="host") for _ in range(8)
        ]
        assert codes == [3] * 8
        assert client.containers.list(all=True, filters={"ancestor": TAG}) == []
    finally:
        client.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("containers")


def load(folder: Path, *overrides: str) -> PipelineConfig:
    return load_config(
        PROJECT / "configs/chicago_taxi.yaml", [*SMALL_TAXI, f"push.destination={folder / 'served'}", *overrides]
    )


@pytest.fixture(scope="module")
def finished(built: image.Image, folder: Path) -> local.RunResult:
    """The compiled pipeline, each step in a container of the image."""
    return training.run_local(load(folder), folder / "runs", image=TAG, console=Console(file=io.StringIO()))


def test_the_pipeline_runs_in_containers_and_gives_the_bytes_of_a_run_in_this_process(
    finished: local.RunResult, folder: Path
) -> None:
    assert finished.exit_code == 0
    assert [step.state for step in finished.steps] == ["done"] * len(STEPS)
    for step in STEPS:
        artifacts.open_artifact(finished.run_dir / step.output, step=step.name)
    assert (folder / "served/chicago_taxi/1/saved_model.pb").is_file()
    here = local.run(load(folder), runs_dir=folder / "here", until="train", console=Console(file=io.StringIO()))
    for name in ("examples", "statistics", "transform", "model"):
        ours, theirs = (artifacts.read_manifest(result.run_dir / name) for result in (here, finished))
        assert ours.files == theirs.files, name


def test_a_step_that_fails_in_its_container_fails_the_run_with_its_own_message(
    finished: local.RunResult, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"data\.label: the data has no column 'tipp'"):
        training.run_local(
            load(tmp_path, "data.label=tipp"), tmp_path / "runs", image=TAG, console=Console(file=io.StringIO())
        )
    assert {path.name for path in (tmp_path / "runs/chicago_taxi/kfp").iterdir()} == {".lock", "log.txt", "config.yaml"}
    assert list((tmp_path / "served").iterdir()) == []


def test_what_was_pushed_is_served_from_the_image(finished: local.RunResult, folder: Path) -> None:
    raw = read_arrays(finished.run_dir / "examples", "test")
    served = folder / "served/chicago_taxi"
    flags = ["--port=0", "--rest_api_port=auto", "--model_name=chicago_taxi", "--model_base_path=/models/chicago_taxi"]
    options = [
        "--detach",
        "--network=host",
        "--read-only",
        "--tmpfs=/tmp",
        f"--volume={served}:/models/chicago_taxi:ro",
    ]
    container = docker("run", *options, TAG, "tensorflow_model_server", *flags).strip()
    try:
        with subprocess.Popen(["docker", "logs", "--follow", container], stdout=subprocess.PIPE, text=True) as log:
            assert log.stdout is not None
            line = next((line for line in log.stdout if line.startswith("serving ")), "it ended")
            log.terminate()
        port = line.rpartition("REST port ")[2].strip()
        assert port.isdigit(), line + docker("logs", container)
        with RestClient(f"http://127.0.0.1:{port}") as client:
            names = client.metadata("chicago_taxi").signatures["serving_default"].inputs
            inputs = {name: raw[name][:50] for name in names}
            answers = np.asarray(client.predict("chicago_taxi", inputs)["probabilities"])
        docker("stop", "--time=30", container)
        assert docker("inspect", "--format={{.State.ExitCode}}", container) == "0\n"
    finally:
        docker("rm", "--force", container)
    from components import formats

    expected = formats.run_file(finished.run_dir / "exported/saved_model", "probabilities")(raw)[:50]
    np.testing.assert_allclose(answers, expected, atol=1e-5)
