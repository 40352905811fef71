"""convert_coreml: what the package holds, the same bytes, and what is refused. macOS alone runs it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from components.errors import ArtifactError, HeadraceError
from components.formats import ConversionError, Network, convert_coreml, load_runner
from components.formats.coreml import FORMS, NOT_RUN
from tests.components.formats.models import Case, several_case, subclassed_case
from tests.components.formats.optional import needs

pytestmark = needs("coremltools")
MACOS = sys.platform == "darwin"
WEIGHTS = "Data/com.apple.CoreML/weights/weight.bin"


def files(package: Path) -> dict[str, bytes]:
    return {str(file.relative_to(package)): file.read_bytes() for file in package.rglob("*") if file.is_file()}


@pytest.fixture(scope="module")
def package(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("coreml") / "m.mlpackage"
    convert_coreml(network, path, metadata={"labels": ["cat", "dog"], "version": 3})
    return path


@pytest.mark.parametrize("form", FORMS)
def test_names_shapes_weights_and_the_note(tmp_path: Path, form: str) -> None:
    case = several_case()
    done = convert_coreml(Network.of(case.model), tmp_path / "m.mlpackage", form=form, examples=case.features)
    assert {info.name: info.shape for info in done.inputs} == {"image": (None, 8, 8, 1), "extra": (None, 3)}
    assert {info.name: info.shape for info in done.outputs} == {"kind": (None, 3), "size": (None, 1)}
    assert done.size_bytes == sum(map(len, files(done.path).values()))
    kernel = case.model.get_layer("hidden").kernel.numpy().T.astype(form)
    assert kernel.tobytes() in (done.path / WEIGHTS).read_bytes()
    if MACOS:
        assert (done.notes, done.max_abs_difference < 0.01) == ((), True)
    else:
        assert done.notes == (NOT_RUN,)
        assert math.isnan(done.max_abs_difference)
        with pytest.raises(HeadraceError, match=r"m\.mlpackage cannot run here: Core ML is a part of macOS"):
            load_runner(done.path)(case.features)


def test_the_exact_gelu_and_a_limit_of_the_batch(tmp_path: Path) -> None:
    import coremltools

    case = subclassed_case()
    network = Network.of(case.model, inputs=case.features)
    convert_coreml(network, tmp_path / "m.mlpackage", max_batch_size=7, examples=case.features)
    spec = coremltools.utils.load_spec(str(tmp_path / "m.mlpackage"))
    ranges = [feature.type.multiArrayType.shapeRange.sizeRanges[0] for feature in spec.description.input]
    assert [(size.lowerBound, size.upperBound) for size in ranges] == [(1, 7), (1, 7)]
    function = spec.mlProgram.functions["main"]
    kinds = [operation.type for operation in function.block_specializations[function.opset].operations]
    assert kinds.count("erf") + kinds.count("gelu") == 2


def test_the_package_says_what_it_is(network: Network, package: Path) -> None:
    import coremltools

    texts = coremltools.utils.load_spec(str(package)).description.metadata.userDefined
    assert json.loads(texts["labels"]) == ["cat", "dog"]
    assert texts["version"] == "3"
    assert texts["weights_sha256"] == network.weights_sha256()


def test_the_same_network_gives_the_same_bytes(resnet: Case, package: Path, tmp_path: Path) -> None:
    again = tmp_path / "m.mlpackage"
    again.mkdir()
    (again / "of an older conversion").touch()
    convert_coreml(Network.of(resnet.model), again, metadata={"version": 3, "labels": ["cat", "dog"]})
    assert files(again) == files(package)
    assert list(tmp_path.iterdir()) == [again]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("Manifest.json", None, "A valid manifest does not exist"),
        ("Data/com.apple.CoreML/model.mlmodel", b"\x07" * 100, "Error parsing message"),
        ("Data/com.apple.CoreML/model.mlmodel", b"", "it holds no ML program"),
        (WEIGHTS, b"", r"weight\.bin is damaged or of another model"),
        (WEIGHTS, None, r"weight\.bin is damaged or of another model"),
    ],
)
def test_a_damaged_or_foreign_package_is_refused(
    package: Path, tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    damaged = tmp_path / "m.mlpackage"
    for part, whole in files(package).items():
        (damaged / part).parent.mkdir(parents=True, exist_ok=True)
        (damaged / part).write_bytes(whole)
    (damaged / name).unlink()
    if content is not None:
        (damaged / name).write_bytes(content)
    with pytest.raises(ArtifactError, match=rf"coremltools cannot load .*m\.mlpackage: {message}"):
        load_runner(damaged)


class Bessel(layers.Layer):
    """Uses an operation that Core ML has not."""

    def call(self, inputs: Any) -> Any:
        return tf.math.bessel_i0e(inputs)


def bessel() -> keras.Model:
    x = keras.Input((3,), name="x")
    return keras.Model(x, Bessel(name="bessel")(x))


def free_length() -> keras.Model:
    x = keras.Input((None, 3), name="x")
    return keras.Model(x, layers.LSTM(2)(x))


def hyphen() -> keras.Model:
    x = keras.Input((3,), name="x")
    return keras.Model(x, layers.Dense(2, name="y-1")(x))


def lookup() -> keras.Model:
    x = keras.Input((1,), dtype="string", name="x")
    return keras.Model(x, layers.StringLookup(vocabulary=["a", "b"], name="lookup")(x))


@pytest.mark.parametrize(
    ("build", "where", "why", "way_round"),
    [
        (bessel, "operation BesselI0e of layer 'bessel'", "coremltools has no form of it", "other operations of keras"),
        (free_length, "input 'x'", "recurrent layers have to be unrolled, and its length is free", "fixed length"),
        (hyphen, "output 'y-1'", "names have letters, digits and underscores", r"Network\.of\(model"),
        (lookup, "operation LookupTableFindV2 of layer 'lookup'", "the table is no part", "split_lookups"),
    ],
)
def test_a_refusal_names_operation_and_layer_and_writes_nothing(
    tmp_path: Path, build: Callable[[], keras.Model], where: str, why: str, way_round: str
) -> None:
    with pytest.raises(ConversionError, match=way_round) as caught:
        convert_coreml(Network.of(build()), tmp_path / "m.mlpackage")
    assert caught.value.where == where
    assert why in caught.value.why
    assert list(tmp_path.iterdir()) == []


def test_options_that_do_not_fit(network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HeadraceError, match=r"Core ML has no form 'int8'\. Known: float16, float32"):
        convert_coreml(network, tmp_path / "m.mlpackage", form="int8")
    with pytest.raises(HeadraceError, match=r"a folder \*\.mlpackage, received m\.mlmodel"):
        convert_coreml(network, tmp_path / "m.mlmodel")
    monkeypatch.setitem(sys.modules, "coremltools", None)
    with pytest.raises(HeadraceError, match=r"coremltools is not installed: pip install 'headrace\[coreml\]'\."):
        convert_coreml(network, tmp_path / "m.mlpackage")


@pytest.mark.skipif(not MACOS, reason="Core ML is a part of macOS")
@pytest.mark.parametrize("count", [1, 7, 48])
def test_it_answers_as_keras_does(network: Network, resnet: Case, package: Path, count: int) -> None:
    part = {name: values[:count] for name, values in resnet.features.items()}
    np.testing.assert_allclose(load_runner(package)(part)["logits"], network.expected(part)["logits"], atol=1e-4)
