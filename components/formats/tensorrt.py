"""TensorRT plans of any Keras model, by way of ONNX.

| form | types in the ONNX file |
| --- | --- |
| `float32` | float32, computed without TF32 |
| `float16` | float16, with float32 inputs and outputs |
| `int8` | int8 by QuantizeLinear and DequantizeLinear with explicit scales: weights per channel, all zero points 0 |

TensorRT takes the types of the file (strongly typed networks, the only kind of TensorRT 11), so each ONNX file is final and
is run and compared with Keras by onnxruntime. A plan serves the kind of GPU and the version of TensorRT that it was built
with: it is built where both are, and elsewhere the folder has all that `trtexec` needs there. The scales stand in the file
in place of a calibration cache, which TensorRT has deprecated since 10.1 and dropped in 11.
"""

from __future__ import annotations

import ctypes.util
import json
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.artifacts import digest_file, replace_directory
from components.errors import HeadraceError
from components.formats.checks import largest_difference
from components.formats.conversion import check_form, require
from components.formats.errors import ConversionError, first_line
from components.formats.network import Arrays, Network
from components.formats.onnx import DEFAULT_OPSET, convert_onnx, quantize_static, quiet
from components.formats.results import Conversion
from components.formats.runners import PLAN, RECIPE, ModelRunner, load_onnx, load_tensorrt

FORMS = ("float32", "float16", "int8")
ONNX = "model.onnx"


