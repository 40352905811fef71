"""Where a model comes from, as OpenLineage events: data -> examples -> model -> export -> pushed version -> endpoint.

One event for each step, made from the artifacts' manifests alone, in the order in which the steps ran:
https://openlineage.io/spec/2-0-2/OpenLineage.json, names as https://openlineage.io/docs/spec/naming has them.
"""

from __future__ import annotations

import importlib.metadata
import uuid
from collections.abc import Iterator, Mapping, Sequence
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from components.artifacts import digest_file

FILE = "lineage.json"
Event = dict[str, Any]
NAMESPACE = "headrace"
_SPEC = "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs"
_VERSION_FACET = (
    "https://openlineage.io/spec/facets/1-0-1/DatasetVersionDatasetFacet.json#/$defs/DatasetVersionDatasetFacet"
)
# The setting that says where a step's outside state is; those of the same name are not listed.
_SETTING_OF = {"data": "path", "schema": "schema_path", "last_span": "drift_from", "champion": "champion_path"}


def events(pipeline: str, origins: Mapping[str, Mapping[str, Any]], *, time: str) -> list[Event]:
    """The events of the steps that made some artifacts.

    Args:
        pipeline: Name of the experiment.
        origins: Artifact -> what `artifacts.origin` says of it; inputs that are not among them have no event.
        time: When this is written, in ISO 8601 with a time zone; manifests hold no times.

    Returns:
        One RunEvent for each artifact, those it was made from first. The run's id follows from the fingerprint, so that
        an artifact that is reused has the same one in every file.
    """
    needs = {name: [each for each in origins[name]["inputs"] if each in origins] for name in sorted(origins)}
    return [_event(pipeline, name, origins[name], time) for name in TopologicalSorter(needs).static_order()]


def pushed_event(
    pipeline: str, origin: Mapping[str, Any], *, time: str, location: str, files: Mapping[str, str]
) -> Event:
    """The event of the step `push`, whose output is a version of the served model.

    Args:
        pipeline: Name of the experiment.
        origin: As of `artifacts.origin`; `digest` is that of the export.
        time: As for `events`.
        location: The version's folder or URI.
        files: Path in it -> SHA-256 of each file of the export.
    """
    event = _event(pipeline, "pushed", origin, time)
    dataset = _location(location)
    dataset["facets"] = _version(origin["digest"]) | {"headrace_files": _facet("DatasetFacet", sha256=dict(files))}
    return event | {"outputs": [dataset]}


def _event(pipeline: str, name: str, origin: Mapping[str, Any], time: str) -> Event:
    facts = {key: value for key, value in origin["result"].items() if isinstance(value, str | int | float)}
    run = _facet(
        "RunFacet",
        fingerprint=origin["fingerprint"],
        source=origin["source"],
        versions=origin["versions"],
        result=facts,
    )
    return {
        "eventType": "COMPLETE",
        "eventTime": time,
        "producer": _producer(),
        "schemaURL": f"{_SPEC}/RunEvent",
        "run": {
            "runId": str(uuid.uuid5(uuid.NAMESPACE_URL, f"{NAMESPACE}:{origin['fingerprint']}")),
            "facets": {"headrace_step": run},
        },
        "job": {"namespace": NAMESPACE, "name": f"{pipeline}.{origin['step']}"},
        "inputs": [
            *_outside(origin),
            *(_artifact(pipeline, each, digest) for each, digest in origin["inputs"].items()),
        ],
        "outputs": [_artifact(pipeline, name, origin["digest"])],
    }


def _artifact(pipeline: str, name: str, digest: str) -> dict[str, Any]:
    return {"namespace": NAMESPACE, "name": f"{pipeline}/{name}", "facets": _version(digest)}


def _outside(origin: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What a step read that is no artifact: the data, the champion, the request log."""
    for name, digest in origin["outside"].items():
        place = origin["config"].get(_SETTING_OF.get(name, name))
        if not isinstance(digest, str) or not place:
            continue
        read = origin["result"].get("inputs") if name == "data" else None
        for each in read or [{"path": place}]:
            chosen = {key: value for key, value in each.items() if key != "path"}
            facet = {"headrace_input": _facet("DatasetFacet", **chosen)} if chosen else {}
            yield _location(each["path"]) | {"facets": _version(digest) | facet}


def _location(place: str) -> dict[str, Any]:
    scheme, separator, rest = place.partition("://")
    if not separator:
        return {"namespace": "file", "name": str(Path(place).absolute())}
    authority, _, name = rest.partition("/")
    return {"namespace": f"{scheme}://{authority}", "name": name}


def _version(digest: str) -> dict[str, Any]:
    return {"version": {"_producer": _producer(), "_schemaURL": _VERSION_FACET, "datasetVersion": digest}}


def _facet(base: str, **values: Any) -> dict[str, Any]:
    return {"_producer": _producer(), "_schemaURL": f"{_SPEC}/{base}", **values}


def _producer() -> str:
    return f"urn:headrace:{importlib.metadata.version('headrace')}"


def digest_of_dataset(dataset: Mapping[str, Any]) -> str:
    """The digest of an input or output of an event."""
    return str(dataset["facets"]["version"]["datasetVersion"])


def breaks(chain: Sequence[Event]) -> Iterator[str]:
    """Where a step read another artifact than the one that an earlier event made, one line each."""
    made: dict[tuple[str, str], str] = {}
    for event in chain:
        for dataset in event["inputs"]:
            digest = digest_of_dataset(dataset)
            if made.get((dataset["namespace"], dataset["name"]), digest) != digest:
                yield f"{event['job']['name']} read another {dataset['name']} ({digest[:12]}) than the one listed here"
        for dataset in event["outputs"]:
            made[dataset["namespace"], dataset["name"]] = digest_of_dataset(dataset)


def changed_files(version_path: Path, chain: Sequence[Event]) -> Iterator[str]:
    """The files of a pushed version that are missing or not what was exported."""
    for dataset in chain[-1]["outputs"]:
        for name, digest in dataset["facets"].get("headrace_files", {}).get("sha256", {}).items():
            file = version_path / name
            if not file.is_file() or digest_file(file) != digest:
                yield name
