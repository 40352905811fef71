"""split_lookups: a model in two that answers as the whole, and what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers

from components.errors import HeadraceError
from components.formats import Network, convert_onnx, load_runner, split_lookups
from tests.components.formats.models import resnet_case, strings_case, subclassed_case


def test_the_two_answer_as_the_whole() -> None:
    case = strings_case()
    split = split_lookups(case.model)
    assert list(split.lookups.specs) == ["city", "company"]
    assert {name: spec.dtype.name for name, spec in split.core.specs.items()} == {
        "fare": "float32",
        "hashing": "int64",
        "lookup": "int64",
    }
    fed = split.feed(case.features)
    assert set(fed["lookup"].ravel()) == {0, 1, 2, 3}
    wanted = Network.of(case.model).expected(case.features)["tip"]
    np.testing.assert_array_equal(split.core.expected(fed)["tip"], wanted)


def test_what_is_shipped_is_enough(tmp_path: Path) -> None:
    case = strings_case()
    split = split_lookups(case.model)
    split.save(tmp_path)
    convert_onnx(split.core, tmp_path / "m.onnx", examples=split.feed(case.features))
    manifest = json.loads((tmp_path / "lookups.json").read_text())
    assert manifest["inputs"] == ["city", "company"]
    assert sorted(manifest["outputs"]) == ["hashing", "lookup"]
    assert manifest["passed_on"] == ["fare"]
    looked_up = load_runner(tmp_path / manifest["saved_model"])({n: case.features[n] for n in manifest["inputs"]})
    fed = {**looked_up, **{name: case.features[name] for name in manifest["passed_on"]}}
    got = load_runner(tmp_path / "m.onnx")(fed)["tip"]
    np.testing.assert_allclose(got, Network.of(case.model).expected(case.features)["tip"], atol=1e-6)


def test_a_feature_that_both_read_goes_to_both() -> None:
    x = keras.Input((1,), dtype="int64", name="x")
    looked_up = layers.Embedding(4, 2)(layers.IntegerLookup(vocabulary=[5, 7], name="lookup")(x))
    joined = layers.Concatenate()([layers.Flatten()(looked_up), keras.ops.cast(x, "float32")])
    model = keras.Model({"x": x}, {"y": layers.Dense(1)(joined)})
    split = split_lookups(model)
    assert list(split.core.specs) == ["lookup", "x"]
    features = {"x": np.array([[5], [7], [9]])}
    got = split.core.expected(split.feed(features))["y"]
    np.testing.assert_allclose(got, Network.of(model).expected(features)["y"], rtol=1e-6)


def test_models_that_cannot_be_split() -> None:
    with pytest.raises(HeadraceError, match="'resnet' has no lookups among its layers"):
        split_lookups(resnet_case().model)
    with pytest.raises(HeadraceError, match="Only a functional model can be split, and 'tagger' is Tagger"):
        split_lookups(subclassed_case().model)
    x = keras.Input((1,), dtype="int64", name="x")
    words = layers.StringLookup(vocabulary=["a"], invert=True, name="words")(x)
    with pytest.raises(HeadraceError, match="Model 'm' answers with 'words', which is a lookup"):
        split_lookups(keras.Model(x, words, name="m"))
