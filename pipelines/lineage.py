"""Where a pushed model comes from: `headrace lineage PATH`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipelines.exits import reported

if TYPE_CHECKING:
    from components.lineage import Event

_DIGITS = 12


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("path")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(path: str, debug: bool) -> None:
    """Say where a pushed model comes from, and check that it is what its lineage says.

    PATH is the folder or URI of a version, or of all versions (of which the one that gets the traffic is taken), or a
    run's folder.

    Exit codes: 0 every digest is right, 1 one is not, or there is no lineage.
    """
    with reported(debug=debug):
        from components import object_store

        above, _, number = path.rstrip("/").rpartition("/")
        base, version = (above, number) if object_store.is_uri(path) and number.isdigit() else (path, "")
        with object_store.base_path(base) as folder:
            _show(*_find(folder / version))


def _show(folder: Path, file: Path) -> None:
    from components import lineage
    from components.errors import ArtifactError

    events = json.loads(file.read_text())
    for line in (*_lines(events), *_share(folder)):
        click.echo(line)
    changed = [f"{name} is missing or not what was exported" for name in lineage.changed_files(folder, events)]
    if wrong := [*lineage.breaks(events), *changed]:
        raise ArtifactError("\n  ".join([f"{folder} is not what its lineage says:", *wrong]))
    click.echo("Every digest is right.")


def _find(path: Path) -> tuple[Path, Path]:
    """The folder that a path stands for, and the lineage in it."""
    from components.errors import ArtifactError
    from components.external import find_champion
    from components.lineage import FILE

    champion = find_champion(path, other_than="")
    for folder in (path, *([champion] if champion else [])):
        for file in (folder / FILE, folder / "assets.extra" / FILE):
            if file.is_file():
                return folder, file
    raise ArtifactError(f"There is no {FILE} in {path}. Give the folder of a version that `push` made, or of a run.")


def _lines(events: Sequence[Event]) -> Iterator[str]:
    """Each dataset with its digest and what it was made from."""
    from components.lineage import digest_of_dataset

    known: set[str] = set()
    for event in events:
        for dataset in event["inputs"]:
            if (name := _name(dataset)) not in known:
                yield f"{digest_of_dataset(dataset)[:_DIGITS]}  {name}"
                known.add(name)
        step = event["job"]["name"].rpartition(".")[2]
        for dataset in event["outputs"]:
            known.add(name := _name(dataset))
            inputs = ", ".join(_name(each) for each in event["inputs"])
            yield f"{digest_of_dataset(dataset)[:_DIGITS]}  {name}: {step} of {inputs}"


def _name(dataset: Mapping[str, Any]) -> str:
    from components.lineage import NAMESPACE

    namespace, name = dataset["namespace"], dataset["name"]
    if namespace == NAMESPACE:
        return str(name.rpartition("/")[2])
    return str(name) if namespace == "file" else f"{namespace}/{name}"


def _share(version_path: Path) -> Iterator[str]:
    """How many of the requests the version gets, where that is set."""
    from components.external import traffic_of

    traffic = traffic_of(version_path.parent)
    if traffic is not None and version_path.name.isdigit():
        version, on_trial = int(version_path.name), traffic.canary_share if traffic.canary else 0.0
        share = {traffic.canary: on_trial, traffic.stable: 1 - on_trial}.get(version, 0.0)
        yield f"It gets {share:.0%} of the requests (traffic.json)."


if __name__ == "__main__":
    main(prog_name="headrace lineage")
