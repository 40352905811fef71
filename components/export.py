"""Step `export`: the SavedModel that takes raw features, and the same model as TFLite and ONNX."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from components import artifacts, formats, model_files, progress
from components.config import ExportConfig
from components.examples import parse, read_batches
from components.formats.network import tables_of
from components.preprocessing import Preprocessing
from models import quantization

_WARMUP_BATCH = 32


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
    examples: Path,
    statistics: Path,
    transform: Path,
    model: Path,
    optimized: Path,
    compressed: Path,
    exported: Path,
    config: ExportConfig,
) -> ExportResult:
    """Write every form into one artifact, beside the list of them.

    Args:
        examples: Artifact of `ingest`; what the SavedModel is compared on and warms up with is from its test split.
        statistics: Artifact of `validate`; its schema travels with the model.
        transform: Artifact of `transform`.
        model: Artifact of `train`.
        optimized: Artifact of `optimize`; with `model: optimized` it is what all but the compressed forms are made of.
        compressed: Artifact of `compress`, whose forms are taken along.
        exported: Where the artifact is written: `saved_model/`, a folder for each other kind, a picture of
            the ONNX graph, `formats.json`.
        config: The forms.

    Raises:
        HeadraceError: a converter cannot take the model; the message names the operation.
    """
    inputs = {
        "examples": examples,
        "statistics": statistics,
        "transform": transform,
        "model": model,
        "optimized": optimized,
        "compressed": compressed,
    }
    steps = ("ingest", "validate", "transform", "train", "optimize", "compress")
    for path, step in zip(inputs.values(), steps, strict=True):
        artifacts.open_artifact(path, step=step)
    with artifacts.writing(exported, step="export", inputs=inputs, config=config) as out:
        preprocessing = Preprocessing.load(transform)
        is_trained = config.model == "trained"
        network = quantization.in_float(model_files.load_model(model if is_trained else optimized))
        progress.report("writing the SavedModel")
        raw = _held_out(examples, preprocessing, config)
        write_saved_model(preprocessing, network, out.path / "saved_model", config, raw)
        shutil.copy2(statistics / "schema.yaml", out.path / "saved_model" / formats.EXTRAS / "schema.yaml")
        is_exact = is_trained and config.weights_dtype == "float32"
        forms = [formats.Format("saved_model", "saved_model", "raw", exact=is_exact)]
        forms += _convert(formats.Core(preprocessing, network), preprocessing, raw, config, out.path)
        forms += _take_along(compressed, out.path)
        formats.write_formats(forms, out.path)
        out.result = ExportResult(
            formats={form.name: formats.size_bytes(out.path / form.path) for form in forms},
            inputs={name: f"{spec.dtype.name} {spec.shape}" for name, spec in preprocessing.raw_signature().items()},
            classes=preprocessing.classes,
        )
    return out.result


def write_saved_model(
    preprocessing: Preprocessing,
    network: keras.Model,
    directory: Path,
    config: ExportConfig,
    raw: formats.Arrays,
) -> formats.Conversion:
    """Write the SavedModel: preprocessing, network and labels behind one set of signatures.

    `serving_default` takes the raw features by name, `serve_examples` serialized tf.Example, and both answer with
    `probabilities` `(batch, num_classes)` and `label` `(batch,)`, or `value` `(batch,)` for regression; `classify` or
    `regress` is as TF Serving defines it. `transform` gives what TFLite and ONNX files with `inputs: transformed` take.

    Args:
        preprocessing: Goes into the SavedModel.
        network: Returns logits.
        directory: Where it is written.
        config: What it holds besides.
        raw: Raw features to compare on, of which the first are the warm-up requests.

    Raises:
        ConversionError: as `formats.convert_saved_model`.
    """
    output, name = preprocessing.output_spec, formats.output_name(preprocessing.output_spec)
    num_examples = len(next(iter(raw.values())))
    singles = [{k: v[i : i + 1] for k, v in raw.items()} for i in range(min(config.num_warmup_examples, num_examples))]
    return formats.convert_saved_model(
        _Served(preprocessing, network),
        directory,
        classify=None if output.task == "regression" else name,
        classes=preprocessing.classes,
        regress=name if output.task == "regression" else None,
        features=config.features,
        weights_dtype=config.weights_dtype,
        parse=lambda serialized: parse(serialized, preprocessing.info, with_label=False),
        others={"transform": preprocessing},
        examples=raw,
        warmup=[*singles, {k: v[:_WARMUP_BATCH] for k, v in raw.items()}] if singles else [],
    )


class _Served(formats.Network):
    """Raw features -> probabilities or values."""

    def __init__(self, preprocessing: Preprocessing, network: keras.Model) -> None:
        output = preprocessing.output_spec

        def answer(raw: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            logits = network(preprocessing(raw), training=False)
            return {formats.output_name(output): model_files.probabilities_from_logits(logits, output)}

        super().__init__(network, preprocessing.raw_signature(), answer)
        self.tables_ += tables_of(inner for each in preprocessing.layers.values() for inner in each._flatten_layers())


def _held_out(examples: Path, preprocessing: Preprocessing, config: ExportConfig) -> formats.Arrays:
    """Raw features of some test examples, drawn by the seed."""
    batch = next(read_batches(examples, "test"))
    order = np.random.default_rng(config.seed).permutation(len(batch[preprocessing.info.label]))
    rows = order[: max(config.num_warmup_examples, _WARMUP_BATCH)]
    return {name: batch[name][rows] for name in preprocessing.raw_inputs}


# Value of export.formats -> name, file, and how it is written.
_FORMS: dict[str, tuple[str, str, Callable[..., formats.Conversion]]] = {
    "tflite": ("tflite_float32", "tflite/model_float32.tflite", formats.convert_tflite),
    "onnx": ("onnx", "onnx/model.onnx", formats.convert_onnx),
    "openvino": ("openvino", "openvino/model.xml", formats.convert_openvino),
    "coreml": ("coreml", "coreml/model.mlpackage", formats.convert_coreml),
    "tensorrt": ("tensorrt", "tensorrt/float32", formats.convert_tensorrt),
}


def _convert(
    core: formats.Core, preprocessing: Preprocessing, raw: formats.Arrays, config: ExportConfig, directory: Path
) -> Iterator[formats.Format]:
    """Write the other float32 forms, with the names of the classes where the format has a place for them."""
    examples = core.feed(preprocessing, raw)
    for kind in config.formats:
        name, path, convert = _FORMS[kind]
        progress.report(f"converting to {kind}")
        (directory / path).parent.mkdir()
        options: dict[str, Any] = {"opset": config.onnx_opset} if kind == "onnx" else {}
        if kind != "tflite":
            options["metadata"] = {"labels": preprocessing.classes}
        done = convert(core, directory / path, examples=examples, **options)
        for note in done.notes:
            progress.report(f"{name}: {note}")
        if kind == "onnx":
            (directory / "pictures").mkdir()
            formats.draw_onnx(directory / path, directory / "pictures/onnx.svg")
        yield formats.Format(name, path, core.inputs, exact=config.model == "trained")


def _take_along(compressed: Path, directory: Path) -> list[formats.Format]:
    forms = formats.read_formats(compressed)
    for form in forms:
        for file in formats.files_of(compressed / form.path):
            copy = directory / file.relative_to(compressed)
            copy.parent.mkdir(exist_ok=True)
            shutil.copy2(file, copy)
    return forms
