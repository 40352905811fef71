"""load_runner: one interface for every format, and clear errors for files and features that do not fit."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from components.errors import ArtifactError, HeadraceError
from components.formats import Network, convert_onnx, convert_tflite, load_runner

SUFFIXES = [".tflite", ".onnx", ""]
FEATURES = {
    "x": np.random.default_rng(0).normal(size=(7, 3)).astype("float32"),
    "id": np.arange(7, dtype="int64")[:, None] % 4,
}


@pytest.fixture(scope="module")
def network() -> Network:
    x, ids = keras.Input((3,), name="x"), keras.Input((1,), dtype="int64", name="id")
    joined = layers.Concatenate()([x, layers.Flatten()(layers.Embedding(4, 2)(ids))])
    return Network.of(keras.Model([x, ids], layers.Dense(2, name="y")(joined)))


@pytest.fixture(scope="module")
def files(network: Network, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    convert_tflite(network, folder / "m.tflite")
    convert_onnx(network, folder / "m.onnx")
    with network.saved_model() as written:
        written.rename(folder / "m")
        written.mkdir()
    return {suffix: folder / f"m{suffix}" for suffix in SUFFIXES}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_all_formats_by_one_interface(network: Network, files: dict[str, Path], suffix: str) -> None:
    runner = load_runner(files[suffix])
    assert {info.name: info.dtype for info in runner.inputs} == {"x": "float32", "id": "int64"}
    assert [info.name for info in runner.outputs] == ["y"]
    for count in (7, 1):
        part = {name: values[:count] for name, values in FEATURES.items()}
        np.testing.assert_allclose(runner({**part, "unread": np.zeros(3)})["y"], network.expected(part)["y"], atol=1e-6)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": None}, r"takes 'x'\. Known: id"),
        ({"x": np.zeros((7, 4), "float32")}, r"'x' has shape \(batch, 3\), received \(7, 4\)"),
        ({"x": np.float32(1)}, r"'x' has shape \(batch, 3\), received \(\)"),
        ({"id": np.zeros((7, 1), "float32")}, "'id' is int64, received float32"),
    ],
    ids=["missing", "shape", "scalar", "kind"],
)
def test_features_that_do_not_fit(files: dict[str, Path], suffix: str, change: dict[str, object], message: str) -> None:
    features = {name: values for name, values in {**FEATURES, **change}.items() if values is not None}
    with pytest.raises(HeadraceError, match=message):
        load_runner(files[suffix])(features)


def test_narrower_integers_and_wider_floats_are_taken(network: Network, files: dict[str, Path]) -> None:
    features = {"x": FEATURES["x"].astype("float64"), "id": FEATURES["id"].astype("int8")}
    for path in files.values():
        np.testing.assert_allclose(load_runner(path)(features)["y"], network.expected(FEATURES)["y"], atol=1e-6)


@pytest.mark.parametrize("count", [1, 3, 4, 7])
def test_a_fixed_batch_is_asked_batch_by_batch(network: Network, tmp_path: Path, count: int) -> None:
    convert_tflite(network, tmp_path / "m.tflite", batch_size=3)
    part = {name: values[:count] for name, values in FEATURES.items()}
    got = load_runner(tmp_path / "m.tflite")(part)["y"]
    np.testing.assert_allclose(got, network.expected(part)["y"], atol=1e-6)


@pytest.mark.parametrize("suffix", [".tflite", ".onnx"])
@pytest.mark.parametrize("damage", ["empty", "cut", "other", "noise"])
def test_a_damaged_or_foreign_file_is_refused(files: dict[str, Path], tmp_path: Path, suffix: str, damage: str) -> None:
    content = files[suffix].read_bytes()
    other = files[".onnx" if suffix == ".tflite" else ".tflite"].read_bytes()
    noise = np.random.default_rng(0).bytes(4000)
    path = tmp_path / f"m{suffix}"
    path.write_bytes({"empty": b"", "cut": content[: len(content) // 2], "other": other, "noise": noise}[damage])
    name = {".tflite": "LiteRT", ".onnx": "onnxruntime"}[suffix]
    with pytest.raises(ArtifactError, match=f"{name} cannot load .*m{suffix}: "):
        load_runner(path)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="Cannot load the SavedModel"):
        load_runner(tmp_path)
    with pytest.raises(ArtifactError, match=r"Cannot read .*none\.onnx: No such file"):
        load_runner(tmp_path / "none.onnx")
    (tmp_path / "m.h5").write_bytes(b"x")
    with pytest.raises(ArtifactError, match=r"Cannot tell what .*m\.h5 is"):
        load_runner(tmp_path / "m.h5")


def test_files_without_the_signature_are_refused(tmp_path: Path) -> None:
    @tf.function(input_signature=[tf.TensorSpec((None, 2))])
    def double(x: tf.Tensor) -> tf.Tensor:
        return 2.0 * x

    module = tf.Module()
    tf.saved_model.save(module, str(tmp_path / "m"), signatures={"double": double.get_concrete_function()})
    with pytest.raises(ArtifactError, match=r"has no signature 'serving_default', only \['double'\]"):
        load_runner(tmp_path / "m")
    converter = tf.lite.TFLiteConverter.from_saved_model(str(tmp_path / "m"), signature_keys=["double"])
    (tmp_path / "m.tflite").write_bytes(converter.convert())
    with pytest.raises(
        ArtifactError, match="has no signature 'serving_default', so its inputs and outputs have no names"
    ):
        load_runner(tmp_path / "m.tflite")


def test_a_file_that_needs_another_runtime_is_refused(tmp_path: Path) -> None:
    @tf.function(input_signature=[tf.TensorSpec((None, 2), name="x")])
    def erf(x: tf.Tensor) -> tf.Tensor:
        return tf.math.erf(x)

    tf.saved_model.save(tf.Module(), str(tmp_path / "m"), signatures=erf.get_concrete_function())
    converter = tf.lite.TFLiteConverter.from_saved_model(str(tmp_path / "m"))
    converter.target_spec.supported_ops = [tf.lite.OpsSet.SELECT_TF_OPS]
    (tmp_path / "m.tflite").write_bytes(converter.convert())
    with pytest.raises(ArtifactError, match=r"LiteRT cannot load .*Select TensorFlow op\(s\)"):
        load_runner(tmp_path / "m.tflite")
