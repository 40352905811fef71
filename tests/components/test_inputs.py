"""Several spans or files read as one: their rows, their types, and what is kept of where they came from."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from components import artifacts, lineage
from components.config import DataConfig
from components.errors import DataError
from components.examples import Feature, read_arrays, read_info
from components.ingest import IngestResult, ingest
from tests.seaweedfs import ObjectStore


def csv_of(file: Path, first: int, **columns: Any) -> None:
    """100 rows: `n` from `first` on, a label, and more columns."""
    table = {"n": list(range(first, first + 100)), "label": ["yes", "no"] * 50, **columns}
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [",".join(map(str, row)) for row in zip(*table.values(), strict=True)]
    file.write_text("\n".join([",".join(table), *lines]) + "\n")


def ingested(folder: Path, path: str, **settings: Any) -> IngestResult:
    return ingest(examples=folder / "e", config=DataConfig.model_validate({"path": path, "task": "binary", **settings}))


def numbers(folder: Path) -> dict[str, list[int]]:
    return {split: read_arrays(folder / "e", split)["n"].tolist() for split in ("train", "validation", "test")}


def test_the_spans_of_a_window_become_splits_and_are_on_record(tmp_path: Path) -> None:
    for span, version in ((1, 1), (2, 1), (2, 2), (3, 1)):
        csv_of(tmp_path / f"{span}/v{version}/x.csv", 1000 * span + 100 * version)
    split = {"method": "span", "validation_spans": 1}
    result = ingested(tmp_path, f"{tmp_path}/{{SPAN}}/v{{VERSION}}/*.csv", window=3, split=split)
    expected = {"train": range(1100, 1200), "validation": range(2200, 2300), "test": range(3100, 3200)}
    assert numbers(tmp_path) == {name: list(part) for name, part in expected.items()}
    assert result.inputs == [
        {"path": f"{tmp_path}/{span}/v{version}/*.csv", "split": name, "span": span, "version": version}
        for span, version, name in ((1, 1, "train"), (2, 2, "validation"), (3, 1, "test"))
    ]
    assert artifacts.read_manifest(tmp_path / "e").result["inputs"] == result.inputs


def test_lineage_names_the_spans_that_were_read(tmp_path: Path) -> None:
    csv_of(tmp_path / "7.csv", 0)
    ingested(tmp_path, f"{tmp_path}/{{SPAN}}.csv")
    origin = artifacts.origin(artifacts.read_manifest(tmp_path / "e"))
    (event,) = lineage.events("spans", {"examples": origin}, time="2026-01-31T23:59:59+00:00")
    (read,) = event["inputs"]
    assert read["name"] == f"{tmp_path}/7.csv"
    assert read["facets"]["headrace_input"]["span"] == 7
    assert read["facets"]["version"]["datasetVersion"] == origin["outside"]["data"]


def test_rows_belong_to_where_their_file_lies(tmp_path: Path) -> None:
    for number, name in enumerate(("old/a", "old/b", "new/a", "new/b")):
        csv_of(tmp_path / "data" / f"{name}.csv", 100 * number)
    paths = {"train": "old/*.csv", "validation": "new/a.csv", "test": "new/b.csv"}
    ingested(tmp_path, f"{tmp_path}/data/", split={"method": "path", "paths": paths})
    expected = {"train": range(200), "validation": range(200, 300), "test": range(300, 400)}
    assert numbers(tmp_path) == {name: list(part) for name, part in expected.items()}


def test_a_path_without_files_is_named(tmp_path: Path) -> None:
    csv_of(tmp_path / "data/a.csv", 0)
    with pytest.raises(DataError, match=r"data\.path: there is no file .*/data/b\*"):
        ingested(tmp_path, f"{tmp_path}/data", split={"method": "path", "paths": {"train": "a*", "test": "b*"}})
    (tmp_path / "data/b.csv").write_text("n,label\n")
    with pytest.raises(DataError, match=r"The test split is empty .*: correct data\.split\.paths\.test"):
        ingested(tmp_path, f"{tmp_path}/data", split={"method": "path", "paths": {"train": "a*", "test": "b*"}})


def test_columns_and_types_are_those_of_all_spans(tmp_path: Path) -> None:
    csv_of(tmp_path / "1.csv", 0, x=list(range(100)))
    csv_of(tmp_path / "2.csv", 100, word=["w"] * 100, x=[number / 2 for number in range(100)])
    path, split = f"{tmp_path}/{{SPAN}}.csv", {"method": "span", "validation": 0.2}
    ingested(tmp_path, path, window=2, split=split)
    features = read_info(tmp_path / "e").features
    assert features["x"] == Feature("float") and features["word"] == Feature("string")
    assert set(read_arrays(tmp_path / "e", "train")["word"].tolist()) == {b""}
    csv_of(tmp_path / "2.csv", 100, x=["some"] * 100)
    with pytest.raises(
        DataError, match=r"column 'x' is int64 in .*/1\.csv and string in .*/2\.csv\. Give the column one"
    ):
        ingested(tmp_path, path, window=2, split=split)


def test_numbers_that_do_not_fit_the_type_of_another_span_are_refused(tmp_path: Path) -> None:
    for span, values in ((1, pa.array([2**63] * 10, pa.uint64())), (2, pa.array([-1] * 10, pa.int64()))):
        pa.parquet.write_table(pa.table({"n": values, "label": ["a", "b"] * 5}), tmp_path / f"{span}.parquet")
    with pytest.raises(
        DataError, match=r"/1\.parquet does not fit the types of the other paths: .*9223372036854775808"
    ):
        ingested(tmp_path, f"{tmp_path}/{{SPAN}}.parquet", source="parquet", window=2)


@pytest.mark.parametrize(
    ("split", "cut_offs"),
    [
        ({"validation": 0.25, "test": 0.25}, {"validation": 150, "test": 225}),
        ({"validation_from": 100, "test_from": 250}, {"validation": 100, "test": 250}),
    ],
    ids=str,
)
def test_cut_offs_of_time_are_on_record(tmp_path: Path, split: dict[str, Any], cut_offs: dict[str, int]) -> None:
    for number in range(3):
        csv_of(tmp_path / f"{number}.csv", 100 * number)
    result = ingested(tmp_path, f"{tmp_path}/{{SPAN}}.csv", window=3, split={"method": "time", "column": "n", **split})
    ends = [0, cut_offs["validation"], cut_offs["test"], 300]
    assert [result.cut_offs[name] for name in ("validation", "test")] == ends[1:3]
    assert list(numbers(tmp_path).values()) == [list(range(*each)) for each in itertools.pairwise(ends)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"test_from": 400}, r"The test split is empty .*: correct data\.split\.test_from"),
        ({"validation_from": 0}, r"The train split is empty .*: correct data\.split\.validation_from"),
        ({"validation": 0.0}, r"The validation split is empty .*: raise data\.split\.validation or give more rows"),
        ({"column": "time"}, r"data\.split\.column: the data has no column 'time'"),
    ],
    ids=str,
)
def test_splits_by_time_that_are_empty(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    csv_of(tmp_path / "x.csv", 0)
    with pytest.raises(DataError, match=message):
        ingested(tmp_path, f"{tmp_path}/x.csv", split={"method": "time", "column": "n", **settings})


def test_folds_are_as_many_runs_over_the_same_rows(tmp_path: Path) -> None:
    csv_of(tmp_path / "x.csv", 0)
    tests = []
    for fold in range(3):
        ingested(tmp_path, f"{tmp_path}/x.csv", split={"method": "fold", "num_folds": 3, "fold": fold})
        tests.append(numbers(tmp_path)["test"])
    assert sorted(functools.reduce(list.__add__, tests)) == list(range(100))


def test_spans_of_a_store_are_fetched_and_read(store: ObjectStore, tmp_path: Path) -> None:
    for span in (1, 2, 3):
        csv_of(tmp_path / "x.csv", 100 * span)
        store.put(f"bucket/days/{span}/x.csv", (tmp_path / "x.csv").read_bytes())
    path = "s3://bucket/days/{SPAN}/*.csv"
    result = ingested(tmp_path, path, window=2, split={"method": "span", "validation": 0.2})
    assert numbers(tmp_path)["test"] == list(range(300, 400))
    assert [each["path"] for each in result.inputs] == ["s3://bucket/days/2/*.csv", "s3://bucket/days/3/*.csv"]
