"""TFLite (LiteRT) files of any Keras model.

| form | weights | computes in |
| --- | --- | --- |
| `float32` | float32 | float32 |
| `float16` | float16 | float32 |
| `dynamic_range` | int8 from 1,024 numbers on | int8 or float32, ranges taken from each input |
| `int8` | int8, per channel | int8 |
| `int16x8` | int8, per channel | int16 |

The plain interpreter runs every file: none needs the Flex delegate. That asks for a choice in recurrent layers, whose
loop converts only with a fixed batch. The float forms get a batch of 1, which the runner asks example by example; that
is the smallest file. The integer forms are unrolled, since the calibration cannot run a loop. `unroll=True` gives a
float form a free batch, in about three times the bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from components.errors import HeadraceError, did_you_mean
from components.formats.checks import largest_difference
from components.formats.errors import ConversionError, first_line
from components.formats.graph import layer_of, nodes_of, text_ops, way_round
from components.formats.network import SIGNATURE, Arrays, Network
from components.formats.results import Conversion
from components.formats.runners import load_tflite

FORMS = ("float32", "float16", "dynamic_range", "int8", "int16x8")
INTEGER_FORMS = ("int8", "int16x8")
_IO_DTYPES = {"int8": ("float32", "int8", "uint8"), "int16x8": ("float32", "int16")}
_LOOPS = frozenset({"While", "StatelessWhile"})


def convert_tflite(
    network: Network,
    file: Path,
    *,
    form: str = "float32",
    calibration: Arrays | None = None,
    examples: Arrays | None = None,
    io_dtype: str = "float32",
    batch_size: int | Literal["auto"] | None = "auto",
    unroll: bool | None = None,
    float_fallback: bool = False,
) -> Conversion:
    """Convert, run and compare with Keras, and write the file.

    Args:
        network: What to convert.
        file: Where to; the same network gives the same bytes.
        form: One of `FORMS`.
        calibration: `int8` and `int16x8`: examples `(num_examples, ...)` by which the ranges of activations are set. See
            `stratified`. Without it `int8` takes a model that has ranges: of `components.ptq`, or trained with them.
        examples: What to compare on; made up by default.
        io_dtype: `int8` and `int16x8`: what float inputs and outputs become in the file.
        batch_size: Of the file; `None` is free. `auto` is free where the converter can, else 1.
        unroll: Whether the steps of recurrent layers are written out; by default only where the form needs it.
        float_fallback: `int8` and `int16x8`: whether operations without an integer form may stay float; a note says which.

    Raises:
        ConversionError: the form cannot take the model; says which operation, why, and the way round.
        HeadraceError: an option does not fit the form.

    Example:
        >>> network = Network.of(model)
        >>> convert_tflite(network, Path("model.tflite"), form="int8", calibration={"image": images[rows]})
    """
    _check_options(network, form, calibration, io_dtype)
    content, notes = to_tflite_bytes(
        network,
        form,
        calibration=calibration,
        io_dtype=io_dtype,
        batch_size=batch_size,
        unroll=unroll,
        float_fallback=float_fallback,
    )
    name = f"tflite_{form}"
    runner = load_tflite(file, content)
    difference = largest_difference(network, runner, name, examples, exact=form == "float32")
    file.write_bytes(content)
    return Conversion(name, file, len(content), runner.inputs, runner.outputs, difference, notes)


def to_tflite_bytes(
    network: Network,
    form: str,
    *,
    calibration: Arrays | None = None,
    io_dtype: str = "float32",
    batch_size: int | Literal["auto"] | None = "auto",
    unroll: bool | None = None,
    float_fallback: bool = False,
) -> tuple[bytes, tuple[str, ...]]:
    """What `convert_tflite` writes, neither run nor compared, and what is otherwise than in the model."""
    _refuse_text(network, form)
    _refuse_ids(network, form)
    refused: ConversionError | None = None
    for size, unrolled in _attempts(network, form, batch_size, unroll):
        try:
            content = _convert(network, form, calibration, io_dtype, size, unrolled, float_fallback)
        except ConversionError as error:
            refused = error
            continue
        left = _float_operations(content) if form in INTEGER_FORMS else []
        if left and not float_fallback:
            raise _left_in_float(form, left)
        notes = [f"the batch is fixed to {size}"] if size is not None else []
        notes += ["recurrent layers are unrolled"] if unrolled and network.is_recurrent else []
        notes += [f"computed in float: {', '.join(left)}"] if left else []
        if refused is not None:
            notes.append(f"with a free batch: {refused.where}: {refused.why}")
        return content, tuple(notes)
    raise refused if refused is not None else RuntimeError("no attempt was made")


def _check_options(network: Network, form: str, calibration: Arrays | None, io_dtype: str) -> None:
    if form not in FORMS:
        raise HeadraceError(f"TFLite has no form '{form}'.{did_you_mean(form, FORMS)}")
    if form in INTEGER_FORMS and not calibration and not (form == "int8" and network.has_ranges):
        raise HeadraceError(f"TFLite {form} needs calibration={{name: examples}}, by which ranges are set.")
    if calibration is not None and (missing := [name for name in network.specs if name not in calibration]):
        raise HeadraceError(f"calibration lacks '{missing[0]}'.{did_you_mean(missing[0], calibration)}")
    allowed = _IO_DTYPES.get(form, ("float32",))
    if io_dtype not in allowed:
        raise HeadraceError(f"TFLite {form} has inputs and outputs of {' or '.join(allowed)}, not of {io_dtype}.")


def _refuse_text(network: Network, form: str) -> None:
    graph = network.traced(None, False).graph.as_graph_def()
    if found := text_ops(graph, network.layer_names):
        raise ConversionError(f"tflite_{form}", where=str(found[0]), why=found[0].why, way_round=found[0].way_round)


def _refuse_ids(network: Network, form: str) -> None:
    ids = next((name for name, spec in network.specs.items() if spec.dtype.is_integer), None)
    if form == "int16x8" and ids is not None:
        raise _no_integers(f"input '{ids}'")


def _no_integers(where: str) -> ConversionError:
    return ConversionError(
        "tflite_int16x8",
        where=where,
        why="int16x8 has no form of integers that are not quantized floats, such as ids",
        way_round="Take int8 or dynamic_range, or look the ids up outside of the model",
    )


def _attempts(
    network: Network, form: str, batch_size: int | Literal["auto"] | None, unroll: bool | None
) -> list[tuple[int | None, bool]]:
    """Batch size and unrolling, in the order in which they are tried."""
    if unroll is None:
        unroll = network.is_recurrent and form in INTEGER_FORMS
    if unroll and (name := _input_of_free_length(network)):
        raise ConversionError(
            f"tflite_{form}",
            where=f"input '{name}'",
            why="recurrent layers have to be unrolled, and its length is free",
            way_round="Give its Input a fixed length and pad to it, or take float32, float16 or dynamic_range",
        )
    if batch_size != "auto":
        return [(batch_size, unroll)]
    if network.is_recurrent and not unroll:
        return [(1, False)]
    return [(None, unroll), (1, unroll)]


def _input_of_free_length(network: Network) -> str | None:
    return next((name for name, spec in network.specs.items() if None in spec.shape[1:]), None)


def _convert(
    network: Network,
    form: str,
    calibration: Arrays | None,
    io_dtype: str,
    batch_size: int | None,
    unroll: bool,
    float_fallback: bool,
) -> bytes:
    if form in INTEGER_FORMS:
        _refuse_loops(network, form, batch_size, unroll)
    with network.saved_model(batch_size=batch_size, unroll=unroll) as directory:
        converter = tf.lite.TFLiteConverter.from_saved_model(str(directory), signature_keys=[SIGNATURE])
        _set_up(converter, form, io_dtype, float_fallback)
        if form in INTEGER_FORMS and calibration:
            converter.representative_dataset = lambda: _batches(network, calibration, batch_size or 1)
        elif form in INTEGER_FORMS:
            # Told to give integers alone, the converter asks for a representative dataset.
            converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS]
        try:
            return bytes(converter.convert())
        except Exception as error:  # the converter's errors have no common base
            raise _refusal(network, form, error) from error


def _refuse_loops(network: Network, form: str, batch_size: int | None, unroll: bool) -> None:
    """The calibration of a graph with a loop ends the whole process, without an error that could be caught."""
    graph = network.traced(batch_size, unroll).graph.as_graph_def()
    if loop := next((node for node in nodes_of(graph) if node.op in _LOOPS), None):
        layer = layer_of(loop.name, network.layer_names)
        raise ConversionError(
            f"tflite_{form}",
            where=f"operation {loop.op} of {f'layer {layer!r}' if layer else f'node {loop.name!r}'}",
            why="the ranges inside of a loop cannot be measured",
            way_round="Convert with unroll=True where it is a recurrent layer, or take dynamic_range",
        )


def _set_up(converter: Any, form: str, io_dtype: str, float_fallback: bool) -> None:
    ops = tf.lite.OpsSet
    if form != "float32":
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
    if form == "float16":
        converter.target_spec.supported_types = [tf.float16]
    if form in INTEGER_FORMS:
        whole = {
            "int8": ops.TFLITE_BUILTINS_INT8,
            "int16x8": ops.EXPERIMENTAL_TFLITE_BUILTINS_ACTIVATIONS_INT16_WEIGHTS_INT8,
        }[form]
        converter.target_spec.supported_ops = [whole, ops.TFLITE_BUILTINS] if float_fallback else [whole]
        converter.inference_input_type = converter.inference_output_type = tf.as_dtype(io_dtype)


def _batches(network: Network, calibration: Arrays, batch_size: int) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    num_examples = len(next(iter(calibration.values())))
    for start in range(0, num_examples - batch_size + 1, batch_size):
        rows = slice(start, start + batch_size)
        yield SIGNATURE, {n: np.asarray(calibration[n][rows], s.dtype.as_numpy_dtype) for n, s in network.specs.items()}


def _float_operations(content: bytes) -> list[str]:
    """Operations of an integer file that have floats among their tensors, beside those that make integers of floats.

    The converter leaves what has no integer kernel in float, even where it was told that there is integers alone.
    """
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    plain = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    interpreter = Interpreter(model_content=content, experimental_op_resolver_type=plain)
    floats = {each["index"] for each in interpreter.get_tensor_details() if each["dtype"] == np.float32}
    operations = {
        each["op_name"] for each in interpreter._get_ops_details() if floats & {*each["inputs"], *each["outputs"]}
    }
    return sorted(operations - {"QUANTIZE", "DEQUANTIZE"})


def _left_in_float(form: str, operations: list[str]) -> ConversionError:
    return ConversionError(
        f"tflite_{form}",
        where=f"operation {', '.join(operations)}",
        why=f"it has no {form} form, so that the converter left it in float",
        way_round="Convert with float_fallback=True if floats are allowed inside, or write that part otherwise",
    )


def _refusal(network: Network, form: str, error: Exception) -> ConversionError:
    """What the converter's message, pages long as a rule, says about the operation at fault."""
    text = str(error)
    name = f"tflite_{form}"
    if form == "int16x8" and (found := re.search(r"Empty min/max for tensor (\S+)", text)):
        return _no_integers(f"tensor '{found[1]}'")
    if kinds := re.findall(r"not yet supported for op: '(\w+)'", text):
        return _left_in_float(form, sorted(set(kinds)))
    op = re.search(r"'tf\.(\w+)' op is neither|(?:TF Select|Custom) ops: (\w+)|'tfl?\.(\w+)' op", text)
    named = next((group for group in op.groups() if group), "") if op else ""
    node = re.search(rf'"{named}:?", "([^"@]+)' if named else r'fused\["\w+:?", "([^"@]+)', text)
    layer = layer_of(node[1], network.layer_names) if node else ""
    where = f"operation {named}" if named else "the graph"
    return ConversionError(
        name,
        where=f"{where} of layer '{layer}'" if layer else where,
        why="the plain interpreter has no such operation" if named else first_line(error),
        way_round=way_round(named),
    )
