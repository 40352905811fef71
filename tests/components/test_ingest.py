from __future__ import annotations

import csv
import datetime
import gzip
import importlib
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import tensorflow as tf

from components import plugins
from components.artifacts import read_manifest
from components.config import DataConfig, SplitConfig
from components.errors import ConfigError, DataError
from components.examples import MISSING_INT, Feature, read_arrays, read_info
from components.ingest import ingest, read_source, sources
from components.ingest.columns import features_of, flat_values
from components.ingest.contract import check_source
from components.ingest.encoding import serialize

TAXI = Path(__file__).parents[2] / "configs" / "data" / "chicago_taxi.csv.gz"
BY_COLUMN = SplitConfig(method="column", column="part")


def _write_csv(folder: Path, rows: int = 200, part: str | None = None) -> Path:
    file = folder / "data.csv"
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["id", "x", "word", "label", *(["part"] if part else [])])
        for i in range(rows):
            parts = [part.split(",")[i % len(part.split(","))]] if part else []
            writer.writerow([i, i / 2, f"w{i % 5}", "yes" if i % 3 else "no", *parts])
    return file


def _config(path: Path, **fields: Any) -> DataConfig:
    return DataConfig(**{"source": "csv", "path": str(path), "task": "binary", **fields})


def _ids(examples: Path) -> dict[str, list[int]]:
    return {split: read_arrays(examples, split)["id"].tolist() for split in ("train", "validation", "test")}


