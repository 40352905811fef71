"""The matrix of models and formats: what works, what has to be split and what cannot be, with the reason.

`MODELS` are the rows and `COLUMNS` the columns. `EXPECTED` names the cells that do not simply work; a test runs every
cell and compares. `python -m tests.components.formats.matrix --write docs/export.md` runs them all and writes the table
into the file, between its two marks.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from components.formats import (
    Conversion,
    ConversionError,
    Network,
    convert_coreml,
    convert_onnx,
    convert_openvino,
    convert_saved_model,
    convert_tensorrt,
    convert_tflite,
    load_runner,
    split_lookups,
)
from components.formats.coreml import NOT_RUN
from tests.components.formats.models import CASES, Arrays

START, END = "<!-- matrix -->", "<!-- /matrix -->"
COMMAND = "python -m tests.components.formats.matrix --write docs/export.md"


@dataclass(frozen=True)
class Column:
    """A format.

    Attributes:
        name: As `Conversion.format` has it.
        bound: Largest difference from Keras that still works, as a share of the spread of the output.
        convert: Writes the network into a file or folder beside the path given; the examples serve to calibrate with, too.
        packages: Optional ones that it needs.
        success: What a cell is called that does all that can be done here.
    """

    name: str
    bound: float
    convert: Callable[[Network, Path, Arrays], Conversion]
    packages: tuple[str, ...] = ()
    success: str = "works"


@dataclass(frozen=True)
class Expected:
    """A cell that is otherwise than the rest of its column.

    Attributes:
        status: `works`, `converts`, `prepared`, `split` or `cannot`.
        reason: Part of the reason that is given, or of the note of one that works.
        bound: In place of the column's; then `reason` says why it needs one.
    """

    status: str
    reason: str
    bound: float | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a cell.

    Attributes:
        status: As `Expected` has it.
        note: The reason, or what is otherwise than in the Keras model.
        difference: Largest difference from Keras as a share of the spread of the output; NaN where it was not run.
        size_bytes: Of the file; 0 where there is none.
    """

    status: str
    note: str
    difference: float = float("nan")
    size_bytes: int = 0


def _tflite(network: Network, path: Path, examples: Arrays, *, form: str) -> Conversion:
    integer = form in ("int8", "int16x8")
    return convert_tflite(
        network,
        path.with_suffix(".tflite"),
        form=form,
        calibration=examples if integer else None,
        examples=examples,
        float_fallback=integer,
    )


def _onnx(network: Network, path: Path, examples: Arrays, *, form: str) -> Conversion:
    calibration = examples if form == "static_int8" else None
    return convert_onnx(network, path.with_suffix(".onnx"), form=form, calibration=calibration, examples=examples)


def _saved_model(network: Network, path: Path, examples: Arrays) -> Conversion:
    return convert_saved_model(network, path, examples=examples)


def _openvino(network: Network, path: Path, examples: Arrays, *, form: str) -> Conversion:
    calibration = examples if form == "int8" else None
    return convert_openvino(network, path.with_suffix(".xml"), form=form, calibration=calibration, examples=examples)


def _coreml(network: Network, path: Path, examples: Arrays) -> Conversion:
    done = convert_coreml(network, path.with_suffix(".mlpackage"), examples=examples)
    return replace(done, notes=tuple(note for note in done.notes if note != NOT_RUN))


def _tensorrt(network: Network, path: Path, examples: Arrays) -> Conversion:
    """Without what is missing here: the table is to be the same everywhere."""
    return replace(convert_tensorrt(network, path, examples=examples), notes=())


COLUMNS = [
    Column("saved_model", 1e-5, _saved_model),
    Column("tflite_float32", 1e-5, partial(_tflite, form="float32")),
    Column("tflite_float16", 2e-3, partial(_tflite, form="float16")),
    Column("tflite_dynamic_range", 0.04, partial(_tflite, form="dynamic_range")),
    Column("tflite_int8", 0.06, partial(_tflite, form="int8")),
    Column("tflite_int16x8", 0.02, partial(_tflite, form="int16x8")),
    Column("onnx", 1e-5, partial(_onnx, form="float32")),
    Column("onnx_dynamic_int8", 0.05, partial(_onnx, form="dynamic_int8")),
    Column("onnx_static_int8", 0.06, partial(_onnx, form="static_int8")),
    Column("openvino", 1e-5, partial(_openvino, form="float32"), ("openvino",)),
    Column("openvino_float16", 2e-3, partial(_openvino, form="float16"), ("openvino",)),
    Column("openvino_int8", 0.06, partial(_openvino, form="int8"), ("openvino", "nncf")),
    Column("coreml", 1e-3, _coreml, ("coremltools",), success="converts"),
    Column("tensorrt", 1e-5, _tensorrt, success="prepared"),
]
MODELS = CASES

