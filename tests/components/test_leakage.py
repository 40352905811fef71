"""What splits share, against sets in Python."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from components.config import DataConfig
from components.errors import DataError
from components.examples import SPLITS
from components.ingest import ingest, leakage

_table: dict[str, list[Any]] = {}


def source(*, path: str | None) -> Iterator[pa.RecordBatch]:
    """The rows of the test that runs, in batches of 100."""
    yield from pa.table(_table).to_batches(100)


def config_of(**settings: Any) -> DataConfig:
    return DataConfig.model_validate({"source": f"{__name__}:source", "task": "binary", **settings})


def people(count: int = 3000) -> None:
    rng = np.random.default_rng(0)
    _table.clear()
    _table["row"] = list(range(count))
    _table["person"] = [f"p{number}" for number in rng.integers(0, 2000, count)]
    _table["x"] = rng.integers(0, 1000, count).tolist()
    _table["part"] = [SPLITS[number] for number in rng.choice(3, count, p=[0.8, 0.1, 0.1])]
    _table["label"] = rng.integers(0, 2, count).tolist()


def shared(columns: list[str]) -> dict[tuple[str, str], tuple[int, int]]:
    """For each two splits, how many values both have and how many rows of the second have one of them."""
    values = list(zip(*(_table[name] for name in columns), strict=True))
    of_split = {split: [v for v, part in zip(values, _table["part"], strict=True) if part == split] for split in SPLITS}
    pairs = [("train", "validation"), ("train", "test"), ("validation", "test")]
    both = {pair: set(of_split[pair[0]]) & set(of_split[pair[1]]) for pair in pairs}
    return {pair: (len(each), sum(v in each for v in of_split[pair[1]])) for pair, each in both.items() if each}


@pytest.mark.parametrize("in_memory", [1 << 22, 50], ids=["in memory", "on disk"])
def test_entities_and_rows_in_two_splits_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: int
) -> None:
    people()
    monkeypatch.setattr(leakage, "_IN_MEMORY", in_memory)
    split = {"method": "column", "column": "part"}
    result = ingest(
        examples=tmp_path / "e", config=config_of(split=split, drop=["row", "person"], leakage={"key": ["person"]})
    )
    expected = [
        *(("SPLITS_SHARE_ENTITIES", *each) for each in shared(["person"]).items()),
        *(("SPLITS_SHARE_ROWS", *each) for each in shared(["x", "label"]).items()),
    ]
    assert len(expected) == 6
    for found, (kind, (first, second), (number, rows)) in zip(result.leakage, expected, strict=True):
        total = _table["part"].count(second)
        assert (found["kind"], found["split"], found["severity"]) == (kind, second, "warning")
        if kind == "SPLITS_SHARE_ENTITIES":
            assert found["feature"] == "person"
            assert found["message"].startswith(f"values of person that the {first} split has, too: {number} (as p")
            assert f"), in {rows} of {total} rows" in found["message"]
            named = found["message"].partition("(as ")[2].partition(")")[0].split(", ")
            owners = {
                split: {p for p, s in zip(_table["person"], _table["part"], strict=True) if s == split}
                for split in SPLITS
            }
            assert len(named) == 5 and set(named) <= owners[first] & owners[second]
        else:
            start = f"rows that the {first} split has, too, alike in every feature and the label: {rows} of {total}."
            assert found["message"].startswith(start)
    assert json.loads((tmp_path / "e" / "leakage.json").read_text()) == result.leakage
    assert not (tmp_path / "e" / ".leakage").exists()


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        # A hash keeps equal rows, and all rows of a key, together; what is dropped it has looked at.
        ({}, []),
        ({"split": {"key": ["person"]}}, []),
        ({"split": {"key": ["person"]}, "leakage": {"key": ["person", "x"]}}, []),
        ({"split": {"method": "fold", "key": ["person"]}}, []),
        ({"leakage": {"key": ["person"]}}, ["SPLITS_SHARE_ENTITIES"]),
        ({"drop": ["row", "person"]}, ["SPLITS_SHARE_ROWS"]),
        ({"drop": ["row"], "split": {"key": ["person"]}}, []),
        ({"drop": ["row", "person", "part"], "split": {"key": ["person"]}}, ["SPLITS_SHARE_ROWS"]),
        ({"drop": ["row", "person"], "leakage": {"check": False}}, []),
        ({"split": {"method": "time", "column": "x"}, "drop": ["row", "person", "part"]}, []),
        ({"split": {"method": "time", "column": "row"}, "drop": ["row", "person", "part"]}, ["SPLITS_SHARE_ROWS"]),
        ({"split": {"method": "time", "column": "row"}, "leakage": {"key": ["person"]}}, ["SPLITS_SHARE_ENTITIES"]),
    ],
    ids=str,
)
def test_what_can_leak_by_which_method(tmp_path: Path, settings: dict[str, Any], kinds: list[str]) -> None:
    people()
    result = ingest(examples=tmp_path / "e", config=config_of(**settings))
    assert sorted({found["kind"] for found in result.leakage}) == kinds


def test_rows_without_a_key_are_no_entity(tmp_path: Path) -> None:
    people(600)
    _table["person"] = [f"{row}" if row % 2 else None for row in range(600)]
    result = ingest(examples=tmp_path / "e", config=config_of(leakage={"key": ["person"]}))
    assert result.leakage == []


@pytest.mark.parametrize("key", [[], ["person"]], ids=str)
def test_validation_rows_carved_from_train_are_those_of_validation(tmp_path: Path, key: list[str]) -> None:
    people()
    _table["part"] = ["train" if part == "validation" else part for part in _table["part"]]
    split = {"method": "column", "column": "part", "validation": 0.2, "key": key}
    config = config_of(split=split, leakage={"key": ["person"]})
    result = ingest(examples=tmp_path / "e", config=config)
    assert result.num_examples["validation"] > 300
    pairs = [(found["split"], found["message"].partition("that the ")[2].split()[0]) for found in result.leakage]
    of_train = [] if key else [("validation", "train")]
    assert pairs == [*of_train, ("test", "train"), ("test", "validation")]


def test_a_key_that_the_data_lacks_is_refused(tmp_path: Path) -> None:
    people(100)
    with pytest.raises(DataError, match=r"data\.leakage\.key: the data has no column 'persn'. Did you mean 'person'"):
        ingest(examples=tmp_path / "e", config=config_of(leakage={"key": ["persn"]}))


def test_the_same_is_found_on_disk_and_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(
        split={"method": "column", "column": "part"}, leakage={"key": ["person"]}, drop=["row", "person"]
    )
    found = []
    monkeypatch.setattr(leakage, "_MOST_TEXTS", 200)
    for in_memory in (1 << 21, 700):
        people()
        monkeypatch.setattr(leakage, "_IN_MEMORY", in_memory)
        found.append(ingest(examples=tmp_path / f"{in_memory}", config=config))
    assert found[0] == found[1]
