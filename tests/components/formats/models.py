"""The models of the matrix: tiny, of every kind that converters stumble over, each with data that it can be asked.

Each has a weight of 1,024 numbers or more, below which TFLite's dynamic range form leaves them float.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import keras
import numpy as np
from keras import layers, ops

from models import resnet, tabular, transformer
from models.contract import random_inputs
from models.spec import FeatureSpec, OutputSpec

Arrays = dict[str, np.ndarray]
CLASSES = OutputSpec("multiclass", 4)
IMAGE = {"image": FeatureSpec((12, 12, 3), "float32")}
VOCABULARY = 24


@dataclass(frozen=True)
class Case:
    """A model with its data.

    Attributes:
        model: Built, its weights drawn from a seed.
        features: Name -> `(num_examples, ...)`, to calibrate with and to compare on.
    """

    model: keras.Model
    features: Arrays


def resnet_case() -> Case:
    model = resnet.build(IMAGE, CLASSES, stage_sizes=(1, 1), stage_widths=(8, 16))
    return _case(model, random_inputs(IMAGE, 48))


def resnext_case() -> Case:
    """Grouped convolutions between pointwise ones: S. Xie et al. (arXiv:1611.05431)."""
    image = keras.Input((12, 12, 3), name="image")
    x = layers.Conv2D(32, 3, padding="same", use_bias=False, name="stem")(image)
    x = layers.ReLU(name="stem_relu")(layers.BatchNormalization(name="stem_norm")(x))
    y = layers.Conv2D(32, 1, activation="relu", name="reduce")(x)
    y = layers.Conv2D(32, 3, padding="same", groups=8, use_bias=False, name="grouped")(y)
    y = layers.ReLU(name="grouped_relu")(layers.BatchNormalization(name="grouped_norm")(y))
    y = layers.Conv2D(32, 1, name="expand")(y)
    x = layers.Add(name="add")([x, y])
    logits = layers.Dense(4, name="logits")(layers.GlobalAveragePooling2D(name="pool")(x))
    return _case(keras.Model(image, logits, name="resnext"), random_inputs(IMAGE, 48))


def transformer_case(length: int | None) -> Case:
    spec = {"text": FeatureSpec((length,), "int64", num_categories=VOCABULARY, is_sequence=True)}
    model = transformer.build(
        spec, CLASSES, num_layers=1, hidden_dim=32, num_heads=2, mlp_dim=64, max_length=None if length else 16
    )
    return _case(model, random_inputs(spec, 48))


def recurrent_case(kind: type[keras.layers.RNN]) -> Case:
    """A recurrent layer over embedded tokens, with masked padding and a fixed length."""
    tokens = keras.Input((8,), dtype="int32", name="text")
    x = layers.Embedding(VOCABULARY, 16, mask_zero=True, name="embedding")(tokens)
    logits = layers.Dense(4, name="logits")(kind(24, name="recurrent")(x))
    spec = {"text": FeatureSpec((8,), "int32", num_categories=VOCABULARY, is_sequence=True)}
    return _case(keras.Model(tokens, logits, name=kind.__name__.lower()), random_inputs(spec, 48))


def tabular_case() -> Case:
    spec = {
        "fare": FeatureSpec((1,), "float32"),
        "distance": FeatureSpec((2,), "float32"),
        "company": FeatureSpec((1,), "int64", num_categories=9),
    }
    return _case(tabular.build(spec, OutputSpec("binary", 2), hidden_dims=(64, 32), wide=True), random_inputs(spec, 48))


def strings_case() -> Case:
    """A lookup and a hash of strings in the graph of the model."""
    fare, company, city = (
        keras.Input((1,), name="fare"),
        *(keras.Input((1,), dtype="string", name=name) for name in ("company", "city")),
    )
    looked_up = layers.StringLookup(vocabulary=["blue", "checker", "sun"], name="lookup")(company)
    hashed = layers.Hashing(num_bins=6, name="hashing")(city)
    columns = [
        fare,
        layers.Flatten(name="company_flatten")(layers.Embedding(4, 3, name="company_embedding")(looked_up)),
        layers.Flatten(name="city_flatten")(layers.Embedding(6, 3, name="city_embedding")(hashed)),
    ]
    x = layers.Dense(64, activation="relu", name="hidden1")(layers.Concatenate(name="columns")(columns))
    x = layers.Dense(32, activation="relu", name="hidden2")(x)
    model = keras.Model([fare, company, city], layers.Dense(1, activation="sigmoid", name="tip")(x), name="strings")
    rng = np.random.default_rng(0)
    features = {
        "fare": rng.normal(size=(48, 1)).astype("float32"),
        "company": rng.choice(["blue", "checker", "sun", "unheard of"], (48, 1)).astype(object),
        "city": rng.choice(["Chicago", "Evanston", "Oak Park"], (48, 1)).astype(object),
    }
    return _case(model, features)


def mixed_float16_case() -> Case:
    image = keras.Input((12, 12, 3), name="image")
    policy = keras.DTypePolicy("mixed_float16")
    x = layers.Conv2D(8, 3, padding="same", dtype=policy, name="conv")(image)
    x = layers.ReLU(dtype=policy, name="relu")(layers.BatchNormalization(dtype=policy, name="norm")(x))
    x = layers.Conv2D(16, 3, activation="relu", dtype=policy, name="conv2")(x)
    x = layers.GlobalAveragePooling2D(dtype=policy, name="pool")(x)
    logits = layers.Dense(4, dtype="float32", name="logits")(x)
    return _case(keras.Model(image, logits, name="mixed_float16"), random_inputs(IMAGE, 48))


class ScaledTanh(keras.layers.Layer):
    """A layer that no converter knows by name."""

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.scale = self.add_weight(name="scale", shape=(input_shape[-1],), initializer="ones")

    def call(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        return ops.tanh(inputs) * self.scale


def custom_layer_case() -> Case:
    x = keras.Input((16,), name="x")
    hidden = ScaledTanh(name="scaled_tanh")(layers.Dense(64, name="hidden")(x))
    return _case(
        keras.Model(x, layers.Dense(3, name="logits")(hidden), name="custom_layer"),
        random_inputs({"x": FeatureSpec((16,), "float32")}, 48),
    )


def several_case() -> Case:
    """Two inputs in a dictionary, two outputs in a list."""
    image, extra = keras.Input((8, 8, 1), name="image"), keras.Input((3,), name="extra")
    x = layers.Flatten(name="flatten")(layers.Conv2D(4, 3, strides=2, activation="relu", name="conv")(image))
    x = layers.Concatenate(name="join")([x, extra])
    x = layers.Dense(32, activation="relu", name="hidden")(x)
    kind = layers.Dense(3, activation="softmax", name="kind")(x)
    size = layers.Dense(1, name="size")(x)
    spec = {"image": FeatureSpec((8, 8, 1), "float32"), "extra": FeatureSpec((3,), "float32")}
    return _case(keras.Model({"image": image, "extra": extra}, [kind, size], name="several"), random_inputs(spec, 48))


class Tagger(keras.Model):
    """Subclassed: two arguments, a dictionary of answers, and the exact GELU."""

    def __init__(self) -> None:
        super().__init__(name="tagger")
        self.hidden = layers.Dense(32, activation="gelu", name="hidden")
        self.wide = layers.Dense(32, activation="gelu", name="wide")
        self.head, self.gate = layers.Dense(3, name="head"), layers.Dense(1, activation="sigmoid", name="gate")

    def call(self, left: keras.KerasTensor, right: keras.KerasTensor) -> dict[str, keras.KerasTensor]:
        x = self.wide(self.hidden(ops.concatenate([left, right], axis=-1)))
        return {"tags": self.head(x), "gate": self.gate(x)}


def subclassed_case() -> Case:
    spec = {"left": FeatureSpec((4,), "float32"), "right": FeatureSpec((2,), "float32")}
    features = random_inputs(spec, 48)
    model = Tagger()
    model(**features)
    return _case(model, features)


CASES: dict[str, Callable[[], Case]] = {
    "ResNet": resnet_case,
    "ResNeXt (grouped convolutions)": resnext_case,
    "Transformer, fixed length": lambda: transformer_case(10),
    "Transformer, dynamic length": lambda: transformer_case(None),
    "LSTM, masked": lambda: recurrent_case(layers.LSTM),
    "GRU, masked": lambda: recurrent_case(layers.GRU),
    "tabular": tabular_case,
    "tabular with strings": strings_case,
    "mixed_float16": mixed_float16_case,
    "custom layer": custom_layer_case,
    "several inputs and outputs": several_case,
    "subclassed, dictionary of outputs": subclassed_case,
}


def _case(model: keras.Model, features: Arrays) -> Case:
    """Draw every weight, so that no branch is silent as a fresh one with zeros or ones would be."""
    rng = np.random.default_rng(7)
    for weight in model.weights:
        if weight.dtype != "float32":
            continue
        fan_in = int(np.prod(weight.shape[:-1])) if len(weight.shape) > 1 else 25
        values = rng.normal(size=weight.shape) / fan_in**0.5
        scales = ("gamma", "moving_variance", "scale")
        weight.assign(1 + np.abs(values) if weight.name in scales else values)
    return Case(model, features)
