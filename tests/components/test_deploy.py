"""deploy: the pushed version gets its share of the requests; push and evaluate know which version serves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import BaseModel

from components import artifacts
from components.config import DeployConfig
from components.deploy import DeployResult, deploy
from components.errors import DataError
from components.external import find_champion
from components.push import _forget_old
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
    _forget_old(base_path, 2)
    assert sorted(path.name for path in base_path.iterdir()) == ["1", "2", "3", "4", TRAFFIC_FILE]
    write_traffic(base_path, Traffic(2))
    _forget_old(base_path, 2)
    assert sorted(path.name for path in base_path.iterdir()) == ["2", "3", "4", TRAFFIC_FILE]


def test_the_champion_is_the_version_that_serves(base_path: Path) -> None:
    assert find_champion(base_path, other_than="") == base_path / "4"
    write_traffic(base_path, Traffic(2, 4, 0.1))
    assert find_champion(base_path, other_than="") == base_path / "2"
    (base_path / TRAFFIC_FILE).write_text("{")
    with pytest.raises(DataError, match=r"traffic\.json: no JSON.*Mend it, or take it away"):
        find_champion(base_path, other_than="")
