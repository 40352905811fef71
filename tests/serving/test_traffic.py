"""The traffic file: a canary beside the stable version."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from serving import traffic as traffic_module
from serving.errors import Code, ServingError
from serving.manager import ModelManager
from serving.served_model import ModelConfig, ServedModel, State
from serving.traffic import TRAFFIC_FILE, Traffic, read_traffic, write_traffic
from serving.versions import latest


class FakeModel:
    signatures: Any = None

    def run(self, signature_name: str, inputs: Any, outputs: Any = (), context: Any = None) -> Any:
        return {}

    def close(self) -> None:
        pass


def add_versions(base_path: Path, *numbers: int) -> None:
    for number in numbers:
        (base_path / str(number)).mkdir()
        (base_path / str(number) / "saved_model.pb").touch()


def available(model: ServedModel) -> list[int]:
    return sorted(version.number for version in model.statuses() if version.state is State.AVAILABLE)


def served(model: ServedModel, number: int | None = None) -> int:
    with model.lease(number) as version:
        return version.number


@pytest.fixture
def model(tmp_path: Path) -> ServedModel:
    add_versions(tmp_path, 1, 2, 3)
    return ServedModel(ModelConfig("m", tmp_path, latest(1), {}), lambda path: FakeModel())


@pytest.mark.parametrize("traffic", [Traffic(3), Traffic(3, 4, 0.25), Traffic(3, 4)])
def test_file_reads_back(tmp_path: Path, traffic: Traffic) -> None:
    write_traffic(tmp_path, traffic)
    assert read_traffic(tmp_path) == traffic
    assert os.listdir(tmp_path) == [TRAFFIC_FILE]
    write_traffic(tmp_path, None)
    assert read_traffic(tmp_path) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no JSON"),
        ("[]", "an object with the keys stable, canary, canary_share"),
        ('{"canary": 1}', "an object with the keys"),
        ('{"stable": 1, "share": 0.1}', "an object with the keys"),
        ('{"stable": "1"}', "stable is the number of a version, but got '1'"),
        ('{"stable": null}', "stable is the number of a version, but got None"),
        ('{"stable": true}', "stable is the number of a version, but got True"),
        ('{"stable": 1, "canary": -1}', "canary is the number of a version, but got -1"),
        ('{"stable": 1, "canary": 1}', "stable and canary are both version 1"),
        ('{"stable": 1, "canary": 2, "canary_share": 1.5}', "from 0 to 1, but got 1.5"),
        ('{"stable": 1, "canary": 2, "canary_share": "0.1"}', "from 0 to 1, but got '0.1'"),
        ('{"stable": 1, "canary_share": 0.5}', "there is no canary"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / TRAFFIC_FILE).write_text(text)
    with pytest.raises(ServingError) as raised:
        read_traffic(tmp_path)
    assert raised.value.code is Code.INVALID_ARGUMENT
    assert raised.value.message.startswith(f"{tmp_path / TRAFFIC_FILE}: ") and message in raised.value.message


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_traffic(tmp_path, Traffic(1))

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        write_traffic(tmp_path, Traffic(2))
    assert read_traffic(tmp_path) == Traffic(1)
    assert os.listdir(tmp_path) == [TRAFFIC_FILE]


def test_the_share_of_the_canary(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter([0.0, 0.249, 0.25, 0.9])
    monkeypatch.setattr(traffic_module.random, "random", lambda: next(numbers))
    assert [Traffic(3, 4, 0.25).choose() for _ in range(4)] == [4, 4, 3, 3]
    assert Traffic(3).choose() == 3


def test_the_file_comes_before_the_policy(model: ServedModel, tmp_path: Path) -> None:
    model.refresh()
    assert available(model) == [3]
    write_traffic(tmp_path, Traffic(2, 3, 0.0))
    model.refresh()
    assert (available(model), served(model), served(model, 3)) == ([2, 3], 2, 3)
    write_traffic(tmp_path, Traffic(2, 3, 1.0))
    model.refresh()
    assert (served(model), served(model, 2)) == (3, 2)
    write_traffic(tmp_path, Traffic(1))
    model.refresh()
    assert (available(model), served(model)) == ([1], 1)
    write_traffic(tmp_path, None)
    model.refresh()
    assert (available(model), served(model)) == ([3], 3)


def test_a_canary_that_is_not_there_leaves_the_traffic_to_the_stable_version(
    model: ServedModel, tmp_path: Path
) -> None:
    write_traffic(tmp_path, Traffic(2, 9, 1.0))
    model.refresh()
    assert (available(model), served(model)) == ([2], 2)


def test_a_broken_file_changes_nothing(model: ServedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_traffic(tmp_path, Traffic(2))
    model.refresh()
    (tmp_path / TRAFFIC_FILE).write_text('{"stable": ')
    for _ in range(2):
        model.refresh()
    assert (available(model), served(model)) == ([2], 2)
    complaints = [record for record in caplog.records if "the traffic stays as it was" in record.message]
    assert len(complaints) == 1  # once, not at each look


def test_labels_of_the_file_count_more_than_those_of_the_config(tmp_path: Path) -> None:
    add_versions(tmp_path, 1, 2)
    write_traffic(tmp_path, Traffic(1, 2, 0.1))
    config = ModelConfig("m", tmp_path, latest(1), {"stable": 2, "other": 2})
    manager = ModelManager([config], lambda path: FakeModel(), 0)
    manager.start()
    try:
        assert manager.labels("m") == {"stable": 1, "canary": 2, "other": 2}
        with manager.lease("m", None, "stable") as version:
            assert version.number == 1
        assert manager.labels("unknown") == {}
    finally:
        manager.stop()
