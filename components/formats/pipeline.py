"""The forms of a pipeline's own model: what each file takes and answers, how it is converted and how it is run.

`FORMATS_FILE` lists them in an export. A form with `inputs: raw` takes the raw features; one with `inputs: transformed`
takes what the SavedModel's `transform` signature gives, because its runtime cannot run string lookups.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from components.errors import HeadraceError
from components.formats.network import Arrays, Network
from components.formats.runners import load_runner
from components.model_files import probabilities_from_logits
from components.preprocessing import Preprocessing
from models.optimization.size import zipped_size
from models.spec import OutputSpec

FORMATS_FILE = "formats.json"
Runner = Callable[[Arrays], np.ndarray]


@dataclass(frozen=True)
class Format:
    """One form of the model.

    Attributes:
        name: Such as `saved_model`, `tflite_float32`, `tflite_int8` or `onnx`; by it `verify` finds its limits.
        path: What `load_runner` takes, relative to the export: its folder, or its file, named as no other form's.
        inputs: `raw` or `transformed`.
        exact: Whether it computes in float32, so that its numbers must be the Keras model's.
    """

    name: str
    path: str
    inputs: str
    exact: bool


def write_formats(formats: Sequence[Format], directory: Path) -> None:
    """Write the list of forms."""
    (directory / FORMATS_FILE).write_text(json.dumps([asdict(form) for form in formats], indent=1))


def read_formats(directory: Path) -> list[Format]:
    """Read the list of forms."""
    return [Format(**fields) for fields in json.loads((directory / FORMATS_FILE).read_text())]


def output_name(output: OutputSpec) -> str:
    """Name of the numeric output in every form."""
    return "value" if output.task == "regression" else "probabilities"


class Core(Network):
    """What TFLite and ONNX files hold: the network, with the preprocessing inside where their runtimes can run it."""

    def __init__(self, preprocessing: Preprocessing, model: Any) -> None:
        self.inputs = "raw" if preprocessing.is_convertible else "transformed"
        output = preprocessing.output_spec
        specs = preprocessing.raw_signature() if self.inputs == "raw" else transformed_signature(preprocessing)

        def answer(features: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            transformed = preprocessing(features) if self.inputs == "raw" else features
            logits = model(transformed, training=False)
            return {output_name(output): probabilities_from_logits(logits, output)}

        super().__init__(model, specs, answer)

    def feed(self, preprocessing: Preprocessing, raw: Arrays) -> dict[str, np.ndarray]:
        """Raw features as the arrays that the files take."""
        if self.inputs == "raw":
            return {name: raw[name] for name in self.specs}
        return preprocessing.transform_in_batches(raw)


def transformed_signature(preprocessing: Preprocessing) -> dict[str, tf.TensorSpec]:
    """Name -> TensorSpec of the transformed features, batch dimension unknown."""
    return {
        name: tf.TensorSpec((None, *feature.shape), tf.as_dtype(feature.dtype), name=name)
        for name, feature in preprocessing.input_spec.items()
    }


def run_file(path: Path, output: str) -> Runner:
    """The answers named `output` of a TFLite or ONNX file, or of a SavedModel's `serving_default` signature."""
    runner = load_runner(path)
    return lambda arrays: runner(arrays)[output]


def make_runner(form: Format, export: Path, output: str) -> Runner:
    """How to run a form: `(name -> (batch, ...)) -> (batch, num_classes)`, or `(batch,)` for regression."""
    return run_file(export / form.path, output)


def answer_in_batches(run: Runner, arrays: Arrays, batch_size: int = 256) -> np.ndarray:
    """The answers for all examples, `batch_size` at a time.

    Raises:
        HeadraceError: there are more or fewer answers than examples.
    """
    num_examples = len(next(iter(arrays.values())))
    starts = range(0, num_examples, batch_size)
    answers = np.concatenate([run({k: v[i : i + batch_size] for k, v in arrays.items()}) for i in starts])
    if len(answers) != num_examples:
        raise HeadraceError(
            f"{num_examples} examples were asked and {len(answers)} answered: the batch dimension is lost."
        )
    return answers


def files_of(path: Path) -> list[Path]:
    """The files of a form: all below a folder; or a file with what lies beside it under its name, such as weights."""
    return sorted(
        file for file in (path.rglob("*") if path.is_dir() else path.parent.glob(f"{path.stem}.*")) if file.is_file()
    )


def size_bytes(path: Path) -> int:
    """Bytes of all files of a form."""
    return sum(file.stat().st_size for file in files_of(path))


def zipped_bytes(path: Path) -> int:
    """Bytes of all files of a form, each zipped."""
    return sum(zipped_size(file) for file in files_of(path))
