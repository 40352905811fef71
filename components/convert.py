"""The float32 forms beside the SavedModel: converting one of them, for `export`, or as an artifact of its own.

On Kubeflow each may have a pod of its own; `export` then takes the files along that it would have written itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from components import artifacts, formats, model_files, progress
from components.config import ExportConfig
from components.examples import read_batches
from components.preprocessing import Preprocessing
from models import quantization

# The SavedModel's batch of warm-up; forms are compared on as many.
WARMUP_BATCH = 32


@dataclass(frozen=True)
class ConvertResult:
    """What was written.

    Attributes:
        kind: The value of `export.formats`.
        notes: What is to be said of it, one line each.
    """

    kind: str
    notes: list[str]


@dataclass(frozen=True)
class _Form:
    """A value of `export.formats`.

    Attributes:
        name: Among all formats.
        path: Its file or folder in the artifact.
        convert: The converter.
    """

    name: str
    path: str
    convert: Callable[..., formats.Conversion]


_FORMS = {
    "tflite": _Form("tflite_float32", "tflite/model_float32.tflite", formats.convert_tflite),
    "onnx": _Form("onnx", "onnx/model.onnx", formats.convert_onnx),
    "openvino": _Form("openvino", "openvino/model.xml", formats.convert_openvino),
    "coreml": _Form("coreml", "coreml/model.mlpackage", formats.convert_coreml),
    "tensorrt": _Form("tensorrt", "tensorrt/float32", formats.convert_tensorrt),
}


class Converter:
    """Converts one model form by form.

    Attributes:
        preprocessing: From raw features to the network's inputs.
        network: In float, as all of these forms are made of it.
        raw: Raw features of some test examples, drawn by the seed.
    """

    def __init__(self, examples: Path, transform: Path, model: Path, optimized: Path, config: ExportConfig) -> None:
        self.config = config
        self.preprocessing = Preprocessing.load(transform)
        self.network = quantization.in_float(model_files.load_model(model if self.is_trained else optimized))
        self.raw = _held_out(examples, self.preprocessing, config)

    @property
    def is_trained(self) -> bool:
        """Whether the model is that of `train`."""
        return self.config.model == "trained"

    def form(self, kind: str) -> formats.Format:
        """How a form is listed in `formats.json`."""
        return formats.Format(_FORMS[kind].name, _FORMS[kind].path, self._core.inputs, exact=self.is_trained)

    def convert(self, kind: str, directory: Path) -> list[str]:
        """Write a form, with the names of the classes where it has a place for them, and return its notes."""
        form = _FORMS[kind]
        progress.report(f"converting to {kind}")
        (directory / form.path).parent.mkdir()
        options: dict[str, Any] = {"opset": self.config.onnx_opset} if kind == "onnx" else {}
        if kind != "tflite":
            options["metadata"] = {"labels": self.preprocessing.classes}
        fed = self._core.feed(self.preprocessing, self.raw)
        done = form.convert(self._core, directory / form.path, examples=fed, **options)
        if kind == "onnx":
            (directory / "pictures").mkdir()
            formats.draw_onnx(directory / form.path, directory / "pictures/onnx.svg")
        return list(done.notes)

    @functools.cached_property
    def _core(self) -> formats.Core:
        return formats.Core(self.preprocessing, self.network)


def convert(
    *, examples: Path, transform: Path, model: Path, optimized: Path, converted: Path, kind: str, config: ExportConfig
) -> ConvertResult:
    """Write one form as an artifact of its own.

    Args:
        examples: Artifact of `ingest`; the form is compared on some of its test split.
        transform: Artifact of `transform`.
        model: Artifact of `train`.
        optimized: Artifact of `optimize`.
        converted: Where the artifact is written: the files as they stand in that of `export`.
        kind: The form, a value of `export.formats`.
        config: The forms.

    Raises:
        HeadraceError: the converter cannot take the model; the message names the operation.
    """
    inputs = {"examples": examples, "transform": transform, "model": model, "optimized": optimized}
    for path, step in zip(inputs.values(), ("ingest", "transform", "train", "optimize"), strict=True):
        artifacts.open_artifact(path, step=step)
    with artifacts.writing(converted, step="convert", inputs=inputs, config=config) as out:
        notes = Converter(examples, transform, model, optimized, config).convert(kind, out.path)
        out.result = ConvertResult(kind, notes)
    return out.result


def _held_out(examples: Path, preprocessing: Preprocessing, config: ExportConfig) -> formats.Arrays:
    """Raw features of some test examples, drawn by the seed."""
    batch = next(read_batches(examples, "test"))
    order = np.random.default_rng(config.seed).permutation(len(batch[preprocessing.info.label]))
    rows = order[: max(config.num_warmup_examples, WARMUP_BATCH)]
    return {name: batch[name][rows] for name in preprocessing.raw_inputs}
