"""The stages one after another, under the training engine: resume, XLA, replicas, mixed precision; and sizes."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import zlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from components.train.engine import Engine
from models.optimization import (
    ClusteringConfig,
    DistillationConfig,
    PruningConfig,
    Stage,
    cluster,
    distill,
    prune,
    quantize,
    zipped_size,
)
from models.quantization import QuantizedLayer, strip
from tests.components.replicas import batches_of, examples, logits_loss

BATCH, STEPS = 16, 4
X, Y = examples(BATCH * 2 * STEPS)


def model_of(width=16, *, dropout=0.0, precision="float32"):
    keras.utils.set_random_seed(3)
    keras.config.set_dtype_policy(precision)
    hidden = [layers.Dense(width, name="first"), layers.BatchNormalization(name="norm"), layers.ReLU(name="relu")]
    hidden += [layers.Dropout(dropout, seed=1), layers.Dense(width, activation="tanh", name="second")]
    model = keras.Sequential([keras.Input((4,)), *hidden, layers.Dense(1, dtype="float32", name="logits")])
    keras.config.set_dtype_policy("float32")
    return model


def coarse(model):
    """With 3 of 4 weights zero, and few values in one kernel."""
    for layer in (model.get_layer("first"), model.get_layer("second")):
        kernel = np.array(layer.kernel.numpy())
        kernel[np.abs(kernel) < np.quantile(np.abs(kernel), 0.75)] = 0
        layer.kernel.assign(kernel)
    model.get_layer("second").kernel.assign(np.round(model.get_layer("second").kernel * 8) / 8)
    return model


def pruning(model, pattern="unstructured", **settings):
    return prune(model, PruningConfig(pattern, frequency=2, end_step=STEPS, **settings), num_steps=2 * STEPS)


def distillation(model):
    features = (("second", "second"),)
    return distill(model, DistillationConfig(temperature=2.0, features=features), teacher=model_of(24))


STAGES = {
    "weights": pruning,
    "global": lambda model: pruning(model, scope="global"),
    "channels": lambda model: pruning(model, "channels"),
    "clusters": lambda model: cluster(model, ClusteringConfig(6)),
    "distillation": distillation,
    "quantization": lambda model: quantize(coarse(model)),
}


def engine_of(stage, strategy, **options):
    stage.model.compile(keras.optimizers.SGD(0.1, momentum=0.9), logits_loss(), auto_scale_loss=False)
    spec = batches_of(X, Y, batch_size=BATCH).element_spec
    return Engine(stage.model, strategy=strategy, **{"xla": False, "spec": spec, **options})


def trained(kind, *, engine=None, strategy=None, make=STAGES, **model):
    """The stage after all steps of the engine."""
    strategy = strategy or tf.distribute.get_strategy()
    with strategy.scope():
        stage = make[kind](model_of(**model))
        runner = engine_of(stage, strategy, **(engine or {}))
    dataset = strategy.experimental_distribute_dataset(batches_of(X, Y, batch_size=BATCH))
    runner.run(iter(dataset), 2 * STEPS)
    return stage


@functools.cache
def plain(kind):
    """The stage, trained on one device, in float32, without XLA."""
    return trained(kind)


def values(variables):
    return [variable.numpy() for variable in variables]


def state_of(model):
    """Weights and masks, in the order in which they are made."""
    return [np.array(variable, np.float64).ravel() for variable in model.variables if variable.dtype != "uint32"]


# Under the engine


@pytest.mark.parametrize("kind", ["global", "clusters", "distillation", "quantization"])
def test_training_goes_on_from_what_the_engine_keeps(kind):
    """Masks are chosen at steps 0, 2 and 4 of 8; the stage that goes on is made anew."""
    strategy, batches = tf.distribute.get_strategy(), batches_of(X, Y, batch_size=BATCH)
    stage = STAGES[kind](model_of(dropout=0.4))
    engine, iterator = engine_of(stage, strategy), iter(batches)
    engine.run(iterator, STEPS)
    kept = values(engine.variables())
    engine.run(iterator, STEPS)
    again = STAGES[kind](model_of(dropout=0.4))
    other = engine_of(again, strategy)
    for variable, value in zip(other.variables(), kept, strict=True):
        variable.assign(value)
    other.run(iter(batches.skip(STEPS)), STEPS)
    for value, expected in zip(values(other.variables()), values(engine.variables()), strict=True):
        np.testing.assert_array_equal(value, expected)
    assert any((np.asarray(v) != k).any() for v, k in zip(values(engine.variables()), kept, strict=True))
    for weight, expected in zip(again.finish().get_weights(), stage.finish().get_weights(), strict=True):
        np.testing.assert_array_equal(weight, expected)


@pytest.mark.parametrize("kind", ["channels", "clusters", "distillation"])
def test_xla_trains_alike(kind):
    compiled = trained(kind, engine={"xla": True})
    for value, expected in zip(state_of(compiled.model), state_of(plain(kind).model), strict=True):
        np.testing.assert_allclose(value, expected, atol=2e-4)


@pytest.mark.parametrize("kind", ["pruning", "distillation"])
def test_a_stage_that_asks_for_nothing_trains_as_the_model_does(kind):
    """Moving statistics and dropout masks included."""
    make = {
        "model": lambda model: Stage(model, lambda: model),
        "pruning": lambda model: pruning(model, sparsity=0.0),
        "distillation": lambda model: distill(model, DistillationConfig(alpha=0.0), teacher=model_of(24)),
    }
    models = [trained(each, make=make, dropout=0.4).finish() for each in (kind, "model")]
    for value, expected in zip(*map(state_of, models), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
    assert np.abs(models[0].get_layer("norm").moving_mean).max() > 1e-3


def test_bad_steps_choose_no_masks():
    """A step with NaN is left out, whichever of the masks were due at it."""
    stage = STAGES["global"](model_of())
    engine = engine_of(stage, tf.distribute.get_strategy())
    bad = batches_of(np.full_like(X, np.nan), Y, batch_size=BATCH)
    before = state_of(stage.model)
    engine.run(iter(bad), 2)
    for value, expected in zip(state_of(stage.model), before, strict=True):
        np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize("kind", ["weights", "distillation", "quantization"])
def test_mixed_precision(kind):
    """Numbers are those of float32 to the precision of float16; kernels, masks and what is made of them are float32."""
    mixed = trained(kind, engine={"scale_loss": True}, precision="mixed_float16")
    model, expected = mixed.finish(), plain(kind).finish()
    assert model.get_layer("second").compute_dtype == "float16"
    for kernel, other in zip(kernels_of(model), kernels_of(expected), strict=True):
        assert kernel.dtype == np.float32
        assert np.sum(kernel == 0) == np.sum(other == 0)
        assert np.corrcoef(kernel.ravel(), other.ravel())[0, 1] > 0.9


def train_on_replicas():
    """Prints what each stage makes on one device and on each of two; in a process of its own."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    found = {}
    for kind in ("global", "clusters", "distillation", "quantization"):
        shared = trained(kind, strategy=strategy)
        copies = [
            [copy.numpy().tolist() for copy in strategy.experimental_local_results(variable.value)]
            for variable in shared.model.variables
            if variable.name in ("kernel", "centroids") or variable.name.startswith(("mask", "steps"))
        ]
        answers = [stage.finish()(X).numpy().tolist() for stage in (plain(kind), shared)]
        found[kind] = {"copies": copies, "answers": answers}
    print(json.dumps(found))


