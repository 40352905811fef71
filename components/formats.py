"""The forms in which a model leaves: what each file takes and answers, how it is converted and how it is run.

`FORMATS_FILE` lists them in an export. A form with `inputs: raw` takes the raw features; one with `inputs: transformed`
takes what the SavedModel's `transform` signature gives, because its runtime cannot run string lookups.
"""

from __future__ import annotations

import json
import logging
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from components.errors import HeadraceError
from components.model_files import probabilities_from_logits
from components.preprocessing import Preprocessing
from models.spec import OutputSpec

FORMATS_FILE = "formats.json"
Arrays = Mapping[str, np.ndarray]
Runner = Callable[[Arrays], np.ndarray]


@dataclass(frozen=True)
class Format:
    """One form of the model.

    Attributes:
        name: `saved_model`, `tflite_float32`, `tflite_float16`, `tflite_dynamic_range`, `tflite_int8` or `onnx`.
        path: Its file or folder, relative to the export.
        inputs: `raw` or `transformed`.
        exact: Whether it computes in float32, so that its numbers must be the Keras model's.
        min_top1_agreement: The limit with which a compressed form passed `compress`; None for exact forms.
    """

    name: str
    path: str
    inputs: str
    exact: bool
    min_top1_agreement: float | None = None


def write_formats(formats: Sequence[Format], directory: Path) -> None:
    """Write the list of forms."""
    (directory / FORMATS_FILE).write_text(json.dumps([asdict(form) for form in formats], indent=1))


def read_formats(directory: Path) -> list[Format]:
    """Read the list of forms."""
    return [Format(**fields) for fields in json.loads((directory / FORMATS_FILE).read_text())]


def output_name(output: OutputSpec) -> str:
    """Name of the numeric output in every form."""
    return "value" if output.task == "regression" else "probabilities"


class Core(tf.Module):
    """What TFLite and ONNX files hold: the network, with the preprocessing inside where their runtimes can run it."""

    def __init__(self, preprocessing: Preprocessing, model: Any) -> None:
        super().__init__(name="core")
        self.inputs = "raw" if preprocessing.is_convertible else "transformed"
        self._output = preprocessing.output_spec
        self.variables_ = [variable.value for variable in model.variables]
        specs = preprocessing.raw_signature() if self.inputs == "raw" else transformed_signature(preprocessing)
        self.specs = dict(sorted(specs.items()))

        def answer(features: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            transformed = preprocessing(features) if self.inputs == "raw" else features
            logits = model(transformed, training=False)
            return {output_name(self._output): probabilities_from_logits(logits, self._output)}

        self.answer = answer
        self.function = tf.function(lambda **features: answer(features))

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


def to_tflite(core: Core, form: str, calibration: Arrays | None = None) -> bytes:
    """Convert to TFLite.

    Args:
        core: The network.
        form: `float32`, `float16`, `dynamic_range` or `int8`. int8 keeps float inputs and outputs.
        calibration: int8: examples `(num_examples, ...)` by which the ranges of activations are set.

    Raises:
        HeadraceError: the converter refuses the model; the message names the operation.
    """
    with tempfile.TemporaryDirectory() as directory:
        concrete = core.function.get_concrete_function(**core.specs)
        tf.saved_model.save(core, directory, signatures={"serving_default": concrete})
        converter = tf.lite.TFLiteConverter.from_saved_model(directory, signature_keys=["serving_default"])
        if form != "float32":
            converter.optimizations = [tf.lite.Optimize.DEFAULT]
        if form == "float16":
            converter.target_spec.supported_types = [tf.float16]
        if form == "int8":
            if calibration is None:
                raise TypeError("int8 needs calibration examples")
            converter.representative_dataset = lambda: _one_by_one(calibration)
        try:
            return bytes(converter.convert())
        except Exception as error:
            raise HeadraceError(
                f"TFLite ({form}) cannot take this model: {_first_line(error)}. "
                "Leave the format out of compress.formats or export.formats, or change the layer that it names."
            ) from error


def to_onnx(core: Core, opset: int, file: Path) -> None:
    """Convert to ONNX by tf2onnx and check the file: the converter reports success for broken graphs, too.

    Raises:
        HeadraceError: an operation has no ONNX form, or the file is not valid.
    """
    import onnx
    import tf2onnx

    specs = list(core.specs.values())
    names = list(core.specs)

    def positional(*tensors: tf.Tensor) -> dict[str, tf.Tensor]:
        return core.answer(dict(zip(names, tensors, strict=True)))

    logging.getLogger("tf2onnx").setLevel(logging.ERROR)
    model, _ = tf2onnx.convert.from_function(tf.function(positional), input_signature=specs, opset=opset)
    _name_onnx_tensors(model.graph, names, [output_name(core._output)])
    known = {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}
    unknown = sorted({node.op_type for node in model.graph.node if node.domain == "" and node.op_type not in known})
    if unknown:
        raise HeadraceError(
            f"ONNX has no form of {', '.join(unknown)}. Leave onnx out of export.formats, or change the layer that uses it."
        )
    try:
        onnx.checker.check_model(model, full_check=True)
    except onnx.checker.ValidationError as error:
        raise HeadraceError(f"tf2onnx wrote an invalid ONNX graph: {_first_line(error)}.") from error
    onnx.save(model, file)


def run_saved_model(path: Path, output: str) -> Runner:
    """Answers of a SavedModel's `serving_default` signature."""
    signature = tf.saved_model.load(str(path)).signatures["serving_default"]
    wanted = signature.structured_input_signature[1]
    return lambda arrays: signature(**{name: tf.constant(arrays[name], spec.dtype) for name, spec in wanted.items()})[
        output
    ].numpy()


def run_tflite(path: Path, output: str) -> Runner:
    """Answers of a TFLite file on one thread, resized to each batch."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=str(path), num_threads=1)
    runner = interpreter.get_signature_runner("serving_default")
    wanted = runner.get_input_details()
    return lambda arrays: runner(**{name: arrays[name].astype(wanted[name]["dtype"]) for name in wanted})[output]


def run_onnx(path: Path, output: str) -> Runner:
    """Answers of an ONNX file by onnxruntime on one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]
    return lambda arrays: session.run([output], {name: arrays[name] for name in names})[0]


def make_runner(form: Format, export: Path, output: str) -> Runner:
    """How to run a form: `(name -> (batch, ...)) -> (batch, num_classes)`, or `(batch,)` for regression."""
    runners = {"saved_model": run_saved_model, "onnx": run_onnx}
    return runners.get(form.name, run_tflite)(export / form.path, output)


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


def size_bytes(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    return path.stat().st_size if path.is_file() else sum(f.stat().st_size for f in path.rglob("*") if f.is_file())


def _one_by_one(calibration: Arrays) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    for i in range(len(next(iter(calibration.values())))):
        yield "serving_default", {name: values[i : i + 1] for name, values in calibration.items()}


def _name_onnx_tensors(graph: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    renamed = {
        **{node.name: name for node, name in zip(graph.input, inputs, strict=True)},
        **{node.name: name for node, name in zip(graph.output, outputs, strict=True)},
    }
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
    for node in (*graph.input, *graph.output):
        node.name = renamed[node.name]
        node.type.tensor_type.shape.dim[0].dim_param = "batch"


def _first_line(error: BaseException) -> str:
    text = re.sub(r"\s+", " ", str(error)).strip()
    return text[:300]
