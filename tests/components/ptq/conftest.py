"""What the tests of post-training quantization share."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

IMAGES = np.random.default_rng(5).normal(size=(192, 8, 8, 3)).astype("float32")
CALIBRATION, HELD_OUT = {"image": IMAGES[:128]}, {"image": IMAGES[128:]}


def small_network() -> keras.Model:
    """Convolutions with what may lie between two of them, weights drawn from a seed."""
    image = x = keras.Input((8, 8, 3), name="image")
    x = layers.Conv2D(6, 3, padding="same", use_bias=False, name="first")(x)
    x = layers.ReLU(name="first_relu")(layers.BatchNormalization(name="first_norm")(x))
    x = layers.MaxPooling2D(2, name="first_pool")(x)
    x = layers.DepthwiseConv2D(3, padding="same", activation="relu", name="second")(x)
    x = y = layers.Conv2D(8, 1, name="third")(x)
    x = layers.Conv2D(8, 3, padding="same", activation="relu", name="fourth")(layers.ReLU(name="third_relu")(x))
    x = layers.Add(name="add")([x, y])
    x = layers.Dropout(0.5, name="dropout")(layers.GlobalAveragePooling2D(name="pool")(x))
    x = layers.Dense(4, name="logits")(x)
    model = keras.Model(image, x, name="small")
    rng = np.random.default_rng(1)
    for weight in model.weights:
        if weight.dtype != "float32":
            continue  # the state of dropout's random numbers
        values = rng.normal(0, 0.3, weight.shape)
        weight.assign(1 + np.abs(values) if weight.name in ("gamma", "moving_variance") else values)
    return model


def spread(model: keras.Model) -> keras.Model:
    """The same function by channels of very different sizes, as trained networks with depthwise convolutions have them."""
    factors = np.geomspace(0.01, 100, 6)
    norm, second, third = (model.get_layer(name) for name in ("first_norm", "second", "third"))
    gamma, beta, *statistics = norm.get_weights()
    norm.set_weights([gamma * factors, beta * factors, *statistics])
    kernel, bias = second.get_weights()
    second.set_weights([kernel / factors[:, None] / factors[::-1][:, None], bias / factors[::-1]])
    kernel, bias = third.get_weights()
    third.set_weights([kernel * factors[::-1][:, None], bias])
    return model


@pytest.fixture
def model() -> keras.Model:
    return small_network()
