"""Steps in containers: what they see of this machine, how they end, and what is said where there is no engine."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from components.errors import HeadraceError
from pipelines import local
from pipelines.config import PipelineConfig
from pipelines.kubeflow import containers
from tests.pipelines import fakes


class Container:
    """One that writes `chunks` and ends with `exit_code`."""

    def __init__(self, chunks: list[bytes], exit_code: int) -> None:
        self._chunks, self._exit_code = chunks, exit_code
        self.is_removed = False

    def logs(self, *, stream: bool) -> list[bytes]:
        assert stream
        return self._chunks

    def wait(self) -> dict[str, Any]:
        assert not self.is_removed
        return {"StatusCode": self._exit_code}

    def remove(self, *, force: bool) -> None:
        self.is_removed = force


class Client:
    """A Docker client whose containers are `container`; notes how it was run."""

    def __init__(self, container: Container) -> None:
        self.containers = self
        self._container = container

    def run(self, *arguments: Any, **options: Any) -> Container:
        self.called = arguments, options
        return self._container


def test_a_container_is_asked_how_it_ended_before_it_is_removed(capsys: pytest.CaptureFixture[str]) -> None:
    container = Container([b"one\ntw", b"o\n", b"\xc3", b"\xa4\nend"], exit_code=3)
    client = Client(container)
    code = containers.run_container(client, "image", ["false"], {"/a": {"bind": "/a"}}, user="5:5")
    assert (code, container.is_removed) == (3, True)
    assert capsys.readouterr().out == "one\ntwo\nä\nend\n"
    assert client.called == (("image", ["false"]), {"detach": True, "volumes": {"/a": {"bind": "/a"}}, "user": "5:5"})


def test_a_container_whose_log_breaks_off_is_removed_too() -> None:
    class Broken(Container):
        def logs(self, *, stream: bool) -> list[bytes]:
            raise KeyboardInterrupt

    container = Broken([], 0)
    with pytest.raises(KeyboardInterrupt):
        containers.run_container(Client(container), "image", [], {})
    assert container.is_removed


def config_of(**sections: Any) -> PipelineConfig:
    return PipelineConfig.model_validate(fakes.settings(**sections))


def test_paths_become_absolute_and_uris_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = config_of(validate={"schema_path": "schema.yaml"}, monitor={"labels": "/labels/*.csv"})
    absolute = containers.with_absolute_paths(config)
    assert absolute.data.path == f"{tmp_path}/data.csv"
    assert absolute.validate_.schema_path == f"{tmp_path}/schema.yaml"
    assert absolute.push.destination == f"{tmp_path}/serving_models"
    assert (absolute.monitor.labels, absolute.monitor.request_log) == ("/labels/*.csv", None)
    assert containers.with_absolute_paths(config, "later.csv").data.path == f"{tmp_path}/later.csv"
    stored = config_of(data={"path": "s3://bucket/x.csv", "task": "binary"}, push={"destination": "s3://bucket/m"})
    assert containers.with_absolute_paths(stored) == stored


def test_a_container_reads_the_data_and_writes_where_models_are_pushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (
        "data/1.csv",
        "logs/requests.tfrecord",
        "logs/requests-20260131T235959.123456Z.tfrecord",
        "labels.csv",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    config = config_of(
        data={"path": "data/*.csv", "task": "binary"},
        validate={"schema_path": "not there.yaml"},
        monitor={"request_log": "logs/requests.tfrecord", "labels": "labels.csv"},
        push={"destination": "pushed"},
        deploy={"manifests": "deploy/taxi"},
    )
    found = dict(containers._mounts(containers.with_absolute_paths(config)))
    assert {path.removeprefix(f"{tmp_path}/"): read_only for path, read_only in found.items()} == {
        "pushed": False,
        "deploy": False,
        "data": True,
        "labels.csv": True,
        "logs/requests.tfrecord": True,
        "logs/requests-20260131T235959.123456Z.tfrecord": True,
    }
    assert (tmp_path / "pushed").is_dir()


def test_a_container_knows_the_variables_that_the_configuration_names_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("AWS_ENDPOINT_URL", "CHAT", "TOKEN", "PASSWORD"):
        monkeypatch.setenv(name, f"value of {name}")
    for name in ("AWS_REGION", "MLFLOW_RUN_ID", "AWS_EC2_METADATA_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    config = config_of(
        monitor={"on_alarm": {"webhook": "$CHAT"}}, registry={"url": "http://hub.example", "token_env": "TOKEN"}
    )
    found = containers._environment(config)
    assert {name: value for name, value in found.items() if value.startswith("value of")} == {
        name: f"value of {name}" for name in ("AWS_ENDPOINT_URL", "CHAT", "TOKEN")
    }
    assert found["HOME"] == "/tmp"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # docker leaves its socket open then
def test_without_an_engine_the_error_says_where_one_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/socket")
    with (
        pytest.raises(
            HeadraceError, match=f"No Docker engine answers at unix://{tmp_path}/socket: .* Start it, or set"
        ),
        containers.docker_runner(config_of(), "image"),
    ):
        pass
    gc.collect()


@pytest.mark.parametrize("runner", ["in-process", "kfp"])
def test_an_image_that_nothing_reads_is_refused(runner: str) -> None:
    done = CliRunner().invoke(local.main, ["--runner", runner, "--image", "m"])
    assert done.exit_code == 2
    assert f"nothing reads --image with --runner {runner}: add --runner kfp-docker" in done.output
