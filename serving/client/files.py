"""The files that the predict command reads and writes."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from serving import atomic, dtypes
from serving.client.base import NO_METADATA
from serving.client.model_info import Classification, Regression, SignatureInfo
from serving.errors import ServingError, invalid_argument
from serving.rest import json_request, json_response, json_tensor, json_text
from serving.tensors import to_bytes


@dataclass(frozen=True)
class PredictRequest:
    """What to send.

    Attributes:
        inputs: input alias -> array.
        layout: json_request.ROW or COLUMNAR, in which to print the answer.
        in_batches: whether it is rows that may be split over several requests.
    """

    inputs: Mapping[str, np.ndarray]
    layout: str = json_request.ROW
    in_batches: bool = True


def from_json(body: bytes, signature: SignatureInfo) -> PredictRequest:
    """The body of a REST request.

    Raises:
        ServingError: INVALID_ARGUMENT, as TF Serving answers it.
    """
    return _from_document(_parse(body), signature, in_batches=False)


def read(path: Path, signature: SignatureInfo) -> PredictRequest:
    """The requests of a file.

    Args:
        path: .json (the body of a REST request), .jsonl (an instance a line), .csv or .parquet (a column for each
            input), .npy (the only input) or .npz (an array for each input).
        signature: says what the types are.

    Raises:
        ServingError: INVALID_ARGUMENT, naming the file, for what is in it.
        OSError: it cannot be read.
    """
    try:
        return _READERS[path.suffix](path, signature)
    except ServingError as error:
        raise ServingError(error.code, f"{path}: {error.message}") from error
    except (ValueError, EOFError, zipfile.BadZipFile) as error:  # of numpy and pyarrow
        raise invalid_argument(f"{path}: {error}") from error


def write(path: Path, outputs: Mapping[str, np.ndarray], layout: str) -> None:
    """Write outputs in the format of the file's name; the file is there only when it is whole.

    Args:
        path: .json (the body of a REST answer), .jsonl (an object a row), .csv, .parquet, .npy (of one output) or .npz.
        outputs: output alias -> array.
        layout: json_request.ROW or COLUMNAR, for .json.

    Raises:
        ServingError: INVALID_ARGUMENT for outputs that the format cannot hold.
        OSError: it cannot be written.
    """
    with atomic.replacing(path) as temporary:
        if path.suffix == ".json":
            temporary.write_text(to_json(outputs, layout) + "\n")
        else:
            _WRITERS[path.suffix](temporary, outputs)


def to_json(outputs: Mapping[str, np.ndarray], layout: str) -> str:
    """The body of TF Serving's REST answer."""
    body = json_response.predictions(outputs) if layout == json_request.ROW else json_response.columns(outputs)
    return body.decode("utf-8", "surrogateescape")


def examples(body: bytes) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """The examples and the context of the body of a REST classify or regress request.

    Raises:
        ServingError: INVALID_ARGUMENT when it is none.
    """
    document = _parse(body)
    found, context = document.get("examples"), document.get("context")
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in [*found, context or {}]):
        raise invalid_argument('the request must look like {"examples": [{"feature": value, ...}, ...]}')
    return list(map(_example, found)), None if context is None else _example(context)


def _parse(body: bytes) -> dict[str, Any]:
    document = json_request.parse_object(body)
    if "signature_name" in document:
        raise invalid_argument("the body has a 'signature_name'; name the signature with --signature instead")
    return document


def _example(features: Mapping[str, Any]) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        return json_tensor.string_bytes(value) if json_tensor.is_base64(value) else value

    return {
        name: list(map(plain, value)) if isinstance(value, list) else plain(value) for name, value in features.items()
    }


def classifications_json(results: Sequence[Sequence[Classification]]) -> str:
    """The body of TF Serving's REST answer."""
    labels = np.array([[found.label for found in row] for row in results], dtype=object)
    scores = np.array([[found.score for found in row] for row in results], dtype=np.float32)
    return json_response.classifications(labels, scores).decode("utf-8", "surrogateescape")


def regressions_json(results: Sequence[Regression]) -> str:
    """The body of TF Serving's REST answer."""
    return json_response.regressions(np.array([found.value for found in results], np.float32)).decode()


def _from_document(document: Mapping[str, Any], signature: SignatureInfo, *, in_batches: bool) -> PredictRequest:
    if signature == NO_METADATA:
        from serving.client.rest_client import infer_arrays

        if "instances" not in document:
            raise invalid_argument(
                "the server tells no signatures, so requests have to be in the row format: 'instances'"
            )
        return PredictRequest(infer_arrays(document["instances"], "instances"), in_batches=in_batches)
    types = {alias: info.number for alias, info in sorted(signature.inputs.items())}
    inputs, layout = json_request.parse_inputs(document, types)
    return PredictRequest(inputs, layout, in_batches)


