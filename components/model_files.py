"""Keras models on disk: the `.keras` format with the same bytes for the same model, and predictions from it."""

from __future__ import annotations

import contextlib
import io
import json
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import tensorflow as tf

from components import plugins
from components.artifacts import read_manifest
from components.errors import ArtifactError, ConfigError
from models import quantization  # noqa: F401  (Keras must know its layers)
from models.spec import OutputSpec

FILE = "model.keras"
_WEIGHTS = "model.weights.h5"
_BFLOAT16 = tf.bfloat16.as_numpy_dtype
_FIXED_TIME = (1980, 1, 1, 0, 0, 0)


def save_model(model: keras.Model, directory: Path, dtype: str = "float32") -> None:
    """Write `model.keras`, without the time and the memory addresses that Keras puts inside.

    What belongs to training alone, how the model was compiled and the optimizer's state, is left out.

    Args:
        model: A built model; it stays as it is, compiled or not.
        directory: Where the file is written.
        dtype: float32, float16 or bfloat16: that of the float32 weights in the file. Keras reads them back as float32.

    Raises:
        ConfigError: a weight is too large for `dtype`.
    """
    written = directory / f"new-{FILE}"
    try:
        with _left_out_of_the_file(model):
            model.save(written)
        with zipfile.ZipFile(written) as source:
            entries = {entry: source.read(entry) for entry in sorted(source.namelist())}
    finally:
        written.unlink(missing_ok=True)
    metadata = {**json.loads(entries["metadata.json"]), "date_saved": ""}
    entries["metadata.json"] = json.dumps(metadata, sort_keys=True).encode()
    entries["config.json"] = _number_shared_objects(entries["config.json"].decode()).encode()
    entries[_WEIGHTS] = _store_weights(entries[_WEIGHTS], dtype)
    with zipfile.ZipFile(directory / FILE, "w") as target:
        for entry, content in entries.items():
            target.writestr(zipfile.ZipInfo(entry, _FIXED_TIME), content)


@contextlib.contextmanager
def _left_out_of_the_file(model: keras.Model) -> Iterator[None]:
    """Let the model tell nothing of how it was compiled; losses of the user's own may not even be serialisable."""
    model.get_compile_config = lambda: None
    try:
        yield
    finally:
        del model.get_compile_config


def _store_weights(content: bytes, dtype: str) -> bytes:
    """The HDF5 file of the weights, without the optimizer's state and with float32 numbers in `dtype`."""
    target = io.BytesIO()
    with h5py.File(io.BytesIO(content)) as source, h5py.File(target, "w") as copy:

        def store(name: str, item: Any) -> None:
            if name.partition("/")[0] == "optimizer":
                return
            place = copy.create_group(name) if isinstance(item, h5py.Group) else None
            if place is None:
                numbers = _in_dtype(item, dtype)
                place = copy.create_dataset(name, data=numbers)
                if numbers.dtype == _BFLOAT16:
                    place.attrs["dtype"] = "bfloat16"  # HDF5 has no such type; Keras looks here
            place.attrs.update(item.attrs)

        source.visititems(store)
    return target.getvalue()


def _in_dtype(weight: Any, dtype: str) -> np.ndarray:
    """A dataset of HDF5 as an array: in `dtype` if it is float32, as it is otherwise."""
    numbers = weight[()]
    if weight.dtype != np.float32 or dtype == "float32":
        return numbers
    with np.errstate(over="ignore"):
        stored = numbers.astype(_BFLOAT16 if dtype == "bfloat16" else dtype)
    if (lost := np.isfinite(numbers) & ~np.isfinite(stored)).any():
        layer = weight.parent.attrs.get("name", weight.name)
        raise ConfigError(
            f"train.storage_dtype: {dtype} ends at {tf.as_dtype(dtype).max:g}, but a weight of layer '{layer}' is "
            f"{numbers[lost].flat[0]:g}. Use float32{' or bfloat16' if dtype == 'float16' else ''}."
        )
    return stored


def _number_shared_objects(config: str) -> str:
    """Keras marks objects that layers share by their addresses; number them in the order in which they come."""
    numbers: dict[str, int] = {}
    return re.sub(
        r'("shared_object_id": )(\d+)', lambda found: f"{found[1]}{numbers.setdefault(found[2], len(numbers))}", config
    )


def load_model(directory: Path) -> keras.Model:
    """Read the model of an artifact of `train`, for inference: in float32, whatever precision it was trained in.

    So what is evaluated, exported and served computes alike, and every converter can take it.

    Args:
        directory: Artifact of `train` or `optimize`.

    Raises:
        ArtifactError: the file is not one that this Keras can read.
    """
    return read_model(directory / FILE, builders_of(read_manifest(directory).made_from["config"]))


def read_model(file: Path, builders: Sequence[str]) -> keras.Model:
    """As `load_model`, of a file whose model came from these builders: their modules register layers of their own.

    Raises:
        ArtifactError: the file is not one that this Keras can read.
    """
    for builder in builders:
        plugins.resolve(builder, plugins.MODELS, "model.name")
    try:
        model = keras.saving.load_model(file, compile=False)
    except (ValueError, OSError, TypeError) as error:
        raise ArtifactError(f"Cannot load {file}: {error}") from error
    return in_float32(model)


def builders_of(config: Mapping[str, Any]) -> list[str]:
    """Of the trained model, and of the students that have learned from it, by the config of `train` or `optimize`."""
    models = [config.get("train", config)["model"], *(stage.get("student") for stage in config.get("stages", []))]
    return [model["name"] for model in models if model is not None]


def in_float32(model: keras.Model) -> keras.Model:
    """The model itself, or a copy with the same weights whose layers all compute in float32."""
    config = json.dumps(keras.saving.serialize_keras_object(model))
    plain = config.replace('"mixed_float16"', '"float32"').replace('"mixed_bfloat16"', '"float32"')
    if plain == config:
        return model
    copy = keras.saving.deserialize_keras_object(json.loads(plain))
    copy.set_weights(model.get_weights())
    return copy


def probabilities_from_logits(logits: tf.Tensor, output: OutputSpec) -> tf.Tensor:
    """What the model answers: `(batch, num_classes)` probabilities, or `(batch,)` values for regression."""
    if output.task == "regression":
        return tf.squeeze(logits, axis=1)
    if output.task == "binary":
        positive = tf.sigmoid(logits)
        return tf.concat([1.0 - positive, positive], axis=1)
    return tf.nn.softmax(logits)


class Predictor:
    """Answers of a Keras model for a transformed split, batch by batch with one static shape.

    Args:
        model: Returns logits.
        output: What they mean.
        batch_size: Rows a call; the last batch is padded and the padding cut off, so no example is lost.
    """

    def __init__(self, model: keras.Model, output: OutputSpec, batch_size: int = 1024) -> None:
        self._batch_size = batch_size
        self._call = tf.function(lambda features: probabilities_from_logits(model(features, training=False), output))

    def __call__(self, features: Mapping[str, np.ndarray]) -> np.ndarray:
        """`(num_examples, num_classes)` float32 probabilities, or `(num_examples,)` values for regression."""
        num_examples = len(next(iter(features.values())))
        answers = []
        for start in range(0, num_examples, self._batch_size):
            batch = {
                name: _pad(values[start : start + self._batch_size], self._batch_size)
                for name, values in features.items()
            }
            answers.append(self._call(batch).numpy())
        return np.concatenate(answers)[:num_examples]


def _pad(rows: np.ndarray, batch_size: int) -> np.ndarray:
    return np.pad(rows, [(0, batch_size - len(rows)), *[(0, 0)] * (rows.ndim - 1)], mode="edge")
