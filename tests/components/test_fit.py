"""Training of compiled models: callbacks, resume, debugging, XLA, class weights, and the end of a run that diverges."""

from __future__ import annotations

import contextlib
import csv
import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from components import progress
from components.config import TrainConfig
from components.errors import ConfigError, HeadraceError
from components.train import engine, fit
from components.train.batches import TrainBatches
from tests.components.replicas import batches_of, dense_model, examples, logits_loss, make_gan

ROWS, BATCH = 64, 8


def compiled(
    *layers: keras.layers.Layer, model: keras.Model | None = None, precision: str = "float32", **options: Any
) -> keras.Model:
    keras.config.set_dtype_policy(precision)
    model = model or dense_model(*layers)
    keras.config.set_dtype_policy("float32")
    chosen = {"optimizer": keras.optimizers.Adam(0.02), "loss": logits_loss(), "metrics": ["mae"]}
    model.compile(**{**chosen, **options}, auto_scale_loss=False)
    return model


def dataset(num_rows: int = ROWS) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(examples(num_rows)).batch(BATCH, drop_remainder=True)


def run(model: keras.Model, data: tf.data.Dataset | None = None, /, **settings: Any) -> fit.Fitted:
    """`fit`, validated with other examples; what is no argument of it goes into the configuration."""
    own = {
        name: settings.pop(name)
        for name in ("callbacks", "class_weight", "steps_per_epoch", "scratch")
        if name in settings
    }
    config = TrainConfig.model_validate({"epochs": 2, "xla": "off", **settings})
    validation = batches_of(*examples(20, seed=1)) if model.output_shape == (None, 1) else None
    with progress.shown_by(lambda _: None):
        return fit.fit(model, dataset() if data is None else data, config=config, validation_data=validation, **own)


def lines_of(*args: Any, **settings: Any) -> list[str]:
    """What a run reports beside its epochs."""
    lines: list[str] = []
    with progress.shown_by(lines.append):
        config = TrainConfig.model_validate({"epochs": 2, **settings})
        fit.fit(*args, config=config)
    return [line for line in lines if not line.startswith("epoch ")]


def lines_of_run(model: keras.Model, **own: Any) -> list[str]:
    lines: list[str] = []
    with progress.shown_by(lines.append):
        config = TrainConfig.model_validate({"epochs": 2, "xla": "off"})
        fit.fit(model, dataset(), config=config, validation_data=batches_of(*examples(20, seed=1)), **own)
    return lines


