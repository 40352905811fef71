"""The body of a REST predict request to arrays, with TF Serving's rules and messages.

Source: tensorflow_serving/util/json_tensor.cc.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from serving.errors import ServingError, invalid_argument
from serving.rest import json_text
from serving.rest.json_tensor import careful_array, is_base64, quick_array, to_array

ROW, COLUMNAR = "row", "columnar"


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a request body.

    Raises:
        ServingError: INVALID_ARGUMENT when it is no JSON or no object.
    """
    document = json_text.loads(body)
    if not isinstance(document, dict):
        raise format_error(document, "Is not object")
    return document


def signature_name(document: Mapping[str, Any]) -> str:
    """The signature a request names; empty when it names none.

    Raises:
        ServingError: INVALID_ARGUMENT when the name is no string.
    """
    name = document.get("signature_name", "")
    if not isinstance(name, str):
        raise format_error(document, "not formatted correctly. 'signature_name' key must be a string value.")
    return name


def parse_inputs(document: Mapping[str, Any], types: Mapping[str, int]) -> tuple[dict[str, np.ndarray], str]:
    """The input arrays of a predict request and the format it came in.

    Args:
        document: the request.
        types: input alias -> number of its TensorFlow type, from the signature.

    Returns:
        Input alias -> array, and ROW or COLUMNAR.

    Raises:
        ServingError: INVALID_ARGUMENT for values that do not fit; UNIMPLEMENTED (only in the columnar format) for
            types that have no JSON form.
    """
    if "instances" in document and "inputs" in document:
        raise format_error(
            document, "Not formatted correctly expecting only one of 'inputs' or 'instances' keys to exist "
        )
    if "instances" in document:
        return _parse_instances(document, types), ROW
    if "inputs" in document:
        return _parse_columns(document["inputs"], types), COLUMNAR
    raise invalid_argument("Missing 'inputs' or 'instances' key")


def _parse_instances(document: Mapping[str, Any], types: Mapping[str, int]) -> dict[str, np.ndarray]:
    instances = document["instances"]
    if not isinstance(instances, list):
        raise format_error(document, "Expecting 'instances' to be an list/array")
    if not instances:
        raise format_error(document, "No values in 'instances' array")
    first = instances[0]
    if not isinstance(first, dict) and len(types) > 1:
        raise invalid_argument(
            "instances is a plain list, but expecting list of objects as multiple input tensors required as per "
            "tensorinfo_map"
        )
    if isinstance(first, dict) and not is_base64(first):
        return _parse_objects(instances, types)
    return {alias: _parse_values(instances, number) for alias, number in list(types.items())[:1]}


def _parse_values(instances: list[Any], number: int) -> np.ndarray:
    """Rows of a signature with one input, given bare."""
    array = quick_array(instances, number)
    if array is not None:
        return array
    rows: list[np.ndarray] = []
    for index, element in enumerate(instances):
        if isinstance(element, dict) and not is_base64(element):
            raise invalid_argument(f"Expecting value/list but got object at item {index} of input list")
        try:
            rows.append(_like_first(careful_array(element, number), rows))
        except ServingError as error:
            raise invalid_argument(f"Failed to process element: {index} of 'instances' list. Error: {error}") from error
    return _stack(rows)


def _parse_objects(instances: list[Any], types: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Rows given as objects with one key for each input."""
    quick = _quick_columns(instances, types)
    if quick is not None:
        return quick
    rows: dict[str, list[np.ndarray]] = {alias: [] for alias in types}
    for index, element in enumerate(instances):
        if not isinstance(element, dict) or is_base64(element):
            raise invalid_argument(f"Expecting object but got list at item {index} of input list")
        for alias, value in element.items():
            try:
                if alias not in types:
                    raise invalid_argument(f"JSON object: does not have named input: {alias}")
                rows[alias].append(_like_first(careful_array(value, types[alias]), rows[alias]))
            except ServingError as error:
                raise invalid_argument(
                    f"Failed to process element: {index} key: {alias} of 'instances' list. Error: {error}"
                ) from error
        if element.keys() != types.keys():
            raise invalid_argument(
                f"Failed to process element: {index} of 'instances' list. JSON object: {json_text.echo(element)} "
                f"keys must be equal to: {','.join(sorted(types))}"
            )
    return {alias: _stack(values) for alias, values in rows.items()}


def _quick_columns(instances: list[Any], types: Mapping[str, int]) -> dict[str, np.ndarray] | None:
    if not all(isinstance(element, dict) and element.keys() == types.keys() for element in instances):
        return None
    columns = {}
    for alias, number in types.items():
        array = quick_array([element[alias] for element in instances], number)
        if array is None:
            return None
        columns[alias] = array
    return columns


def _like_first(array: np.ndarray, rows: list[np.ndarray]) -> np.ndarray:
    if rows and array.size != rows[0].size:
        raise invalid_argument(f"Expecting tensor size: {rows[0].size} but got: {array.size}")
    if rows and array.shape != rows[0].shape:
        raise invalid_argument(f"Expecting shape {_shape(rows[0])} but got: {_shape(array)}")
    return array


def _shape(array: np.ndarray) -> str:
    return "[" + ",".join(map(str, array.shape)) + "]"


def _stack(rows: list[np.ndarray]) -> np.ndarray:
    stacked = np.empty((len(rows), *rows[0].shape), dtype=rows[0].dtype)
    for index, row in enumerate(rows):
        stacked[index] = row[()]
    return stacked


def _parse_columns(value: Any, types: Mapping[str, int]) -> dict[str, np.ndarray]:
    if not isinstance(value, dict) or is_base64(value):
        if len(types) > 1:
            raise invalid_argument(
                "inputs is a plain value/list, but expecting an object as multiple input tensors required as per "
                "tensorinfo_map"
            )
        return {alias: to_array(value, number) for alias, number in types.items()}
    for alias in types:
        if alias not in value:
            raise invalid_argument(f"Missing named input: {alias} in 'inputs' object.")
    return {alias: to_array(value[alias], number) for alias, number in types.items()}


def format_error(value: Any, message: str) -> ServingError:
    """The error for a request body that is laid out wrongly."""
    return invalid_argument(f"JSON Value: {json_text.echo(value)} {message}")
