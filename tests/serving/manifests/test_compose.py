"""The compose file: valid, and all that it mounts is there."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from serving.manifests.render import render
from tests.serving.manifests.configs import make_config

compose_spec = pytest.importorskip("compose_spec", reason="has builds for Linux")


def files(**changes: Any) -> dict[str, str]:
    return render(make_config("kind", **changes), "compose")


def check(text: str) -> None:
    compose_spec.PyCompose.from_yaml(text).validate()


CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "labels": {"stable_version": 3, "canary": {"version": 4}, "batching": {}},
    "gpus": {"resources": {"gpus": 1, "memory": "512Mi"}},
    "embedded": {"server": "embedded"},
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_file_is_valid(changes: dict[str, Any]) -> None:
    texts = files(**changes)
    check(texts["compose.yaml"])
    for service in yaml.safe_load(texts["compose.yaml"])["services"].values():
        for mount in service["volumes"]:
            source = mount["source"]
            assert source == "/mnt/models/chicago_taxi" or any(f"./{path}".startswith(source) for path in texts), source


@pytest.mark.parametrize(
    ("old", "new"), [("read_only: true\n    tmpfs", "read_onyl: true\n    tmpfs"), ("10s", "soon")]
)
def test_the_check_refuses_what_is_broken(old: str, new: str) -> None:
    text = files()["compose.yaml"]
    assert old in text
    with pytest.raises(ValueError, match=r"read_onyl|soon"):
        check(text.replace(old, new))


def _docker_compose() -> list[str] | None:
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) and subprocess.run([*command, "version"], capture_output=True).returncode == 0:
            return command
    return None


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_compose_itself_takes_the_file(changes: dict[str, Any], tmp_path: Path) -> None:
    if (command := _docker_compose()) is None:
        pytest.skip("needs docker compose")
    (tmp_path / "compose.yaml").write_text(files(**changes)["compose.yaml"])
    done = subprocess.run([*command, "-f", str(tmp_path / "compose.yaml"), "config"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(yaml.safe_load(done.stdout)["services"]) == {"chicago-taxi"}, "prometheus runs only if asked for"


def test_what_it_says() -> None:
    texts = files(stable_version=3, resources={"memory": "512Mi"})
    service = yaml.safe_load(texts["compose.yaml"])["services"]["chicago-taxi"]
    assert service["ports"] == ["127.0.0.1:8500:8500", "127.0.0.1:8501:8501"]
    assert service["mem_limit"] == "512m"
    assert service["entrypoint"] == ["/usr/bin/tensorflow_model_server"]
    assert "GET /v1/models/chicago_taxi/labels/stable/metadata HTTP/1.0" in service["healthcheck"]["test"][3]
    assert "# TF Serving's image has neither curl nor wget.\n" in texts["compose.yaml"]
    assert yaml.safe_load(texts["prometheus.yaml"])["scrape_configs"] == [
        {
            "job_name": "chicago-taxi",
            "metrics_path": "/monitoring/prometheus/metrics",
            "static_configs": [{"targets": ["chicago-taxi:8501"]}],
        }
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_uri": "pvc://a/b"},
            "compose serves a folder of this machine: give model_uri as file:///path, not pvc",
        ),
        (
            {
                "stable_version": 3,
                "canary": {"version": 4, "method": "replicas", "percent": 33},
            },
            "compose runs one server, so it has no canary.method replicas: use labels",
        ),
    ],
)
def test_what_compose_cannot_serve(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        files(**changes)