def assert_close(model: keras.Model, expected: keras.Model, tolerance: float = 1e-5) -> None:
    for weight, other in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(weight, other, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def plain() -> tuple[keras.Model, fit.Fitted]:
    """Two epochs, as they come."""
    model = compiled()
    return model, run(model)


def test_it_trains_as_keras_does(plain: tuple[keras.Model, fit.Fitted]) -> None:
    model, fitted = plain
    by_keras = compiled()
    x, y = examples(20, seed=1)
    history = by_keras.fit(dataset(), epochs=2, validation_data=batches_of(x, y), verbose=0, shuffle=False).history
    assert_close(model, by_keras)
    for ours, theirs in [("train_loss", "loss"), ("train_mae", "mae"), ("validation_loss", "val_loss")]:
        assert [epoch[ours] for epoch in fitted.history] == pytest.approx(history[theirs], rel=1e-5)
    assert (fitted.epochs, fitted.xla, fitted.skipped_steps) == (2, "off", 0)
    assert fitted.validation == pytest.approx(
        {"loss": history["val_loss"][-1], "mae": history["val_mae"][-1]}, rel=1e-5
    )


# Eager debugging and XLA


class Watched(keras.layers.Layer):
    """Counts its calls, and those in which a breakpoint would see numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = self.num_eager_calls = 0

    def call(self, x: Any) -> Any:
        self.num_calls += 1
        self.num_eager_calls += tf.executing_eagerly() and hasattr(x, "numpy")
        return x


def test_eager_steps_agree_and_can_be_looked_into(plain: tuple[keras.Model, fit.Fitted]) -> None:
    watched = Watched()
    model = compiled(watched)
    watched.num_calls = watched.num_eager_calls = 0
    assert run(model, debug="eager", xla="auto").xla == "off: train.debug is eager"
    # 8 steps and a batch of validation each epoch, and the validation of the weights that are kept
    assert watched.num_eager_calls == 2 * (8 + 1) + 1
    assert_close(model, plain[0])
    assert not tf.config.functions_run_eagerly()


def test_compiled_steps_are_traced_once() -> None:
    watched = Watched()
    run(compiled(watched))
    assert watched.num_eager_calls == 0
    assert watched.num_calls < 8


def test_eager_steps_take_the_batches_of_a_split() -> None:
    x, y = examples(16)
    batches = TrainBatches({"x": x}, y, np.ones(16, np.float32), batch_size=BATCH, seed=0)
    network = dense_model()
    inputs = keras.Input((4,), name="x")
    model = compiled(model=keras.Model({"x": inputs}, network(inputs)))
    lines: list[str] = []
    with progress.shown_by(lines.append):
        config = TrainConfig(epochs=2, debug="eager")
        fit.run(model, batches, strategy=model.distribute_strategy, config=config, validate=lambda _: {})
    assert [line.split()[1] for line in lines] == ["1/2", "2/2"]


def test_xla_agrees(plain: tuple[keras.Model, fit.Fitted]) -> None:
    model = compiled()
    fitted = run(model, xla="on")
    assert fitted.xla == "on"
    assert_close(model, plain[0])
    # The step that tried XLA has left no trace.
    assert int(model.optimizer.iterations) == 16
    assert fitted.history[0] == pytest.approx(plain[1].history[0], rel=1e-5)


class NotForXla(keras.layers.Layer):
    """Adds zeros that come from Python."""

    def call(self, x: Any) -> Any:
        return x + tf.ensure_shape(tf.numpy_function(np.zeros_like, [x], x.dtype), x.shape)


def test_without_xla_where_it_cannot(plain: tuple[keras.Model, fit.Fitted]) -> None:
    model = compiled(NotForXla())
    lines = lines_of(model, dataset(), xla="auto")
    assert len(lines) == 1
    assert lines[0].startswith("XLA cannot compile this model, going on without it: ") and "PyFunc" in lines[0]
    assert_close(model, plain[0], 0)
    with pytest.raises(ConfigError, match=r"train\.xla is on, but XLA cannot compile this model: .*PyFunc"):
        run(compiled(NotForXla()), xla="on")


def test_shapes_that_vary_are_reported_where_xla_compiles_each() -> None:
    def sequences() -> keras.Model:
        layers = [keras.Input((None, 4)), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)]
        return compiled(model=keras.Sequential(layers))

    x, y = tf.ones((BATCH, 5, 4)), tf.ones((BATCH, 1))
    varying = tf.data.Dataset.from_tensor_slices([3, 5]).map(lambda length: (x[:, :length], y))
    (line,) = lines_of(sequences(), varying, xla="on")
    assert "(8, None, 4)" in line and "XLA compiles again" in line
    assert lines_of(sequences(), varying, xla="off") == []
    assert lines_of(sequences(), tf.data.Dataset.from_tensors((x, y)), xla="on") == []


# Class weights


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_class_weights_are_kerass(shape: tuple[int, ...]) -> None:
    x, _ = examples()
    y = np.random.default_rng(1).integers(0, 3, len(x)).reshape(shape)
    weights = {0: 0.2, 2: 5.0}

    def model() -> keras.Model:
        keras.utils.set_random_seed(3)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        network = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        return compiled(model=network, loss=loss, metrics=[], optimizer=keras.optimizers.SGD(0.5))

    ours, by_keras, unweighted = model(), model(), model()
    run(ours, batches_of(x, y), class_weight=weights)
    by_keras.fit(batches_of(x, y), epochs=2, class_weight=weights, verbose=0, shuffle=False)
    assert_close(ours, by_keras)
    run(unweighted, batches_of(x, y))
    assert np.abs(ours.get_weights()[0] - unweighted.get_weights()[0]).max() > 0.05


def test_class_weights_multiply_sample_weights() -> None:
    x, y = examples()
    own = np.random.default_rng(1).uniform(0.5, 2, len(x)).astype(np.float32)
    together, by_hand = compiled(), compiled()
    run(together, batches_of(x, y, own), class_weight={1: 3.0})
    run(by_hand, batches_of(x, y, own * np.where(y[:, 0] == 1, 3, 1).astype(np.float32)))
    assert_close(together, by_hand, 1e-6)


def test_class_weights_are_for_one_output() -> None:
    x, y = examples()
    with pytest.raises(ConfigError, match="class_weight is for one output of class numbers"):
        run(compiled(), batches_of(x, {"a": y, "b": y}), class_weight={0: 1.0})


# Callbacks


def test_reduce_learning_rate_on_plateau() -> None:
    model = compiled()
    callback = keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.1, patience=1, min_delta=10)
    run(model, epochs=3, callbacks=[callback])
    assert float(model.optimizer.learning_rate) == pytest.approx(0.02 * 0.1**2)


def test_kerass_early_stopping() -> None:
    weights: list[Any] = []
    keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: weights.append(model.get_weights()))
    stop = keras.callbacks.EarlyStopping("val_loss", min_delta=10, patience=1, restore_best_weights=True)
    model = compiled()
    fitted = run(model, epochs=5, callbacks=[keep, stop])
    assert fitted.epochs == len(fitted.history) == 2
    for weight, first, second in zip(model.get_weights(), *weights, strict=True):
        np.testing.assert_array_equal(weight, first)
        assert (first != second).any()


def test_early_stopping_of_the_configuration_keeps_the_best_epoch() -> None:
    model = compiled(optimizer=keras.optimizers.SGD(30.0))
    weights: list[Any] = []
    keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: weights.append(model.get_weights()))
    fitted = run(model, epochs=9, early_stopping={"patience": 2}, callbacks=[keep])
    losses = [epoch["validation_loss"] for epoch in fitted.history]
    assert fitted.epochs == fitted.best_epoch + 2 < 9
    assert fitted.best_epoch == 1 + int(np.argmin(losses))
    for weight, best in zip(model.get_weights(), weights[fitted.best_epoch - 1], strict=True):
        np.testing.assert_array_equal(weight, best)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("auc", r"train\.early_stopping\.metric: validation gives no 'auc'\. Known: loss, mae"),
        ("a_b", r"train\.early_stopping\.metric: nobody knows whether more of 'a_b' is better\. Use the callback"),
    ],
)
def test_a_metric_to_stop_by_must_be_there_and_have_a_direction(metric: str, message: str) -> None:
    measured = ["mae"] if metric == "auc" else [keras.metrics.MeanAbsoluteError("a_b")]
    with pytest.raises(ConfigError, match=message):
        run(compiled(metrics=measured), early_stopping={"metric": metric})


def test_early_stopping_needs_validation() -> None:
    config = TrainConfig.model_validate({"early_stopping": {}, "xla": "off"})
    with progress.shown_by(lambda _: None), pytest.raises(ConfigError, match="There is no validation data"):
        fit.fit(compiled(), dataset(), config=config)


def test_callbacks_that_write(tmp_path: Path) -> None:
    model = compiled()
    callbacks = [
        keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.weights.h5", save_weights_only=True),
        keras.callbacks.CSVLogger(tmp_path / "log.csv"),
        keras.callbacks.TensorBoard(tmp_path / "events"),
    ]
    fitted = run(model, callbacks=callbacks)
    again = compiled()
    again.optimizer.build(again.trainable_variables)
    again.load_weights(tmp_path / "2.weights.h5")
    assert_close(again, model, 0)
    assert (tmp_path / "1.weights.h5").exists()
    rows = list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))
    assert [row["epoch"] for row in rows] == ["0", "1"]
    assert [float(row["val_mae"]) for row in rows] == [epoch["validation_mae"] for epoch in fitted.history]
    events = b"".join(file.read_bytes() for file in (tmp_path / "events" / "train").glob("events.*"))
    assert events.count(b"epoch_loss") == 2


def averaged(momentum: float = 0.9) -> keras.Optimizer:
    return keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=momentum, ema_overwrite_frequency=None)


def test_averaged_weights_are_validated_and_kept() -> None:
    ours, raw, swapped = (compiled(optimizer=averaged()) for _ in range(3))
    fitted = run(ours, ema_decay=0.9)
    of_raw = run(raw)
    of_swapped = run(swapped, ema_decay=0.9, callbacks=[keras.callbacks.SwapEMAWeights()])
    assert_close(swapped, ours, 1e-6)
    for epoch in range(2):
        loss = fitted.history[epoch]["validation_loss"]
        assert of_swapped.history[epoch]["validation_loss"] == pytest.approx(loss, rel=1e-6)
        assert of_raw.history[epoch]["validation_loss"] != pytest.approx(loss, rel=1e-3)
        assert of_raw.history[epoch]["train_loss"] == pytest.approx(fitted.history[epoch]["train_loss"], rel=1e-6)


class Seen(keras.callbacks.Callback):
    """Notes what it is told, and may press Ctrl-C after some batches."""

    def __init__(self, stop_after: int | None = None) -> None:
        super().__init__()
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.losses: list[float] = []
        self.epochs: list[dict[str, float]] = []
        # A function, since numbers and lists are state, which a run that goes on gets back.
        self._is_time = lambda: len(self.ended) == stop_after

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.begun.append(batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ended.append(batch)
        self.losses.append(logs["loss"])
        if self._is_time():
            raise KeyboardInterrupt

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs.append(logs)


def test_what_a_callback_is_told() -> None:
    seen = Seen()
    fitted = run(compiled(), steps_per_execution=3, callbacks=[seen])
    assert seen.begun == 2 * [0, 3, 6]
    assert seen.ended == 2 * [2, 5, 7]
    assert [set(logs) for logs in seen.epochs] == 2 * [{"loss", "mae", "val_loss", "val_mae"}]
    # The loss so far, which at the end is that of the epoch.
    assert [seen.losses[2], seen.losses[5]] == [epoch["train_loss"] for epoch in fitted.history]
    assert seen.losses[0] > seen.losses[2]


def test_batch_hooks_of_a_lambda_callback() -> None:
    ended: list[int] = []
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ended.append(batch))
    run(compiled(), epochs=1, steps_per_execution=4, callbacks=[callback])
    assert ended == [3, 7]


def test_steps_per_execution_and_a_callback_change_no_weight(plain: tuple[keras.Model, fit.Fitted]) -> None:
    model = compiled()
    run(model, steps_per_execution=3, callbacks=[Seen()])
    assert_close(model, plain[0], 0)


def test_a_callback_may_stop_the_run_within_an_epoch() -> None:
    def stop(batch: int, logs: Any) -> None:
        model.stop_training = batch == 3

    model = compiled()
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
    fitted = run(model, steps_per_execution=2, callbacks=[callback])
    assert fitted.epochs == 1
    assert int(model.optimizer.iterations) == 4


# Resume


def resumable(scratch: Path, stop_after: int | None = None) -> dict[str, Any]:
    """A run with all that has a state."""
    optimizer = keras.optimizers.Adam(0.02, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=None)
    layers = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.4, seed=5)]
    model = compiled(*layers, optimizer=optimizer, precision="mixed_float16")
    seen = Seen(stop_after)
    scratch.mkdir(exist_ok=True)
    log = keras.callbacks.CSVLogger(scratch / "log.csv")
    plateau = keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=2, min_delta=0.02)
    data = tf.data.Dataset.from_tensor_slices(examples(60)).shuffle(60, seed=1).batch(BATCH)
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: log.csv_file.close())
        fitted = run(
            model,
            data,
            epochs=5,
            ema_decay=0.9,
            steps_per_execution=3,
            checkpoint_steps=5,
            early_stopping={"patience": 4},
            callbacks=[plateau, log, seen],
            scratch=scratch / "run",
        )
    return {
        "weights": [variable.numpy().tolist() for variable in (*model.variables, *model.optimizer.variables)],
        "rate": float(model.optimizer.learning_rate),
        "history": fitted.history,
        "best": (fitted.best_epoch, fitted.validation),
        "csv": (scratch / "log.csv").read_text(),
        "seen": (seen.ended, seen.losses),
    }


def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "LOSS_SCALE_GROWTH_STEPS", 7)
    whole = resumable(tmp_path / "whole")
    assert whole["rate"] < 0.02, "the learning rate has not fallen, so its fall is not tested"
    # Batch 10 ends in the third epoch, which has a checkpoint after its fourth step.
    with pytest.raises(KeyboardInterrupt):
        resumable(tmp_path / "stopped", stop_after=10)
    saved = (tmp_path / "stopped" / "run" / "checkpoints").glob("ckpt-*.index")
    assert max(int(file.stem.removeprefix("ckpt-")) for file in saved) == 20
    resumed = resumable(tmp_path / "stopped")
    assert json.dumps(resumed) == json.dumps(whole)


# NaN


class Log(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return tf.math.log(x)


def turning_bad_after(num_steps: int, num_batches: int = 12) -> tf.data.Dataset:
    x = np.full((num_batches * BATCH, 4), 2, np.float32)
    x[num_steps * BATCH :] = -1
    return batches_of(x, np.ones((len(x), 1), np.float32), batch_size=BATCH)


def logarithmic() -> keras.Model:
    keras.utils.set_random_seed(3)
    return compiled(model=keras.Sequential([keras.Input((4,)), Log(name="log"), keras.layers.Dense(1)]))


def test_a_run_that_stays_bad_ends_with_the_step_and_the_layer() -> None:
    model = logarithmic()
    message = (
        r"went to NaN or Inf at step 3 of epoch 2 and stayed there for 3 steps: "
        r"layer 'log' \(Log\) gives NaN in 8 of 8 rows; its inputs lie in \[-1, -1\]"
    )
    with pytest.raises(HeadraceError, match=message):
        run(model, turning_bad_after(6), steps_per_epoch=4, steps_per_execution=1, epochs=3, max_bad_steps=3)
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


def test_bad_steps_that_end_are_left_out_and_counted() -> None:
    model, only_good = logarithmic(), logarithmic()
    fitted = run(model, turning_bad_after(10), max_bad_steps=3)
    assert fitted.skipped_steps == 4
    assert int(model.optimizer.iterations) == 20
    run(only_good, turning_bad_after(10).take(10))
    assert_close(model, only_good, 0)


def test_a_loss_scale_that_still_falls_does_not_end_a_run() -> None:
    x, y = examples()
    model = compiled(optimizer=keras.optimizers.SGD(1e-4), loss="mse", precision="mixed_float16")
    fitted = run(model, batches_of(x, y + 1000, batch_size=4), max_bad_steps=1, steps_per_execution=1)
    assert 2 < fitted.skipped_steps < 14
    assert fitted.history[1]["train_loss"] < fitted.history[0]["train_loss"]


def test_a_loss_scale_that_has_fallen_to_one_does() -> None:
    keras.config.set_dtype_policy("mixed_float16")
    model = logarithmic()
    keras.config.set_dtype_policy("float32")
    with pytest.raises(HeadraceError, match="at step 3 of epoch 1 and stayed there for 15 steps: layer 'log'"):
        run(model, turning_bad_after(2, 40), max_bad_steps=3, steps_per_execution=1)


# Several optimizers


def train_gan(xla: str, scratch: Path | None = None, *callbacks: keras.callbacks.Callback) -> tuple[Any, fit.Fitted]:
    gan = make_gan()
    real = tf.data.Dataset.from_tensor_slices(examples(32)[0] + 3).batch(BATCH, drop_remainder=True)
    config = TrainConfig(epochs=6, xla=xla, checkpoint_steps=1)
    with progress.shown_by(lambda _: None):
        return gan, fit.fit(gan, real, config=config, scratch=scratch, callbacks=callbacks)


def test_a_model_with_two_optimizers_trains_on_one_device(tmp_path: Path) -> None:
    gan, fitted = train_gan("off")
    before = make_gan()
    for network in ("generator", "discriminator"):
        for weight, old in zip(
            getattr(gan, network).get_weights(), getattr(before, network).get_weights(), strict=True
        ):
            assert np.abs(weight - old).max() > 0.01
    assert int(gan.d_optimizer.iterations) == int(gan.g_optimizer.iterations) == 24
    assert list(fitted.history[0]) == ["train_d_loss", "train_g_loss"]
    assert fitted.history[-1]["train_d_loss"] < fitted.history[0]["train_d_loss"]
    by_xla, of_xla = train_gan("on")
    assert of_xla.xla == "on"
    assert int(by_xla.d_optimizer.iterations) == 24
    with contextlib.suppress(KeyboardInterrupt):
        train_gan("off", tmp_path, StopAfterTen())
    resumed, of_resumed = train_gan("off", tmp_path)
    assert_close(resumed, gan, 0)
    assert of_resumed.history == fitted.history


class StopAfterTen(keras.callbacks.Callback):
    num_batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.num_batches += 1
        if self.num_batches == 10:
            raise KeyboardInterrupt


def test_a_metric_of_several_numbers_has_a_name_for_each() -> None:
    model = compiled(metrics=[keras.metrics.F1Score(average=None, threshold=0.5, name="f1"), "mae"])
    assert {"train_f1", "train_mae"} <= set(run(model, epochs=1).history[0])
    x, y = examples(ROWS)
    two = keras.Sequential([keras.Input(x.shape[1:]), keras.layers.Dense(2)])
    two.compile(optimizer="sgd", loss="mse", metrics=[keras.metrics.F1Score(average=None)], auto_scale_loss=False)
    targets = np.eye(2, dtype=np.float32)[(np.ravel(y) > 0).astype(int)]
    data = tf.data.Dataset.from_tensor_slices((x, targets)).batch(BATCH, drop_remainder=True)
    assert {"train_f1_score_0", "train_f1_score_1"} <= set(run(two, data, epochs=1).history[0])


def test_a_run_goes_on_with_other_callbacks_each_with_its_own_state(tmp_path: Path) -> None:
    class Count(keras.callbacks.Callback):
        def __init__(self, first: int = 0) -> None:
            super().__init__()
            self.epochs_seen = first

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epochs_seen += 1

    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                raise KeyboardInterrupt

    class Later(Count):
        pass

    with pytest.raises(KeyboardInterrupt):
        run(compiled(), scratch=tmp_path, callbacks=[Stop(), Count(10)])
    count, later = Count(), Later()
    lines = lines_of_run(compiled(), scratch=tmp_path, callbacks=[later, count])
    assert (count.epochs_seen, later.epochs_seen) == (12, 1)
    assert "callback Later was not in the run that goes on: it starts anew" in lines


def test_a_first_epoch_without_a_number_is_not_the_best() -> None:
    model = compiled()

    class FirstIsNan(keras.metrics.Metric):
        """NaN until the optimizer has made ten steps."""

        def update_state(self, *args: Any, **kwargs: Any) -> None:
            pass

        def result(self) -> tf.Tensor:
            return tf.where(model.optimizer.iterations < 10, np.nan, 1.0)

    model.compile(optimizer="sgd", loss="mse", metrics=[FirstIsNan(name="accuracy")], auto_scale_loss=False)
    assert run(model, epochs=3, early_stopping={"metric": "accuracy", "patience": 3}).best_epoch == 2
