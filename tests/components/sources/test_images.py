from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from components import progress
from components.errors import ConfigError, DataError
from components.ingest import sources
from components.ingest.columns import features_of
from components.ingest.sources import images
from tests.components.sources import read


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
    table = read(sources.image_folder, tmp_path)
    assert table["label"].to_pylist() == ["cat", "cat", "dog", "dog"]
    assert features_of(table.schema)["image"].shape == (4, 6, 3)
    images = table["image"].combine_chunks().to_numpy_ndarray()
    assert (images[:2] == 10).all()
    assert (abs(images[2:].astype(int) - 200) <= 2).all()


@pytest.mark.parametrize(("args", "shape"), [({"size": [2, 3]}, (2, 3, 3)), ({"channels": 1}, (4, 6, 1))])
def test_image_folder_options(tmp_path, args, shape):
    _write_images(tmp_path)
    assert features_of(read(sources.image_folder, tmp_path, **args).schema)["image"].shape == shape


def test_image_folder_with_splits(tmp_path):
    for top in ("train", "val"):
        _write_images(tmp_path, top=top)
    table = read(sources.image_folder, tmp_path)
    assert table["split"].to_pylist() == ["train"] * 4 + ["val"] * 4
    assert set(table["label"].to_pylist()) == {"cat", "dog"}


def test_images_of_two_sizes_need_one(tmp_path):
    _write_images(tmp_path, sizes=((4, 6), (5, 6)))
    with pytest.raises(DataError, match=r"1.png is 5 x 6 pixels, .*0.png is 4 x 6. Set data.args.size"):
        read(sources.image_folder, tmp_path)
    assert read(sources.image_folder, tmp_path, size=[4, 6]).num_rows == 4


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("content", [None, b"hello", b""])
def test_a_broken_image_is_named(tmp_path, number, content):
    file = _write_images(tmp_path, sizes=((64, 64),))[number]
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2] if content is None else content)
    with pytest.raises(DataError, match=f"{file.name} is truncated or no JPEG or PNG"):
        read(sources.image_folder, tmp_path)


def test_image_folder_refuses(tmp_path):
    with pytest.raises(DataError, match="has no images"):
        read(sources.image_folder, tmp_path)
    _write_images(tmp_path)
    (tmp_path / "cat" / "notes.txt").write_text("x")
    with pytest.raises(DataError, match=r"notes.txt is not named as a JPEG or PNG"):
        read(sources.image_folder, tmp_path)
    with pytest.raises(ConfigError, match="max_bad_files: 0 or more"):
        read(sources.image_folder, tmp_path, max_bad_files=-1)
    with pytest.raises(ConfigError, match="channels: 1"):
        read(sources.image_folder, tmp_path, channels=2)
    with pytest.raises(ConfigError, match=r"size: .height, width."):
        read(sources.image_folder, tmp_path, size=[3])
    with pytest.raises(DataError, match="is not a folder"):
        read(sources.image_folder, tmp_path / "cat" / "notes.txt")


def test_broken_files_up_to_a_limit_are_left_out_and_told_of(tmp_path):
    files = _write_images(tmp_path, sizes=((8, 8),) * 4)
    files[1].write_bytes(b"hello")
    files[4].write_bytes(files[4].read_bytes()[:-30])
    (tmp_path / "dog" / "notes.txt").write_text("x")
    with progress.warnings_kept() as warnings:
        table = read(sources.image_folder, tmp_path, max_bad_files=3)
    assert table["label"].to_pylist() == ["cat"] * 3 + ["dog"] * 3
    (warning,) = warnings
    assert warning.startswith("3 of 9 files left out: ")
    assert all(
        str(file.relative_to(tmp_path)) in warning for file in (files[1], files[4], tmp_path / "dog" / "notes.txt")
    )
    with pytest.raises(DataError, match=r"3 files are no whole images, and 2 may be: .*raise data.args.max_bad_files"):
        read(sources.image_folder, tmp_path, max_bad_files=2)


def test_what_was_left_out_is_told_of_where_the_rest_is_not_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "_ROWS_PER_BATCH", 1)
    files = _write_images(tmp_path, sizes=((8, 8),) * 4)
    files[0].write_bytes(b"hello")
    with progress.warnings_kept() as warnings:
        batches = sources.image_folder(path=str(tmp_path), max_bad_files=1)
        next(batches)
        batches.close()
    assert warnings == ["1 of 8 files left out: cat/0.png is truncated or no JPEG or PNG"]


@pytest.mark.parametrize("ending", ["jpg", "png"])
@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.9])
def test_a_file_that_is_cut_off_anywhere_is_found(tmp_path, ending, share):
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    (tmp_path / "a").mkdir()
    file = tmp_path / "a" / f"x.{ending}"
    Image.fromarray(pixels).save(file)
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    with pytest.raises(DataError, match=rf"x.{ending} is truncated or no JPEG or PNG"):
        read(sources.image_folder, tmp_path)


