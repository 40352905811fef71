"""The contract notices what it is there to notice."""

import keras
import pytest

from models.contract import check_model
from models.spec import FeatureSpec, OutputSpec

SPEC = {"x": FeatureSpec((4,), "float32")}
OUTPUT = OutputSpec("multiclass", 3)


def network(layer, *, units=3, dtype="float32"):
    """A linear model after `layer`."""
    x = keras.Input((4,), name="x")
    return keras.Model({"x": x}, keras.layers.Dense(units, dtype=dtype, name="logits")(layer(x)))


def good(input_spec, output_spec, *, name="identity"):
    return network(keras.layers.Identity(name=name))


def wrong_width(input_spec, output_spec):
    return network(keras.layers.Identity(), units=2)


def low_precision(input_spec, output_spec):
    return network(keras.layers.Identity(), dtype="bfloat16")


def follows_the_policy(input_spec, output_spec):
    return network(keras.layers.Identity(), dtype=None)


def own_seed(input_spec, output_spec):
    own_seed.count = getattr(own_seed, "count", 0) + 1
    return network(keras.layers.Dense(4, kernel_initializer=keras.initializers.GlorotUniform(own_seed.count)))


def frozen(input_spec, output_spec):
    model = network(keras.layers.Identity())
    model.trainable = False
    return model


def cut_gradient(input_spec, output_spec):
    model = network(keras.layers.Identity())
    model.get_layer("logits").trainable = False
    x = model.output
    hidden = keras.layers.Dense(4, name="unused")(keras.ops.stop_gradient(model.input["x"]) * 0)
    return keras.Model(model.input, x + 0 * hidden[:, :3])


def over_the_batch(input_spec, output_spec):
    class Centre(keras.layers.Layer):
        def call(self, inputs):
            return inputs - keras.ops.mean(inputs, axis=0)

    return network(Centre())


def test_accepts_a_good_model():
    check_model(good, SPEC, OUTPUT, name="other")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (wrong_width, r"logits have shape \(4, 2\), should be"),
        (low_precision, "logits are bfloat16: give the last layer dtype='float32'"),
        (follows_the_policy, "logits are bfloat16 under mixed_bfloat16"),
        (own_seed, "differs between two builds after the same"),
        (frozen, "the model has no trainable weights"),
        (cut_gradient, "a training step changes no weight"),
        (over_the_batch, "an example's logits depend on the rest of its batch"),
    ],
)
def test_notices(build, message):
    with pytest.raises(AssertionError, match=message):
        check_model(build, SPEC, OUTPUT)
    assert keras.config.dtype_policy().name == "float32"