def test_every_row_lands_once_in_source_order(tmp_path):
    result = ingest(examples=tmp_path / "e", config=_config(_write_csv(tmp_path), examples_per_shard=50))
    ids = _ids(tmp_path / "e")
    assert sorted(i for part in ids.values() for i in part) == list(range(200))
    assert all(part == sorted(part) for part in ids.values())
    assert result.num_examples == {split: len(part) for split, part in ids.items()}
    assert result.num_shards["train"] == -(-len(ids["train"]) // 50)
    assert result.features == {"id": "int", "x": "float", "word": "string", "label": "string"}
    assert read_info(tmp_path / "e").task == "binary"


def test_twice_the_same_bytes_and_another_seed_other_splits(tmp_path):
    file = _write_csv(tmp_path)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        ingest(examples=tmp_path / name, config=_config(file, seed=seed))
    digests = [read_manifest(tmp_path / name).digest for name in "abc"]
    assert digests[0] == digests[1] != digests[2]


def test_rows_keep_their_split_as_data_grows_and_columns_are_dropped(tmp_path):
    ingest(examples=tmp_path / "small", config=_config(_write_csv(tmp_path, 200)))
    ingest(examples=tmp_path / "large", config=_config(_write_csv(tmp_path, 400), drop=["word"]))
    small, large = _ids(tmp_path / "small"), _ids(tmp_path / "large")
    assert all(set(small[split]) < set(large[split]) for split in small)
    assert "word" not in read_info(tmp_path / "large").features


def test_nested_columns_are_refused_and_can_be_dropped(tmp_path):
    file = tmp_path / "data.parquet"
    numbers = list(range(200))
    table = {
        "id": numbers,
        "struct": [{"a": number} for number in numbers],
        "list": [[[number], None] for number in numbers],
        "label": ["yes" if number % 3 else "no" for number in numbers],
    }
    pa.parquet.write_table(pa.table(table), file)
    with pytest.raises(DataError, match=r"Column 'struct' has type .*, or leave it out with data\.drop"):
        ingest(examples=tmp_path / "e", config=_config(file, source="parquet", drop=["list"]))
    ingest(examples=tmp_path / "e", config=_config(file, source="parquet", drop=["struct", "list"]))
    assert sorted(id for ids in _ids(tmp_path / "e").values() for id in ids) == numbers


def test_lists_of_varying_length_are_read_padded(tmp_path):
    numbers = list(range(200))
    lists = [None if number % 5 == 0 else list(range(number % 5)) for number in numbers]
    table = {"id": numbers, "ids": lists, "label": [number % 2 for number in numbers]}
    pa.parquet.write_table(pa.table(table), tmp_path / "data.parquet")
    config = _config(tmp_path / "data.parquet", source="parquet")
    ingest(examples=tmp_path / "e", config=config)
    assert read_info(tmp_path / "e").features["ids"] == Feature("int", (None,))
    arrays = read_arrays(tmp_path / "e", "train")
    assert arrays["ids"].shape == (len(arrays["id"]), 4)
    for number, row in zip(arrays["id"], arrays["ids"].tolist(), strict=True):
        assert row == [*range(number % 5), *[MISSING_INT] * (4 - number % 5)]
    with pytest.raises(DataError, match=r"data\.label: 'ids' is a list; a label is one number or string"):
        ingest(examples=tmp_path / "f", config=config.model_copy(update={"label": "ids"}))


def test_limit_is_the_first_rows_of_each_split(tmp_path):
    file = _write_csv(tmp_path, 400)
    ingest(examples=tmp_path / "all", config=_config(file))
    ingest(examples=tmp_path / "few", config=_config(file, limit=7))
    assert _ids(tmp_path / "few") == {split: ids[:7] for split, ids in _ids(tmp_path / "all").items()}


def test_split_by_column(tmp_path):
    config = _config(_write_csv(tmp_path, part="train,train,eval,test"), split=BY_COLUMN, classes=["no", "yes"])
    ingest(examples=tmp_path / "e", config=config)
    ids = _ids(tmp_path / "e")
    assert {i % 4 for i in ids["train"]} == {0, 1}
    assert {i % 4 for i in ids["validation"]} == {2}
    info = read_info(tmp_path / "e")
    assert "part" not in info.features
    assert info.classes == ("no", "yes")


@pytest.mark.parametrize("examples_per_shard", [30, 20_000])
def test_validation_is_carved_where_the_column_names_none(tmp_path, examples_per_shard):
    config = _config(
        _write_csv(tmp_path, 400, part="train,test"), split=BY_COLUMN, examples_per_shard=examples_per_shard
    )
    ingest(examples=tmp_path / "e", config=config)
    ids = _ids(tmp_path / "e")
    assert sorted(ids["train"] + ids["validation"]) == list(range(0, 400, 2))
    assert ids["train"] == sorted(ids["train"])
    assert 5 <= len(ids["validation"]) <= 40
    assert sorted(path.name for path in (tmp_path / "e").iterdir()) == [
        "features.json",
        "leakage.json",
        "manifest.json",
        "test",
        "train",
        "validation",
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"label": "lable"}, "data.label: the data has no column 'lable'. Did you mean 'label'"),
        ({"drop": ["wrd"]}, "data.drop: the data has no column 'wrd'. Did you mean 'word'"),
        ({"drop": ["label"]}, "data.label: 'label' is dropped"),
        ({"drop": ["id", "x", "word"]}, "Nothing is left to learn from"),
        ({"split": SplitConfig(key=["idd"])}, "data.split.key: the data has no column 'idd'. Did you mean 'id'"),
        ({"split": BY_COLUMN}, "data.split.column: the data has no column 'part'"),
        ({"split": SplitConfig(method="column", column="word")}, "column 'word' holds 'w0', which names no split"),
        ({"split": SplitConfig(test=0.0)}, r"The test split is empty \(200 rows were read\): raise data.split.test"),
        ({"split": SplitConfig(key=["word"], test=0.01)}, "more distinct values of word"),
        ({"args": {"types": {"word": "INTEGER"}}}, "data.csv cannot be read"),
    ],
)
def test_columns_and_splits_are_checked_and_nothing_is_left(tmp_path, fields, message):
    file = _write_csv(tmp_path)
    with pytest.raises(DataError, match=message):
        ingest(examples=tmp_path / "e", config=_config(file, **fields))
    assert [path.name for path in tmp_path.iterdir()] == ["data.csv"]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("train,eval", "The test split is empty .*: mark rows 'test' in column 'part'"),
        ("test,eval", "The train split is empty .*: mark rows 'train' in column 'part'"),
    ],
)
def test_an_empty_split_of_a_column(tmp_path, part, message):
    with pytest.raises(DataError, match=message):
        ingest(examples=tmp_path / "e", config=_config(_write_csv(tmp_path, part=part), split=BY_COLUMN))


def test_a_file_with_nothing_but_a_header(tmp_path):
    with pytest.raises(DataError, match=r"data.csv holds no rows"):
        ingest(examples=tmp_path / "e", config=_config(_write_csv(tmp_path, rows=0)))


@pytest.mark.parametrize(
    ("args", "message"),
    [({"delimeter": ";"}, "data.args of source 'csv'.*Did you mean 'delimiter'"), ({"x": 1}, "unexpected keyword")],
)
def test_a_wrong_argument_of_a_source(tmp_path, args, message):
    with pytest.raises(ConfigError, match=message):
        ingest(examples=tmp_path / "e", config=_config(_write_csv(tmp_path), args=args))


