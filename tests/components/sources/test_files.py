from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import tensorflow as tf
from PIL import Image

from components.errors import DataError
from components.ingest import sources

ROWS = 40_000  # several batches


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of each kind that is read in more than one batch."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "x.csv").write_text("a\n" + "1\n" * ROWS)
    (folder / "x.jsonl").write_text('{"a": 1}\n' * ROWS)
    (folder / "x.txt").write_text("word\n" * ROWS)
    pa.parquet.write_table(pa.table({"a": range(ROWS)}), folder / "x.parquet")
    np.save(folder / "x.npy", np.arange(ROWS))
    with tf.io.TFRecordWriter(str(folder / "x.tfrecord")) as writer:
        feature = tf.train.Feature(int64_list=tf.train.Int64List(value=[1]))
        record = tf.train.Example(features=tf.train.Features(feature={"a": feature})).SerializeToString()
        for _ in range(ROWS // 2):
            writer.write(record)
    (folder / "images" / "a").mkdir(parents=True)
    for number in range(300):
        Image.new("L", (1, 1)).save(folder / "images" / "a" / f"{number:03}.png")
    return folder


KINDS = {
    "x.csv": (sources.csv, {}),
    "x.jsonl": (sources.jsonl, {}),
    "x.parquet": (sources.parquet, {}),
    "x.tfrecord": (sources.tfrecord, {}),
    "x.npy": (sources.numpy_arrays, {}),
    "x.txt": (sources.text, {"unit": "line"}),
    "images": (sources.image_folder, {}),
    "sql": (sources.sql, {"query": "FROM data"}),
    "latin": (sources.csv, {"encoding": "latin-1"}),
}


@pytest.mark.parametrize("change", ["vanished", "changed"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_changes_while_it_is_read_is_named(data: Path, kind: str, change: str) -> None:
    source, args = KINDS[kind]
    name = "x.csv" if kind in ("sql", "latin") else kind
    victim = data / ("images/a/299.png" if kind == "images" else name)
    content = victim.read_bytes()
    batches: Iterator[Any] = source(path=str(data / name), **args)
    try:
        next(batches)
        if change == "vanished":
            victim.unlink()
        else:
            os.utime(victim, ns=(1, 1))
        with pytest.raises(DataError, match=rf"data.path: {victim} {change} while it was read. Run again"):
            list(batches)
    finally:
        batches.close()
        victim.write_bytes(content)


@pytest.mark.parametrize("kind", ["parquet", "npy", "tfrecord"])
def test_rows_of_a_megabyte_come_in_small_batches(tmp_path: Path, kind: str) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (100, 1 << 20), np.uint8)
    if kind == "parquet":
        pa.parquet.write_table(pa.table({"a": [row.tobytes() for row in rows]}), tmp_path / "x.parquet")
    elif kind == "npy":
        np.save(tmp_path / "x.npy", rows)
    else:
        with tf.io.TFRecordWriter(str(tmp_path / "x.tfrecord")) as writer:
            for row in rows:
                feature = tf.train.Feature(bytes_list=tf.train.BytesList(value=[row.tobytes()]))
                writer.write(tf.train.Example(features=tf.train.Features(feature={"a": feature})).SerializeToString())
    source = {"parquet": sources.parquet, "npy": sources.numpy_arrays, "tfrecord": sources.tfrecord}[kind]
    batches = list(source(path=str(tmp_path / f"x.{kind}")))
    assert sum(batch.num_rows for batch in batches) == 100
    assert max(batch.num_rows for batch in batches) <= 64
