"""Spark makes the artifacts that the local engine makes, to the byte."""

from __future__ import annotations

import dataclasses
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import tensorflow as tf

from components import artifacts, object_store
from components.config import DataConfig, SparkConfig, ValidateConfig
from components.errors import ConfigError, DataError
from components.examples import read_arrays
from components.external import data_files
from components.ingest import ingest
from components.ingest.on_spark import _files, _local
from components.spark import connected
from components.spark.session import _told_in
from components.statistics import load_statistics
from components.validate import validate

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.seaweedfs import ObjectStore

pyspark = pytest.importorskip("pyspark")
needs_java = pytest.mark.skipif(
    shutil.which("java") is None, reason="there is no Java: apt-get install openjdk-17-jre-headless"
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[SparkSession]:
    """A master and two workers in processes of their own; what runs inside the block uses them."""
    quick = "-XX:TieredStopAtLevel=1"  # Java compiles less, for it does not live long
    conf = {
        "spark.task.maxFailures": 2,
        "spark.driver.extraJavaOptions": quick,
        "spark.executor.extraJavaOptions": quick,
        "spark.sql.codegen.wholeStage": "false",
    }
    with connected(SparkConfig(master="local-cluster[2,1,1024]", conf=conf)) as session:
        work = Path(pyspark.__file__).parent / "work" / session.sparkContext.applicationId
        yield session
    shutil.rmtree(work, ignore_errors=True)


def config_of(path: Path | str | None, source: str = "csv", **settings: Any) -> DataConfig:
    split = {"validation": 0.2, "test": 0.2}
    tree = {"source": source, "path": path and str(path), "task": "binary", "examples_per_shard": 16, "split": split}
    return DataConfig.model_validate({**tree, **settings})


def check_same(tmp_path: Path, config: DataConfig) -> None:
    """Both engines make the same artifact: results, manifest and every byte."""
    local = ingest(examples=tmp_path / "local", config=config)
    on_spark = ingest(examples=tmp_path / "spark", config=config.model_copy(update={"engine": "spark"}))
    assert on_spark == local
    one, other = (artifacts.read_manifest(tmp_path / name) for name in ("local", "spark"))
    assert dataclasses.asdict(one) == dataclasses.asdict(other)
    artifacts.check_files(tmp_path / "spark", other)
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith(".")} == set()


def write_csv(folder: Path, **files: str) -> Path:
    folder.mkdir()
    for name, text in files.items():
        (folder / f"{name}.csv").write_text(text)
    return folder


def rows_of(start: int, stop: int, *, price: str = "{}") -> str:
    return "".join(f"{n},{price.format(n)},word {n % 7},{'yes' if n % 3 else 'no'}\n" for n in range(start, stop))


HEADER = "id,price,text,label\n"


@needs_java
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"limit": 20, "seed": 7},
        {"split": {"key": ["code"], "validation": 0.2, "test": 0.3}, "args": {"types": {"price": "VARCHAR"}}},
    ],
    ids=["plain", "limit", "key_and_types"],
)
def test_files_of_differing_types_and_columns_give_the_same_examples(tmp_path: Path, settings: dict[str, Any]) -> None:
    data = write_csv(
        tmp_path / "data",
        a=HEADER + rows_of(0, 60),
        b=HEADER + rows_of(60, 90, price="{}.5"),
        c="label,code,id\n" + "".join(f"no,00{n},{n}\n" for n in range(90, 120)),
        d=HEADER + rows_of(120, 150, price=""),
        e="id,code,label\n" + "".join(f"{n},x,yes\n" for n in range(150, 160)),
    )
    check_same(tmp_path, config_of(data, **settings))


@needs_java
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    "settings",
    [
        {"path": "data/{SPAN}/*.csv", "leakage": {"key": ["text"]}, "drop": ["id", "price"]},
        {"path": "data/{SPAN}/*.csv", "leakage": {"key": ["text"]}, "drop": ["id", "price"], "limit": 15},
        {"path": "data/{SPAN}/*.csv", "window": 2, "split": {"method": "span"}},
        {"path": "data", "split": {"method": "path", "paths": {"train": "2/*.csv", "test": "1/*.csv"}}},
        {"path": "data/{SPAN}/*.csv", "split": {"method": "time", "column": "id"}},
        {"path": "data/2", "split": {"method": "time", "column": "id", "validation_from": 120, "test_from": 140}},
        {"path": "data/2", "split": {"method": "fold", "num_folds": 3, "fold": 2}},
    ],
    ids=["span", "limit", "window", "path", "time by shares", "time", "fold"],
)
def test_spans_splits_and_what_they_share_are_the_same(tmp_path: Path, settings: dict[str, Any]) -> None:
    (tmp_path / "data").mkdir()
    write_csv(tmp_path / "data" / "1", x=HEADER + rows_of(0, 60))
    write_csv(tmp_path / "data" / "2", x=HEADER + rows_of(60, 110), y=HEADER + rows_of(110, 160, price="{}.5"))
    check_same(tmp_path, config_of(**{**settings, "path": tmp_path / settings["path"]}))