def _read_json(path: Path, signature: SignatureInfo) -> PredictRequest:
    return from_json(path.read_bytes(), signature)


def _read_json_lines(path: Path, signature: SignatureInfo) -> PredictRequest:
    instances = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            instances.append(json_text.loads(line))
        except ServingError as error:
            raise ServingError(error.code, f"line {number}: {error.message}") from error
    return _from_document({"instances": instances}, signature, in_batches=True)


def _read_csv(path: Path, signature: SignatureInfo) -> PredictRequest:
    import pyarrow as pa
    from pyarrow import csv

    from serving.client import frame as client_frame

    # Without them "007" would be a number, whatever the signature says.
    types = {
        alias: pa.string() if info.number == dtypes.STRING else pa.float64()
        for alias, info in signature.inputs.items()
        if info.number in (dtypes.STRING, dtypes.FLOAT, dtypes.DOUBLE, dtypes.HALF)
    }
    table = csv.read_csv(path, convert_options=csv.ConvertOptions(column_types=types))
    return PredictRequest(client_frame.to_inputs(table, signature))


def _read_parquet(path: Path, signature: SignatureInfo) -> PredictRequest:
    from pyarrow import parquet

    from serving.client import frame as client_frame

    return PredictRequest(client_frame.to_inputs(parquet.read_table(path), signature))


def _read_npy(path: Path, signature: SignatureInfo) -> PredictRequest:
    aliases = sorted(signature.inputs) or ["instances"]
    if len(aliases) > 1:
        raise invalid_argument(f"an .npy file holds one input, but the signature has {aliases}; give an .npz file")
    with path.open("rb") as file:
        return PredictRequest({aliases[0]: np.load(file)})


def _read_npz(path: Path, signature: SignatureInfo) -> PredictRequest:
    with path.open("rb") as file, np.load(file) as arrays:
        return PredictRequest(dict(arrays))


def _write_json_lines(path: Path, outputs: Mapping[str, np.ndarray]) -> None:
    columns = {alias: _texts(array).tolist() for alias, array in outputs.items()}
    with path.open("w") as file:
        for row in zip(*columns.values(), strict=True):
            file.write(json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False) + "\n")


def _write_csv(path: Path, outputs: Mapping[str, np.ndarray]) -> None:
    from pyarrow import csv

    from serving.client import frame as client_frame

    many = sorted(alias for alias, array in outputs.items() if array.ndim > 2)
    if many:
        raise invalid_argument(f"CSV has one value a cell, but {many} have more; write .parquet or .npz")
    csv.write_csv(client_frame.from_outputs(outputs), path)


def _write_parquet(path: Path, outputs: Mapping[str, np.ndarray]) -> None:
    from pyarrow import parquet

    from serving.client import frame as client_frame

    parquet.write_table(client_frame.from_outputs(outputs), path)


def _write_npy(path: Path, outputs: Mapping[str, np.ndarray]) -> None:
    if len(outputs) > 1:
        raise invalid_argument(f".npy holds one output, but there are {sorted(outputs)}; write .npz, or filter them")
    with path.open("wb") as file:
        np.save(file, _texts(next(iter(outputs.values()))), allow_pickle=False)


def _write_npz(path: Path, outputs: Mapping[str, np.ndarray]) -> None:
    with path.open("wb") as file:
        np.savez(file, **{alias: _texts(array) for alias, array in outputs.items()}, allow_pickle=False)


def _texts(array: np.ndarray) -> np.ndarray:
    """Strings as numpy's unicode, which files can hold without pickle; numbers as they are.

    Raises:
        ServingError: INVALID_ARGUMENT for bytes that are no UTF-8.
    """
    if array.dtype.kind != "O":
        return array
    try:
        return np.array([to_bytes(value).decode() for value in array.ravel()], dtype=np.str_).reshape(array.shape)
    except UnicodeDecodeError as error:
        raise invalid_argument(f"an output holds bytes that are no text ({error}); write .json or .parquet") from error


_READERS = {
    ".json": _read_json,
    ".jsonl": _read_json_lines,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".npy": _read_npy,
    ".npz": _read_npz,
}
_WRITERS = {
    ".jsonl": _write_json_lines,
    ".csv": _write_csv,
    ".parquet": _write_parquet,
    ".npy": _write_npy,
    ".npz": _write_npz,
}
