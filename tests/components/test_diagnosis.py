from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from components.train.diagnosis import Finding, first_non_finite

X = np.array([[0.0, 1.0], [2.0, 0.0], [3.0, 4.0], [1.0, 1.0]], np.float32)
Y = np.ones((4, 1), np.float32)


@keras.saving.register_keras_serializable(package="test_diagnosis")
class Apply(layers.Layer):
    """An operation of keras.ops by name."""

    def __init__(self, operation: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.operation = getattr(ops, operation)

    def call(self, inputs: Any) -> Any:
        return self.operation(inputs)


def dense(units: int = 2, *, weight: float = 1.0, name: str = "dense", **kwargs: Any) -> layers.Dense:
    """Every output the weighted sum of the inputs."""
    return layers.Dense(units, kernel_initializer=keras.initializers.Constant(weight), name=name, **kwargs)


def compiled(model: keras.Model, loss: Any = "mse") -> keras.Model:
    model.compile(optimizer="sgd", loss=loss)
    return model


def chain(*parts: layers.Layer, loss: Any = "mse", name: str = "chain") -> keras.Model:
    return compiled(keras.Sequential([keras.Input((2,), name="x"), *parts], name=name), loss)


class Subclassed(keras.Model):
    """Two Dense layers with an operation between them and one at the end, that are no layers."""

    def __init__(self, between: str = "relu", end: str = "relu", policy: str = "float32", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.first, self.second = dense(name="first", dtype=policy), dense(1, name="second", dtype=policy)
        self.between, self.end = getattr(ops, between), getattr(ops, end)

    def call(self, inputs: Any) -> Any:
        return self.end(self.second(self.between(self.first(inputs))))


class Block(layers.Layer):
    """Dense, and the log of what it gives."""

    def __init__(self, regularizer: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.dense = dense(kernel_regularizer=regularizer)

    def call(self, inputs: Any) -> Any:
        return ops.log(self.dense(inputs) - 1)


def subclassed(**kwargs: Any) -> keras.Model:
    model = Subclassed(name="net", **kwargs)
    model(X)
    return compiled(model)


def found(model: keras.Model, x: Any = X, y: Any = Y, *rest: Any, **kwargs: Any) -> Finding:
    finding = first_non_finite(model, (x, y, *rest), **kwargs)
    assert finding is not None
    return finding


def test_a_finite_step():
    assert first_non_finite(chain(dense()), (X, Y)) is None
    assert first_non_finite(chain(dense()), (X, Y, np.ones(4, np.float32))) is None


# Data and weights


def test_feature():
    inputs = {"age": keras.Input((1,), name="age"), "id": keras.Input((1,), name="id", dtype="int64")}
    model = compiled(
        keras.Model(inputs, dense(1)(layers.Concatenate()([inputs["age"], ops.cast(inputs["id"], "float32")])))
    )
    batch = {"age": np.array([[1.0], [np.nan], [-np.inf], [np.nan]], np.float32), "id": np.ones((4, 1), np.int64)}
    finding = found(model, batch)
    assert (finding.kind, finding.name, finding.values, finding.num_rows) == ("feature", "age", ("NaN", "-Inf"), 3)
    assert str(finding) == "feature 'age' is NaN and -Inf in 3 of 4 rows"


def test_features_without_names():
    bad = np.where(X == 4, np.inf, X)
    assert str(found(chain(dense()), bad)) == "feature 'x' is Inf in 1 of 4 rows"
    assert str(found(subclassed(), bad)) == "feature 'x' is Inf in 1 of 4 rows"


def test_a_feature_that_the_model_copes_with():
    model = chain(Apply("nan_to_num", name="clean"), dense())
    assert first_non_finite(model, (np.where(X == 4, np.nan, X), Y)) is None


@pytest.mark.parametrize(
    ("y", "weights", "text"),
    [
        (np.where(X[:, :1] == 3, np.nan, Y), None, "label 'y' is NaN in 1 of 4 rows"),
        (
            Y,
            np.array([1, np.inf, np.nan, 1], np.float32),
            "sample weight 'sample_weight' is NaN and Inf in 2 of 4 rows",
        ),
    ],
)
def test_labels_and_sample_weights(y, weights, text):
    assert str(found(chain(dense(1)), X, y, weights)) == text


def test_weight():
    model = chain(dense(3, name="first"), dense(1, name="second"))
    kernel = model.layers[0].kernel
    kernel.assign([[1, np.nan, 1], [1, 1, np.inf]])
    finding = found(model)
    assert (finding.kind, finding.name, finding.values, finding.num_rows) == ("weight", kernel.path, ("NaN", "Inf"), 2)
    assert str(finding) == f"weight '{kernel.path}' is NaN and Inf in 2 of 6 entries before this step"


def test_moving_statistics_that_training_does_not_use():
    """The step itself is finite, but the model is spoilt."""
    model = chain(layers.BatchNormalization(name="norm"))
    model.layers[0].moving_variance.assign([1, np.nan])
    assert found(model).name.endswith("norm/moving_variance")


def test_metrics_that_are_nan_from_a_step_before_are_no_weights():
    class Counting(layers.Layer):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.mean = keras.metrics.Mean(name="mean")

        def call(self, inputs: Any) -> Any:
            return inputs

    model = chain(Counting(name="counting"), dense(1))
    model.layers[0].mean.update_state(np.nan)
    model.metrics[0].update_state(np.nan)
    assert first_non_finite(model, (X, Y)) is None


# Layers


def test_layer_of_a_sequential_model():
    finding = found(chain(dense(), Apply("log", name="log"), dense(1, name="last")), X - 1)
    assert finding == Finding(
        kind="layer",
        name="log",
        values=("NaN", "-Inf"),
        num_rows=3,
        input_range=(-1.0, 5.0),
        text="layer 'log' (Apply) gives NaN and -Inf in 3 of 4 rows; its inputs lie in [-1, 5]",
    )


def test_overflow_says_what_the_weights_are():
    finding = found(chain(dense(name="small", weight=1e20), dense(name="large", weight=-1e30)))
    assert str(finding).startswith("layer 'large' (Dense) gives -Inf in 4 of 4 rows; its inputs lie in [1e+20, 7e+20]")
    assert str(finding).endswith("its weights in [-1e+30, 0]")


def test_layer_of_a_submodel():
    inputs = keras.Input((2,))
    inner = keras.Model(inputs, Apply("log", name="log")(dense(weight=0.0)(inputs)), name="inner")
    finding = found(chain(inner, dense(1, name="last")))
    assert str(finding) == "layer 'inner/log' (Apply) gives -Inf in 4 of 4 rows; its inputs lie in [0, 0]"


def test_second_call_of_a_shared_layer():
    inputs = keras.Input((2,))
    shared = Apply("log", name="shared")
    model = compiled(keras.Model(inputs, dense(1)(shared(shared(inputs)))))
    finding = found(model, np.array([[2.0, 3.0], [1.0, 5.0]], np.float32), Y[:2])
    assert str(finding).startswith("layer 'shared' (Apply) gives -Inf in 1 of 2 rows; its inputs lie in [0, 1.609]")


def test_operation_of_a_functional_graph():
    inputs = keras.Input((2,))
    finding = found(compiled(keras.Model(inputs, dense(1)(ops.log(inputs)))))
    assert finding.name.startswith("log") and finding.input_range == (0, 4)
    assert str(finding).endswith("(Log) gives -Inf in 2 of 4 rows; its inputs lie in [0, 4]")


def test_operation_of_a_layer_with_layers():
    """The Dense gives 1, 2, 7, 2, of which it takes the log less one."""
    text = str(found(chain(Block(name="block"), dense(1, name="last"))))
    assert text.startswith("layer 'block' (Block) gives -Inf in 1 of 4 rows, by an operation of its own call(): ")
    assert "; its inputs lie in [0, 4]" in text


def test_operation_between_the_layers_of_a_subclassed_model():
    finding = found(subclassed(between="log"), X - X)
    assert (finding.kind, finding.name, finding.input_range) == ("layer", "net", (0, 0))
    assert str(finding) == (
        "an operation in the call() of model 'net' gives -Inf in 4 of 4 rows; layer 'second' (Dense) receives it, "
        "and layer 'first' (Dense) before gives values in [0, 0]"
    )


def test_operation_at_the_end_of_a_subclassed_model():
    finding = found(subclassed(end="log"), X - X)
    assert (finding.kind, finding.name) == ("layer", "net")
    assert str(finding).startswith(
        "model 'net' (Subclassed) gives -Inf in 4 of 4 rows by an operation of its own call()"
    )


def test_other_layers_that_start_from_finite_inputs():
    """Masked scores may be infinite without harm, so what comes later is named, too."""
    inputs = keras.Input((2,))
    masked = layers.Softmax(name="softmax")(Apply("log", name="mask")(inputs))
    model = compiled(keras.Model(inputs, Apply("log", name="fault")(dense(weight=0.0)(masked))))
    text = str(found(model))
    assert text.startswith("layer 'mask' (Apply) gives -Inf in 2 of 4 rows")
    assert text.endswith(". From finite inputs so do layer 'fault' (Apply)")
    harmless = compiled(keras.Model(inputs, layers.Softmax()(Apply("log")(ops.stop_gradient(inputs)))))
    assert first_non_finite(harmless, (X, Y)) is None


# Mixed precision


def half(*parts: Any) -> keras.Model:
    return chain(*parts, dense(1, name="logits", dtype="float32"))


def test_float16_overflow_in_the_second_layer():
    model = half(dense(name="first", weight=1e4, dtype="mixed_float16"), dense(name="second", dtype="mixed_float16"))
    finding = found(model, np.array([[1.0, 1.0], [2.0, 2.0]], np.float32), Y[:2])
    assert (finding.name, finding.num_rows, finding.input_range) == ("second", 1, (20000, 40000))
    assert str(finding).startswith(
        "layer 'second' (Dense) gives Inf in 1 of 2 rows (float16 ends at 65504); its inputs lie in [2e+04, 4e+04]"
    )


@pytest.mark.parametrize("first", [False, True])
def test_cast_to_float16(first):
    """Of a feature, or of what a float32 layer gives."""
    before = [dense(name="full", weight=1e5)] if first else []
    model = half(*before, dense(name="half", weight=0.0, dtype="mixed_float16"))
    finding = found(model, X if first else X * 1e5)
    assert finding.name == "half"
    assert str(finding) == (
        "the cast of the inputs of layer 'half' (Dense) gives Inf in 4 of 4 rows "
        f"(float16 ends at 65504), and they reach {'7e+05' if first else '4e+05'}"
    )


def test_float16_gradient_depends_on_the_loss_scale():
    """Logits of the sum of 2 x; the gradients at them are 2 (2 sum - 1) / 4, of which the largest, 6.5, is scaled."""
    model = half(dense(name="half", dtype="mixed_float16"))
    assert first_non_finite(model, (X, Y), loss_scale=2.0**10) is None
    finding = found(model, loss_scale=2.0**15)
    assert (finding.kind, finding.values) == ("gradient", ("Inf",))
    assert str(finding).endswith(
        " with a loss scale of 32768; it arises in the gradient of the output of layer 'half' (Dense), which is float16 "
        "(that ends at 65504)"
    )


def test_overflow_of_an_operation_between_float16_layers():
    """exp(12) is no float16, but nothing was cast that is not."""
    finding = found(subclassed(between="exp", policy="mixed_float16"), np.full((4, 2), 6, np.float32))
    assert str(finding).startswith("an operation in the call() of model 'net' gives Inf in 4 of 4 rows (float16 ends")
    assert finding.input_range == (12, 12)


# Loss


def test_loss():
    model = chain(dense(1), loss=lambda y_true, y_pred: ops.log(y_pred - 1))
    finding = found(model)
    assert (finding.kind, finding.name, finding.input_range) == ("loss", "loss", (1, 7))
    assert str(finding) == "the loss is -Inf; the model's outputs lie in [1, 7]; the labels lie in [1, 1]"


@pytest.mark.parametrize("as_dictionary", [False, True])
def test_loss_of_one_of_several_outputs(as_dictionary):
    def infinite(y_true: Any, y_pred: Any) -> Any:
        return ops.log(0 * y_pred)

    inputs = keras.Input((2,))
    outputs = [dense(1, name="good")(inputs), dense(1, name="bad")(inputs)]
    names = ["good", "bad"]
    model = keras.Model(inputs, dict(zip(names, outputs, strict=True)) if as_dictionary else outputs)
    compiled(model, {"good": "mse", "bad": infinite})
    y = {"good": Y, "bad": Y} if as_dictionary else (Y, Y)
    for _ in range(2):  # The first builds the loss.
        finding = found(model, X, y)
        assert (finding.kind, finding.name) == ("loss", "bad")
        assert str(finding).startswith("the loss of output 'bad' is -Inf; ")
        # As a bad step before would have left them.
        for metric in [metric for metric in model.metrics if metric.name.endswith("_loss")]:
            metric.update_state(np.nan)


def log_of_zero(values: Any) -> Any:
    return ops.log(ops.sum(0 * values))


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (dense(1, name="second", kernel_regularizer=log_of_zero), "second"),
        (dense(1, name="second", activity_regularizer=log_of_zero), "second"),
        (Block(name="block", regularizer=log_of_zero), "block/dense"),
    ],
)
def test_loss_that_a_layer_adds(layer, name):
    finding = found(chain(dense(name="first"), layer), X + 2)
    assert (finding.kind, finding.name) == ("loss", name)
    assert str(finding).startswith(f"the loss that layer '{name}' (Dense) adds (a regularizer or add_loss) is -Inf")


# Gradients


def test_gradient_alone():
    """sqrt at 0, behind a layer and before one."""
    model = chain(dense(name="first", weight=0.0), Apply("sqrt", name="sqrt"), dense(1, name="second"))
    finding = found(model, X + 1)
    assert finding == Finding(
        kind="gradient",
        name=model.layers[0].kernel.path,
        values=("-Inf",),
        num_rows=4,
        input_range=(0, 0),
        text=(
            f"the loss is finite (1), but the gradient of '{model.layers[0].kernel.path}' is -Inf in 4 of 4 "
            "entries; it arises in layer 'sqrt' (Apply), whose inputs lie in [0, 0]"
        ),
    )


def test_the_variable_nearest_to_the_loss():
    """Gradients of all layers before the sqrt are bad; the second's is computed first."""
    parts = [dense(name="z"), dense(name="a", weight=0.0), Apply("sqrt", name="sqrt"), dense(1, name="m")]
    assert found(chain(*parts)).name == parts[1].kernel.path


class Outer(layers.Layer):
    """Layers one after the other."""

    def __init__(self, *parts: layers.Layer, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.parts = list(parts)

    def call(self, inputs: Any) -> Any:
        for part in self.parts:
            inputs = part(inputs)
        return inputs


def test_gradient_in_a_layer_within_a_layer():
    outer = Outer(Apply("sqrt", name="inner"), dense(name="after"), name="outer")
    model = chain(dense(weight=0.0), outer, dense(1, name="last"))
    assert "it arises in layer 'outer/inner' (Apply), whose" in str(found(model))


def test_the_variable_nearest_to_the_loss_within_a_layer():
    outer = Outer(dense(name="a"), dense(name="b", weight=0.0), name="outer")
    assert found(chain(outer, Apply("sqrt", name="sqrt"), dense(1))).name.endswith("outer/b/kernel")


def test_gradient_of_an_operation_between_layers():
    assert "it arises in an operation of a call() that takes the output of layer 'first' (Dense)" in str(
        found(subclassed(between="sqrt", end="negative"), X - X)
    )


def test_gradient_of_layers_that_share_an_input():
    inputs = keras.Input((2,))
    shared = dense(weight=0.0, name="shared")(inputs)
    roots, other = Apply("sqrt", name="root")(shared), Apply("square", name="square")(shared)
    model = compiled(keras.Model(inputs, dense(1, name="last")(roots + other)))
    assert "it arises in layer 'square' (Apply) or layer 'root' (Apply), whose inputs lie in [0, 0]" in str(
        found(model)
    )


def test_gradient_of_the_loss():
    model = chain(dense(1, weight=0.0), loss=lambda y_true, y_pred: ops.sqrt(y_pred))
    assert str(found(model)).endswith("it arises in the loss itself, for outputs of the model in [0, 0]")


def test_gradient_within_the_weights():
    class Root(layers.Layer):
        def build(self, input_shape: Any) -> None:
            self.scale = self.add_weight(name="scale", shape=(), initializer="zeros")

        def call(self, inputs: Any) -> Any:
            return inputs * ops.sqrt(self.scale)

    model = chain(dense(), Root(name="root"))
    finding = found(model)
    assert finding.name == model.layers[1].scale.path
    assert "it arises in layer 'root' (Root)" in str(finding)


def test_gradient_of_an_embedding():
    """Which TensorFlow keeps as slices."""
    inputs = keras.Input((3,), dtype="int64")
    embedded = layers.Embedding(5, 2, embeddings_initializer="zeros", name="table")(inputs)
    pooled = layers.GlobalAveragePooling1D()(Apply("sqrt", name="sqrt")(embedded))
    finding = found(compiled(keras.Model(inputs, dense(1)(pooled))), np.array([[0, 1, 1], [2, 3, 4]]), Y[:2])
    assert finding.name.endswith("table/embeddings") and "layer 'sqrt'" in str(finding)


# The rest


def test_the_state_stays_as_it_is():
    model = chain(
        layers.BatchNormalization(name="norm", momentum=0.5),
        layers.Dropout(0.5, name="drop", seed=1),
        dense(1, kernel_regularizer="l2", activity_regularizer="l1"),
        Apply("log", name="log"),
    )
    model.compile(optimizer="adam", loss="mse", metrics=["mae"])
    model.train_on_batch(X, Y)
    for variable in model.trainable_variables:
        variable.assign(np.zeros(variable.shape))
    variables = [*model.variables, *model.optimizer.variables]
    before = [np.array(variable) for variable in variables]
    assert found(model).name == "log"
    for variable, value in zip(variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)
    assert all("call" not in vars(layer) for layer in model.layers)


def test_random_layers_draw_what_the_step_would():
    """The diagnosis repeats the step, so it has to draw the same mask: here a mask that leaves exactly one infinite sum."""
    model = chain(layers.Dropout(0.5, name="drop", seed=3), Apply("log", name="log"))
    state = model.layers[0].seed_generator.state.numpy()
    first, second = found(model, X + 1), found(model, X + 1)
    dropped = np.asarray(model.layers[0](X + 1, training=True) == 0)
    assert first == second and first.num_rows == dropped.any(axis=1).sum()
    assert not np.array_equal(state, model.layers[0].seed_generator.state)


def test_a_loss_of_the_models_own():
    class Own(keras.Model):
        def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool = True) -> Any:
            return ops.sum(ops.log(y_pred * 0))

    inputs = keras.Input((2,))
    model = Own(inputs, dense(1)(inputs))
    model.compile(optimizer="sgd")
    assert str(found(model)).startswith("the loss is -Inf; ")


def test_a_model_without_layers():
    class Bare(keras.Model):
        def build(self, input_shape: Any) -> None:
            self.scale = self.add_weight(name="scale", shape=(), initializer="zeros")

        def call(self, inputs: Any) -> Any:
            return ops.log(inputs * self.scale)

    model = Bare(name="bare")
    model(X)
    assert str(found(compiled(model))).startswith("model 'bare' (Bare) gives -Inf in 4 of 4 rows")


@pytest.mark.parametrize("what", ["built", "compiled"])
def test_a_model_that_is_not_ready(what):
    model = {"built": compiled(keras.Sequential([dense()], name="raw")), "compiled": keras.Sequential(name="raw")}[what]
    if what == "compiled":
        model.add(keras.Input((2,)))
        model.add(dense())
    with pytest.raises(ValueError, match=f"model 'raw' is not {what}; call"):
        first_non_finite(model, (X, Y))


def test_recurrent_layers():
    model = compiled(
        keras.Sequential([keras.Input((3, 2)), layers.LSTM(2, name="lstm"), Apply("log", name="log")], name="sequence")
    )
    finding = found(model, np.zeros((4, 3, 2), np.float32))
    assert finding.name == "log" and finding.input_range == (0, 0)


def test_bfloat16():
    model = half(dense(name="first", dtype="mixed_bfloat16"), Apply("log", name="log", dtype="mixed_bfloat16"))
    assert str(found(model, X - X)).startswith(
        "layer 'log' (Apply) gives -Inf in 4 of 4 rows; its inputs lie in [0, 0]"
    )


def test_tensors_of_a_dataset():
    batch = next(iter(tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)))
    assert first_non_finite(chain(dense(1)), batch) is None