@needs_java
@pytest.mark.usefixtures("cluster")
def test_one_file_is_divided_by_its_batches(tmp_path: Path) -> None:
    data = write_csv(tmp_path / "data", a=HEADER + rows_of(0, 20_000))
    check_same(tmp_path, config_of(data, examples_per_shard=5000))


@needs_java
@pytest.mark.usefixtures("cluster")
def test_statistics_are_the_same_to_the_bit(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = "".join(f"{n},{rng.normal():.6f},word {rng.integers(40)},{n % 2}\n" for n in range(600))
    data = write_csv(tmp_path / "data", a=HEADER + rows)
    ingest(examples=tmp_path / "examples", config=config_of(data, examples_per_shard=50))
    config = ValidateConfig(text_features=["text"], slice_features=["label"])
    results = {
        engine: validate(
            examples=tmp_path / "examples",
            statistics=tmp_path / engine,
            config=config.model_copy(update={"engine": engine}),
        )
        for engine in ("local", "spark")
    }
    assert results["local"] == results["spark"]
    one, other = (artifacts.read_manifest(tmp_path / name) for name in results)
    assert dataclasses.asdict(one) == dataclasses.asdict(other)
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith(".")} == set()
    price = load_statistics(tmp_path / "spark")["train"]["price"]
    values = read_arrays(tmp_path / "examples", "train")["price"].astype(np.float64)
    assert (price.count, price.mean, price.std) == (
        len(values),
        pytest.approx(values.mean()),
        pytest.approx(values.std()),
    )


@needs_java
@pytest.mark.usefixtures("cluster")
def test_a_split_column_and_its_carved_validation_rows_are_the_same(tmp_path: Path) -> None:
    files = {
        name: "id,part,label\n" + "".join(f"{n},{'test' if n % 4 else 'train'},{n % 2}\n" for n in range(*ends))
        for name, ends in {"a": (0, 100), "b": (100, 300)}.items()
    }
    split = {"method": "column", "column": "part", "validation": 0.3}
    check_same(tmp_path, config_of(write_csv(tmp_path / "data", **files), split=split))


