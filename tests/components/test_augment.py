"""Augmentation: each change against numpy, and the same images again after a resume and on any number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from pydantic import ValidationError

from components import artifacts, metrics, progress
from components.augment_config import Augment
from components.config import TrainConfig
from components.errors import ConfigError
from components.examples import read_arrays
from components.model_files import Predictor, load_model
from components.preprocessing import Preprocessing
from components.train import train
from components.train.augment import AugmentedBatches, ImageChange
from components.train.batches import TrainBatches
from pipelines.config import PipelineConfig
from tests.conftest import StepRun

MEAN, STD = [0.5, 0.4, 0.3], [0.25, 0.5, 1.0]
IMAGES = np.random.default_rng(0).uniform(size=(6, 5, 7, 3)).astype(np.float32)
DRAWS = (
    *("flip_x", "flip_y", "angle", "zoom", "move_x", "move_y", "crop_x", "crop_y", "brightness", "contrast"),
    *("cut_x", "cut_y", "erases", "erase_area", "erase_aspect", "erase_x", "erase_y"),
)


def changed(settings: dict[str, Any], images: np.ndarray = IMAGES, **draws: float) -> np.ndarray:
    """The images in [0, 1] after a change by these draws, all others in the middle: 0.5."""
    values = {name: tf.fill([len(images)], tf.constant(draws.get(name, 0.5))) for name in DRAWS}
    out = ImageChange(Augment(**settings), mean=MEAN, std=STD)(tf.constant((images - MEAN) / STD, tf.float32), values)
    assert out.shape == images.shape
    return out.numpy() * np.float32(STD) + np.float32(MEAN)


def shifted(images: np.ndarray, right: int, down: int) -> np.ndarray:
    out = np.zeros_like(images)
    height, width = images.shape[1:3]
    for y in range(height):
        for x in range(width):
            if 0 <= y + down < height and 0 <= x + right < width:
                out[:, y, x] = images[:, y + down, x + right]
    return out


MEANS = IMAGES.mean((1, 2, 3), keepdims=True)
SQUARE = IMAGES[:, :5, :5]
TRUTHS: dict[str, tuple[dict[str, Any], dict[str, float], np.ndarray, np.ndarray]] = {
    "nothing": ({}, {}, IMAGES, IMAGES),
    "flip": ({"flip": "horizontal"}, {"flip_x": 0.4, "flip_y": 0.4}, IMAGES, IMAGES[:, :, ::-1]),
    "no_flip": ({"flip": "both"}, {"flip_x": 0.6, "flip_y": 0.6}, IMAGES, IMAGES),
    "flip_vertical": ({"flip": "vertical"}, {"flip_x": 0.4, "flip_y": 0.4}, IMAGES, IMAGES[:, ::-1]),
    "flip_both": ({"flip": "both"}, {"flip_x": 0.0, "flip_y": 0.49}, IMAGES, IMAGES[:, ::-1, ::-1]),
    "quarter_turn": ({"rotation_degrees": 90}, {"angle": 1.0}, SQUARE, np.rot90(SQUARE, 1, (1, 2))),
    "half_turn": ({"rotation_degrees": 180}, {"angle": 1.0}, IMAGES, IMAGES[:, ::-1, ::-1]),
    "translation": ({"translation": 1 / 7}, {"move_x": 1.0, "move_y": 0.5}, IMAGES, shifted(IMAGES, 1, 0)),
    "crop": ({"crop_padding": 2}, {"crop_x": 0.0, "crop_y": 0.99}, IMAGES, shifted(IMAGES, -2, 2)),
    "crop_nearest": (
        {"crop_padding": 1, "fill": "nearest"},
        {"crop_x": 0.99, "crop_y": 0.5},
        IMAGES,
        IMAGES[:, :, [1, 2, 3, 4, 5, 6, 6]],
    ),
    "brightness": ({"brightness": 0.3}, {"brightness": 1.0}, IMAGES, np.clip(IMAGES + 0.3, 0, 1)),
    "contrast": ({"contrast": 0.5}, {"contrast": 0.0}, IMAGES, (IMAGES - MEANS) * 0.5 + MEANS),
}


@pytest.mark.parametrize("name", TRUTHS)
def test_a_change_is_what_numpy_makes_of_it(name: str) -> None:
    settings, draws, images, expected = TRUTHS[name]
    np.testing.assert_allclose(changed(settings, images, **draws), expected, atol=1e-5)


def test_zoom_shows_the_middle_larger() -> None:
    """A ramp zoomed by 1.5 rises by 1 / 1.5 a pixel around its middle."""
    ramp = np.broadcast_to(np.linspace(0, 1, 7, dtype=np.float32)[:, np.newaxis], (1, 5, 7, 3)).copy()
    zoomed = changed({"zoom": 0.5}, ramp, zoom=1.0)
    np.testing.assert_allclose(zoomed[0, 2, :, 0], 0.5 + (np.arange(7) - 3) / 6 / 1.5, atol=1e-5)


def test_cutout_is_a_square_cut_off_at_the_edges() -> None:
    inside = changed({"cutout": 3}, cut_x=0.5, cut_y=0.5)
    expected = IMAGES.copy()
    expected[:, 1:4, 2:5] = MEAN
    np.testing.assert_allclose(inside, expected, atol=1e-6)
    corner = changed({"cutout": 3}, cut_x=0.0, cut_y=0.0)
    expected = IMAGES.copy()
    expected[:, :2, :2] = MEAN
    np.testing.assert_allclose(corner, expected, atol=1e-6)


def test_erasing_takes_a_rectangle_of_the_area_it_draws() -> None:
    images = np.ones((1, 20, 20, 3), np.float32)
    for area in (0.0, 0.5, 0.999):
        out = changed({"erasing": 0.5}, images, erases=0.4, erase_area=area, erase_aspect=0.5)
        erased = np.isclose(out[0], MEAN, atol=1e-6).all(-1)
        assert erased.mean() == pytest.approx(0.02 + area * 0.31, abs=0.03)
        rows, columns = np.flatnonzero(erased.any(1)), np.flatnonzero(erased.any(0))
        assert erased.sum() == len(rows) * len(columns)
    np.testing.assert_allclose(changed({"erasing": 0.5}, images, erases=0.6), images, atol=1e-6)


ALL = {
    "flip": "both",
    "rotation_degrees": 15,
    "zoom": 0.1,
    "translation": 0.1,
    "crop_padding": 1,
    "fill": "reflect",
} | {
    "brightness": 0.1,
    "contrast": 0.1,
    "cutout": 2,
    "erasing": 0.5,
}


def batches(part: tuple[int, int] = (0, 1), last_batch: Any = "keep", seed: int = 3) -> AugmentedBatches:
    """Of 11 images, 4 a batch; `part` is (worker, workers)."""
    images = np.random.default_rng(1).uniform(size=(11, 5, 7, 3)).astype(np.float32)

    def part_of(rows: int) -> tuple[int, int]:
        return rows * part[0] // part[1], rows * (part[0] + 1) // part[1]

    plain = TrainBatches(
        {"image": images, "other": images[:, 0, 0]},
        np.arange(11),
        np.ones(11, np.float32),
        batch_size=4,
        seed=seed,
        last_batch=last_batch,
        part_of=part_of,
    )
    change = ImageChange(Augment(**ALL), mean=MEAN, std=STD)
    rest = 3 if last_batch == "keep" else 0
    return AugmentedBatches(plain, {"image": change}, seed=seed, batch_size=4, rest=rest, part_of=part_of)


def take(made: AugmentedBatches, step: int, count: int) -> list[Any]:
    return list(made.from_step(step).take(count).as_numpy_iterator())


def test_any_step_can_be_resumed_at_and_an_epoch_has_other_changes_than_the_one_before() -> None:
    whole = take(batches(), 0, 7)
    assert batches().steps_per_epoch == 3
    for step in (1, 2, 5):
        (again,) = take(batches(), step, 1)
        np.testing.assert_array_equal(again[0]["image"], whole[step][0]["image"])
    by_label = [
        {int(label): image for batch in epoch for label, image in zip(batch[1], batch[0]["image"], strict=True)}
        for epoch in (whole[:3], whole[3:6])
    ]
    assert sorted(by_label[0]) == list(range(11))
    assert all(np.abs(by_label[0][i] - by_label[1][i]).max() > 1e-3 for i in range(11))
    (other,) = take(batches(seed=4), 0, 1)
    assert np.abs(other[0]["image"] - whole[0][0]["image"]).max() > 1e-3


def test_labels_weights_and_other_features_stay_and_shapes_are_static() -> None:
    made = batches(last_batch="drop")
    features, labels, weights = take(made, 1, 1)[0]
    images = np.random.default_rng(1).uniform(size=(11, 5, 7, 3)).astype(np.float32)
    np.testing.assert_array_equal(features["other"], images[labels, 0, 0])
    np.testing.assert_array_equal(weights, 1)
    assert made.from_step(0).element_spec[0]["image"].shape == (4, 5, 7, 3)


def test_two_workers_change_the_images_as_one_does() -> None:
    one, first, second = take(batches(), 0, 3), take(batches((0, 2)), 0, 3), take(batches((1, 2)), 0, 3)
    for whole, *parts in zip(one, first, second, strict=True):
        np.testing.assert_array_equal(np.concatenate([part[0]["image"] for part in parts]), whole[0]["image"])


def test_a_worker_without_rows_of_the_last_batch_gets_none() -> None:
    assert [len(batch[0]["image"]) for batch in take(batches((0, 4)), 0, 3)] == [1, 1, 0]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> StepRun:
    """60 small pictures in PNG files, brighter ones of class 1."""
    root = tmp_path_factory.mktemp("images")
    labels = np.arange(60) % 2
    pictures = (
        np.random.default_rng(0).integers(0, 150, (60, 6, 6, 1)) + labels[:, np.newaxis, np.newaxis, np.newaxis] * 90
    )
    files = [tf.io.encode_png(picture.astype(np.uint8)).numpy() for picture in pictures]
    pq.write_table(pa.table({"image": pa.array(files, pa.binary()), "label": labels}), root / "data.parquet")
    data = {
        "source": "parquet",
        "path": str(root / "data.parquet"),
        "task": "binary",
        "split": {"validation": 0.2, "test": 0.2},
    }
    features = {"image": {"op": "image", "mean": [0.4], "std": [0.3], "decode": True, "size": [6, 6], "channels": 1}}
    return StepRun(
        root,
        PipelineConfig.model_validate(
            {
                "name": "m",
                "data": data,
                "evaluate": {"thresholds": [{"metric": "accuracy", "min": 0}]},
                "transform": {"features": features},
            }
        ),
    )


def test_a_run_is_the_same_after_a_stop_and_validates_the_images_as_they_are(images: StepRun, tmp_path: Path) -> None:
    def run(name: str, **augment: Any) -> Path:
        settings = {
            "epochs": 2,
            "global_batch_size": 8,
            "xla": "off",
            "checkpoint_steps": 2,
            "model": {"name": "resnet", "args": {"stage_sizes": [1], "stage_widths": [4]}},
            "augment": {"image": augment} if augment else {},
        }
        config = TrainConfig.model_validate(settings)
        path = tmp_path / name
        train(examples=images.path("examples"), transform=images.path("transform"), model=path, config=config)
        return path

    def stop(message: str) -> None:
        raise KeyboardInterrupt

    plain, whole = run("plain"), run("whole", **ALL)
    with pytest.raises(KeyboardInterrupt), progress.shown_by(stop):
        run("stopped", **ALL)
    digests = [artifacts.read_manifest(path).digest for path in (plain, whole, run("stopped", **ALL))]
    assert digests[0] != digests[1] == digests[2]

    preprocessing = Preprocessing.load(images.path("transform"))
    raw = read_arrays(images.path("examples"), "validation")
    answers = Predictor(load_model(whole), preprocessing.output_spec)(preprocessing.transform_in_batches(raw))
    recorded = artifacts.read_manifest(whole).result["validation"]
    labels = preprocessing.encode_labels(raw["label"])
    assert metrics.compute("binary", labels, answers)["loss"] == pytest.approx(recorded["loss"], rel=1e-5)


def test_only_images_that_the_transform_makes_are_changed(images: StepRun, tmp_path: Path) -> None:
    config = TrainConfig.model_validate({"global_batch_size": 8, "augment": {"imag": {"flip": "both"}}})
    with pytest.raises(ConfigError, match=r"train.augment: op image makes no feature 'imag'. Did you mean 'image'"):
        train(examples=images.path("examples"), transform=images.path("transform"), model=tmp_path / "m", config=config)
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fill": "reflect"}, "nothing reads fill without rotation_degrees, zoom, translation or crop_padding"),
        ({"zoom": 1.0}, "less than 1"),
        ({"flip": "sideways"}, "'none', 'horizontal', 'vertical' or 'both'"),
    ],
)
def test_settings_without_effect_or_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Augment(**settings)
