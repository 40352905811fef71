"""The body of a REST classify or regress request to tf.Examples, with TF Serving's rules and messages.

Source: tensorflow_serving/util/json_tensor.cc. The kind of a feature follows from its JSON values: integers and booleans
are int64, decimals float, strings and `{"b64": "..."}` bytes; one feature has one kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from serving.errors import invalid_argument
from serving.rest.json_request import format_error
from serving.rest.json_tensor import is_base64, json_type, string_bytes

_KINDS = {bool: "int64", int: "int64", float: "float", str: "bytes"}
_CONVERTERS: dict[str, Callable[[Any], Any]] = {"int64": int, "float": float, "bytes": string_bytes}


def parse_examples(document: Mapping[str, Any]) -> Any:
    """The `Input` message of a request: its examples, with their context if it has one.

    Raises:
        ServingError: INVALID_ARGUMENT for examples that are none.
    """
    from serving.protos import Input

    message = Input()
    has_context = "context" in document
    if has_context:
        _fill_example(message.example_list_with_context.context, document["context"])
    if "examples" not in document:
        raise format_error(document, "When method is classify, key 'examples' is expected and was not found")
    values = document["examples"]
    if not isinstance(values, list):
        raise format_error(document, "Expecting 'examples' value to be an list/array")
    if not values:
        raise format_error(document, "'examples' value is an empty array")
    examples = (message.example_list_with_context if has_context else message.example_list).examples
    for value in values:
        _fill_example(examples.add(), value)
    return message


def _fill_example(example: Any, value: Any) -> None:
    if not isinstance(value, dict):
        raise invalid_argument(f"Example must be JSON object but got JSON {json_type(value)}")
    for name, content in value.items():
        try:
            feature = example.features.feature[name]
        except UnicodeEncodeError as error:
            raise invalid_argument(f"Feature name {name!r} is not UTF-8") from error
        _fill_feature(feature, name, content if isinstance(content, list) else [content])


def _fill_feature(feature: Any, name: str, values: list[Any]) -> None:
    expected = ""
    converted: list[Any] = []
    for value in values:
        kind = "bytes" if is_base64(value) else _KINDS.get(type(value))
        if kind is None:
            raise invalid_argument(f"Feature: {name} has element with unexpected JSON type: {json_type(value)}")
        expected = expected or kind
        if kind != expected:
            raise invalid_argument(f"Unexpected element type in feature: {name} expecting type: {expected}")
        if kind == "int64" and value >= 2**63:
            raise invalid_argument(f"Feature: {name} has uint64_t element. Only int64_t is supported.")
        converted.append(_CONVERTERS[kind](value))
    if expected:
        getattr(feature, f"{expected}_list").value.extend(converted)