@needs_java
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("source", ["jsonl", "parquet", "tfrecord"])
def test_other_files_are_read_with_the_types_of_all(tmp_path: Path, source: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for number, fraction in enumerate((0, 0.5, 0)):
        rows = [{"id": n, "x": n + fraction or n, "label": n % 2} for n in range(number * 50, number * 50 + 50)]
        if source == "jsonl":
            lines = [f'{{"id": {r["id"]}, "x": {r["x"]}, "label": {r["label"]}}}' for r in rows]
            (folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
        elif source == "parquet":
            pa.parquet.write_table(pa.Table.from_pylist(rows), folder / f"{number}.parquet")
        else:
            with tf.io.TFRecordWriter(str(folder / f"{number}.tfrecord")) as writer:
                for row in rows:
                    writer.write(example(id=[row["id"]], label=[row["label"]], many=[1] * (1 + number)))
    check_same(tmp_path, config_of(folder, source))


def example(**values: list[int]) -> bytes:
    feature = {name: tf.train.Feature(int64_list=tf.train.Int64List(value=each)) for name, each in values.items()}
    return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()


OWN = """
import os, pathlib
import pyarrow as pa
from components.errors import DataError

def batch(start, stop):
    numbers = list(range(start, stop))
    return pa.RecordBatch.from_pydict({"id": numbers, "label": [n % 2 for n in numbers]})

def whole(*, path):
    yield batch(0, 60)
    yield batch(60, 100)

def by_files(*, path, files=None):
    for file in files or sorted(map(str, pathlib.Path(path).iterdir())):
        start = int(pathlib.Path(file).read_text())
        yield batch(start, start + 50)

def dies_once(*, path, kills):
    mark = pathlib.Path(path) / "died"
    yield batch(0, 60)
    if kills and not mark.exists():
        mark.touch()
        os._exit(1)
    yield batch(60, 100)

def fails_once(*, path):
    mark = pathlib.Path(path) / "failed"
    yield batch(0, 60)
    if not mark.exists():
        mark.touch()
        raise ConnectionError("the table is away")
    yield batch(60, 100)

def fails(*, path):
    yield batch(0, 60)
    raise ValueError("no such table")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module of the user's, from which the run is started."""
    (tmp_path / "own_for_spark.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "data"
    data.mkdir()
    return data


@needs_java
@pytest.mark.usefixtures("cluster")
def test_a_source_of_the_users_is_read_by_one_task_or_by_its_files(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_same(tmp_path, config_of(None, "own_for_spark:whole"))
    assert "source own_for_spark:whole is read by one task" in capsys.readouterr().out
    for start in (0, 50, 100):
        (own / f"{start:03d}.txt").write_text(str(start))
    for name in ("local", "spark"):
        shutil.rmtree(tmp_path / name)
    check_same(tmp_path, config_of(own, "own_for_spark:by_files"))
    assert "encoding in 3 tasks of Spark" in capsys.readouterr().out


@needs_java
@pytest.mark.usefixtures("cluster")
def test_a_task_that_dies_is_tried_again_and_leaves_nothing_behind(own: Path, tmp_path: Path) -> None:
    config = config_of(own, "own_for_spark:dies_once", args={"kills": False})
    local = ingest(examples=tmp_path / "local", config=config)
    dying = config.model_copy(update={"engine": "spark", "args": {"kills": True}})
    assert ingest(examples=tmp_path / "spark", config=dying) == local
    assert (own / "died").exists()
    digests = {artifacts.read_manifest(tmp_path / name).digest for name in ("local", "spark")}
    assert len(digests) == 1
    failing = config_of(own, "own_for_spark:fails_once", engine="spark")
    assert ingest(examples=tmp_path / "again", config=failing) == local
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith(".")} == set()


@needs_java
@pytest.mark.usefixtures("cluster")
def test_errors_of_the_data_are_those_of_the_local_engine(own: Path, tmp_path: Path) -> None:
    def message(config: DataConfig) -> str:
        with pytest.raises((ConfigError, DataError)) as caught:
            ingest(examples=tmp_path / "examples", config=config)
        assert not (tmp_path / "examples").exists()
        return str(caught.value)

    (own / "a.csv").write_text(HEADER + rows_of(0, 10))
    (own / "b.csv").write_text(HEADER + "1,2\n")
    for config, text in [
        (config_of(None, "own_for_spark:fails"), "failed: ValueError: no such table"),
        (config_of(own), "b.csv, line 2 has 2 fields, the first line has 4"),
        (config_of(own, args={"delimeter": ";"}), "Did you mean 'delimiter'?"),
        (config_of(own / "a.csv", label="labell"), "Did you mean 'label'?"),
    ]:
        assert text in message(config)
        assert text in message(config.model_copy(update={"engine": "spark"}))


def test_what_keeps_spark_from_starting_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def message(config: SparkConfig) -> str:
        with pytest.raises(ConfigError) as caught, connected(config):
            pass
        return str(caught.value)

    monkeypatch.setattr("pyspark.sql.SparkSession.getActiveSession", lambda: None)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    if shutil.which("java"):
        refused = message(SparkConfig(master=f"spark://127.0.0.1:{port}"))
        assert "data.spark.master: nothing answers at spark://127.0.0.1" in refused and "Connection refused" in refused
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert f"JAVA_HOME, {tmp_path}, has none. Install it" in message(SparkConfig())
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "there is none on the PATH. Install it (Debian: apt-get install openjdk-17-jre-headless)" in message(
        SparkConfig()
    )


def test_what_java_says_of_a_wrong_master_is_told(tmp_path: Path) -> None:
    log = tmp_path / "spark.log"
    log.write_text(
        'WARN x\nException in thread "main" org.apache.spark.SparkException: Master must be local.\n\tat y\n'
    )
    assert _told_in(log) == "Master must be local"
    log.write_text("WARNING: Using incubator modules\n")
    assert _told_in(log) is None


def test_objects_of_a_store_are_read_apart_in_the_order_of_their_copies(store: ObjectStore, tmp_path: Path) -> None:
    texts = {"a-b/1.csv": "first", "a/x[1].csv": "second", "a/x1.csv": "third"}
    for name, text in texts.items():
        with store.filesystem().open_output_stream(f"bucket/raw/{name}") as stream:
            stream.write(text.encode())
    with object_store.local_data(config_of("s3://bucket/raw"), tmp_path / "whole") as whole:
        expected = [file.read_text() for file in data_files(str(whole.path))]
    uris = _files(config_of("s3://bucket/raw"), takes_files=False)
    assert len(uris) == 3
    with _local(config_of("s3://bucket/raw"), uris, tmp_path / "apart") as files:
        assert [file.read_text() for file in files] == expected
    with _local(config_of("s3://bucket/raw"), uris[1:2], tmp_path / "one") as files:
        assert [file.read_text() for file in files] == expected[1:2]


def test_settings_of_spark_need_the_engine() -> None:
    with pytest.raises(ValueError, match="nothing reads spark with engine: local"):
        config_of(None, spark={"master": "local[2]"})
