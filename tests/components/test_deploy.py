"""deploy: the pushed version gets its share of the requests; push and evaluate know which version serves."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from components import artifacts
from components.config import DeployConfig
from components.deploy import DeployResult, deploy
from components.errors import DataError
from components.external import find_champion
from components.push import _forget_old
from serving.manifests import folder as manifest_folder
from serving.manifests.config import ServingManifestConfig
from serving.manifests.render import render
from serving.rollout.places import ManifestFolder
from serving.traffic import TRAFFIC_FILE, Traffic, read_traffic, write_traffic


@dataclass(frozen=True)
class Pushed:
    model_name: str
    version: int
    version_path: str


class Empty(BaseModel):
    pass


@pytest.fixture
def base_path(tmp_path: Path) -> Path:
    path = tmp_path / "served" / "taxi"
    for number in (1, 2, 3, 4):
        (path / str(number)).mkdir(parents=True)
        (path / str(number) / "saved_model.pb").write_text(f"graph {number}")
    return path


def deploy_version(base_path: Path, version: int, **settings: object) -> DeployResult:
    pushed = base_path.parent.parent / f"pushed-{version}"
    if not pushed.exists():
        with artifacts.writing(pushed, step="push", inputs={}, config=Empty()) as out:
            out.result = Pushed("taxi", version, str(base_path / str(version)))
    deployed = base_path.parent.parent / f"deployed-{len(list(base_path.parent.parent.iterdir()))}"
    return deploy(pushed=pushed, deployed=deployed, config=DeployConfig.model_validate(settings))


def test_a_version_gets_all_requests_by_default(base_path: Path) -> None:
    assert deploy_version(base_path, 4) == DeployResult(4, stable=4, canary=None, canary_share=0.0)
    assert read_traffic(base_path) is None  # servers take the newest by themselves
    assert deploy_version(base_path, 3) == DeployResult(3, stable=3, canary=None, canary_share=0.0)
    assert read_traffic(base_path) == Traffic(3)
    assert deploy_version(base_path, 4) == DeployResult(4, stable=4, canary=None, canary_share=0.0)
    assert read_traffic(base_path) == Traffic(4)


def test_a_version_on_trial(base_path: Path) -> None:
    assert deploy_version(base_path, 4, canary_share=0.2) == DeployResult(4, 3, 4, 0.2)
    assert deploy_version(base_path, 4, canary_share=0.2) == DeployResult(4, 3, 4, 0.2)
    assert deploy_version(base_path, 4, canary_share=0.5) == DeployResult(4, 3, 4, 0.5)
    with pytest.raises(DataError, match="version 4 is on trial with 50% of the requests; promote it or roll it back"):
        deploy_version(base_path, 2, canary_share=0.2)
    assert read_traffic(base_path) == Traffic(3, 4, 0.5)
    assert deploy_version(base_path, 4) == DeployResult(4, 4, None, 0.0)
    assert deploy_version(base_path, 4, canary_share=0.2) == DeployResult(4, 4, None, 0.0)  # it is the stable one


def test_servers_that_cannot_be_asked_stop_the_step(base_path: Path) -> None:
    with pytest.raises(DataError, match=r"deploy: http://127\.0\.0\.1:1/monitoring/prometheus/metrics cannot be read"):
        deploy_version(base_path, 4, canary_share=0.2, servers=["http://127.0.0.1:1"])
    assert read_traffic(base_path) is None


def test_push_keeps_the_versions_that_serve(base_path: Path) -> None:
    write_traffic(base_path, Traffic(1, 2, 0.1))
    _forget_old(base_path, 2, None)
    assert sorted(path.name for path in base_path.iterdir()) == ["1", "2", "3", "4", TRAFFIC_FILE]
    write_traffic(base_path, Traffic(2))
    _forget_old(base_path, 2, None)
    assert sorted(path.name for path in base_path.iterdir()) == ["2", "3", "4", TRAFFIC_FILE]


def test_the_champion_is_the_version_that_serves(base_path: Path) -> None:
    assert find_champion(base_path, other_than="") == base_path / "4"
    write_traffic(base_path, Traffic(2, 4, 0.1))
    assert find_champion(base_path, other_than="") == base_path / "2"
    (base_path / TRAFFIC_FILE).write_text("{")
    with pytest.raises(DataError, match=r"traffic\.json: no JSON.*Mend it, or take it away"):
        find_champion(base_path, other_than="")


def manifests_at(folder: Path, **settings: Any) -> ManifestFolder:
    config = ServingManifestConfig(model_name="taxi", model_uri="pvc://models/taxi", **settings)
    manifest_folder.write(render(config, "kubernetes"), folder)
    return ManifestFolder(folder)


def test_manifests_say_who_gets_the_requests(base_path: Path, tmp_path: Path) -> None:
    place = manifests_at(tmp_path / "deploy")
    manifests = {"manifests": str(tmp_path / "deploy")}
    assert deploy_version(base_path, 3, **manifests) == DeployResult(3, 3, None, 0.0)
    assert place.traffic() == Traffic(3)
    assert deploy_version(base_path, 4, canary_share=0.2, **manifests) == DeployResult(4, 3, 4, 0.2)
    assert place.traffic() == Traffic(3, 4, 0.2)
    assert read_traffic(base_path) is None
    with pytest.raises(DataError, match="deploy: version 4 is on trial with 20% of the requests"):
        deploy_version(base_path, 2, canary_share=0.2, **manifests)


def test_the_first_trial_is_beside_the_version_pushed_before(base_path: Path, tmp_path: Path) -> None:
    place = manifests_at(tmp_path / "deploy")
    deploy_version(base_path, 4, canary_share=0.2, manifests=str(tmp_path / "deploy"))
    assert place.traffic() == Traffic(3, 4, 0.2)


def test_manifests_are_applied_again_after_a_failure(
    base_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = manifests_at(tmp_path / "deploy", stable_version=3)
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.parent.mkdir()
    kubectl.write_text('#!/bin/sh\necho "$@" >> "$0.told"; echo "no cluster" >&2; test -e "$0.works"\n')
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{kubectl.parent}:{os.environ['PATH']}")
    settings = {"canary_share": 0.2, "manifests": str(tmp_path / "deploy"), "apply": True, "overlay": "dev"}
    with pytest.raises(DataError, match=r"kubectl apply -k \S+/overlays/dev ended with exit code 1: no cluster"):
        deploy_version(base_path, 4, **settings)
    assert place.traffic() == Traffic(3, 4, 0.2)
    with pytest.raises(DataError, match="no cluster"):
        deploy_version(base_path, 4, **settings)
    kubectl.with_suffix(".works").touch()
    assert deploy_version(base_path, 4, **settings) == DeployResult(4, 3, 4, 0.2)
    assert kubectl.with_suffix(".told").read_text() == f"apply -k {tmp_path}/deploy/overlays/dev\n" * 3


def test_push_and_evaluate_know_what_manifests_say(base_path: Path, tmp_path: Path) -> None:
    manifests_at(tmp_path / "deploy", stable_version=1, canary={"version": 2})
    folder = str(tmp_path / "deploy")
    assert find_champion(base_path, other_than="", manifests=folder) == base_path / "1"
    _forget_old(base_path, 1, folder)
    assert sorted(path.name for path in base_path.iterdir()) == ["1", "2", "4"]
    with pytest.raises(DataError, match=r"nowhere is no folder of manifests: it has no serving\.resolved\.yaml"):
        find_champion(base_path, other_than="", manifests=str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"apply": True}, "nothing reads apply with manifests: null"),
        ({"manifests": "m", "overlay": "dev"}, "nothing reads overlay with apply: false"),
    ],
)
def test_settings_that_nothing_reads(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DeployConfig.model_validate(settings)
