"""Step `export`: the SavedModel that takes raw features, and the same model as TFLite and ONNX."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import keras
import tensorflow as tf

from components import artifacts, formats, model_files, progress
from components.config import ExportConfig
from components.convert import WARMUP_BATCH, Converter
from components.examples import parse
from components.formats.network import tables_of
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
    examples: Path,
    statistics: Path,
    transform: Path,
    model: Path,
    optimized: Path,
    compressed: Path,
    exported: Path,
    config: ExportConfig,
    converted: Sequence[Path] = (),
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
        converted: Artifacts of `convert`; a form that one of them holds is not converted again.

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
        converter = Converter(examples, transform, model, optimized, config)
        preprocessing = converter.preprocessing
        progress.report("writing the SavedModel")
        write_saved_model(preprocessing, converter.network, out.path / "saved_model", config, converter.raw)
        shutil.copy2(statistics / "schema.yaml", out.path / "saved_model" / formats.EXTRAS / "schema.yaml")
        is_exact = converter.is_trained and config.weights_dtype == "float32"
        forms = [formats.Format("saved_model", "saved_model", "raw", exact=is_exact)]
        forms += _float32_forms(converter, converted, out.path)
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
        parse=lambda serialized: _raw_features(serialized, preprocessing),
        others={"transform": preprocessing},
        examples=raw,
        warmup=[*singles, {k: v[:WARMUP_BATCH] for k, v in raw.items()}] if singles else [],
    )


def _raw_features(serialized: tf.Tensor, preprocessing: Preprocessing) -> dict[str, tf.Tensor]:
    """Those that the model reads; Examples may hold others, as the training data may."""
    features = parse(serialized, preprocessing.info, with_label=False)
    return {name: features[name] for name in preprocessing.raw_inputs}


class _Served(formats.Network):
    """Raw features -> probabilities or values."""

    def __init__(self, preprocessing: Preprocessing, network: keras.Model) -> None:
        output = preprocessing.output_spec

        def answer(raw: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            logits = network(preprocessing(raw), training=False)
            return {formats.output_name(output): model_files.probabilities_from_logits(logits, output)}

        super().__init__(network, preprocessing.raw_signature(), answer)
        self.tables_ += tables_of(inner for each in preprocessing.layers.values() for inner in each._flatten_layers())


def _float32_forms(converter: Converter, converted: Sequence[Path], directory: Path) -> Iterator[formats.Format]:
    """Write the other float32 forms, or take along those that were made already."""
    made = {str(artifacts.open_artifact(path, step="convert").result["kind"]): path for path in converted}
    for kind in converter.config.formats:
        if kind in made:
            shutil.copytree(
                made[kind], directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns(artifacts.MANIFEST)
            )
            notes = artifacts.read_manifest(made[kind]).result["notes"]
        else:
            notes = converter.convert(kind, directory)
        for note in notes:
            progress.report(f"{converter.form(kind).name}: {note}")
        yield converter.form(kind)


def _take_along(compressed: Path, directory: Path) -> list[formats.Format]:
    forms = formats.read_formats(compressed)
    for form in forms:
        for file in formats.files_of(compressed / form.path):
            copy = directory / file.relative_to(compressed)
            copy.parent.mkdir(exist_ok=True)
            shutil.copy2(file, copy)
    return forms