@pytest.mark.slow
def test_replicas_choose_the_same():
    code = "from tests.models.test_optimization import train_on_replicas; train_on_replicas()"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-3000:]
    for kind, found in json.loads(process.stdout.splitlines()[-1]).items():
        assert found["copies"], kind
        assert all(len(copies) == 2 and copies[0] == copies[1] for copies in found["copies"]), kind
        alone, shared = found["answers"]
        # Batch norm takes the statistics of each replica's rows.
        assert np.abs(np.subtract(alone, shared)).mean() < 0.3 * np.std(alone), kind


# One after another


@pytest.mark.slow
def test_zeros_and_shared_values_last_through_all_stages(tmp_path):
    distilled = trained("distillation", width=64)
    sparse = trained("weights", make={"weights": lambda _: pruning(distilled.finish(), sparsity=0.75)})
    shared = trained("clusters", make={"clusters": lambda _: cluster(sparse.finish(), ClusteringConfig(8))})
    before = kernels_of(shared.finish())
    assert [round(float(np.mean(kernel == 0)), 2) for kernel in before] == [0.75, 0.75, 0.75]
    sizes = {}
    for preserve in (True, False):
        options = {"preserve_sparsity": preserve, "preserve_clusters": preserve}
        make = {"all": lambda _, options=options: quantize(shared.finish(), **options)}
        aware = trained("all", make=make).finish()
        assert isinstance(aware.get_layer("second"), QuantizedLayer)
        after = [kernel.reshape(old.shape) for kernel, old in zip(kernels_of(aware), before, strict=True)]
        for old, new in zip(before, after, strict=True):
            assert np.mean((new == 0)[old == 0]) == 1 if preserve else np.mean(new == 0) < 0.4
            assert (len(np.unique(new)) <= 8) == preserve
            assert np.abs(new - old).max() > 1e-3
        sizes[preserve] = zipped_size(tflite_of(aware, tmp_path / str(preserve)))
    assert sizes[True] < 0.9 * sizes[False]


