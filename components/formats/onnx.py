"""ONNX files of any Keras model, by tf2onnx; int8 by onnxruntime.

| form | weights | computes in |
| --- | --- | --- |
| `float32` | float32 | float32 |
| `dynamic_int8` | int8, per tensor | int8 in MatMul, Gemm and Conv, ranges taken from each input; else float32 |
| `static_int8` | int8, per channel, as QDQ | int8, ranges from calibration examples or the model's own |
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from components.errors import HeadraceError
from components.formats.checks import largest_difference
from components.formats.conversion import check_form, described
from components.formats.errors import ConversionError, first_line
from components.formats.graph import UnmappedOp, text_ops, unmapped
from components.formats.network import Arrays, Network
from components.formats.onnx_graph import name_and_order
from components.formats.results import Conversion
from components.formats.runners import load_onnx

FORMS = ("float32", "dynamic_int8", "static_int8")
OPSETS = range(13, 19)
DEFAULT_OPSET = 17
_NO_OPS = frozenset({"Placeholder", "Const", "NoOp"})
# Of weights, which tf2onnx computes.
_FOLDED_OPS = frozenset({"FakeQuantWithMinMaxVarsPerChannel"})
_CALIBRATION_BATCH = 16
_OFF_GRID = 1e-3


def convert_onnx(
    network: Network,
    file: Path,
    *,
    form: str = "float32",
    opset: int = DEFAULT_OPSET,
    calibration: Arrays | None = None,
    examples: Arrays | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Conversion:
    """Convert, run and compare with Keras, and write the file.

    Inputs and outputs keep their names. The batch is a free axis called `batch`, another free size `length` or, where
    there are several, `<input>_<axis>`.

    Args:
        network: What to convert.
        file: Where to; the same network gives the same bytes, unless it has a loop, whose state tf2onnx orders by chance.
        form: One of `FORMS`.
        opset: 13 to 18.
        calibration: `static_int8`: examples `(num_examples, ...)` by which ranges are set. See `stratified`. Not needed
            for a model that has ranges: of `components.ptq`, or trained with them.
        examples: What to compare on; made up by default.
        metadata: What the file says of itself, such as `{"labels": [...], "version": 3}`: strings as they are, other
            values as JSON. `weights_sha256` is added.

    Raises:
        ConversionError: ONNX cannot take the model; says which operation, why, and the way round.
        HeadraceError: an option does not fit.

    Example:
        >>> convert_onnx(Network.of(model), Path("model.onnx"), metadata={"labels": ["cat", "dog"]})
    """
    import onnx

    needs_calibration = form == "static_int8" and not network.has_ranges
    check_form("ONNX", form, FORMS, network, calibration, needs_calibration=needs_calibration)
    name = "onnx" if form == "float32" else f"onnx_{form}"
    model = to_onnx_model(network, opset, name)
    if form == "static_int8" and not calibration:
        _weights_to_int8(model.graph)
    elif form != "float32":
        model = _quantized(network, model, form, calibration or {})
    onnx.helper.set_model_props(model, described(network, metadata))
    _check(model, name)
    content = model.SerializeToString(deterministic=True)
    runner = load_onnx(file, content)
    difference = largest_difference(network, runner, name, examples, exact=form == "float32")
    file.write_bytes(content)
    return Conversion(name, file, len(content), runner.inputs, runner.outputs, difference)


def unmapped_ops(network: Network, opset: int = DEFAULT_OPSET) -> list[UnmappedOp]:
    """Every operation of the network that ONNX lacks, told before anything is converted.

    Example:
        >>> for op in unmapped_ops(Network.of(model)):
        ...     print(f"{op}: {op.why}. {op.way_round}.")
        operation StringLower of layer 'city_text': there is no operator for text. Split the lookups off ...
    """
    return _unmapped(_frozen(network), network, opset)


def to_onnx_model(network: Network, opset: int = DEFAULT_OPSET, form: str = "onnx") -> Any:
    """The float32 `onnx.ModelProto`, checked but not run.

    Raises:
        ConversionError: as `convert_onnx`.
        HeadraceError: tf2onnx does not know the opset.
    """
    import onnx
    import tf2onnx.convert

    if opset not in OPSETS:
        raise HeadraceError(
            f"ONNX opset {opset}: tf2onnx writes {OPSETS[0]} to {OPSETS[-1]}. Runtimes read older opsets, so take "
            f"{OPSETS[-1]} or less."
        )
    graph = _frozen(network)
    if found := _unmapped(graph, network, opset):
        others = f" ({len(found) - 1} more: unmapped_ops lists them)" if len(found) > 1 else ""
        raise ConversionError(form, where=str(found[0]) + others, why=found[0].why, way_round=found[0].way_round)
    concrete = network.traced(None, False)
    if same := sorted(set(network.specs) & set(concrete.structured_outputs)):
        raise ConversionError(
            form,
            where=f"output '{same[0]}'",
            why="an input has the same name, and names are unique in an ONNX graph",
            way_round="Give the outputs other names: Network.of(model, outputs=[...])",
        )
    inputs, outputs = _tensor_names(concrete)
    with quiet():
        model, _ = tf2onnx.convert.from_graph_def(
            graph,
            name="network",
            input_names=inputs,
            output_names=outputs,
            opset=opset,
            custom_op_handlers={op: (handler, []) for op, handler in _HANDLERS.items()},
        )
    _rename(model.graph, network, concrete)
    known = {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}
    if left := sorted({n.op_type for n in model.graph.node if n.domain == "" and n.op_type not in known}):
        raise ConversionError(
            form,
            where=f"operation {', '.join(left)}",
            why="tf2onnx left it as it was",
            way_round="Write that part of the layer with other operations of keras.ops, or leave this form out",
        )
    _check(model, form)
    return model


def _frozen(network: Network) -> Any:
    """The graph with its weights as constants, simplified as tf2onnx does it before it converts."""
    from tf2onnx import tf_loader

    concrete = network.traced(None, False)
    with quiet(), tf.device("/cpu:0"):
        return tf_loader.from_function(concrete, *_tensor_names(concrete))


def _tensor_names(concrete: Any) -> tuple[list[str], list[str]]:
    num_inputs = len(concrete.structured_input_signature[1])
    # Captured weights and tables come after what the caller feeds.
    return [tensor.name for tensor in concrete.inputs[:num_inputs]], [tensor.name for tensor in concrete.outputs]


def _unmapped(graph: Any, network: Network, opset: int) -> list[UnmappedOp]:
    import tf2onnx.convert  # noqa: F401  registers the operations that tf2onnx knows
    from tf2onnx.handler import tf_op

    text = text_ops(graph, network.layer_names)
    known = {*tf_op.create_mapping(opset, None), *_HANDLERS, *_NO_OPS, *_FOLDED_OPS, *(op.op for op in text)}
    return [*text, *unmapped(graph, known, network.layer_names, f"tf2onnx has no form of it in opset {opset}")]


def _erfc(context: Any, node: Any, name: str, args: Any) -> None:
    """Erfc as 1 - Erf: the exact GELU is made of it, and ONNX has Erf alone."""
    source, outputs = node.input[0], list(node.output)
    dtype, shape = context.get_dtype(outputs[0]), context.get_shape(outputs[0])
    context.remove_node(name)
    erf = context.make_node("Erf", [source], dtypes=[dtype], shapes=[shape])
    one = context.make_const(f"{name}/one", np.array(1, np.float32))
    context.make_node("Sub", [one.output[0], erf.output[0]], name=name, outputs=outputs, dtypes=[dtype], shapes=[shape])


def _log1p(context: Any, node: Any, name: str, args: Any) -> None:
    """Log1p as the logarithm of 1 + x, which is all that ONNX has: off by up to 6e-8 near 0."""
    source, outputs = node.input[0], list(node.output)
    dtype, shape = context.get_dtype(outputs[0]), context.get_shape(outputs[0])
    context.remove_node(name)
    one = context.make_const(f"{name}/one", np.array(1, np.float32))
    more = context.make_node("Add", [source, one.output[0]], dtypes=[dtype], shapes=[shape])
    context.make_node("Log", more.output, name=name, outputs=outputs, dtypes=[dtype], shapes=[shape])


_HANDLERS = {"Erfc": _erfc, "Log1p": _log1p}


def _rename(graph: Any, network: Network, concrete: Any) -> None:
    """Give inputs, outputs and their free axes the names of the network."""
    inputs, outputs = _tensor_names(concrete)
    renamed = {
        **dict(zip(inputs, network.specs, strict=True)),
        **dict(zip(outputs, concrete.structured_outputs, strict=True)),
    }
    name_and_order(graph, renamed, network.layer_names)
    axes = _axis_names(network)
    for value in graph.input:
        for axis, dimension in zip(axes[value.name], value.type.tensor_type.shape.dim, strict=True):
            if axis:
                dimension.dim_param = axis
    for value in graph.output:
        dimensions = value.type.tensor_type.shape.dim
        if dimensions and concrete.structured_outputs[value.name].shape[0] is None:
            dimensions[0].dim_param = "batch"


def _axis_names(network: Network) -> dict[str, list[str]]:
    free = [
        (name, i) for name, spec in network.specs.items() for i, size in enumerate(spec.shape) if i and size is None
    ]
    return {
        name: [
            "" if size is not None else "batch" if axis == 0 else "length" if len(free) == 1 else f"{name}_{axis}"
            for axis, size in enumerate(spec.shape)
        ]
        for name, spec in network.specs.items()
    }


def _check(model: Any, form: str) -> None:
    import onnx

    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ConversionError(
            form,
            where="the graph",
            why=f"the converter reported success, but wrote an invalid file: {first_line(error)}",
            way_round="Look for the layer that the message names, or leave this form out",
        ) from error


def _quantized(network: Network, model: Any, form: str, calibration: Arrays) -> Any:
    import onnx
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    with tempfile.TemporaryDirectory() as directory, quiet():
        source, plain, target = (Path(directory) / f"{name}.onnx" for name in ("source", "plain", "int8"))
        onnx.save(model, source)
        try:
            # Given a ModelProto instead of a file it takes the weights out of it, and does not find them afterwards.
            quant_pre_process(source, plain, skip_symbolic_shape=True)
            if form == "dynamic_int8":
                quantization.quantize_dynamic(plain, target, weight_type=quantization.QuantType.QInt8)
            else:
                quantize_static(network, plain, target, calibration)
        except Exception as error:  # onnxruntime's own errors have no common base
            raise ConversionError(
                f"onnx_{form}",
                where="the graph",
                why=f"onnxruntime cannot quantize it: {first_line(error)}",
                way_round="Take float32, or leave the layer that the message names in float",
            ) from error
        return onnx.load(target)


def _weights_to_int8(graph: Any) -> None:
    """Store rounded weights as integers; tf2onnx computes them from the ranges and stores them as floats.

    One scale for each output channel of a convolution, and one for a table. Where a channel has a wider range than its
    weights, on behalf of its bias, they are not on the grid that is looked for, and the weights stay as they are.
    """
    import onnx

    floats = {tensor.name: tensor for tensor in graph.initializer}
    uses = {(n.input[1], True) for n in graph.node if n.op_type == "Conv"}
    uses |= {(n.input[0], False) for n in graph.node if n.op_type == "Gather"}
    for name, per_channel in sorted(uses):
        values = onnx.numpy_helper.to_array(floats[name]) if name in floats else np.zeros(0, np.int8)
        if values.dtype != np.float32:
            continue
        largest = (
            np.abs(values).max(tuple(range(1, values.ndim)), keepdims=True) if per_channel else np.abs(values).max()
        )
        scale = np.where(largest > 0, largest, 1) / np.float32(127)
        integers = np.round(values / scale)
        if np.abs(values / scale - integers).max() > _OFF_GRID:
            continue
        parts = {
            "int8": integers.astype(np.int8),
            "scale": np.asarray(scale, np.float32).reshape(-1 if per_channel else ()),
        }
        parts["zero"] = np.zeros(parts["scale"].shape, np.int8)
        names = [f"{name}/{part}" for part in parts]
        graph.initializer.extend(map(onnx.numpy_helper.from_array, parts.values(), names))
        axis = {"axis": 0} if per_channel else {}
        graph.node.insert(
            0, onnx.helper.make_node("DequantizeLinear", names, [name], f"{name}/DequantizeLinear", **axis)
        )
        graph.initializer.remove(floats[name])


def quantize_static(network: Network, source: Path, target: Path, calibration: Arrays, **extra_options: Any) -> None:
    """Write an ONNX file as one with int8 QDQ pairs, weights per channel, by onnxruntime."""
    from onnxruntime import quantization

    quantization.quantize_static(
        source,
        target,
        _CalibrationReader(network, calibration),
        per_channel=True,
        activation_type=quantization.QuantType.QInt8,
        weight_type=quantization.QuantType.QInt8,
        extra_options=extra_options,
    )


class _CalibrationReader:
    """Calibration examples, as onnxruntime asks for them."""

    def __init__(self, network: Network, calibration: Arrays) -> None:
        num_examples = len(next(iter(calibration.values())))
        self._batches = iter(
            {
                n: np.asarray(calibration[n][i : i + _CALIBRATION_BATCH], s.dtype.as_numpy_dtype)
                for n, s in network.specs.items()
            }
            for i in range(0, num_examples, _CALIBRATION_BATCH)
        )

    def get_next(self) -> dict[str, np.ndarray] | None:
        """The next batch, or None after the last."""
        return next(self._batches, None)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The libraries log refusals, which are raised here, and advice that is followed."""
    loggers = [logging.getLogger(name) for name in ("tf2onnx", "tensorflow", "")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
