"""The train step: same seed same bytes, exact resume, early stopping, precision, XLA, and clear refusals."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from components import artifacts, model_files, plugins, progress
from components.config import TrainConfig
from components.errors import ArtifactError, ConfigError, DataError, HeadraceError
from components.preprocessing import Preprocessing
from components.train import train
from models import transformer
from models.spec import FeatureSpec, OutputSpec
from tests.conftest import StepRun

SETTINGS: dict[str, Any] = {
    "epochs": 3,
    "global_batch_size": 256,
    "optimizer": {"learning_rate": 0.02},
    "seed": 5,
    "model": {"name": "tabular", "args": {"hidden_dims": [8], "dropout": 0.3}},
    "xla": "off",
}


@pytest.fixture(scope="module")
def base_digest(taxi: StepRun, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of one epoch with the unchanged settings."""
    path = tmp_path_factory.mktemp("base") / "model"
    config = TrainConfig.model_validate({**SETTINGS, "epochs": 1})
    train(examples=taxi.path("examples"), transform=taxi.path("transform"), model=path, config=config)
    return artifacts.read_manifest(path).digest


@pytest.fixture
def run_train(taxi: StepRun, tmp_path: Path):
    """Train on the shared taxi examples: `run_train(name, **changes) -> (result, path)`."""
    examples, transform = taxi.path("examples"), taxi.path("transform")

    def run(name: str = "model", **changes: Any):
        settings = {key: value for key, value in {**SETTINGS, **changes}.items() if value is not None}
        config = TrainConfig.model_validate(settings)
        return train(examples=examples, transform=transform, model=tmp_path / name, config=config), tmp_path / name

    return run


def history(path: Path) -> list[dict[str, float]]:
    return json.loads((path / "history.json").read_text())


def test_training_learns_and_is_the_same_to_the_byte_for_a_seed(run_train) -> None:
    result, first = run_train("a")
    _, second = run_train("b")
    _, other = run_train("c", seed=6)
    assert result.validation["auc"] > 0.8
    assert result.epochs == result.best_epoch == 3
    digests = [artifacts.read_manifest(path).digest for path in (first, second, other)]
    assert digests[0] == digests[1] != digests[2]
    losses = [entry["train_loss"] for entry in history(first)]
    assert losses == sorted(losses, reverse=True)


def test_a_run_killed_in_an_epoch_goes_on_and_ends_with_the_same_bytes(
    run_train, taxi: StepRun, tmp_path: Path
) -> None:
    _, whole = run_train("whole")
    script = f"""
        import os, signal
        from pathlib import Path
        from components import progress
        from components.config import TrainConfig
        from components.train import train

        def kill_in_the_third_epoch(message):
            if message.startswith("epoch 3/"):
                os.kill(os.getpid(), signal.SIGKILL)

        with progress.shown_by(kill_in_the_third_epoch):
            train(
                examples=Path({str(taxi.path("examples"))!r}),
                transform=Path({str(taxi.path("transform"))!r}),
                model=Path({str(tmp_path / "killed")!r}),
                config=TrainConfig.model_validate({SETTINGS!r}),
            )
    """
    killed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    assert not (tmp_path / "killed").exists()
    messages: list[str] = []
    with progress.shown_by(messages.append):
        _, resumed = run_train("killed")
    assert messages[0] == "going on after epoch 2 of a run that was stopped"
    assert artifacts.read_manifest(resumed).digest == artifacts.read_manifest(whole).digest


def interrupt_in(epoch: int, run_train: Any, **changes: Any) -> None:
    def stop(message: str) -> None:
        if message.startswith(f"epoch {epoch}/"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), progress.shown_by(stop):
        run_train(**changes)


@pytest.mark.parametrize("damage", ["data cut", "data changed", "index cut"])
def test_a_damaged_newest_checkpoint_is_passed_over(run_train, tmp_path: Path, damage: str) -> None:
    _, whole = run_train("whole")
    interrupt_in(3, run_train, name="stopped")
    kind, how = damage.split()
    saved = (tmp_path / ".stopped.scratch").rglob(f"ckpt-*.{kind}*")
    file = max(saved, key=lambda path: int(path.name.partition(".")[0].removeprefix("ckpt-")))
    content = file.read_bytes()
    file.write_bytes(content[:-100] if how == "cut" else content[:200] + bytes(8) + content[208:])
    messages: list[str] = []
    with progress.shown_by(messages.append):
        _, resumed = run_train("stopped")
    newest = file.name.partition(".")[0]
    assert any(f"checkpoint {newest} cannot be read and is passed over" in line for line in messages)
    assert "going on after epoch 1 of a run that was stopped" in messages
    assert artifacts.read_manifest(resumed).digest == artifacts.read_manifest(whole).digest