OWN = """
import pyarrow as pa

def rows(*, path, count=30, step=1):
    for start in range(0, count, 10):
        yield pa.RecordBatch.from_pydict({{"n": list(range(start, start + 10, step)), "label": [0, 1] * (5 // step)}})

def changes(*, path):
    yield pa.RecordBatch.from_pydict({{"n": [1, 2], "label": [0, 1]}})
    yield pa.RecordBatch.from_pydict({{"n": [1.5, 2], "label": [0, 1]}})

def numbers(*, path):
    yield 1

def fails(*, path):
    yield from rows(path=path)
    raise RuntimeError("the disk fell off")
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_source.py").write_text(OWN.replace("{{", "{").replace("}}", "}"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield
    importlib.sys.modules.pop("own_source", None)


@pytest.mark.usefixtures("own")
def test_a_source_of_ones_own(tmp_path):
    config = DataConfig(source="own_source:rows", args={"count": 300}, task="binary")
    result = ingest(examples=tmp_path / "e", config=config)
    assert sum(result.num_examples.values()) == 300


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("own_source:changes", DataError, "Column 'n' changes from int to float at row 2"),
        ("own_source:numbers", DataError, "it yielded a int; yield a pyarrow RecordBatch or Table, a DataFrame"),
        ("own_source:rwos", ConfigError, "has no 'rwos'. Did you mean 'rows'"),
        (
            "own_source:fails",
            DataError,
            r"data\.source: 'own_source:fails' failed: RuntimeError: the disk fell off \(.*own_source\.py, line 17\)",
        ),
    ],
)
def test_a_source_that_fails_leaves_nothing(tmp_path, source, error, message):
    with pytest.raises(error, match=message):
        ingest(examples=tmp_path / "e", config=DataConfig(source=source, task="binary"))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".e", "e"))]


@pytest.mark.usefixtures("own")
def test_the_error_of_a_source_is_kept_as_the_cause(tmp_path):
    with pytest.raises(DataError) as caught:
        ingest(examples=tmp_path / "e", config=DataConfig(source="own_source:fails", task="binary"))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_error_of_a_built_in_source_stays_a_defect_of_ours(tmp_path, monkeypatch):
    def fails(*, path):
        yield from ()
        raise RuntimeError("not foreseen")

    monkeypatch.setattr(sources, "csv", fails)
    with pytest.raises(RuntimeError, match="not foreseen"):
        ingest(examples=tmp_path / "e", config=_config(_write_csv(tmp_path)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import os\n\ndef rows(:\n", r"SyntaxError: .* \(.*broken_source\.py, line 3\)"),
        ("\nfrom os import no_such\n", r"ImportError: cannot import name 'no_such'.*broken_source\.py, line 2\)"),
        ("\n\nimport no_such_module\n", r"ModuleNotFoundError: .*'no_such_module' \(.*broken_source\.py, line 3\)"),
        ("import json\njson.loads('{')\n", r"JSONDecodeError: .*broken_source\.py, line 2\)"),
        ("raise SystemExit(2)\n", r"SystemExit: 2 \(.*broken_source\.py, line 1\)"),
    ],
)
def test_a_module_of_ones_own_that_cannot_be_imported_is_named_with_the_line(tmp_path, monkeypatch, text, message):
    (tmp_path / "broken_source.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    with pytest.raises(
        ConfigError, match=f"data.source: module 'broken_source' cannot be imported: {message}"
    ) as caught:
        plugins.resolve("broken_source:rows", plugins.SOURCES, "data.source")
    assert caught.value.__cause__ is not None


@pytest.mark.usefixtures("own")
def test_check_source_accepts_good_ones_and_refuses_others(tmp_path):
    own_source = importlib.import_module("own_source")
    check_source(own_source.rows, count=20)
    for source in (own_source.changes, own_source.numbers):
        with pytest.raises(AssertionError):
            check_source(source)


TYPES: dict[str, tuple[pa.Array, list[Any]]] = {
    "bool": (pa.array([True, None, False]), [1, None, 0]),
    "uint8": (pa.array([1, 2, 3], pa.uint8()), [1, 2, 3]),
    "decimal": (pa.array([Decimal("1.50"), None, Decimal("2.25")]), [1.5, None, 2.25]),
    "date": (pa.array([datetime.date(2020, 1, 2)] * 3), [b"2020-01-02"] * 3),
    "timestamp": (
        pa.array([datetime.datetime(2020, 1, 2, 3, 4, 5)] * 3, pa.timestamp("s")),
        [b"2020-01-02T03:04:05"] * 3,
    ),
    "dictionary": (pa.array(["a", None, "b"]).dictionary_encode(), [b"a", None, b"b"]),
    "null": (pa.nulls(3), [None] * 3),
    "bytes": (pa.array([b"\xff", b"", None]), [b"\xff", None, None]),
    "list": (pa.array([[1, None], None, [], [2]]), [[1, MISSING_INT], None, None, [2]]),
    "list of uint8": (pa.array([[1, 255]], pa.list_(pa.uint8())), [[1, 255]]),
    "list of booleans": (pa.array([[True, None, False]]), [[1, MISSING_INT, 0]]),
    "list of decimals": (pa.array([[Decimal("1.50")], None]), [[1.5], None]),
    "list of dates": (pa.array([[datetime.date(2020, 1, 2), None]]), [[b"2020-01-02", b""]]),
    "large list of a dictionary": (
        pa.array([["a", "b"], ["a"]], pa.large_list(pa.string())).cast(
            pa.large_list(pa.dictionary(pa.int32(), pa.string()))
        ),
        [[b"a", b"b"], [b"a"]],
    ),
    "part of a list": (pa.array([[1], [2, 3], None, [4]])[1:3], [[2, 3], None]),
}


@pytest.mark.parametrize("kind", TYPES)
def test_arrow_types(kind):
    array, expected = TYPES[kind]
    feature = features_of(pa.schema([("x", array.type)]))["x"]
    batch = pa.RecordBatch.from_arrays([array], ["x"])
    examples = [tf.train.Example.FromString(record) for record in serialize(batch, {"x": feature})]
    assert [_values(example) for example in examples] == [
        [] if value is None else value if isinstance(value, list) else [value] for value in expected
    ]


def _values(example: tf.train.Example) -> list[Any]:
    feature = example.features.feature.get("x", tf.train.Feature())
    return list(getattr(feature, feature.WhichOneof("kind")).value) if feature.WhichOneof("kind") else []


@pytest.mark.parametrize(
    "array", [pa.array([[[1, 2]]]), pa.array([[{"a": 1}]]), pa.array([{"a": 1}]), pa.array([datetime.timedelta(1)])]
)
def test_types_that_no_feature_can_hold(array):
    with pytest.raises(DataError, match=r"Column 'x' has type .*, which no feature can hold"):
        features_of(pa.schema([("x", array.type)]))


def test_numbers_beyond_64_bits_and_missing_images():
    for array, message in (
        (pa.array([2**64 - 1], pa.uint64()), "Column 'x': .* Numbers must fit 64 bits: give larger ones as floats"),
        (pa.array([[2**64 - 1]], pa.list_(pa.uint64())), "Column 'x': .* Numbers must fit 64 bits"),
        (
            pa.array([[1, 2], None], pa.list_(pa.uint8(), 2)).cast(pa.fixed_shape_tensor(pa.uint8(), (2,))),
            "no tensor in row 1",
        ),
    ):
        feature = features_of(pa.schema([("x", array.type)]))["x"]
        with pytest.raises(DataError, match=message):
            flat_values("x", array, feature)


def test_the_taxi_trips(tmp_path):
    config = DataConfig(source="csv", path=str(TAXI), label="big_tipper", task="binary", drop=["tips"])
    result = ingest(examples=tmp_path / "e", config=config)
    assert sum(result.num_examples.values()) == 15_002
    arrays = [read_arrays(tmp_path / "e", split) for split in result.num_examples]
    with gzip.open(TAXI, "rt") as stream:
        rows = list(csv.DictReader(stream))
    companies = [value for part in arrays for value in part["company"]]
    assert sum(not company for company in companies) == sum(not row["company"] for row in rows) == 5140
    assert sum((part["fare"] == 0).sum() for part in arrays) == 27
    assert sum(part["fare"].astype(np.float64).sum() for part in arrays) == pytest.approx(
        sum(float(row["fare"]) for row in rows), rel=1e-6
    )


def test_read_source_gives_the_batches_themselves(tmp_path):
    batches = list(read_source(_config(_write_csv(tmp_path))))
    assert sum(batch.num_rows for batch in batches) == 200