_IDS = "int16x8 has no form of integers that are not quantized floats"
_STRIDED = "operation StridedSlice of layer 'block1_attention'"
_HASHING = "operation StringToHashBucketFast of layer 'hashing'"
_MASK = "the -1e9 of masked scores takes up the range that int8 has for all scores"
_UNROLLED = "recurrent layers are unrolled"
_UNROLLED_FLOAT = f"{_UNROLLED}; computed in float: SELECT_V2, ZEROS_LIKE"
_ONE = "the batch is fixed to 1"
EXPECTED: dict[tuple[str, str], Expected] = {
    ("Transformer, fixed length", "tflite_int8"): Expected("works", _MASK, bound=0.3),
    ("Transformer, fixed length", "onnx_static_int8"): Expected("works", _MASK, bound=0.3),
    ("Transformer, fixed length", "tflite_int16x8"): Expected("cannot", _IDS),
    ("Transformer, dynamic length", "tflite_float32"): Expected("works", _STRIDED),
    ("Transformer, dynamic length", "tflite_float16"): Expected("works", _STRIDED),
    ("Transformer, dynamic length", "tflite_dynamic_range"): Expected("works", _STRIDED),
    ("Transformer, dynamic length", "tflite_int8"): Expected("works", _MASK, bound=0.3),
    ("Transformer, dynamic length", "onnx_static_int8"): Expected("works", _MASK, bound=0.3),
    ("Transformer, dynamic length", "tflite_int16x8"): Expected("cannot", _IDS),
    **{
        (row, f"tflite_{form}"): Expected("works", note)
        for row in ("LSTM, masked", "GRU, masked")
        for form, note in (("float32", _ONE), ("float16", _ONE), ("dynamic_range", _ONE), ("int8", _UNROLLED_FLOAT))
    },
    ("LSTM, masked", "tflite_int16x8"): Expected("cannot", _IDS),
    ("GRU, masked", "tflite_int16x8"): Expected("cannot", _IDS),
    ("LSTM, masked", "coreml"): Expected("converts", _UNROLLED),
    ("GRU, masked", "coreml"): Expected("converts", _UNROLLED),
    ("tabular", "tflite_int16x8"): Expected("cannot", _IDS),
    **{("tabular with strings", column.name): Expected("split", _HASHING) for column in COLUMNS[1:]},
    ("tabular with strings", "tflite_int16x8"): Expected("cannot", _IDS),
}


def outcome(row: str, column: Column) -> Outcome:
    """Convert, run and compare one cell; done once a process."""
    return _outcome(row, column.name)


@functools.cache
def _outcome(row: str, column_name: str) -> Outcome:
    column = next(each for each in COLUMNS if each.name == column_name)
    network, features = _prepared(row)
    try:
        return _works(column.success, column, network, features)
    except ConversionError as error:
        note = f"{error.where}: {error.why}. {error.way_round}."
        if "split_lookups" not in error.way_round:
            return Outcome("cannot", note)
    split = split_lookups(MODELS[row]().model)
    try:
        done = _works("split", column, split.core, split.feed(features))
    except ConversionError as error:
        return Outcome("cannot", f"{error.where}: {error.why}. {error.way_round}.")
    return Outcome("split", "; ".join(filter(None, (note, done.note))), done.difference, done.size_bytes)


@functools.cache
def _prepared(row: str) -> tuple[Network, Arrays]:
    case = MODELS[row]()
    is_graph = bool(getattr(case.model, "inputs", None))
    return Network.of(case.model, inputs=None if is_graph else case.features), case.features


def _works(status: str, column: Column, network: Network, features: Arrays) -> Outcome:
    with tempfile.TemporaryDirectory() as directory:
        conversion = column.convert(network, Path(directory) / "model", features)
        notes = "; ".join(conversion.notes)
        if np.isnan(conversion.max_abs_difference):
            return Outcome(status, notes, size_bytes=conversion.size_bytes)
        answers = load_runner(conversion.path)(features)
    expected = network.expected(features)
    assert answers.keys() == expected.keys()
    differences = [np.abs(answers[name] - wanted).max() / np.ptp(wanted) for name, wanted in expected.items()]
    return Outcome(status, notes, float(max(differences)), conversion.size_bytes)


def bound(row: str, column: Column) -> float:
    """Largest difference with which a cell still works."""
    expected = EXPECTED.get((row, column.name))
    return column.bound if expected is None or expected.bound is None else expected.bound


def table() -> str:
    """The whole matrix as Markdown, with a numbered note for each reason."""
    notes: list[str] = []

    def cell(row: str, column: Column) -> str:
        done = outcome(row, column)
        expected = EXPECTED.get((row, column.name))
        loss = f"differs by up to {expected.bound:g}: {expected.reason}" if expected and expected.bound else ""
        note = "; ".join(filter(None, (done.note, loss)))
        if not note:
            return done.status
        if note not in notes:
            notes.append(note)
        return f"{done.status} [{notes.index(note) + 1}]"

    lines = [
        f"| model | {' | '.join(column.name for column in COLUMNS)} |",
        f"| --- |{' --- |' * len(COLUMNS)}",
        f"| differs by at most | {' | '.join(f'{column.bound:g}' for column in COLUMNS)} |",
        *(f"| {row} | {' | '.join(cell(row, column) for column in COLUMNS)} |" for row in MODELS),
        "",
        *(f"{number}. {note}" for number, note in enumerate(notes, start=1)),
    ]
    return "\n".join(lines)


def written_into(text: str, content: str) -> str:
    """`text` with what stands between its marks replaced."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{content}\n{END}{after}"


def read_table(text: str) -> str:
    """What stands between the marks."""
    return text.partition(START)[2].partition(END)[0].strip("\n")


def main() -> None:
    """Run every cell and write the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "--write", type=Path, required=True, metavar="FILE", help="the Markdown file with the two marks"
    )
    file = parser.parse_args().write
    file.write_text(written_into(file.read_text(), table()))


if __name__ == "__main__":
    main()
