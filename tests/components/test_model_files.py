"""Model files: the same bytes for the same model, without what belongs to training, in full or half precision."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from components import model_files
from components.errors import ConfigError

BFLOAT16 = tf.bfloat16.as_numpy_dtype
X = np.random.default_rng(0).normal(size=(16, 24)).astype(np.float32)


def make_model() -> keras.Model:
    """Two layers in a model of their own, ids beside numbers, and a head."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    x, ids = keras.Input((24,), name="x"), keras.Input((), dtype="int64", name="ids")
    encoder = [keras.Input((24,)), keras.layers.Dense(64, name="wide"), keras.layers.BatchNormalization(name="norm")]
    y = keras.Sequential([*encoder, keras.layers.Dropout(0.5)], name="encoder")(x)
    y = keras.layers.Concatenate(name="both")([y, keras.layers.Embedding(9, 5, name="embedding")(ids)])
    return keras.Model({"x": x, "ids": ids}, keras.layers.Dense(1, name="head")(y), name="net")


def save(model: keras.Model, folder: Path, *dtype: str) -> Path:
    folder.mkdir(exist_ok=True)
    model_files.save_model(model, folder, *dtype)
    assert [file.name for file in folder.iterdir()] == [model_files.FILE]
    return folder / model_files.FILE


def load(file: Path) -> keras.Model:
    return keras.saving.load_model(file, compile=False)


def answers(model: keras.Model) -> np.ndarray:
    return np.asarray(model({"x": X, "ids": np.arange(16) % 9}))


def fit(model: keras.Model, epochs: int) -> None:
    model.fit({"x": X, "ids": np.arange(16) % 9}, X[:, :1], epochs=epochs, shuffle=False, verbose=0)


def own_loss(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


def test_a_file_gives_the_same_weights_and_the_same_bytes_again(tmp_path: Path) -> None:
    model = make_model()
    file = save(model, tmp_path / "a")
    again = load(file)
    for ours, theirs in zip(model.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(answers(again), answers(model))
    assert save(make_model(), tmp_path / "b").read_bytes() == file.read_bytes()


@pytest.mark.parametrize(("dtype", "unit_roundoff"), [("float16", 2.0**-11), ("bfloat16", 2.0**-8)])
def test_half_precision_rounds_once_and_is_float32_in_memory(tmp_path: Path, dtype: str, unit_roundoff: float) -> None:
    model = make_model()
    file = save(model, tmp_path / "half", dtype)
    again = load(file)
    assert {variable.dtype for variable in again.weights} == {"float32"}
    errors = []
    for ours, theirs in zip(model.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_array_equal(
            theirs, ours.astype(BFLOAT16 if dtype == "bfloat16" else dtype).astype(ours.dtype)
        )
        errors.append((np.abs(theirs - ours) / np.maximum(np.abs(ours), 1e-3)).max())
    assert 0.9 * unit_roundoff < max(errors) < unit_roundoff
    assert 0 < np.abs(answers(again) - answers(model)).max() < 30 * unit_roundoff
    assert save(make_model(), tmp_path / "again", dtype).read_bytes() == file.read_bytes()


def test_a_file_in_half_precision_is_half_as_large(tmp_path: Path) -> None:
    layers = [keras.Input((256,)), keras.layers.Dense(512, name="a"), keras.layers.Dense(512, name="b")]
    model = keras.Sequential(layers)
    full = save(model, tmp_path / "float32").stat().st_size
    for dtype in ("float16", "bfloat16"):
        assert save(model, tmp_path / dtype, dtype).stat().st_size / full == pytest.approx(0.5, abs=0.01)


def test_a_weight_beyond_float16_is_refused_and_bfloat16_holds_it(tmp_path: Path) -> None:
    model = make_model()
    norm = model.get_layer("encoder").get_layer("norm")
    norm.moving_variance.assign(np.full(64, 70_000, np.float32))
    file = save(model, tmp_path)
    before = file.read_bytes()
    with pytest.raises(
        ConfigError,
        match=r"train\.storage_dtype: float16 ends at 65504, but a weight of layer 'norm' is 70000\. Use float32 or "
        r"bfloat16\.",
    ):
        model_files.save_model(model, tmp_path, "float16")
    assert [each.name for each in tmp_path.iterdir()] == [model_files.FILE]
    assert file.read_bytes() == before
    assert float(load(save(model, tmp_path, "bfloat16")).get_layer("encoder").get_layer("norm").moving_variance[0]) == (
        70_144
    )
    norm.moving_variance.assign(np.full(64, 65_504, np.float32))
    assert np.isfinite(answers(load(save(model, tmp_path, "float16")))).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_compiled_model_gives_the_file_of_the_same_model_uncompiled(tmp_path: Path, dtype: str) -> None:
    model = make_model()
    model.compile("adam", own_loss, metrics=["mae"], weighted_metrics=[own_loss])
    fit(model, 1)
    plain = make_model()
    plain.set_weights(model.get_weights())
    file = save(model, tmp_path / "compiled", dtype)
    assert file.read_bytes() == save(plain, tmp_path / "plain", dtype).read_bytes()
    with zipfile.ZipFile(file) as archive:
        assert "compile_config" not in json.loads(archive.read("config.json"))


def test_a_model_compiled_with_what_no_file_can_hold_is_saved(tmp_path: Path) -> None:
    """Keras would warn of the lambda."""
    model = make_model()
    model.compile("sgd", lambda y_true, y_pred: own_loss(y_true, y_pred))
    np.testing.assert_array_equal(answers(load(save(model, tmp_path))), answers(model))


def test_saving_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    saved, unsaved = make_model(), make_model()
    for model in (saved, unsaved):
        keras.utils.set_random_seed(3)
        model.compile("adam", "mse")
        fit(model, 2)
        optimizer, config = model.optimizer, model.get_compile_config()
        state = [variable.numpy() for variable in optimizer.variables]
        if model is saved:
            save(model, tmp_path, "float16")
        assert model.compiled
        assert model.optimizer is optimizer
        assert model.get_compile_config() == config
        for variable, value in zip(optimizer.variables, state, strict=True):
            np.testing.assert_array_equal(variable, value)
        fit(model, 2)
    for ours, theirs in zip(saved.get_weights(), unsaved.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
