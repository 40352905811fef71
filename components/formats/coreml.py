"""Core ML packages of any Keras model: ML programs, for macOS 12 and iOS 15 on.

| form | weights | computes in |
| --- | --- | --- |
| `float32` | float32 | float32 |
| `float16` | float16 | float16 |

coremltools converts everywhere, and macOS alone runs the result. Elsewhere a package is read back and its inputs, outputs
and weights are looked at, and the conversion's note says that it was not run. Recurrent layers are unrolled, since
coremltools 9 does not convert Keras's loop.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import tempfile
import traceback
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from components.artifacts import digest_file, replace_directory
from components.errors import HeadraceError
from components.formats.checks import largest_difference
from components.formats.conversion import check_form, described, quiet_coremltools, require_coremltools
from components.formats.errors import ConversionError, first_line
from components.formats.graph import layer_of, text_ops, way_round
from components.formats.network import Arrays, Network
from components.formats.results import Conversion
from components.formats.runners import COREML_WEIGHTS, load_coreml

FORMS = ("float32", "float16")
NOT_RUN = "converted and read back, but not run: Core ML is a part of macOS"
_PROGRAM = "Data/com.apple.CoreML/model.mlmodel"


def convert_coreml(
    network: Network,
    package: Path,
    *,
    form: str = "float32",
    max_batch_size: int = 32,
    max_length: int = 512,
    examples: Arrays | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Conversion:
    """Convert, run and compare with Keras where this is macOS, and write the package.

    Args:
        network: What to convert.
        package: Where to, `*.mlpackage`, a folder; the same network gives the same bytes.
        form: One of `FORMS`.
        max_batch_size: Core ML wants a limit for a free axis: this is that of the batch.
        max_length: The limit of every other free axis.
        examples: What to compare on; made up by default.
        metadata: What the package says of itself, such as `{"labels": [...], "version": 3}`, in its user-defined
            metadata: strings as they are, other values as JSON. `weights_sha256` and `bin_sha256` are added.

    Returns:
        Where this is not macOS, `max_abs_difference` is NaN and a note says why.

    Raises:
        ConversionError: Core ML cannot take the model; says which operation, why, and the way round.
        HeadraceError: an option does not fit, or the package is not installed.

    Example:
        >>> convert_coreml(Network.of(model), Path("model.mlpackage"), form="float16", metadata={"labels": ["cat", "dog"]})
    """
    require_coremltools()
    check_form("Core ML", form, FORMS, network, None, needs_calibration=False)
    if package.suffix != ".mlpackage":
        raise HeadraceError(f"A Core ML model is a folder *.mlpackage, received {package.name}.")
    name = "coreml" if form == "float32" else f"coreml_{form}"
    _refuse(network, name)
    concrete = network.traced(None, network.is_recurrent)
    with tempfile.TemporaryDirectory(dir=package.parent) as directory, quiet_coremltools():
        written = Path(directory) / package.name
        _convert(network, concrete, written, form, name, {"batch": max_batch_size, "length": max_length})
        _complete(written, concrete, described(network, metadata))
        runner = load_coreml(written)
        _check_ends(network, concrete, runner, name)
        runs = sys.platform == "darwin"
        exact = form == "float32"
        difference = largest_difference(network, runner, name, examples, exact=exact) if runs else float("nan")
        size = sum(file.stat().st_size for file in written.rglob("*") if file.is_file())
        replace_directory(written, package)
    notes = ["recurrent layers are unrolled"] if network.is_recurrent else []
    notes += [] if runs else [NOT_RUN]
    return Conversion(name, package, size, runner.inputs, runner.outputs, difference, tuple(notes))


def _refuse(network: Network, form: str) -> None:
    concrete = network.traced(None, False)
    if found := text_ops(concrete.graph.as_graph_def(), network.layer_names):
        raise ConversionError(form, where=str(found[0]), why=found[0].why, way_round=found[0].way_round)
    free = next((name for name, spec in network.specs.items() if None in spec.shape[1:]), None)
    if network.is_recurrent and free is not None:
        raise ConversionError(
            form,
            where=f"input '{free}'",
            why="recurrent layers have to be unrolled, and its length is free",
            way_round="Give its Input a fixed length and pad to it",
        )
    for end, name in [*(("input", n) for n in network.specs), *(("output", n) for n in concrete.structured_outputs)]:
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) or (end == "output" and name in network.specs):
            raise ConversionError(
                form,
                where=f"{end} '{name}'",
                why="names have letters, digits and underscores, and an output none of an input",
                way_round="Give it another name: Network.of(model, inputs={...}, outputs=[...])",
            )


def _convert(network: Network, concrete: Any, package: Path, form: str, name: str, limits: Mapping[str, int]) -> None:
    import coremltools

    _register_erfc()
    inputs = []
    for key, spec in network.specs.items():
        shape = [
            coremltools.RangeDim(1, limits["length" if axis else "batch"], default=1) if size is None else size
            for axis, size in enumerate(spec.shape)
        ]
        dtype = np.int32 if spec.dtype.is_integer else np.float32
        inputs.append(coremltools.TensorType(name=key, shape=shape, dtype=dtype))
    try:
        coremltools.convert(
            [concrete],
            source="tensorflow",
            convert_to="mlprogram",
            inputs=inputs,
            compute_precision=getattr(coremltools.precision, form.upper()),
            package_dir=str(package),
            skip_model_load=True,
        )
    except Exception as error:  # the converter's errors have no common base
        # Or the converter's folder for weights stays for as long as somebody keeps the error.
        traceback.clear_frames(error.__traceback__)
        raise _refusal(network, name, error) from error


def _refusal(network: Network, form: str, error: Exception) -> ConversionError:
    text = str(error)
    found = re.search(r"TF op '(\w+)' not implemented", text)
    op = found[1] if found else ""
    node = re.search(r'name: "([^"]+)"', text)
    layer = layer_of(node[1], network.layer_names) if node else ""
    where = f"operation {op}" if op else "the graph"
    return ConversionError(
        form,
        where=f"{where} of layer '{layer}'" if layer else where,
        why="coremltools has no form of it"
        if op
        else f"coremltools fails: {type(error).__name__}: {first_line(error)}",
        way_round=way_round(op),
    )


@functools.cache
def _register_erfc() -> None:
    """Erfc as 1 - Erf: the exact GELU is made of it, and Core ML has Erf alone."""
    from coremltools.converters.mil import Builder, register_tf_op

    @register_tf_op(tf_alias=["Erfc"], override=True)
    def erfc(context: Any, node: Any) -> None:
        erf = Builder.erf(x=context[node.inputs[0]])
        context.add(node.name, Builder.sub(x=1.0, y=erf, name=node.name))


def _complete(package: Path, concrete: Any, texts: Mapping[str, str]) -> None:
    """Name the outputs, add the metadata, and replace the random identifiers of the package's parts."""
    import coremltools

    program = package / _PROGRAM
    spec = coremltools.utils.load_spec(str(package))
    for tensor, name in zip(concrete.outputs, concrete.structured_outputs, strict=True):
        coremltools.utils.rename_feature(spec, tensor.op.name, name)
    spec.description.metadata.userDefined.update(texts)
    if (weights := package / COREML_WEIGHTS).exists():
        spec.description.metadata.userDefined["bin_sha256"] = digest_file(weights)
    program.write_bytes(spec.SerializeToString(deterministic=True))
    manifest = json.loads((package / "Manifest.json").read_text())
    entries = manifest["itemInfoEntries"]
    names = {key: str(uuid.uuid5(uuid.NAMESPACE_URL, entry["path"])) for key, entry in entries.items()}
    manifest["itemInfoEntries"] = {names[key]: entry for key, entry in entries.items()}
    manifest["rootModelIdentifier"] = names[manifest["rootModelIdentifier"]]
    (package / "Manifest.json").write_text(json.dumps(manifest, indent=4, sort_keys=True))


def _check_ends(network: Network, concrete: Any, runner: Any, form: str) -> None:
    shapes = {info.name: info.shape for info in runner.inputs}
    wanted = {name: tuple(spec.shape) for name, spec in network.specs.items()}
    outputs = {info.name for info in runner.outputs}
    if shapes != wanted or outputs != set(concrete.structured_outputs):
        raise ConversionError(
            form,
            where="the package",
            why=f"the converter reported success, but it takes {shapes} and answers {sorted(outputs)}",
            way_round="Leave this form out",
        )
