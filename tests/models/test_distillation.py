"""The loss of distillation against its formula, and what becomes of teacher and student."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers, ops

from models.optimization import DistillationConfig, distill

RNG = np.random.default_rng(5)
ROWS = RNG.normal(size=(24, 6)).astype(np.float32)
LABELS = RNG.integers(0, 3, 24)
WEIGHTS = RNG.uniform(0.2, 2, 24).astype(np.float32)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def network(width, num_outputs=3, seed=0, penalty=0.0):
    """With a penalty of weights, and with layers that do something else in training than at inference."""
    keras.utils.set_random_seed(seed)
    kernel = {"kernel_regularizer": keras.regularizers.L2(penalty) if penalty else None}
    x = inputs = keras.Input((6,), name="features")
    x = layers.Dense(width, activation="tanh", name="hidden", **kernel)(x)
    x = layers.Dropout(0.3, name="dropout")(layers.BatchNormalization(name="norm")(x))
    return keras.Model(inputs, layers.Dense(num_outputs, name="logits")(x), name=f"width_{width}")


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def loss_of(stage, labels=LABELS, weights=None, loss=LOSS, training=True):
    """What a step would learn from, of answers without dropout."""
    stage.model.compile("sgd", loss)
    answers = stage.model(ROWS, training=False)
    return float(stage.model.compute_loss(ROWS, labels, answers, weights, training=training))


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_loss_of_logits(weights):
    """Hinton et al. (arXiv:1503.02531), section 2: soft targets at a temperature, times its square."""
    student, teacher = network(4, penalty=0.1), network(16, seed=1)
    config = DistillationConfig(alpha=0.7, temperature=3.0)
    s, t = (log_softmax(model.predict(ROWS, verbose=0) / 3.0) for model in (student, teacher))
    soft = 9 * (np.exp(t) * (t - s)).sum(-1)
    hard = -log_softmax(student.predict(ROWS, verbose=0))[np.arange(24), LABELS]
    penalty = 0.1 * (ops.convert_to_numpy(student.get_layer("hidden").kernel) ** 2).sum()
    each = 1 if weights is None else weights
    stage = distill(student, config, teacher=teacher)
    expected = (each * (0.7 * soft + 0.3 * hard)).mean() + penalty
    np.testing.assert_allclose(loss_of(stage, weights=weights), expected, rtol=1e-5)
    np.testing.assert_allclose(
        loss_of(stage, weights=weights, training=False), (each * hard).mean() + penalty, rtol=1e-5
    )


def test_loss_of_one_logit_is_that_of_two_classes():
    student, teacher = network(4, 1), network(16, 1, seed=1)
    s, t = (1 / (1 + np.exp(-model.predict(ROWS, verbose=0) / 2.0)) for model in (student, teacher))
    expected = 4 * (t * np.log(t / s) + (1 - t) * np.log((1 - t) / (1 - s))).mean()
    stage = distill(student, DistillationConfig(alpha=1.0, temperature=2.0), teacher=teacher)
    np.testing.assert_allclose(loss_of(stage, LABELS[:, None] > 0, loss="mse"), expected, rtol=1e-4)


def test_loss_of_numbers():
    student, teacher = network(4, 2), network(16, 2, seed=1)
    labels = RNG.normal(size=(24, 2)).astype(np.float32)
    s, t = student.predict(ROWS, verbose=0), teacher.predict(ROWS, verbose=0)
    expected = 0.25 * ((t - s) ** 2).mean() + 0.75 * np.abs(labels - s).mean()
    stage = distill(student, DistillationConfig("numbers", alpha=0.25), teacher=teacher)
    np.testing.assert_allclose(loss_of(stage, labels, loss="mae"), expected, rtol=1e-5)


def test_loss_of_several_outputs_is_the_sum():
    def two(model):
        return keras.Model(model.input, {"a": model.output, "b": layers.Dense(2)(model.get_layer("norm").output)})

    student, teacher = two(network(4)), two(network(16, seed=1))
    s, t = student.predict(ROWS, verbose=0), teacher.predict(ROWS, verbose=0)
    expected = sum(((t[name] - s[name]) ** 2).mean() for name in "ab")
    stage = distill(student, DistillationConfig("numbers", alpha=1.0), teacher=teacher)
    labels = {name: np.zeros_like(s[name]) for name in "ab"}
    np.testing.assert_allclose(loss_of(stage, labels, loss={"a": "mse", "b": "mse"}), expected, rtol=1e-5)


@pytest.mark.parametrize("width", [4, 16])
def test_features_are_matched_through_a_projection_where_their_sizes_differ(width):
    student, teacher = network(width), network(16, seed=1)
    config = DistillationConfig(alpha=0.0, features=(("hidden", "hid*"),), feature_weight=2.0)
    stage = distill(student, config, teacher=teacher)
    hidden = [keras.Model(m.input, m.get_layer("hidden").output).predict(ROWS, verbose=0) for m in (student, teacher)]
    if width == 4:
        kernel, bias = stage.model.projections[0].get_weights()
        hidden[0] = hidden[0] @ kernel + bias
    plain = loss_of(distill(student, DistillationConfig(alpha=0.0), teacher=teacher))
    expected = plain + 2 * ((hidden[0] - hidden[1]) ** 2).mean()
    np.testing.assert_allclose(loss_of(stage), expected, rtol=1e-5)
    assert len(stage.model.trainable_variables) == len(student.trainable_variables) + 2 * (width == 4)


def test_the_student_learns_the_teacher_stays_and_is_not_kept():
    student, teacher = network(4), network(16, seed=1)
    before = [weight.numpy().copy() for weight in (*teacher.weights, *student.weights)]
    features = (("hidden", "hidden"),)
    stage = distill(student, DistillationConfig(alpha=1.0, features=features), teacher=teacher)
    # Labels that say nothing: what is learned comes from the teacher.
    stage.model.compile(keras.optimizers.Adam(0.03), LOSS)
    history = stage.model.fit(ROWS, LABELS, epochs=20, batch_size=24, verbose=0).history["loss"]
    assert history[-1] < 0.4 * history[0]
    after = [weight.numpy() for weight in (*teacher.weights, *student.weights)]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(new, old)
    finished = stage.finish()
    assert {variable.shape[-1] for variable in stage.model.variables if variable.name == "kernel"} == {4, 3, 16}
    assert [weight.shape for weight in finished.weights] == [weight.shape for weight in student.weights]
    assert type(finished) is type(student)
    np.testing.assert_array_equal(finished(ROWS), stage.model(ROWS))
    agreement = np.mean(finished.predict(ROWS, verbose=0).argmax(1) == teacher.predict(ROWS, verbose=0).argmax(1))
    assert agreement > 0.7


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": 1.5}, r"alpha must be a number in \[0, 1\], received 1.5"),
        ({"temperature": 0}, "temperature must be above 0, received 0"),
        ({"outputs": "classes"}, "outputs must be one of 'logits', 'numbers', received 'classes'"),
        ({"outputs": "numbers", "temperature": 2.0}, "nothing reads temperature with outputs 'numbers'"),
        ({"feature_weight": 2.0}, "nothing reads feature_weight without features"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        DistillationConfig(**settings)


def test_pairs_that_cannot_be():
    stage = distill(network(4, 1), DistillationConfig(), teacher=network(16))
    with pytest.raises(ValueError, match=r"answers in the shapes \[\(1,\)\], the teacher in \[\(3,\)\]"):
        loss_of(stage, loss="mse")
    with pytest.raises(ValueError, match=r"'\*o\*' matches 3 layers of model 'width_4': name one of a pair"):
        distill(network(4), DistillationConfig(features=(("*o*", "hidden"),)), teacher=network(16))
    nested = keras.Sequential([keras.Input((6,)), network(4)])
    with pytest.raises(
        ValueError, match=r"does not give the outputs of \['hidden'\]: features are outputs of layers of"
    ):
        distill(nested, DistillationConfig(features=(("hidden", "hidden"),)), teacher=network(16))
    image = keras.Input((8, 8, 3))
    sizes = [keras.Model(image, layers.Flatten()(layers.Conv2D(2, k, name="conv")(image))) for k in (2, 3)]
    with pytest.raises(ValueError, match=r"features 'conv' .* may differ in their last axis alone"):
        distill(sizes[0], DistillationConfig(features=(("conv", "conv"),)), teacher=sizes[1])