def convert_tensorrt(
    network: Network,
    directory: Path,
    *,
    form: str = "float32",
    calibration: Arrays | None = None,
    batch_sizes: tuple[int, int, int] = (1, 8, 32),
    lengths: tuple[int, int, int] = (1, 64, 512),
    examples: Arrays | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Conversion:
    """Write `model.onnx`, how to build it in `build.json` and, where TensorRT and a GPU are, `model.plan`.

    Args:
        network: What to convert.
        directory: Where to; the same network gives the same ONNX bytes, unless it has a loop.
        form: One of `FORMS`.
        calibration: `int8`: examples `(num_examples, ...)` by which ranges are set. See `stratified`.
        batch_sizes: Smallest, most frequent and largest batch, for which the plan is built.
        lengths: The same of every other free axis.
        examples: What to compare on; made up by default.
        metadata: What the ONNX file says of itself; see `convert_onnx`.

    Returns:
        The conversion to the plan; of the ONNX file where it was not built, with a note that says what is missing.

    Raises:
        ConversionError: ONNX or TensorRT cannot take the model; says which operation, why, and the way round.
        HeadraceError: an option does not fit.

    Example:
        >>> done = convert_tensorrt(Network.of(model), Path("tensorrt"), form="int8", calibration={"image": images[rows]})
        >>> done.notes
        ('no plan was built: tensorrt is not installed ...',)
    """
    check_form("TensorRT", form, FORMS, network, calibration, needs_calibration=form == "int8")
    shapes = _shapes(network, batch_sizes, lengths)
    name = "tensorrt" if form == "float32" else f"tensorrt_{form}"
    missing = _missing()
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        folder = Path(scratch) / directory.name
        folder.mkdir()
        file = folder / ONNX
        convert_onnx(network, file, examples=examples, metadata=metadata)
        if form == "float16":
            _to_float16(file)
        elif form == "int8":
            _to_int8(network, file, calibration or {})
        runner, built_by = load_onnx(file), None
        difference = _difference(network, runner, name, examples, form)
        if not missing:
            file, built_by = folder / PLAN, require("tensorrt", "tensorrt").__version__
            file.write_bytes(_build(folder / ONNX, shapes, name))
            runner = load_tensorrt(file)
            difference = _difference(network, runner, name, examples, form)
        recipe = {
            "form": form,
            "onnx_sha256": digest_file(folder / ONNX),
            "opset": DEFAULT_OPSET,
            "shapes": shapes,
            "command": _command(shapes),
            "built_by_tensorrt": built_by,
        }
        (folder / RECIPE).write_text(json.dumps(recipe, indent=1))
        size = file.stat().st_size
        replace_directory(folder, directory)
    notes = (f"no plan was built: {'; '.join(missing)}",) if missing else ()
    return Conversion(name, directory / file.name, size, runner.inputs, runner.outputs, difference, notes)


def _difference(network: Network, runner: ModelRunner, name: str, examples: Arrays | None, form: str) -> float:
    return largest_difference(network, runner, name, examples, exact=form == "float32")


def _shapes(
    network: Network, batch_sizes: tuple[int, int, int], lengths: tuple[int, int, int]
) -> dict[str, dict[str, list[int]]]:
    for option, (low, best, high) in (("batch_sizes", batch_sizes), ("lengths", lengths)):
        if not 1 <= low <= best <= high:
            raise HeadraceError(f"{option} are (smallest, most frequent, largest), received {(low, best, high)}.")
    return {
        name: {
            key: [
                size if size is not None else (lengths if axis else batch_sizes)[i]
                for axis, size in enumerate(spec.shape)
            ]
            for i, key in enumerate(("min", "opt", "max"))
        }
        for name, spec in network.specs.items()
    }


def _command(shapes: Mapping[str, Mapping[str, list[int]]]) -> list[str]:
    """What builds the plan, run in the folder; `--stronglyTyped` is for TensorRT 10 and without effect in 11."""

    def sizes_of(key: str) -> str:
        return ",".join(f"{name}:{'x'.join(map(str, sizes[key]))}" for name, sizes in shapes.items())

    ranges = [f"--{key}Shapes={sizes_of(key)}" for key in ("min", "opt", "max")]
    return ["trtexec", f"--onnx={ONNX}", f"--saveEngine={PLAN}", "--stronglyTyped", "--noTF32", *ranges]


def _missing() -> list[str]:
    """What building a plan wants and is not here."""
    missing = []
    for module in ("tensorrt", "cuda.bindings.runtime"):
        try:
            require(module, "tensorrt")
        except HeadraceError as error:
            missing.append(str(error).rstrip("."))
    if ctypes.util.find_library("cuda") is None:
        missing.append("there is no NVIDIA driver")
    elif not missing:
        cuda = require("cuda.bindings.runtime", "tensorrt")
        status, count = cuda.cudaGetDeviceCount()
        if int(status) != 0 or not count:
            missing.append(f"there is no NVIDIA GPU ({status})")
    return missing


def _to_float16(file: Path) -> None:
    import onnx
    from onnxruntime.quantization.onnx_model import ONNXModel
    from onnxruntime.transformers.float16 import convert_float_to_float16

    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of numbers beyond float16, which become its largest
        model = ONNXModel(convert_float_to_float16(onnx.load(file), keep_io_types=True))
    model.topological_sort()  # the casts come last
    file.write_bytes(model.model.SerializeToString(deterministic=True))


def _to_int8(network: Network, file: Path, calibration: Arrays) -> None:
    import onnx
    from onnxruntime.quantization.shape_inference import quant_pre_process

    plain, target = file.with_name("plain.onnx"), file.with_name("int8.onnx")
    try:
        with quiet():
            quant_pre_process(file, plain, skip_symbolic_shape=True)
            # TensorRT takes no zero point but 0 and no int32 bias.
            symmetric = {"ActivationSymmetric": True, "WeightSymmetric": True, "QuantizeBias": False}
            quantize_static(network, plain, target, calibration, **symmetric)
    except Exception as error:  # onnxruntime's own errors have no common base
        raise ConversionError(
            "tensorrt_int8",
            where="the graph",
            why=f"onnxruntime cannot quantize it: {first_line(error)}",
            way_round="Take float16 or float32",
        ) from error
    file.write_bytes(onnx.load(target).SerializeToString(deterministic=True))
    plain.unlink()
    target.unlink()


def _build(file: Path, shapes: Mapping[str, Mapping[str, list[int]]], form: str) -> bytes:
    trt = require("tensorrt", "tensorrt")
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    definition = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(definition, logger)
    if not parser.parse(file.read_bytes()):
        raise ConversionError(
            form,
            where="the ONNX graph",
            why="; ".join(parser.get_error(index).desc() for index in range(parser.num_errors)),
            way_round="Write that part of the layer with other operations of keras.ops, or leave this form out",
        )
    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)
    profile = builder.create_optimization_profile()
    for name, sizes in shapes.items():
        profile.set_shape(name, sizes["min"], sizes["opt"], sizes["max"])
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(definition, config)
    if plan is None:
        raise ConversionError(
            form,
            where="the ONNX graph",
            why="TensorRT has no kernels for it, as it told on standard output",
            way_round="Take another form, or smaller shapes",
        )
    return bytes(plan)
