"""convert_openvino: names, bytes, int8, what is written into the files, and what is refused."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from components.errors import ArtifactError, HeadraceError
from components.formats import ConversionError, Network, convert_onnx, convert_openvino, load_runner
from components.formats import openvino as module
from components.formats.conversion import require
from components.formats.openvino import FORMS
from tests.components.formats.models import Case, recurrent_case, resnet_case, several_case, transformer_case
from tests.components.formats.optional import needs

pytestmark = [needs("openvino"), needs("nncf")]


def calibration(form: str, case: Case) -> dict[str, np.ndarray] | None:
    return case.features if form == "int8" else None


def test_names_shapes_and_free_axes(tmp_path: Path) -> None:
    case = several_case()
    done = convert_openvino(Network.of(case.model), tmp_path / "m.xml", examples=case.features)
    assert (done.format, done.path) == ("openvino", tmp_path / "m.xml")
    assert {info.name: info.shape for info in done.inputs} == {"image": (None, 8, 8, 1), "extra": (None, 3)}
    assert {info.name: info.shape for info in done.outputs} == {"kind": (None, 3), "size": (None, 1)}
    assert done.size_bytes == sum(file.stat().st_size for file in tmp_path.iterdir())
    text = convert_openvino(Network.of(transformer_case(None).model), tmp_path / "t.xml")
    assert [(info.name, info.dtype, info.shape) for info in text.inputs] == [("text", "int64", (None, None))]


def test_recurrent_layers_keep_a_free_batch(tmp_path: Path) -> None:
    case = recurrent_case(layers.LSTM)
    network = Network.of(case.model)
    assert convert_openvino(network, tmp_path / "m.xml", examples=case.features).notes == ()
    for count in (1, 5):
        part = {name: values[:count] for name, values in case.features.items()}
        got = load_runner(tmp_path / "m.xml")(part)["logits"]
        np.testing.assert_allclose(got, network.expected(part)["logits"], atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_the_same_network_gives_the_same_bytes(resnet: Case, tmp_path: Path, form: str) -> None:
    for name in "ab":
        file = tmp_path / f"{name}.xml"
        convert_openvino(Network.of(resnet.model), file, form=form, calibration=calibration(form, resnet))
    for suffix in (".xml", ".bin"):
        assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()


def test_each_form_stores_fewer_bytes_of_weights(network: Network, resnet: Case, tmp_path: Path) -> None:
    sizes = []
    for form in FORMS:
        convert_openvino(network, tmp_path / "m.xml", form=form, calibration=calibration(form, resnet))
        sizes.append((tmp_path / "m.bin").stat().st_size)
    assert sizes[1] == pytest.approx(sizes[0] / 2, rel=0.05)
    assert sizes[2] < 0.65 * sizes[1]


def test_int8_takes_its_ranges_from_the_calibration(network: Network, resnet: Case, tmp_path: Path) -> None:
    import openvino

    limits = []
    for factor in (1, 3):
        images = resnet.features["image"] * factor
        images[0] *= 4
        convert_openvino(network, tmp_path / "m.xml", form="int8", calibration={"image": images})
        nodes = openvino.Core().read_model(tmp_path / "m.xml").get_ordered_ops()
        rounding = [node for node in nodes if node.get_type_name() == "FakeQuantize"]
        assert len(rounding) > 5
        source = rounding[0].input_value(2).get_node()
        constant = source if source.get_type_name() == "Constant" else source.input_value(0).get_node()
        limits.append(float(np.ravel(constant.data)[0]))
        # Of all examples, not the average over batches, which NNCF takes by default.
        assert limits[-1] == pytest.approx(np.abs(images).max(), rel=0.02)
    assert limits[1] == pytest.approx(3 * limits[0], rel=1e-2)


def test_what_others_log_is_not_silenced_with_nncf(network: Network, resnet: Case, tmp_path: Path) -> None:
    handler = logging.NullHandler()
    logging.getLogger("nncf").addHandler(handler)  # as pytest does with its own
    try:
        convert_openvino(network, tmp_path / "m.xml", form="int8", calibration={"image": resnet.features["image"]})
    finally:
        logging.getLogger("nncf").removeHandler(handler)
    assert handler.level == logging.NOTSET


def test_the_file_says_what_it_is(network: Network, resnet: Case, tmp_path: Path) -> None:
    import openvino

    metadata = {"labels": ["cat", "dog"], "version": 3, "note": "é"}
    for form in ("float32", "int8"):
        file = tmp_path / "m.xml"
        convert_openvino(network, file, form=form, calibration=calibration(form, resnet), metadata=metadata)
        model = openvino.Core().read_model(file)
        texts = {key: model.get_rt_info(["headrace", key]).value for key in (*metadata, "weights_sha256")}
        assert json.loads(texts["labels"]) == ["cat", "dog"]
        assert (texts["version"], texts["note"]) == ("3", "é")
        assert texts["weights_sha256"] == network.weights_sha256()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("empty", "it holds no graph of OpenVINO"),
        ("onnx", "it holds no graph of OpenVINO"),
        ("cut", "Error parsing start element"),
        ("no weights", "Empty weights data in bin file"),
        ("cut weights", "Incorrect weights in bin file"),
        ("other weights", r"m\.bin is damaged or of another model"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused(network: Network, tmp_path: Path, damage: str, message: str) -> None:
    file, weights = tmp_path / "m.xml", tmp_path / "m.bin"
    convert_openvino(network, file)
    if damage == "onnx":
        convert_onnx(network, file)
    elif damage == "no weights":
        weights.unlink()
    elif damage == "cut weights":
        weights.write_bytes(weights.read_bytes()[:100])
    elif damage == "other weights":
        model = resnet_case().model
        model.get_layer("logits").bias.assign_add([0.0, 0.0, 0.0, 1.0])
        convert_openvino(Network.of(model), tmp_path / "other.xml")
        weights.write_bytes((tmp_path / "other.bin").read_bytes())
    else:
        file.write_bytes(file.read_bytes()[: {"empty": 0, "cut": 3000}[damage]])
    with pytest.raises(ArtifactError, match=rf"OpenVINO cannot load .*m\.xml: {message}"):
        load_runner(file)


class Determinant(layers.Layer):
    """ONNX has it, OpenVINO has not."""

    def call(self, inputs: Any) -> Any:
        return tf.linalg.det(inputs)[:, None]


def test_a_refusal_names_the_operation_and_writes_nothing(tmp_path: Path) -> None:
    x = keras.Input((3, 3), name="x")
    with pytest.raises(ConversionError) as caught:
        convert_openvino(Network.of(keras.Model(x, Determinant()(x))), tmp_path / "m.xml")
    assert caught.value.where == "operation Det-17 of ONNX"
    assert caught.value.why == "OpenVINO has no form of it"
    assert "other operations of keras.ops" in caught.value.way_round
    x = keras.Input((1,), dtype="string", name="x")
    with pytest.raises(ConversionError, match="openvino cannot take this model: operation LookupTableFindV2 of layer"):
        lookup = layers.StringLookup(vocabulary=["a", "b"], name="lookup")
        convert_openvino(Network.of(keras.Model(x, lookup(x))), tmp_path / "m.xml")
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_model_is_not_written(
    network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = module.to_onnx_model(network)
    model = resnet_case().model
    model.get_layer("logits").bias.assign_add([0.0, 0.0, 0.1, 0.0])
    monkeypatch.setattr(module, "to_onnx_model", lambda *args, **options: other)
    with pytest.raises(ConversionError, match=r"reported success, but it differs from Keras by 0\.1"):
        convert_openvino(Network.of(model), tmp_path / "m.xml")
    assert list(tmp_path.iterdir()) == []


def test_options_that_do_not_fit(network: Network, tmp_path: Path) -> None:
    with pytest.raises(HeadraceError, match=r"OpenVINO has no form 'flaot16'\. Did you mean 'float16'\?"):
        convert_openvino(network, tmp_path / "m.xml", form="flaot16")
    with pytest.raises(HeadraceError, match="OpenVINO int8 needs calibration"):
        convert_openvino(network, tmp_path / "m.xml", form="int8")
    with pytest.raises(HeadraceError, match="calibration lacks 'image'"):
        convert_openvino(network, tmp_path / "m.xml", form="int8", calibration={"images": np.zeros(3)})
    with pytest.raises(HeadraceError, match=r"a pair of files, \*\.xml and \*\.bin, received m\.onnx"):
        convert_openvino(network, tmp_path / "m.onnx")


def test_the_packages_are_imported_in_the_way_that_keeps_them_from_reporting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both report imports and calls by default, and keep a number for the user in the home folder."""
    from openvino_telemetry.utils.opt_in_checker import ConsentCheckResult, OptInChecker

    (tmp_path / "reporter.py").write_text("import os\nSEEN = os.environ.get('CI')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("CI", raising=False)
    seen = require("reporter", "openvino").SEEN
    assert "CI" not in os.environ
    monkeypatch.setenv("CI", seen)
    declined = OptInChecker().check(enable_opt_in_dialog=False, disable_in_ci=True)
    assert declined == ConsentCheckResult.DECLINED


def test_a_package_that_is_not_installed(network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    for act in (lambda: convert_openvino(network, tmp_path / "m.xml"), lambda: load_runner(tmp_path / "m.xml")):
        with pytest.raises(HeadraceError, match=r"openvino is not installed: pip install 'headrace\[openvino\]'\."):
            act()
