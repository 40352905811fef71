"""Step `compress`: smaller forms of the model, TFLite and ONNX. What they are worth, `verify` judges."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from components import artifacts, formats, metrics, model_files, progress, ptq
from components.config import CompressConfig
from components.examples import read_arrays
from components.preprocessing import Preprocessing
from models.quantization import in_float, strip

RECORD_FILE = "compression.json"
_NUM_COMPARED = 64


@dataclass(frozen=True)
class CompressResult:
    """What was written.

    Attributes:
        formats: For each: `format, size_bytes, max_abs_difference, ranges, notes`. `ranges` says where those of an int8
            form are from: `ptq`, `training`, or `converter`, which takes minima and maxima, where `components.ptq` cannot
            take the model; the notes say why.
    """

    formats: list[dict[str, Any]]


def compress(
    *, examples: Path, transform: Path, optimized: Path, compressed: Path, config: CompressConfig
) -> CompressResult:
    """Write the compressed forms.

    Args:
        examples: Artifact of `ingest`: int8 is calibrated on the train split, and on the validation split it is measured
            what helps.
        transform: Artifact of `transform`.
        optimized: Artifact of `optimize`. The int8 forms of a quantization-aware model have the ranges of its training.
        compressed: Where the artifact is written: a folder a kind, `formats.json`, and `compression.json` with the
            ranges, what was tried, and what each layer costs.
        config: The forms and how they are made.

    Raises:
        ConversionError: a form cannot take the model; says which operation, why, and the way round.
        HeadraceError: `mixed.max_drop` cannot be reached.
    """
    for path, step in ((examples, "ingest"), (transform, "transform"), (optimized, "optimize")):
        artifacts.open_artifact(path, step=step)
    inputs = {"examples": examples, "transform": transform, "optimized": optimized}
    with artifacts.writing(compressed, step="compress", inputs=inputs, config=config) as out:
        converter = _Converter(examples, Preprocessing.load(transform), model_files.load_model(optimized), config)
        forms, rows = [], []
        for name in config.formats:
            progress.report(f"converting to {_FORMS[name].name}")
            form, row = converter.convert(name, out.path)
            forms.append(form)
            rows.append(row)
        formats.write_formats(forms, out.path)
        record = {"formats": rows, **({"quantization": converter.record} if converter.record else {})}
        (out.path / RECORD_FILE).write_text(json.dumps(record, indent=1))
        out.result = CompressResult(formats=rows)
    return out.result


@dataclass(frozen=True)
class _Form:
    """A value of `compress.formats`.

    Attributes:
        name: Among all formats.
        path: Its file or folder in the artifact.
        form: What its converter calls it.
        convert: The converter.
    """

    name: str
    path: str
    form: str
    convert: Callable[..., formats.Conversion]

    @property
    def takes_ranges(self) -> bool:
        """Whether the ranges of its activations may come with the network."""
        return self.name in ("tflite_int8", "onnx_static_int8")

    @property
    def takes_examples(self) -> bool:
        """Whether its converter sets the ranges of a network that has none by examples."""
        return self.form in ("int8", "int16x8", "static_int8")


def _forms(kind: str, path: str, forms: tuple[str, ...], convert: Callable[..., formats.Conversion]) -> list[_Form]:
    return [_Form(f"{kind}_{form}", f"{kind}/{path.format(form)}", form, convert) for form in forms]


_FORMS = {
    form.name.removeprefix("tflite_"): form
    for form in (
        *_forms(
            "tflite",
            "model_{}.tflite",
            ("float16", "dynamic_range", "int8", "int16x8"),
            formats.convert_tflite,
        ),
        *_forms("onnx", "model_{}.onnx", ("dynamic_int8", "static_int8"), formats.convert_onnx),
        *_forms("openvino", "model_{}.xml", ("float16", "int8"), formats.convert_openvino),
        *_forms("coreml", "model_{}.mlpackage", ("float16",), formats.convert_coreml),
        *_forms("tensorrt", "{}", ("float16", "int8"), formats.convert_tensorrt),
    )
}


class _Converter:
    """Converts one model form by form.

    Attributes:
        record: How `components.ptq` quantized it; empty where it did not.
    """

    def __init__(
        self, examples: Path, preprocessing: Preprocessing, model: keras.Model, config: CompressConfig
    ) -> None:
        self.examples, self.preprocessing, self.model, self.config = examples, preprocessing, model, config
        floating = in_float(model)
        self.has_trained_ranges = floating is not model
        self.core = formats.Core(preprocessing, floating)
        self.record: dict[str, Any] = {}

    def convert(self, name: str, directory: Path) -> tuple[formats.Format, dict[str, Any]]:
        """Write one form."""
        form = _FORMS[name]
        file = directory / form.path
        file.parent.mkdir(exist_ok=True)
        core, ranges, notes = self._ranged if form.takes_ranges else (self.core, None, [])
        try:
            done = self._written(core, form, file)
        except formats.ConversionError as error:
            if core is self.core:
                raise
            done, ranges, notes = self._written(self.core, form, file), "converter", [str(error)]
        row = {
            "format": form.name,
            "size_bytes": done.size_bytes,
            "max_abs_difference": done.max_abs_difference,
            "ranges": ranges,
            "notes": [*notes, *done.notes],
        }
        return formats.Format(form.name, form.path, self.core.inputs, exact=False), row

    def _written(self, core: formats.Core, form: _Form, file: Path) -> formats.Conversion:
        compared = self._feed({name: values[:_NUM_COMPARED] for name, values in self._validation.items()})
        options: dict[str, Any] = {"form": form.form, "examples": compared}
        if form.takes_examples and not (form.takes_ranges and core.has_ranges):
            options["calibration"] = self._feed(self._calibration)
        if form.convert is not formats.convert_tflite:
            options["metadata"] = {"labels": self.preprocessing.classes}
        elif form.takes_examples:
            options["float_fallback"] = True
            if form.form == "int8":
                options["io_dtype"] = self.config.io_dtype
        return form.convert(core, file, **options)

    @functools.cached_property
    def _ranged(self) -> tuple[formats.Core, str | None, list[str]]:
        """The network with the ranges of its int8 form, or as it is where it cannot have any; and where they are from."""
        if self.has_trained_ranges:
            return formats.Core(self.preprocessing, strip(self.model)), "training", []
        progress.report("quantizing")
        try:
            quantized = ptq.quantize(
                self.model,
                calibration=self.preprocessing.transform_in_batches(self._calibration),
                validation=self.preprocessing.transform_in_batches(self._validation),
                config=self.config,
                drop=self._drop,
            )
        except formats.ConversionError as error:
            return self.core, "converter", [str(error)]
        self.record = quantized.to_json()
        return formats.Core(self.preprocessing, quantized.model), "ptq", []

    @functools.cached_property
    def _calibration(self) -> dict[str, np.ndarray]:
        return self._chosen("train")

    @functools.cached_property
    def _validation(self) -> dict[str, np.ndarray]:
        return self._chosen("validation")

    def _chosen(self, split: str) -> dict[str, np.ndarray]:
        """Raw examples of a split, of each class alike."""
        raw = read_arrays(self.examples, split)
        labels = self.preprocessing.encode_labels(raw[self.preprocessing.info.label])
        if self.preprocessing.info.task == "regression":
            labels = np.zeros(len(labels))
        rows = formats.stratified(labels, self.config.calibration.num_examples, seed=self.config.seed)
        return {name: values[rows] for name, values in raw.items()}

    def _feed(self, raw: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return self.core.feed(self.preprocessing, raw)

    def _drop(self, logits: list[np.ndarray]) -> float:
        """What the metric loses on the validation examples."""
        return metrics.improvement(self.config.primary_metric, self._float_value, self._value(logits[0]))

    @functools.cached_property
    def _float_value(self) -> float:
        features = self.preprocessing.transform_in_batches(self._validation)
        return self._value(self.model.predict(features, verbose=0))

    def _value(self, logits: np.ndarray) -> float:
        output = self.preprocessing.output_spec
        answers = model_files.probabilities_from_logits(tf.constant(logits), output).numpy()
        labels = self.preprocessing.encode_labels(self._validation[self.preprocessing.info.label])
        return metrics.compute(output.task, labels, answers)[self.config.primary_metric]