def test_sparsity_alone_is_kept_too():
    stage = trained("q", make={"q": lambda _: quantize(coarse(model_of()), preserve_clusters=False)})
    for old, new in zip(kernels_of(coarse(model_of())), kernels_of(stage.finish()), strict=True):
        np.testing.assert_array_equal(new.reshape(old.shape) == 0, old == 0)
    assert len(np.unique(kernels_of(stage.finish())[1])) > 20


def test_without_zeros_and_shared_values_it_is_plain_quantization():
    model = keras.Sequential([keras.Input((4,)), layers.BatchNormalization(), layers.Dense(8)])
    stage = quantize(model)
    assert stage.finish() is stage.model
    assert any(isinstance(layer, QuantizedLayer) for layer in stage.model.layers)


def kernels_of(model):
    return [np.array(weight.numpy()) for weight in model.trainable_weights if weight.name == "kernel"]


def tflite_of(aware, folder):
    strip(aware).export(folder, format="tf_saved_model", verbose=False)
    converter = tf.lite.TFLiteConverter.from_saved_model(str(folder))
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    file = folder / "model.tflite"
    file.write_bytes(converter.convert())
    return file


# Any model


@keras.saving.register_keras_serializable(package="test")
class Subclassed(keras.Model):
    """A model with weights of its own, a loss of its own, and no graph."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden, self.head = layers.Dense(8, activation="relu"), layers.Dense(1)

    def build(self, shape):
        self.kernel = self.add_weight(name="kernel", shape=(shape[-1], shape[-1]))
        self.hidden.build(shape)
        self.head.build((None, 8))

    def call(self, inputs):
        self.add_loss(keras.ops.mean(keras.ops.square(inputs @ self.kernel)))
        return self.head(self.hidden(inputs @ self.kernel))


def test_subclassed_models_with_losses_of_their_own():
    model = Subclassed()
    model(X)
    before = model.losses[0]
    stage = prune(model, PruningConfig(sparsity=0.5, schedule="constant"), num_steps=4)
    stage.model(X, training=False)
    np.testing.assert_allclose(stage.model.losses, [before], rtol=1e-6)
    stage.model(X, training=True)
    assert float(stage.model.losses[-1]) < 0.9 * float(before)
    assert [float(np.mean(kernel == 0)) for kernel in kernels_of(stage.finish())] == [0.5, 0.5, 0.5]


def test_models_without_weights_or_graph_are_refused():
    with pytest.raises(ValueError, match="has no weights yet: call it on a batch first"):
        prune(Subclassed(), PruningConfig(), num_steps=4)
    model = Subclassed(name="own")
    model(X)
    with pytest.raises(ValueError, match="the channels of model 'own' cannot be followed, since it is a subclass"):
        prune(model, PruningConfig("channels"), num_steps=4)


# Size


def test_zipped_size_is_that_of_deflate(tmp_path):
    content = bytes(3 << 20) + np.random.default_rng(0).bytes(5000)
    (file := tmp_path / "file").write_bytes(content)
    assert zipped_size(file) == len(zlib.compress(content, 9, wbits=-15))
