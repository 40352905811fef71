"""OpenVINO models of any Keras model, by way of ONNX; int8 by NNCF.

| form | weights | computes in |
| --- | --- | --- |
| `float32` | float32 | float32 |
| `float16` | float16 | float32 |
| `int8` | int8, per channel; float16 where there is no int8 form | int8, ranges from calibration examples |

A model is a pair of files, `model.xml` with the graph and `model.bin` with the weights. The way by ONNX takes recurrent
layers with a free batch and names inputs and outputs, neither of which OpenVINO does with TensorFlow's graph.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from components.artifacts import digest_file
from components.errors import HeadraceError
from components.formats.checks import largest_difference
from components.formats.conversion import check_form, described, require
from components.formats.errors import ConversionError
from components.formats.network import Arrays, Network
from components.formats.onnx import to_onnx_model
from components.formats.results import Conversion
from components.formats.runners import OPENVINO_SECTION, load_openvino, openvino_reason

FORMS = ("float32", "float16", "int8")
_BATCH = 16


def convert_openvino(
    network: Network,
    file: Path,
    *,
    form: str = "float32",
    calibration: Arrays | None = None,
    examples: Arrays | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Conversion:
    """Convert, run and compare with Keras, and write `file` and the `.bin` beside it.

    Args:
        network: What to convert.
        file: Where to, `*.xml`; the same network gives the same bytes, unless it has a loop.
        form: One of `FORMS`.
        calibration: `int8`: examples `(num_examples, ...)` by which ranges are set. See `stratified`.
        examples: What to compare on; made up by default.
        metadata: What the file says of itself, such as `{"labels": [...], "version": 3}`, in the section `headrace` of its
            `rt_info`: strings as they are, other values as JSON. `weights_sha256` and `bin_sha256` are added.

    Raises:
        ConversionError: OpenVINO cannot take the model; says which operation, why, and the way round.
        HeadraceError: an option does not fit, or the package is not installed.

    Example:
        >>> convert_openvino(Network.of(model), Path("model.xml"), metadata={"labels": ["cat", "dog"]})
    """
    openvino = require("openvino", "openvino")
    check_form("OpenVINO", form, FORMS, network, calibration, needs_calibration=form == "int8")
    if file.suffix != ".xml":
        raise HeadraceError(f"An OpenVINO model is a pair of files, *.xml and *.bin, received {file.name}.")
    name = "openvino" if form == "float32" else f"openvino_{form}"
    model = _to_openvino(network, name)
    if form == "int8":
        model = _quantized(network, model, calibration or {})
    _name_nodes(model)
    for key, text in described(network, metadata).items():
        model.set_rt_info(text, [OPENVINO_SECTION, key])
    with tempfile.TemporaryDirectory(dir=file.parent) as directory:
        written = Path(directory) / file.name
        weights = written.with_suffix(".bin")
        openvino.save_model(model, written, compress_to_fp16=form != "float32")
        # OpenVINO reads any numbers of the right length, those of another model too.
        model.set_rt_info(digest_file(weights), [OPENVINO_SECTION, "bin_sha256"])
        openvino.save_model(model, written, compress_to_fp16=form != "float32")
        runner = load_openvino(written)
        difference = largest_difference(network, runner, name, examples, exact=form == "float32")
        size = written.stat().st_size + weights.stat().st_size
        weights.replace(file.with_suffix(".bin"))
        written.replace(file)
    return Conversion(name, file, size, runner.inputs, runner.outputs, difference)


def _to_openvino(network: Network, form: str) -> Any:
    openvino = require("openvino", "openvino")
    content = to_onnx_model(network, form=form).SerializeToString(deterministic=True)
    try:
        return openvino.Core().read_model(content)
    except RuntimeError as error:
        reason = openvino_reason(error)
        lacking = re.search(r"No conversion rule found for operations: (.+)", reason)
        raise ConversionError(
            form,
            where=f"operation {lacking[1]} of ONNX" if lacking else "the graph",
            why="OpenVINO has no form of it" if lacking else reason,
            way_round="Write that part of the layer with other operations of keras.ops, or leave this form out",
        ) from error


def _quantized(network: Network, model: Any, calibration: Arrays) -> Any:
    nncf = require("nncf", "openvino")
    # Not nncf.set_log_level, which also sets every handler that anyone has put there, such as pytest's of all loggers.
    logging.getLogger("nncf").setLevel(logging.ERROR)
    batches = list(_batches(network, calibration))
    # Each batch's own range, averaged, is the default; of few examples it cuts off what the others reach.
    ranges = require("nncf.quantization.range_estimator", "openvino").RangeEstimatorParametersSet.MINMAX
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # progress bars
            return nncf.quantize(
                model,
                nncf.Dataset(batches),
                subset_size=len(batches),
                model_type=nncf.ModelType.TRANSFORMER if _has_attention(model) else None,
                advanced_parameters=nncf.AdvancedQuantizationParameters(activations_range_estimator_params=ranges),
            )
    except (RuntimeError, nncf.ValidationError, nncf.InternalError, nncf.UnsupportedModelError) as error:
        raise ConversionError(
            "openvino_int8",
            where="the graph",
            why=f"NNCF cannot quantize it: {openvino_reason(error)}",
            way_round="Take float16 or float32",
        ) from error


def _batches(network: Network, calibration: Arrays) -> Iterator[dict[str, np.ndarray]]:
    num_examples = len(next(iter(calibration.values())))
    for start in range(0, num_examples, _BATCH):
        rows = slice(start, start + _BATCH)
        yield {n: np.asarray(calibration[n][rows], s.dtype.as_numpy_dtype) for n, s in network.specs.items()}


def _has_attention(model: Any) -> bool:
    """Whether weights of a softmax are multiplied with values: NNCF smooths and spares such models."""
    return any(
        user.get_node().get_type_name() == "MatMul"
        for node in model.get_ops()
        if node.get_type_name() == "Softmax"
        for user in node.output(0).get_target_inputs()
    )


def _name_nodes(model: Any) -> None:
    """Names that follow from the order alone: OpenVINO numbers its nodes on through the life of a process."""
    for index, node in enumerate(model.get_ordered_ops()):
        if node.get_type_name() != "Parameter":
            node.set_friendly_name(f"{node.get_type_name()}_{index}")
