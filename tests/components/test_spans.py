"""Spans and versions in data.path: which are read, what a run remembers of them, and what is said of wrong ones."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from components import external
from components.config import DataConfig
from components.errors import DataError
from components.spans import Input
from tests.seaweedfs import ObjectStore

FILES = ("1/v1/x.csv", "1/v2/x.csv", "2/v9/x.csv", "2/v10/x.csv", "4/v1/x.csv", "4/v2/notes.txt", "old/v1/x.csv")
PATTERN = "{SPAN}/v{VERSION}/*.csv"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Spans 1, 2 and 4, the last of which has no files in its second version, and an empty span 5."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "5").mkdir()
    return tmp_path


def read(folder: Path | str, pattern: str, **settings: Any) -> list[Input]:
    return external.data_inputs(DataConfig(path=f"{folder}/{pattern}", **settings))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [(4, 1)]),
        ({"span": 2}, [(2, 10)]),
        ({"window": 2, "span": 2}, [(1, 2), (2, 10)]),
        ({"window": 3, "allow_gaps": True}, [(1, 2), (2, 10), (4, 1)]),
    ],
    ids=str,
)
def test_the_newest_spans_with_files_are_read_in_their_newest_version(
    folder: Path, settings: dict[str, Any], expected: list[tuple[int, int]]
) -> None:
    found = read(folder, PATTERN, **settings)
    assert [(each.span, each.version) for each in found] == expected
    assert [each.path for each in found] == [f"{folder}/{span}/v{version}/*.csv" for span, version in expected]


@pytest.mark.parametrize(
    ("names", "pattern", "expected"),
    [
        (["day-2013-09-30/a", "day-2013-10-01/a"], "day-{YYYY}-{MM}-{DD}/*", "day-2013-10-01/*"),
        (["2013/12/31.csv", "2014/01/01.csv"], "{YYYY}/{MM}/{DD}.csv", "2014/01/01.csv"),
        (["20131001v2.csv", "20131001v10.csv"], "{YYYY}{MM}{DD}v{VERSION}.csv", "20131001v10.csv"),
        (["0009.csv", "0010.csv", "00011.csv"], "{SPAN:4}.csv", "0010.csv"),
        (["000301.csv", "000299.csv"], "{SPAN:4}{VERSION:2}.csv", "000301.csv"),
        (["north/7/x.csv", "south/8/x.csv"], "*/{SPAN}/*.csv", "*/8/*.csv"),
        (["3/deep/deeper/x.csv", "4/x.txt"], "{SPAN}/**/*.csv", "3/**/*.csv"),
        (["3/cat/x.png", "4/dog/y.png"], "{SPAN}", "4"),
        (["a-9.csv", "a.10.csv"], "a.{SPAN}.csv", "a.10.csv"),
    ],
    ids=str,
)
def test_patterns_of_every_form(tmp_path: Path, names: list[str], pattern: str, expected: str) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [each.path for each in read(tmp_path, pattern)] == [f"{tmp_path}/{expected}"]


def test_a_date_is_the_number_of_its_days_since_1970(tmp_path: Path) -> None:
    for day in ("2013-10-30", "2013-10-31", "2013-11-02"):
        (tmp_path / f"{day}.csv").write_text(day)
    settings: dict[str, Any] = {"span": "2013-10-31", "window": 2}
    found = read(tmp_path, "{YYYY}-{MM}-{DD}.csv", **settings)
    assert [each.span for each in found] == [(date(2013, 10, day) - date(1970, 1, 1)).days for day in (30, 31)]
    with pytest.raises(
        DataError, match=r"has no files of span 2013-11-01; there are 2013-10-30, 2013-10-31, 2013-11-02"
    ):
        read(tmp_path, "{YYYY}-{MM}-{DD}.csv", span="2013-11-01")


def test_a_path_relative_to_the_working_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert [each.path for each in external.data_inputs(DataConfig(path=PATTERN))] == ["4/v1/*.csv"]


@pytest.mark.parametrize(
    ("pattern", "settings", "message"),
    [
        ("{SPAN}/*.parquet", {}, r"data\.path: no file matches .*\{SPAN\}/\*\.parquet; there are 1, 2, 4, 5\. Correct"),
        ("none/{SPAN}.csv", {}, r"no file matches .*; there is none\. Correct the path"),
        (PATTERN, {"span": 3}, r"data\.span: .* has no files of span 3; there are 1, 2, 4\. Correct data\.span"),
        ("{SPAN}/*/*.csv", {"span": 5}, r"has no files of span 5"),
        (PATTERN, {"window": 2}, r"data\.window: .* has no files of spans between 2 and 4\. .* data\.allow_gaps: true"),
        (
            PATTERN,
            {"window": 4, "allow_gaps": True},
            r"4 spans are asked for, and .* has 3 with files: 1, 2, 4\. Lower",
        ),
        (PATTERN, {"window": 3, "span": 2}, r"has 2 with files up to 2: 1, 2\. Lower it"),
    ],
    ids=str,
)
def test_spans_that_are_not_there(folder: Path, pattern: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(folder, pattern, **settings)


@pytest.mark.parametrize(
    ("names", "pattern", "message"),
    [
        (
            ["2013-02-30.csv"],
            "{YYYY}-{MM}-{DD}.csv",
            r"2013-02-30\.csv has no date: 2013-02-30 does not exist. Rename it",
        ),
        (
            ["3.csv", "03.csv"],
            "{SPAN}.csv",
            r"span 3 is there twice, as .*/03\.csv and .*/3\.csv\. Delete one, or give",
        ),
        (["3/1.csv", "3/01.csv"], "{SPAN}/{VERSION}.csv", r"span 3 version 1 is there twice"),
    ],
    ids=str,
)
def test_names_that_make_no_sense(tmp_path: Path, names: list[str], pattern: str, message: str) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    with pytest.raises(DataError, match=message):
        read(tmp_path, pattern)


@pytest.mark.parametrize(
    ("path", "settings", "message"),
    [
        ("{SPAN}/{YYYY}{MM}{DD}", {}, r"has both \{SPAN\} and a date"),
        ("{YYYY}{MM}", {}, r"a date needs \{YYYY\}, \{MM\} and \{DD\}"),
        ("{VERSION}/x", {}, r"\{VERSION\} is the version of a span"),
        ("{SPAN}/{SPAN}", {}, r"\{SPAN\} stands in .* more than once"),
        ("{SPAN:x}", {}, r"takes a number of digits as in \{SPAN:4\}, received \{SPAN:x\}"),
        ("{YYYY:4}{MM}{DD}", {}, r"\{YYYY\} has its own width"),
        ("{span}", {}, r"write \{SPAN\} in capitals, received \{span\}"),
        ("{SPAN}{VERSION}", {}, "a number that another follows needs a width"),
        ("**/{SPAN}", {}, r"only \* and \? stand for others"),
        ("x[ab]{SPAN}", {}, r"only \* and \? stand for others"),
        ("x.csv", {"span": 3}, "nothing reads span"),
        ("x.csv", {"window": 3}, "nothing reads window"),
        ("{SPAN}", {"allow_gaps": True}, "nothing reads allow_gaps without window"),
        ("{SPAN}", {"span": "2013-01-01"}, r"needs a number, received '2013-01-01'"),
        ("{YYYY}{MM}{DD}", {"span": 20130101}, "needs a date as 2013-11-01, received 20130101"),
        ("{YYYY}{MM}{DD}", {"span": "2013-02-30"}, "needs a date as 2013-11-01, received '2013-02-30'"),
        ("{SPAN}", {"split": {"method": "span"}}, r"set window to 2 or more, received None"),
        ("{SPAN}", {"window": 3, "split": {"method": "span", "test_spans": 2, "validation_spans": 1}}, "window to 4"),
        (None, {"split": {"method": "path", "paths": {"train": "a", "test": "b"}}}, "needs path, the folder"),
        ("x", {"split": {"method": "path", "paths": {"train": "{SPAN}", "test": "b"}}}, "write it into all or none"),
        ("x", {"split": {"method": "path", "paths": {"train": "a"}}}, r"needs paths\.train and paths\.test"),
    ],
    ids=str,
)
def test_configurations_that_make_no_sense(path: str | None, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DataConfig(path=path, **settings)


def test_newest_spans_are_test_and_those_before_validation(folder: Path) -> None:
    split = {"method": "span", "validation_spans": 1}
    found = read(folder, PATTERN, window=3, allow_gaps=True, split=split)
    assert [(each.span, each.split) for each in found] == [(1, "train"), (2, "validation"), (4, "test")]


def test_paths_of_splits_are_of_the_same_spans_and_share_no_file(tmp_path: Path) -> None:
    for name in ("1/train.csv", "1/test.csv", "2/train.csv", "2/test.csv", "3/train.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    paths = {"train": "{SPAN}/train*", "test": "{SPAN}/test*"}
    with pytest.raises(
        DataError, match=r"of different spans \(train 3; test 2\). Complete the newest, or set data.span"
    ):
        read(tmp_path, "", split={"method": "path", "paths": paths})
    found = read(tmp_path, "", span=2, split={"method": "path", "paths": paths})
    assert [(each.split, each.path) for each in found] == [
        ("train", f"{tmp_path}/2/train*"),
        ("test", f"{tmp_path}/2/test*"),
    ]
    paths["test"] = "{SPAN}/t*"
    with pytest.raises(DataError, match=r"data\.split\.paths: .*/2/train\.csv is in both train and test"):
        read(tmp_path, "", span=2, split={"method": "path", "paths": paths})


def test_a_run_notices_a_new_span_a_new_version_and_new_bytes(folder: Path) -> None:
    config = DataConfig(path=f"{folder}/{PATTERN}", window=2, allow_gaps=True)
    states = [external.state("ingest", config, {})]
    (folder / "1" / "v2" / "x.csv").write_text("not in the window")
    assert external.state("ingest", config, {}) == states[0]
    for name in ("2/v10/x.csv", "4/v3/x.csv", "6/v1/x.csv"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("new")
        states.append(external.state("ingest", config, {}))
    assert len({str(state) for state in states}) == 4


def test_spans_of_an_object_store(store: ObjectStore) -> None:
    for name in FILES:
        store.put(f"bucket/spans/{name}", name.encode())
    found = read("s3://bucket/spans", PATTERN, window=3, allow_gaps=True)
    assert [(each.span, each.version) for each in found] == [(1, 2), (2, 10), (4, 1)]
    config = DataConfig(path=f"s3://bucket/spans/{PATTERN}")
    before = external.state("ingest", config, {})
    store.put("bucket/spans/4/v2/x.csv", b"newer")
    assert read("s3://bucket/spans", PATTERN)[0].path == "s3://bucket/spans/4/v2/*.csv"
    assert external.state("ingest", config, {}) != before