def test_without_a_readable_checkpoint_a_run_starts_from_the_beginning(run_train, tmp_path: Path) -> None:
    _, whole = run_train("whole")
    interrupt_in(3, run_train, name="stopped")
    for file in (tmp_path / ".stopped.scratch").rglob("ckpt-*.data*"):
        file.write_bytes(file.read_bytes()[:-1])
    messages: list[str] = []
    with progress.shown_by(messages.append):
        _, resumed = run_train("stopped")
    assert sum("is passed over" in line for line in messages) == 2
    assert not any(line.startswith("going on") for line in messages)
    assert artifacts.read_manifest(resumed).digest == artifacts.read_manifest(whole).digest


def test_early_stopping_keeps_the_best_epoch(run_train) -> None:
    stopping = {"metric": "loss", "patience": 1}
    result, path = run_train(epochs=30, optimizer={"learning_rate": 0.3}, early_stopping=stopping)
    losses = [entry["validation_loss"] for entry in history(path)]
    assert result.epochs < 30
    assert result.best_epoch == int(np.argmin(losses)) + 1 == result.epochs - 1
    assert result.validation["loss"] == pytest.approx(min(losses), rel=1e-6)


def test_steps_per_execution_changes_no_weight(run_train) -> None:
    digests = {artifacts.digest_file(run_train(str(k), steps_per_execution=k)[1] / model_files.FILE) for k in (1, 3)}
    assert len(digests) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"global_batch_size": 128},
        {"optimizer": {"learning_rate": 0.03}},
        {"optimizer": {"learning_rate": 0.02, "schedule": "cosine"}},
        {"optimizer": {"learning_rate": 0.02, "warmup_steps": 5}},
        {"optimizer": {"learning_rate": 0.02, "name": "sgd"}},
        {"optimizer": {"learning_rate": 0.02, "clip_norm": 0.01}},
        {"class_weights": "balanced"},
        {"label_smoothing": 0.2},
        {"model": {"name": "tabular", "args": {"hidden_dims": [4]}}},
    ],
    ids=str,
)
def test_every_option_changes_the_result(run_train, base_digest: str, changes: dict[str, Any]) -> None:
    _, changed = run_train(epochs=1, **changes)
    assert artifacts.read_manifest(changed).digest != base_digest


