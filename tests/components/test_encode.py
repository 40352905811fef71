"""Shares of `ingest`, put together, are what `ingest` makes by itself."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from components import artifacts
from components.config import DataConfig
from components.encode import encode
from components.errors import ArtifactError, DataError
from components.ingest import ingest
from components.ingest.sources import tables


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ROWS_PER_BATCH", 7)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """100 rows in 15 batches."""
    marks = ("train", "train", "train", "test")
    lines = [f"{row},word {row % 13},{marks[row % 4]},{'yes' if row % 3 else 'no'}" for row in range(100)]
    file = tmp_path / "data.csv"
    file.write_text("\n".join(["number,text,part,label", *lines]) + "\n")
    return file


def config_of(data: Path, **settings: Any) -> DataConfig:
    return DataConfig.model_validate({"path": str(data), "task": "binary", "examples_per_shard": 10, **settings})


def shares_of(folder: Path, config: DataConfig, num_shares: int) -> list[Path]:
    paths = [folder / f"share{number}" for number in range(num_shares)]
    for number, path in enumerate(paths):
        encode(encoded=path, number=str(number), num_shares=str(num_shares), config=config)
    return paths


@pytest.mark.parametrize(
    ("num_shares", "settings"),
    [
        (1, {"split": {"validation": 0.2, "test": 0.2}}),
        (3, {"split": {"validation": 0.2, "test": 0.2}}),
        (3, {"split": {"validation": 0.2, "test": 0.2}, "limit": 12}),
        (2, {"split": {"method": "column", "column": "part", "validation": 0.3}}),
        (3, {"split": {"method": "column", "column": "part", "validation": 0.3}, "limit": 15, "drop": ["text"]}),
        (17, {"split": {"validation": 0.2, "test": 0.2}}),  # more than there are batches
        (3, {"split": {"method": "fold", "num_folds": 3, "fold": 1}, "leakage": {"key": ["text"]}}),
        (3, {"split": {"validation": 0.2, "test": 0.2}, "leakage": {"key": ["text"]}, "limit": 12}),
        (3, {"split": {"method": "time", "column": "number", "validation": 0.2}, "drop": ["number"]}),
        (2, {"split": {"method": "column", "column": "part", "key": ["text"]}, "leakage": {"key": ["text"]}}),
    ],
)
def test_all_shares_together_are_the_examples(
    data: Path, tmp_path: Path, settings: dict[str, Any], num_shares: int
) -> None:
    config = config_of(data, **settings)
    whole = ingest(examples=tmp_path / "whole", config=config)
    shares = shares_of(tmp_path, config, num_shares)
    assert ingest(examples=tmp_path / "together", config=config, encoded=shares[::-1]) == whole
    one, other = (artifacts.read_manifest(tmp_path / name) for name in ("whole", "together"))
    assert dataclasses.asdict(one) == dataclasses.asdict(other)
    artifacts.check_files(tmp_path / "together", other)


@pytest.mark.parametrize("method", ["span", "path"])
def test_shares_of_several_files_are_alike(tmp_path: Path, method: str) -> None:
    for span in range(4):
        lines = [f"{row},word {row % 13},{'yes' if row % 3 else 'no'}" for row in range(span * 30, span * 30 + 40)]
        (tmp_path / f"{span}.csv").write_text("\n".join(["number,text,label", *lines]) + "\n")
    settings: dict[str, Any] = {
        "span": {"path": f"{tmp_path}/{{SPAN}}.csv", "window": 4, "split": {"method": "span", "test_spans": 2}},
        "path": {"path": str(tmp_path), "split": {"method": "path", "paths": {"train": "[012].csv", "test": "3.csv"}}},
    }
    config = config_of(tmp_path, **settings[method])
    whole = ingest(examples=tmp_path / "whole", config=config)
    assert whole.inputs and whole.leakage
    shares = shares_of(tmp_path, config, 3)
    assert ingest(examples=tmp_path / "together", config=config, encoded=shares) == whole
    assert len({artifacts.read_manifest(tmp_path / name).digest for name in ("whole", "together")}) == 1


def test_each_share_encodes_its_batches_alone(data: Path, tmp_path: Path) -> None:
    config = config_of(data, split={"validation": 0.2, "test": 0.2})
    shares = [encode(encoded=tmp_path / f"{n}", number=f"{n}", num_shares="2", config=config) for n in range(2)]
    assert shares[0].batches == shares[1].batches
    assert [sum(counts.values()) for counts in shares[0].batches] == [7] * 14 + [2]
    infos = [artifacts.read_manifest(tmp_path / f"{n}").files for n in range(2)]
    sizes = [sum(file["size_bytes"] for name, file in info.items() if "part-" in name) for info in infos]
    assert all(0.4 < size / sum(sizes) < 0.6 for size in sizes)


def test_shares_that_are_not_all_of_this_data_are_refused(data: Path, tmp_path: Path) -> None:
    config = config_of(data)
    shares = shares_of(tmp_path, config, 3)
    other = config_of(data, seed=1)
    for given, settings in [(shares[:2], config), ([*shares, shares[0]], config), (shares, other)]:
        with pytest.raises(ArtifactError, match=r"share0, .* are not all shares of this data. Run them again"):
            ingest(examples=tmp_path / "examples", config=settings, encoded=given)
    with pytest.raises(ArtifactError, match="made by step 'ingest', expected one of 'encode'"):
        ingest(examples=tmp_path / "examples", config=config, encoded=[_ingested(tmp_path / "whole", config)])
    assert not (tmp_path / "examples").exists()


def _ingested(path: Path, config: DataConfig) -> Path:
    ingest(examples=path, config=config)
    return path


def test_data_that_changes_between_the_shares_is_refused(data: Path, tmp_path: Path) -> None:
    config = config_of(data)
    encode(encoded=tmp_path / "first", number="0", num_shares="2", config=config)
    data.write_text(data.read_text().replace("word 5", "word 6"))
    encode(encoded=tmp_path / "second", number="1", num_shares="2", config=config)
    with pytest.raises(DataError, match=r"the data changed while it was encoded\. Run again when it is at rest"):
        ingest(examples=tmp_path / "examples", config=config, encoded=[tmp_path / "first", tmp_path / "second"])


def test_what_ingest_refuses_is_refused_of_shares_too(data: Path, tmp_path: Path) -> None:
    config = config_of(data, label="lable")
    with pytest.raises(DataError, match="has no column 'lable'"):
        shares_of(tmp_path, config, 2)
    data.write_text("number,label\n")
    with pytest.raises(DataError, match="holds no rows"):
        ingest(examples=tmp_path / "e", config=config_of(data), encoded=shares_of(tmp_path, config_of(data), 2))


def test_what_was_left_out_is_known_whether_in_shares_or_not(tmp_path: Path) -> None:
    for number in range(60):
        file = tmp_path / "images" / "ab"[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (2, 2), number).save(file)
    (tmp_path / "images" / "a" / "bad.png").write_bytes(b"no image")
    settings = {"source": "image_folder", "args": {"max_bad_files": 1}, "split": {"validation": 0.2, "test": 0.2}}
    config = config_of(tmp_path / "images", **settings)
    whole = ingest(examples=tmp_path / "whole", config=config)
    assert whole.warnings == ["1 of 61 files left out: a/bad.png is truncated or no JPEG or PNG"]
    shares = shares_of(tmp_path, config, 2)
    assert ingest(examples=tmp_path / "together", config=config, encoded=shares) == whole
