"""Step `export`: the SavedModel that takes raw features, and the same model as TFLite and ONNX."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from components import artifacts, formats, model_files, progress
from components.config import ExportConfig
from components.examples import parse
from components.preprocessing import Preprocessing


@dataclass(frozen=True)
class ExportResult:
    """What was written.

    Attributes:
        formats: Name -> size in bytes.
        inputs: Raw features that the SavedModel takes, with dtype and shape.
        classes: Class names in the order of their ids.
    """

    formats: dict[str, int]
    inputs: dict[str, str]
    classes: list[str | int]


def export(
    *,
    statistics: Path,
    transform: Path,
    model: Path,
    compressed: Path,
    exported: Path,
    config: ExportConfig,
) -> ExportResult:
    """Write every form into one artifact, beside the list of them.

    Args:
        statistics: Artifact of `validate`; its schema travels with the model.
        transform: Artifact of `transform`.
        model: Artifact of `train`.
        compressed: Artifact of `compress`, whose forms are taken along.
        exported: Where the artifact is written: `saved_model/`, `tflite/`, `onnx/`, `labels.txt`, `formats.json`.
        config: The forms.

    Raises:
        HeadraceError: a converter cannot take the model; the message names the operation.
    """
    inputs = {"statistics": statistics, "transform": transform, "model": model, "compressed": compressed}
    made_by = {"statistics": "validate", "transform": "transform", "model": "train", "compressed": "compress"}
    for name, path in inputs.items():
        artifacts.open_artifact(path, step=made_by[name])
    with artifacts.writing(exported, step="export", inputs=inputs, config=config) as out:
        preprocessing = Preprocessing.load(transform)
        network = model_files.load_model(model)
        served = ServedModel(preprocessing, network)
        served.save(out.path / "saved_model")
        _write_extras(out.path / "saved_model", preprocessing, statistics)
        forms = [formats.Format("saved_model", "saved_model", "raw", exact=True)]
        forms += _convert(formats.Core(preprocessing, network), config, out.path)
        forms += _take_along(compressed, out.path)
        formats.write_formats(forms, out.path)
        out.result = ExportResult(
            formats={form.name: formats.size_bytes(out.path / form.path) for form in forms},
            inputs={name: f"{spec.dtype.name} {spec.shape}" for name, spec in preprocessing.raw_signature().items()},
            classes=preprocessing.classes,
        )
    return out.result


class ServedModel(tf.Module):
    """The SavedModel: preprocessing, network and labels behind three signatures.

    `serving_default` takes the raw features by name, `serve_examples` takes serialized tf.Example, and both answer with
    `probabilities` `(batch, num_classes)` and `label` `(batch,)`, or `value` `(batch,)` for regression. `transform` gives
    what TFLite and ONNX files with `inputs: transformed` take.
    """

    def __init__(self, preprocessing: Preprocessing, network: keras.Model) -> None:
        super().__init__(name="served_model")
        self.preprocessing = preprocessing
        self.lookups = preprocessing.layers
        # The variables alone: tracking the Keras model would store every weight a second time.
        self.weights = [variable.value for variable in network.variables]
        self._network_call = _Untracked(network)

    def answer(self, raw: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Answer a batch of raw features."""
        output = self.preprocessing.output_spec
        logits = self._network_call.value(self.preprocessing(raw), training=False)
        answers = {formats.output_name(output): model_files.probabilities_from_logits(logits, output)}
        if output.task != "regression":
            class_ids = tf.argmax(answers["probabilities"], axis=1)
            answers["label"] = tf.gather(tf.constant(self.preprocessing.classes), class_ids)
        return answers

    def save(self, directory: Path) -> None:
        """Write the SavedModel with its signatures."""
        raw = self.preprocessing.raw_signature()
        by_name = tf.function(lambda **features: self.answer(features))
        transform = tf.function(lambda **features: self.preprocessing(features))

        @tf.function(input_signature=[tf.TensorSpec((None,), tf.string, name="examples")])
        def from_examples(examples: tf.Tensor) -> dict[str, tf.Tensor]:
            return self.answer(parse(examples, self.preprocessing.info, with_label=False))

        signatures = {
            "serving_default": by_name.get_concrete_function(**raw),
            "serve_examples": from_examples.get_concrete_function(),
            "transform": transform.get_concrete_function(**raw),
        }
        tf.saved_model.save(self, str(directory), signatures=signatures)


@dataclass(frozen=True)
class _Untracked:
    """Holds an object so that `tf.Module` does not look inside."""

    value: Any


def _convert(core: formats.Core, config: ExportConfig, directory: Path) -> list[formats.Format]:
    forms = []
    for name, path in (("tflite", "tflite/model_float32.tflite"), ("onnx", "onnx/model.onnx")):
        if name not in config.formats:
            continue
        progress.report(f"converting to {name}")
        (directory / path).parent.mkdir()
        if name == "tflite":
            (directory / path).write_bytes(formats.to_tflite(core, "float32"))
        else:
            formats.to_onnx(core, config.onnx_opset, directory / path)
        label = "tflite_float32" if name == "tflite" else "onnx"
        forms.append(formats.Format(label, path, core.inputs, exact=True))
    return forms


def _take_along(compressed: Path, directory: Path) -> list[formats.Format]:
    forms = formats.read_formats(compressed)
    for form in forms:
        (directory / form.path).parent.mkdir(exist_ok=True)
        shutil.copy2(compressed / form.path, directory / form.path)
    return forms


def _write_extras(saved_model: Path, preprocessing: Preprocessing, statistics: Path) -> None:
    extras = saved_model / "assets.extra"
    extras.mkdir()
    (extras / "labels.txt").write_text("".join(f"{name}\n" for name in preprocessing.classes))
    shutil.copy2(statistics / "schema.yaml", extras / "schema.yaml")