# Orientation -> what numpy does to the stored pixels to make them upright; EXIF 2.32, tag 0x0112.
UPRIGHT = {
    1: lambda x: x,
    2: np.fliplr,
    3: lambda x: np.rot90(x, 2),
    4: np.flipud,
    5: lambda x: x.swapaxes(0, 1),
    6: lambda x: np.rot90(x, -1),
    7: lambda x: np.rot90(x, 2).swapaxes(0, 1),
    8: lambda x: np.rot90(x),
}


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_images_stand_upright_as_exif_says(tmp_path, orientation):
    pixels = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    exif = Image.Exif()
    exif[0x0112] = orientation
    (tmp_path / "a").mkdir()
    Image.fromarray(pixels).save(tmp_path / "a" / "x.png", exif=exif)
    table = read(sources.image_folder, tmp_path)
    image = table["image"].combine_chunks().to_numpy_ndarray()[0]
    np.testing.assert_array_equal(image, UPRIGHT[orientation](pixels))


def _one(folder: Path, image: Image.Image, channels: int) -> np.ndarray:
    (folder / "a").mkdir(parents=True)
    image.save(folder / "a" / "x.png")
    table = read(sources.image_folder, folder, channels=channels)
    return table["image"].combine_chunks().to_numpy_ndarray()[0]


def test_every_kind_of_pixel_becomes_the_channels_asked_for(tmp_path):
    grey = np.arange(6, dtype=np.uint8).reshape(2, 3)
    rgba = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    np.testing.assert_array_equal(_one(tmp_path / "1", Image.fromarray(grey), 3), np.stack([grey] * 3, -1))
    np.testing.assert_array_equal(_one(tmp_path / "2", Image.fromarray(rgba), 3), rgba[..., :3])
    np.testing.assert_array_equal(_one(tmp_path / "3", Image.fromarray(rgba), 4), rgba)
    opaque = _one(tmp_path / "4", Image.fromarray(rgba[..., :3]), 4)
    np.testing.assert_array_equal(opaque[..., 3], 255)
    deep = np.array([[0, 255, 65535], [256, 512, 32768]], np.uint16)
    np.testing.assert_array_equal(_one(tmp_path / "5", Image.fromarray(deep), 1)[..., 0], deep >> 8)


def test_many_images_keep_their_order_and_are_resized(tmp_path):
    (tmp_path / "a").mkdir()
    for number in range(300):
        level = np.full((1 + number % 7, 1 + number % 5, 3), number % 256, np.uint8)
        Image.fromarray(level).save(tmp_path / "a" / f"{number:03}.png")
    table = read(sources.image_folder, tmp_path, size=[2, 2])
    images = np.concatenate([chunk.to_numpy_ndarray() for chunk in table["image"].chunks])
    np.testing.assert_array_equal(images, np.broadcast_to((np.arange(300) % 256)[:, None, None, None], (300, 2, 2, 3)))


def _write_manifest(folder: Path, ending: str) -> list[dict[str, Any]]:
    rows = [{"file_name": f"in/{n}.png", "label": "ab"[n % 2], "id": 2**53 + n} for n in (2, 0, 1)]
    (folder / "in").mkdir()
    for row in rows:
        level = int(row["file_name"][3])
        Image.fromarray(np.full((2, 2, 3), level, np.uint8)).save(folder / row["file_name"])
    if ending == "csv":
        with (folder / "metadata.csv").open("w", newline="") as stream:
            writer = csv.DictWriter(stream, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_a_manifest_lists_images_with_what_belongs_to_them(tmp_path, ending):
    rows = _write_manifest(tmp_path, ending)
    table = read(sources.image_manifest, tmp_path, manifest=f"metadata.{ending}")
    assert table.drop_columns(["image"]).to_pylist() == [{"label": row["label"], "id": row["id"]} for row in rows]
    assert table["image"].combine_chunks().to_numpy_ndarray()[:, 0, 0, 0].tolist() == [2, 0, 1]
    assert features_of(table.schema)["image"].shape == (2, 2, 3)


def test_images_that_a_manifest_lists_may_be_missing_up_to_the_limit(tmp_path):
    _write_manifest(tmp_path, "csv")
    (tmp_path / "in" / "0.png").unlink()
    with pytest.raises(DataError, match=r"in/0.png is not there"):
        read(sources.image_manifest, tmp_path)
    table = read(sources.image_manifest, tmp_path, max_bad_files=1)
    assert table["label"].to_pylist() == ["a", "b"]


def test_manifests_that_list_nothing_useful_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"there is no file .*metadata.csv"):
        read(sources.image_manifest, tmp_path)
    _write_manifest(tmp_path, "csv")
    with pytest.raises(DataError, match=r"has no column 'file_nam'. Did you mean 'file_name'"):
        read(sources.image_manifest, tmp_path, file_column="file_nam")
    with pytest.raises(ConfigError, match=r"metadata.txt is neither .csv nor .jsonl"):
        read(sources.image_manifest, tmp_path, manifest="metadata.txt")
    (tmp_path / "metadata.csv").write_text("file_name,label\na.png,x\n,y\n")
    with pytest.raises(DataError, match="names no file in row 2"):
        read(sources.image_manifest, tmp_path)
    (tmp_path / "metadata.csv").write_text("file_name,label\n")
    with pytest.raises(DataError, match="lists no images"):
        read(sources.image_manifest, tmp_path)
