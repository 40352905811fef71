"""What int8 costs in accuracy: this project and tfmot on the same network, from the same weights, on the same batches.

    python -m pipelines.local configs/fashion_mnist.yaml
    python -m benchmarks.quantization runs/fashion_mnist --tfmot-python .tfmot/bin/python

Both quantize the run's ResNet to full int8, weights, activations, input and output: once by calibration, once after
quantization-aware training by Adam on the same rows in the same order. The TFLite files answer the whole test split.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.quantization.task import Task

PROJECT = Path(__file__).resolve().parents[2]
_NUM_VALIDATION = 512


def load_task(run: Path, *, epochs: int, learning_rate: float, seed: int) -> Task:
    """The network and the examples of a run of the pipeline whose model is a ResNet on ten classes."""
    from components import artifacts, model_files
    from components.examples import read_arrays
    from components.preprocessing import Preprocessing

    preprocessing = Preprocessing.load(run / "transform")
    model = model_files.load_model(run / "model")
    settings = artifacts.read_manifest(run / "model").made_from["config"]
    (feature,) = preprocessing.input_spec
    arrays = {}
    for split in ("train", "test"):
        raw = read_arrays(run / "examples", split)
        arrays[f"{split}_x"] = preprocessing.transform_in_batches(raw)[feature]
        arrays[f"{split}_y"] = preprocessing.encode_labels(raw[preprocessing.info.label])
    return Task(
        feature=feature,
        model_args=settings["model"]["args"],
        weights=[np.asarray(weight) for weight in model.get_weights()],
        **arrays,
        epochs=epochs,
        batch_size=settings["global_batch_size"],
        learning_rate=learning_rate,
        seed=seed,
        num_calibration=500,
    )


def measure_ours(task: Task) -> dict[str, Any]:
    """Accuracy in float, after PTQ and after QAT, and bytes of the two files."""
    import keras
    import tensorflow as tf

    from components import formats, ptq
    from components.config import CompressConfig, TrainConfig
    from components.train.fit import fit
    from models import resnet
    from models.quantization import QuantizationConfig, quantize_aware, strip
    from models.spec import FeatureSpec, OutputSpec

    inputs = {task.feature: FeatureSpec(task.train_x.shape[1:], "float32")}
    model = resnet.build(inputs, OutputSpec("multiclass", 10), **task.model_args)
    model.set_weights(task.weights)

    def in_int8(quantized: keras.Model) -> tuple[float, int]:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.tflite"
            formats.convert_tflite(formats.Network.of(quantized), file, form="int8", io_dtype="int8")
            runner = formats.load_runner(file)
            answers = runner({task.feature: task.test_x})
            return task.accuracy(next(iter(answers.values()))), file.stat().st_size

    held_out = task.train_x[np.random.default_rng(task.seed + 1).permutation(len(task.train_x))[:_NUM_VALIDATION]]
    calibrated = ptq.quantize(
        model,
        calibration={task.feature: task.calibration_x},
        validation={task.feature: held_out},
        config=CompressConfig(sensitivity=False),
    )
    aware = quantize_aware(model, QuantizationConfig(freeze_step=max(1, round(0.7 * task.num_steps))))
    aware.compile(
        optimizer=keras.optimizers.Adam(task.learning_rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        auto_scale_loss=False,
    )
    rows = np.stack(list(task.batches()))
    batches = tf.data.Dataset.from_tensor_slices(rows).map(
        lambda chosen: ({task.feature: tf.gather(task.train_x, chosen)}, tf.gather(task.train_y, chosen))
    )
    fit(aware, batches, config=TrainConfig(epochs=1, xla="off"))
    results: dict[str, Any] = {"float": task.accuracy(model.predict({task.feature: task.test_x}, verbose=0))}
    for name, quantized in (("ptq", calibrated.model), ("qat", strip(aware))):
        results[name], results[f"{name}_size_bytes"] = in_int8(quantized)
    return results


def measure_tfmot(task: Task, python: str) -> dict[str, Any]:
    """The same by tfmot, in its own environment.

    Raises:
        ClickException: it fails; with the last line that it wrote.
    """
    with tempfile.TemporaryDirectory() as folder:
        task.save(Path(folder))
        environ = {**os.environ, "TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(PROJECT)}
        command = [python, "-m", "benchmarks.quantization.tfmot_peer", folder]
        try:
            done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        except OSError as error:
            raise click.ClickException(f"--tfmot-python: {error}") from error
    if done.returncode:
        raise click.ClickException(f"tfmot: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    results: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return results


def table(results: dict[str, dict[str, Any]]) -> Table:
    """Accuracies, and points lost, with bytes."""
    shown = Table(title="Test accuracy of full int8 (points lost)", title_justify="left")
    for column in ("by", "float", "PTQ", "QAT", "PTQ bytes", "QAT bytes"):
        shown.add_column(column, justify="left" if column == "by" else "right")
    for name, result in results.items():
        lost = [f"{result[kind]:.4f} ({100 * (result['float'] - result[kind]):+.2f})" for kind in ("ptq", "qat")]
        sizes = [f"{result[f'{kind}_size_bytes']:,}" for kind in ("ptq", "qat")]
        shown.add_row(name, f"{result['float']:.4f}", *lost, *sizes)
    return shown


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("run", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--epochs", type=click.IntRange(1), default=2, help="Of quantization-aware training.")
@click.option("--learning-rate", type=float, default=2e-4, help="Of Adam.")
@click.option("--seed", type=int, default=0, help="Of the batches and the calibration examples.")
@click.option("--tfmot-python", help="Interpreter with tensorflow-model-optimization and tf_keras; without: no peer.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="JSON file to write.")
def main(
    run: Path, epochs: int, learning_rate: float, seed: int, tfmot_python: str | None, output: Path | None
) -> None:
    """Accuracy that int8 costs the ResNet of a pipeline's RUN, beside tfmot."""
    task = load_task(run, epochs=epochs, learning_rate=learning_rate, seed=seed)
    results = {"headrace": measure_ours(task)}
    if tfmot_python:
        results["tfmot"] = measure_tfmot(task, tfmot_python)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        settings = {"epochs": epochs, "learning_rate": learning_rate, "seed": seed, "run": run.name}
        described = {"benchmark": "quantization", "machine": machine.describe(), **settings, "results": results}
        output.write_text(json.dumps(described, indent=1) + "\n")
    Console(width=None if sys.stdout.isatty() else 120).print(table(results))


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.quantization")
