"""The model registry: what is recorded, once, in which state, and what is said when it cannot be."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import urllib3

from components.config import RegistryConfig
from components.errors import ConfigError, HeadraceError
from components.model_registry import PushedVersion, register
from tests.components.hub import Hub, serving

PUSHED = PushedVersion(
    model_name="taxi",
    version=3,
    uri="s3://models/taxi/3",
    destination="s3://models/taxi",
    digest="a" * 64,
    properties={"test_auc": 0.96, "epochs": 7, "blessed": True, "parameters": 10**10, "model_digest": "b" * 64},
)


@pytest.fixture
def hub() -> Hub:
    return Hub()


@pytest.fixture(autouse=True)
def _without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urllib3.Retry, "sleep", lambda self, response=None: None)


@pytest.fixture
def config(hub: Hub) -> Iterator[RegistryConfig]:
    with serving(hub) as url:
        yield RegistryConfig(url=f"{url}/")


def names_and_states(hub: Hub) -> dict[str, str]:
    return {each["name"]: each["state"] for each in hub.resources["model_version"].values()}


def test_model_version_and_artifact_are_recorded_with_what_is_known(hub: Hub, config: RegistryConfig) -> None:
    version_id = register(config, PUSHED, kept=[3])
    (model,) = hub.resources["registered_model"].values()
    (version,) = hub.resources["model_version"].values()
    (artifact,) = hub.resources["model_artifact"].values()
    assert (model["name"], model["state"]) == ("taxi", "LIVE")
    assert (version["id"], version["name"], version["registeredModelId"]) == (version_id, "3", model["id"])
    assert version["customProperties"]["test_auc"] == {"metadataType": "MetadataDoubleValue", "double_value": 0.96}
    assert version["customProperties"]["epochs"] == {"metadataType": "MetadataIntValue", "int_value": "7"}
    assert version["customProperties"]["parameters"]["double_value"] == 1e10  # its integers end at nine digits
    assert version["customProperties"]["blessed"] == {"metadataType": "MetadataBoolValue", "bool_value": True}
    assert version["customProperties"]["digest"]["string_value"] == "a" * 64
    assert artifact["parent"] == version_id
    assert (artifact["uri"], artifact["modelFormatName"], artifact["state"]) == (
        "s3://models/taxi/3",
        "tensorflow",
        "LIVE",
    )


def test_the_same_version_is_recorded_once(hub: Hub, config: RegistryConfig) -> None:
    ids = {register(config, PUSHED, kept=[3]) for _ in range(2)}
    assert len(ids) == 1
    assert [len(of_kind) for of_kind in hub.resources.values()] == [1, 1, 1]
    assert [request for request in hub.requests if not request.startswith("GET")] == [
        "POST /registered_models",
        "POST /model_versions",
        f"POST /model_versions/{ids.pop()}/artifacts",
    ]


def test_versions_that_are_gone_are_archived_on_every_page_and_others_left_alone(
    hub: Hub, config: RegistryConfig
) -> None:
    for number in range(1, 6):
        register(config, replace(PUSHED, version=number, digest=str(number)), kept=list(range(1, 6)))
    elsewhere = replace(PUSHED, version=1, digest="1", destination="s3://other/taxi")
    register(config, elsewhere, kept=[1])
    assert "ARCHIVED" not in names_and_states(hub).values()
    register(config, replace(PUSHED, version=6, digest="6"), kept=[4, 6])
    states = names_and_states(hub)
    (other,) = set(states) - {"1", "2", "3", "4", "5", "6"}
    assert [states[str(number)] for number in range(1, 7)] == ["ARCHIVED"] * 3 + ["LIVE", "ARCHIVED", "LIVE"]
    assert re.fullmatch(r"1-[0-9a-f]{8}", other) and states[other] == "LIVE"


def test_a_number_that_begins_anew_does_not_take_over_an_old_record(hub: Hub, config: RegistryConfig) -> None:
    first = register(config, PUSHED, kept=[3])
    second = register(config, replace(PUSHED, digest="c" * 64), kept=[3])
    assert first != second == register(config, replace(PUSHED, digest="c" * 64), kept=[3])
    (name,) = set(names_and_states(hub)) - {"3"}
    assert names_and_states(hub) == {"3": "ARCHIVED", name: "LIVE"}
    assert register(config, PUSHED, kept=[3]) == first
    assert names_and_states(hub) == {"3": "LIVE", name: "ARCHIVED"}


def test_what_another_run_makes_first_is_taken(hub: Hub, config: RegistryConfig) -> None:
    version_id = register(config, PUSHED, kept=[3])
    hub.hidden = ["registered_model", "model_version", "model_artifact"]
    assert register(config, PUSHED, kept=[3]) == version_id
    assert [len(of_kind) for of_kind in hub.resources.values()] == [1, 1, 1]
    assert hub.hidden == []


@pytest.mark.parametrize("faults", [[503, 429], ["lost"]], ids=str)
def test_a_registry_that_falters_is_asked_again(hub: Hub, config: RegistryConfig, faults: list[int | str]) -> None:
    register(config, replace(PUSHED, version=1, digest="1"), kept=[1])
    hub.faults = [*faults]
    assert register(config, PUSHED, kept=[1, 3])
    assert names_and_states(hub) == {"1": "LIVE", "3": "LIVE"}


def test_an_answer_that_is_lost_makes_nothing_twice(hub: Hub, config: RegistryConfig) -> None:
    """Each request in turn is done, and its answer is lost."""
    for lost in range(7):
        hub.faults = [*["none"] * lost, "lost"]
        register(config, replace(PUSHED, version=lost + 1, digest=str(lost)), kept=list(range(9)))
    assert [len(of_kind) for of_kind in hub.resources.values()] == [1, 7, 7]


def test_a_token_is_sent_and_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(token="open sesame")
    with serving(hub) as url:
        with pytest.raises(HeadraceError, match=r"refuses \(401\): invalid token\. .*registry\.token_env"):
            register(RegistryConfig(url=url), PUSHED, kept=[3])
        monkeypatch.delenv("HUB_TOKEN", raising=False)
        config = RegistryConfig(url=url, token_env="HUB_TOKEN")
        with pytest.raises(ConfigError, match="HUB_TOKEN is not set"):
            register(config, PUSHED, kept=[3])
        monkeypatch.setenv("HUB_TOKEN", "open sesame")
        assert register(config, PUSHED, kept=[3])


def test_what_the_registry_refuses_is_told(hub: Hub, config: RegistryConfig) -> None:
    hub.faults = [500]
    with pytest.raises(HeadraceError, match=r"answered 500 to GET /registered_model: try again\."):
        register(config, PUSHED, kept=[3])
    with pytest.raises(HeadraceError, match=r"answered 400 to GET /registered_model: invalid parameters call"):
        register(config, replace(PUSHED, model_name=""), kept=[3])


def test_nobody_there_is_told() -> None:
    with serving(Hub()) as url:
        pass
    with pytest.raises(HeadraceError, match=rf"No model registry answers at {url}: .*Check registry\.url\."):
        register(RegistryConfig(url=url), PUSHED, kept=[3])


def test_its_address_is_checked_with_the_config() -> None:
    with pytest.raises(ValueError, match=r"must begin with http:// or https://, received 'hub:8080'"):
        RegistryConfig(url="hub:8080")
