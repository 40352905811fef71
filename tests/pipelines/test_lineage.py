"""`headrace lineage`: where a version comes from, and whether it still is what was pushed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from components import lineage
from pipelines.lineage import main
from pipelines.local import run
from tests.components.origins import origin, origins
from tests.pipelines import fakes

TIME = "2026-01-31T23:59:59+00:00"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Two pushed versions, the second with a lineage."""
    base = tmp_path / "taxi"
    for number in "12":
        (base / number / "assets.extra").mkdir(parents=True)
        (base / number / "saved_model.pb").write_text("graph")
    files = {"saved_model.pb": hashlib.sha256(b"graph").hexdigest()}
    push = origin("push", {"exported": "digest of export"})
    pushed = lineage.pushed_event("taxi", push, time=TIME, location=str(base / "2"), files=files)
    write(base / "2", [*lineage.events("taxi", origins(), time=TIME), pushed])
    return base


def write(version: Path, events: list[lineage.Event]) -> None:
    (version / "assets.extra" / lineage.FILE).write_text(json.dumps(events))


def said_of(path: Path) -> Result:
    return CliRunner().invoke(main, [str(path)])


@pytest.mark.parametrize("place", ["", "2"])
def test_every_dataset_is_shown_with_its_digest_and_what_it_was_made_from(base: Path, place: str) -> None:
    result = said_of(base / place)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == f"digest of tr  {Path('trips.csv').absolute()}"
    assert "digest of tr  model: train of examples, transform" in lines
    assert lines[-2:] == [f"digest of pu  {base / '2'}: push of exported", "Every digest is right."]


def test_the_share_of_the_requests_is_told(base: Path) -> None:
    (base / "traffic.json").write_text(json.dumps({"stable": 1, "canary": 2, "canary_share": 0.1}))
    assert "It gets 10% of the requests (traffic.json)." in said_of(base / "2").output


def test_a_file_that_is_not_what_was_pushed_ends_with_1(base: Path) -> None:
    (base / "2/saved_model.pb").write_text("another graph")
    result = said_of(base / "2")
    assert result.exit_code == 1
    assert (
        f"{base / '2'} is not what its lineage says:\n  saved_model.pb is missing or not what was exported"
        in result.output
    )


def test_a_broken_chain_ends_with_1(base: Path) -> None:
    known = origins() | {"exported": origin("export", {"model": "another"})}
    write(base / "2", lineage.events("taxi", known, time=TIME))
    result = said_of(base / "2")
    assert result.exit_code == 1
    assert "taxi.export read another taxi/model" in result.output


def test_a_folder_without_a_lineage_is_told(base: Path) -> None:
    result = said_of(base / "1")
    assert result.exit_code == 1
    assert f"There is no lineage.json in {base / '1'}. Give the folder of a version" in result.output


def test_a_run_leaves_its_lineage_with_the_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = fakes.config_of()
    run(config, runs_dir=tmp_path / "runs", steps=fakes.real_table(), console=fakes.quiet())
    events = json.loads((tmp_path / "runs/tiny/lineage.json").read_text())
    steps = [event["job"]["name"] for event in events]
    assert (
        steps.index("tiny.ingest") < steps.index("tiny.train") < steps.index("tiny.push") < steps.index("tiny.deploy")
    )
    deployed = next(event for event in events if event["job"]["name"] == "tiny.deploy")
    assert deployed["run"]["facets"]["headrace_step"]["result"]["stable"] == 1
    assert said_of(tmp_path / "runs/tiny").exit_code == 0


def test_a_run_that_ends_early_leaves_the_lineage_of_what_it_made(tmp_path: Path) -> None:
    run(fakes.config_of(), runs_dir=tmp_path, steps=fakes.table(), console=fakes.quiet())
    run(fakes.config_of(), runs_dir=tmp_path, steps=fakes.table(), console=fakes.quiet(), until="shape")
    events = json.loads((tmp_path / "tiny/lineage.json").read_text())
    assert [event["job"]["name"] for event in events] == ["tiny.make", "tiny.shape"]