@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_trains_and_what_is_loaded_computes_in_float32(run_train, precision: str) -> None:
    # Without dropout, whose masks depend on the precision.
    network = {"name": "tabular", "args": {"hidden_dims": [8], "dropout": 0.0}}
    result, path = run_train(precision=precision, model=network)
    full, _ = run_train("full", model=network)
    assert result.validation["loss"] == pytest.approx(full.validation["loss"], rel=0.02)
    assert result.validation["loss"] != full.validation["loss"]
    assert keras.config.dtype_policy().name == "float32"
    model = model_files.load_model(path)
    assert {layer.compute_dtype for layer in model.layers} <= {"float32", "int64"}
    trained = keras.saving.load_model(path / model_files.FILE, compile=False)
    assert precision in {layer.dtype_policy.name for layer in trained.layers}
    for ours, theirs in zip(model.get_weights(), trained.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_xla_agrees_with_uncompiled(run_train) -> None:
    off, _ = run_train("off", epochs=1, model={"name": "tabular", "args": {"dropout": 0.0}})
    on, _ = run_train("on", epochs=1, model={"name": "tabular", "args": {"dropout": 0.0}}, xla="on")
    assert (off.xla, on.xla) == ("off", "on")
    assert on.validation["loss"] == pytest.approx(off.validation["loss"], rel=1e-4)


class _NoXla(keras.layers.Layer):
    """Takes a way through strings, which XLA cannot compile."""

    def call(self, x: Any) -> Any:
        import tensorflow as tf

        return tf.ensure_shape(tf.strings.to_number(tf.strings.as_string(x)), x.shape)


def build_no_xla(input_spec: Any, output_spec: Any) -> keras.Model:
    inputs = {name: keras.Input(spec.shape, name=name, dtype=spec.dtype) for name, spec in input_spec.items()}
    logits = keras.layers.Dense(output_spec.num_logits, name="logits")(inputs["fare"])
    return keras.Model(inputs, logits + 0.0 * _NoXla(name="strings")(inputs["fare"]))


def build_two_logits(input_spec: Any, output_spec: Any) -> keras.Model:
    return build_no_xla(input_spec, OutputSpec("multiclass", 2))


def build_nothing(input_spec: Any, output_spec: Any) -> int:
    return 3


def test_where_xla_cannot_auto_falls_back_with_the_reason_and_on_refuses(taxi: StepRun, tmp_path: Path) -> None:
    settings = {**SETTINGS, "epochs": 1, "model": {"name": "tests.components.test_train:build_no_xla"}}
    inputs = {"examples": taxi.path("examples"), "transform": taxi.path("transform")}
    result = train(**inputs, model=tmp_path / "auto", config=TrainConfig.model_validate({**settings, "xla": "auto"}))
    assert result.xla.startswith("off: ")
    assert "AsString" in result.xla or "StringToNumber" in result.xla
    off = train(**inputs, model=tmp_path / "off", config=TrainConfig.model_validate({**settings, "xla": "off"}))
    assert off.validation == result.validation
    with pytest.raises(ConfigError, match=r"train\.xla is on, but XLA cannot compile this model"):
        train(**inputs, model=tmp_path / "on", config=TrainConfig.model_validate({**settings, "xla": "on"}))


def test_tensorboard_events_lie_beside_the_model_and_change_no_digest(run_train, base_digest: str) -> None:
    _, path = run_train("events", epochs=1, tensorboard=True)
    assert list((path / "tensorboard").glob("events.out.tfevents.*"))
    assert artifacts.read_manifest(path).digest == base_digest


def test_layer_statistics_are_kept_by_epoch(run_train) -> None:
    _, path = run_train(epochs=2, layer_statistics=["*_relu", "logits"])
    epochs = json.loads((path / "layer_statistics.json").read_text())
    assert [set(epoch) for epoch in epochs] == [{"hidden1_relu", "logits"}] * 2
    assert epochs[0]["hidden1_relu"]["min"] == 0.0 and 0.0 < epochs[0]["hidden1_relu"]["zero_share"] < 1.0
    assert epochs[0]["logits"]["mean"] != epochs[1]["logits"]["mean"]
    assert list((path / "tensorboard").glob("events.out.tfevents.*"))


def build_compiled(input_spec: Any, output_spec: Any) -> keras.Model:
    """With an optimizer that knows all weights already."""
    inputs = {name: keras.Input(spec.shape, name=name, dtype=spec.dtype) for name, spec in input_spec.items()}
    hidden = keras.layers.Dense(4, activation="relu", name="hidden")(inputs["fare"])
    model = keras.Model(inputs, keras.layers.Dense(output_spec.num_logits, name="head")(hidden))
    optimizer = keras.optimizers.Adam(0.05)
    optimizer.build(model.trainable_variables)
    model.compile(optimizer=optimizer, loss=keras.losses.BinaryCrossentropy(from_logits=True), auto_scale_loss=False)
    return model


@pytest.mark.parametrize("frozen", [[], ["hidden"]], ids=str)
def test_a_model_brings_its_own_loss_and_optimizer_and_some_layers_stay_frozen(run_train, frozen: list[str]) -> None:
    changes = {
        "model": {"name": "tests.components.test_train:build_compiled"},
        "objective": "model",
        "optimizer": None,
        "frozen": frozen,
    }
    _, early = run_train("early", **changes, epochs=1)
    result, late = run_train("late", **changes)
    kernels = [
        {name: model_files.load_model(path).get_layer(name).kernel.numpy() for name in ("hidden", "head")}
        for path in (early, late)
    ]
    changed = {name for name in kernels[0] if not np.array_equal(kernels[0][name], kernels[1][name])}
    assert changed == {"hidden", "head"} - set(frozen)
    assert history(late)[-1]["train_loss"] < history(late)[0]["train_loss"]
    assert result.num_parameters == (5 if frozen else 13)


def build_with_noise(input_spec: Any, output_spec: Any) -> keras.Model:
    """A layer whose random generator has a name of its own, as Keras's augmentations have."""
    inputs = {name: keras.Input(spec.shape, name=name, dtype=spec.dtype) for name, spec in input_spec.items()}
    logits = keras.layers.Dense(output_spec.num_logits, name="head")(_Noise(name="noise")(inputs["fare"]))
    return keras.Model(inputs, logits)


@keras.saving.register_keras_serializable("tests")
class _Noise(keras.layers.Layer):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.generator = keras.random.SeedGenerator()

    def call(self, x: Any, training: bool = False) -> Any:
        return x + keras.random.normal(keras.ops.shape(x), seed=self.generator) if training else x


def build_overflow(input_spec: Any, output_spec: Any) -> keras.Model:
    """Gradients that no loss scale makes finite."""
    inputs = {name: keras.Input(spec.shape, name=name, dtype=spec.dtype) for name, spec in input_spec.items()}
    logits = keras.layers.Dense(output_spec.num_logits, name="head", dtype="float32")(inputs["fare"])
    return keras.Model(inputs, logits * float("inf"))


def test_any_layers_random_state_is_resumed(run_train) -> None:
    changes = {"model": {"name": "tests.components.test_train:build_with_noise"}}
    _, whole = run_train("whole", **changes)
    interrupt_in(3, run_train, **changes)
    _, resumed = run_train(**changes)
    assert artifacts.read_manifest(resumed).digest == artifacts.read_manifest(whole).digest


def test_events_outlive_a_failure_at_the_very_end(run_train, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(artifacts, "_write_manifest", lambda *_: 1 / 0)
        run_train(epochs=1, tensorboard=True)
    _, path = run_train(epochs=1, tensorboard=True)
    assert list((path / "tensorboard").glob("events.out.tfevents.*"))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"global_batch_size": 100_000}, DataError, "fewer than train.global_batch_size"),
        ({"early_stopping": {"metric": "macro_f1"}}, ConfigError, "a binary task has no 'macro_f1'"),
        ({"layer_statistics": ["hiden1*"]}, ConfigError, "train.layer_statistics: no layer of model .* did you mean"),
        ({"objective": "model", "optimizer": None}, ConfigError, "'tabular' returns a model that is not compiled"),
        ({"model": {"name": "tabluar"}}, ConfigError, "Did you mean 'tabular'"),
        ({"model": {"name": "no_such_package.nets:build"}}, ConfigError, "no module 'no_such_package'"),
        ({"model": {"name": "models.tabular:biuld"}}, ConfigError, "has no 'biuld'. Did you mean 'build'"),
        ({"model": {"name": "tabular", "args": {"hiden": 3}}}, ConfigError, "unexpected keyword argument .hiden"),
        (
            {"model": {"name": "tests.components.test_train:build_nothing"}},
            ConfigError,
            "returned int, expected a keras.Model",
        ),
        (
            {"model": {"name": "tests.components.test_train:build_two_logits"}},
            ConfigError,
            r"expected logits of shape \(batch, 1\)",
        ),
        (
            {"precision": "mixed_float16", "model": {"name": "tests.components.test_train:build_overflow"}},
            HeadraceError,
            "at step 1 of epoch 1 and stayed there for 18 steps: layer 'multiply'",
        ),
        ({"optimizer": {"name": "sgd", "learning_rate": 1e30}}, HeadraceError, "step 2 of epoch 1.*layer 'hidden1'"),
    ],
    ids=str,
)
def test_what_cannot_be_trained_is_refused_and_nothing_is_left(
    run_train, tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run_train(**changes)
    assert not (tmp_path / "model").exists()


def test_a_model_file_that_keras_cannot_read_is_refused(run_train) -> None:
    _, path = run_train(epochs=1)
    (path / model_files.FILE).write_bytes(b"no zip")
    with pytest.raises(ArtifactError, match="Cannot load"):
        model_files.load_model(path)


def test_a_transformer_loads_in_a_process_that_did_not_build_it(tmp_path: Path) -> None:
    """Its layers are its own: Keras must be told of them before it reads the file."""
    script = f"""
        from pathlib import Path
        from components import model_files
        print(type(model_files.load_model(Path({str(tmp_path)!r})).layers[-1]).__name__)
    """
    spec = {"text": FeatureSpec((8,), "int64", num_categories=20, is_sequence=True)}
    model_files.save_model(transformer.build(spec, OutputSpec("binary", 2), num_layers=1), tmp_path)
    config = TrainConfig.model_validate({"model": {"name": "transformer"}})
    manifest = artifacts.Manifest("train", "", {"config": config.model_dump(mode="json")}, {}, "", {})
    (tmp_path / artifacts.MANIFEST).write_text(json.dumps(vars(manifest)))
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "Dense", done.stderr[-2000:]


def test_predictor_loses_no_example(run_train, taxi: StepRun) -> None:
    _, path = run_train(epochs=1)
    preprocessing = Preprocessing.load(taxi.path("transform"))
    model = model_files.load_model(path)
    rng = np.random.default_rng(0)
    features = {
        name: rng.integers(0, spec.num_categories, (7, *spec.shape))
        if spec.num_categories
        else rng.normal(size=(7, *spec.shape)).astype(np.float32)
        for name, spec in preprocessing.input_spec.items()
    }
    whole = model_files.Predictor(model, preprocessing.output_spec, batch_size=7)(features)
    padded = model_files.Predictor(model, preprocessing.output_spec, batch_size=5)(features)
    assert padded.shape == (7, 2)
    np.testing.assert_allclose(padded, whole, atol=1e-6)
    np.testing.assert_allclose(whole.sum(axis=1), 1, atol=1e-6)


def test_built_in_names_resolve() -> None:
    for name in plugins.MODELS:
        assert callable(plugins.resolve(name, plugins.MODELS, "model.name"))
