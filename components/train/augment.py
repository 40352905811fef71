"""Random changes of the images of a training batch: a function of (seed, step, row), so that a run repeats and resumes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from components.augment_config import Augment
from components.errors import ConfigError, did_you_mean
from components.preprocessing import Preprocessing
from components.train.batches import Batches

_WITHOUT_END = 2**62
# Random numbers of an image, one after the other.
_DRAWS = (
    *("flip_x", "flip_y", "angle", "zoom", "move_x", "move_y", "crop_x", "crop_y", "brightness", "contrast"),
    *("cut_x", "cut_y", "erases", "erase_area", "erase_aspect", "erase_x", "erase_y"),
)
_ERASED_AREA, _ERASED_ASPECT = (0.02, 0.33), (0.3, 1 / 0.3)

Draws = Mapping[str, tf.Tensor]


class AugmentedBatches:
    """Batches whose images are changed; the rest of them stays as it is.

    Args:
        batches: What is changed, `(features, ...)`.
        changes: Feature -> what changes its images.
        seed: Seed of the random numbers.
        batch_size: Rows of a batch, over all devices.
        rest: Rows of the last batch of an epoch, if they are fewer.
        part_of: First row and end of what this process takes of a batch of so many rows; default: all of it.
    """

    def __init__(
        self,
        batches: Batches,
        changes: Mapping[str, ImageChange],
        *,
        seed: int,
        batch_size: int,
        rest: int = 0,
        part_of: Callable[[int], tuple[int, int]] = lambda num_rows: (0, num_rows),
    ) -> None:
        self._batches, self._changes, self._seed, self._batch_size = batches, dict(changes), seed, batch_size
        self.steps_per_epoch = batches.steps_per_epoch
        self._rest, self._first, self._first_of_rest = rest, part_of(batch_size)[0], part_of(rest)[0]

    def from_step(self, step: int) -> tf.data.Dataset:
        """The batches from the global step `step` on."""
        steps = tf.data.Dataset.range(step, _WITHOUT_END)
        numbered = tf.data.Dataset.zip(steps, self._batches.from_step(step))
        return numbered.map(self._change, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).prefetch(
            tf.data.AUTOTUNE
        )

    def _change(self, step: tf.Tensor, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        features, *others = batch
        is_rest = (self._rest > 0) & (step % self.steps_per_epoch == self.steps_per_epoch - 1)
        first = tf.where(is_rest, self._first_of_rest, self._first)
        changed = dict(features)
        for number, (name, change) in enumerate(sorted(self._changes.items())):
            images = features[name]
            seed = tf.random.fold_in(tf.stack([tf.constant(self._seed, tf.int64), step]), number)
            draws = tf.random.stateless_uniform([self._batch_size, len(_DRAWS)], seed, alg="philox")
            own = draws[first : first + tf.shape(images)[0]]
            changed[name] = change(images, dict(zip(_DRAWS, tf.unstack(own, axis=1), strict=True)))
        return changed, *others


class ImageChange:
    """Changes normalised images by random numbers.

    Args:
        config: What is changed, and how much.
        mean: By which the images were normalised.
        std: As `mean`.
    """

    def __init__(self, config: Augment, *, mean: list[float], std: list[float]) -> None:
        self._config, self._mean, self._std = config, np.asarray(mean, np.float32), np.asarray(std, np.float32)

    def __call__(self, images: tf.Tensor, draws: Draws) -> tf.Tensor:
        """Change `(batch, height, width, channels)` float32 by numbers `(batch,)` in [0, 1) for each of `_DRAWS`."""
        config = self._config
        x = images * self._std + self._mean
        if config.moves or config.flip != "none":
            x = keras.ops.image.affine_transform(
                x, self._matrix(tf.shape(images), draws), "bilinear", config.fill, 0.0, "channels_last"
            )
        if config.brightness or config.contrast:
            x = self._recoloured(x, draws)
        x = (x - self._mean) / self._std
        if config.cutout or config.erasing:
            x = tf.where(self._erased(tf.shape(images), draws)[..., tf.newaxis], 0.0, x)
        return tf.ensure_shape(x, images.shape)

    def _matrix(self, shape: tf.Tensor, draws: Draws) -> tf.Tensor:
        """`(batch, 8)`: where each pixel comes from, as the projective transform of TensorFlow takes it."""
        config = self._config
        height, width = tf.cast(shape[1], tf.float32), tf.cast(shape[2], tf.float32)
        flip_x = tf.where(draws["flip_x"] < 0.5, -1.0, 1.0) if config.flip in ("horizontal", "both") else 1.0
        flip_y = tf.where(draws["flip_y"] < 0.5, -1.0, 1.0) if config.flip in ("vertical", "both") else 1.0
        angle = _spread(draws["angle"], math.radians(config.rotation_degrees))
        scale = 1.0 / (1.0 + _spread(draws["zoom"], config.zoom))
        steps = 2 * config.crop_padding + 1
        crop_x, crop_y = (tf.floor(draws[name] * steps) - config.crop_padding for name in ("crop_x", "crop_y"))
        move_x = _spread(draws["move_x"], config.translation) * width + crop_x
        move_y = _spread(draws["move_y"], config.translation) * height + crop_y
        a, b = tf.cos(angle) * scale * flip_x, -tf.sin(angle) * scale * flip_y
        c, d = tf.sin(angle) * scale * flip_x, tf.cos(angle) * scale * flip_y
        centre_x, centre_y = (width - 1) / 2, (height - 1) / 2
        from_x = centre_x - a * centre_x - b * centre_y + move_x
        from_y = centre_y - c * centre_x - d * centre_y + move_y
        zero = tf.zeros_like(angle)
        return tf.stack([a, b, from_x, c, d, from_y, zero, zero], axis=1)

    def _recoloured(self, x: tf.Tensor, draws: Draws) -> tf.Tensor:
        brightness = _per_image(_spread(draws["brightness"], self._config.brightness))
        contrast = _per_image(1.0 + _spread(draws["contrast"], self._config.contrast))
        mean = tf.reduce_mean(x, axis=[1, 2, 3], keepdims=True)
        return tf.clip_by_value((x - mean) * contrast + mean + brightness, 0.0, 1.0)

    def _erased(self, shape: tf.Tensor, draws: Draws) -> tf.Tensor:
        """`(batch, height, width)`: which pixels become 0."""
        config = self._config
        height, width = tf.cast(shape[1], tf.float32), tf.cast(shape[2], tf.float32)
        erased = tf.zeros(shape[:3], tf.bool)
        if config.cutout:
            left, top = (
                tf.floor(draws[name] * size) - config.cutout // 2
                for name, size in (("cut_x", width), ("cut_y", height))
            )
            erased |= _rectangle(shape, left, top, config.cutout, config.cutout)
        if config.erasing:
            area = height * width * _between(draws["erase_area"], *_ERASED_AREA)
            aspect = tf.exp(_between(draws["erase_aspect"], *map(math.log, _ERASED_ASPECT)))
            tall = tf.minimum(tf.round(tf.sqrt(area * aspect)), height)
            wide = tf.minimum(tf.round(tf.sqrt(area / aspect)), width)
            left = tf.floor(draws["erase_x"] * (width - wide + 1))
            top = tf.floor(draws["erase_y"] * (height - tall + 1))
            is_hit = (draws["erases"] < config.erasing)[:, tf.newaxis, tf.newaxis]
            erased |= is_hit & _rectangle(shape, left, top, wide, tall)
        return erased


def image_changes(augment: Mapping[str, Augment], preprocessing: Preprocessing) -> dict[str, ImageChange]:
    """What `train.augment` says, of features that the op `image` makes.

    Raises:
        ConfigError: a name is none of these.
    """
    images = {name: op.params for name, op in preprocessing.fitted.items() if op.op == "image"}
    for name in augment:
        if name not in images:
            raise ConfigError(
                f"train.augment: op image makes no feature '{name}'.{did_you_mean(name, images)} Those that it makes: "
                f"{', '.join(images) or 'none'}."
            )
    return {
        name: ImageChange(config, mean=images[name]["mean"], std=images[name]["std"])
        for name, config in augment.items()
    }


def _spread(draw: tf.Tensor, limit: float) -> tf.Tensor:
    return (2.0 * draw - 1.0) * limit


def _between(draw: tf.Tensor, low: float, high: float) -> tf.Tensor:
    return low + draw * (high - low)


def _per_image(values: tf.Tensor) -> tf.Tensor:
    return values[:, tf.newaxis, tf.newaxis, tf.newaxis]


def _rectangle(shape: tf.Tensor, left: tf.Tensor, top: tf.Tensor, wide: Any, tall: Any) -> tf.Tensor:
    """`(batch, height, width)`: true inside; what is outside of the image is cut off."""
    rows, columns = tf.range(shape[1], dtype=tf.float32), tf.range(shape[2], dtype=tf.float32)
    left, top = left[:, tf.newaxis], top[:, tf.newaxis]
    wide, tall = (value[:, tf.newaxis] if isinstance(value, tf.Tensor) else value for value in (wide, tall))
    in_rows, in_columns = (rows >= top) & (rows < top + tall), (columns >= left) & (columns < left + wide)
    return in_rows[:, :, tf.newaxis] & in_columns[:, tf.newaxis, :]
