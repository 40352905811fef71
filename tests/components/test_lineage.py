"""Lineage: OpenLineage events whose digests form a chain from the data to the pushed version."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from components import lineage
from tests.components.origins import origin, origins

TIME = "2026-01-31T23:59:59+00:00"
# What https://openlineage.io/spec/2-0-2/OpenLineage.json asks of a RunEvent and of the facets in it.
FACETS = {
    "type": "object",
    "additionalProperties": {
        "type": "object",
        "required": ["_producer", "_schemaURL"],
        "properties": {"_producer": {"format": "uri"}, "_schemaURL": {"format": "uri"}},
    },
}
DATASETS = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["namespace", "name"],
        "properties": {"namespace": {"type": "string"}, "name": {"type": "string"}, "facets": FACETS},
    },
}
RUN_EVENT = {
    "type": "object",
    "required": ["eventTime", "producer", "schemaURL", "run", "job"],
    "properties": {
        "eventTime": {"type": "string", "format": "date-time"},
        "eventType": {"enum": ["START", "RUNNING", "COMPLETE", "ABORT", "FAIL", "OTHER"]},
        "producer": {"type": "string", "pattern": r"^urn:[a-z]+:\S+$"},
        "schemaURL": {"type": "string", "pattern": "^https://"},
        "run": {
            "required": ["runId"],
            "properties": {"runId": {"pattern": "^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"}, "facets": FACETS},
        },
        "job": {"required": ["namespace", "name"]},
        "inputs": DATASETS,
        "outputs": DATASETS,
    },
}


def chain(changes: dict[str, dict[str, Any]] | None = None) -> list[lineage.Event]:
    return lineage.events("taxi", origins() | (changes or {}), time=TIME)


def event_of(step: str) -> lineage.Event:
    return next(event for event in chain() if event["job"]["name"] == f"taxi.{step}")


def datasets(of: list[dict[str, Any]]) -> dict[tuple[str, str], str]:
    return {(each["namespace"], each["name"]): lineage.digest_of_dataset(each) for each in of}


def test_each_step_is_an_event_after_those_it_needs() -> None:
    steps = [event["job"]["name"].removeprefix("taxi.") for event in chain()]
    assert sorted(steps) == ["evaluate", "export", "ingest", "train", "transform", "validate", "verify"]
    for event in chain():
        jsonschema.validate(event, RUN_EVENT)
        before = steps[: steps.index(event["job"]["name"].removeprefix("taxi."))]
        made = {step: origin["step"] for step, origin in origins().items()}
        assert all(
            made[each["name"].removeprefix("taxi/")] in before
            for each in event["inputs"]
            if each["namespace"] == "headrace"
        )


def test_inputs_outside_are_named_as_openlineage_names_files_and_buckets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert datasets(event_of("ingest")["inputs"]) == {("file", str(tmp_path / "trips.csv")): "digest of trips.csv"}
    assert datasets(event_of("evaluate")["inputs"])["s3://models", "served/taxi"] == "digest of version 2"


def test_a_run_id_follows_from_the_fingerprint_alone() -> None:
    before, after = chain(), chain({"model": origins()["model"] | {"fingerprint": "another"}})
    changed = [
        event["job"]["name"]
        for event, other in zip(before, after, strict=True)
        if event["run"]["runId"] != other["run"]["runId"]
    ]
    assert changed == ["taxi.train"]


def test_a_step_that_read_another_artifact_breaks_the_chain() -> None:
    assert list(lineage.breaks(chain())) == []
    broken = chain({"exported": origin("export", {"model": "digest of another model"})})
    assert list(lineage.breaks(broken)) == [
        "taxi.export read another taxi/model (digest of an) than the one listed here"
    ]


def test_a_pushed_version_is_known_by_the_digests_of_its_files(tmp_path: Path) -> None:
    for name in ("saved_model.pb", "tflite/model.tflite"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    files = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("saved_model.pb", "tflite/model.tflite")}
    event = lineage.pushed_event(
        "taxi", origin("push", {"exported": "digest of export"}), time=TIME, location=str(tmp_path), files=files
    )
    jsonschema.validate(event, RUN_EVENT)
    assert datasets(event["outputs"]) == {("file", str(tmp_path)): "digest of push"}
    assert list(lineage.changed_files(tmp_path, [*chain(), event])) == []
    (tmp_path / "saved_model.pb").write_text("another")
    (tmp_path / "tflite/model.tflite").unlink()
    assert list(lineage.changed_files(tmp_path, [*chain(), event])) == ["saved_model.pb", "tflite/model.tflite"]
