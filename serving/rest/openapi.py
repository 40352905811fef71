"""An OpenAPI 3.1 description of the REST API of the models that are served, made from their signatures.

Source: https://spec.openapis.org/oas/v3.1.0. JSON has no NaN, which TF Serving writes bare for lack of another form; the
schemas say `number`. Shapes are asked of requests only: a model may take others than its signature says, and then answers
in others, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

import numpy as np

from serving import dtypes, inference
from serving.errors import ServingError
from serving.manager import ModelManager
from serving.served_model import DEFAULT_SIGNATURE, EXPLAIN_SIGNATURE, ServedModel, State, Version

Json = dict[str, Any]

_FLOATS = {dtypes.FLOAT: "float", dtypes.DOUBLE: "double"}
_BYTES: Json = {
    "type": "object",
    "properties": {"b64": {"type": "string", "contentEncoding": "base64"}},
    "required": ["b64"],
    "additionalProperties": False,
}
_STRING: Json = {"anyOf": [{"type": "string"}, _BYTES]}
_ERROR: Json = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
_STATUS: Json = {
    "type": "object",
    "properties": {
        "model_version_status": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "version": {"type": "string"},
                    "state": {"enum": [state.name for state in State]},
                    "status": {
                        "type": "object",
                        "properties": {"error_code": {"type": "string"}, "error_message": {"type": "string"}},
                    },
                },
            },
        }
    },
}
_VERSION = {
    "name": "version",
    "in": "path",
    "required": True,
    "schema": {"type": "integer", "minimum": 0},
    "description": "The number of a version that is loaded.",
}


def describe(manager: ModelManager) -> Json:
    """The OpenAPI document of the models that have an available version; each is described by its newest one.

    Args:
        manager: what is served.

    Returns:
        The document, JSON-able.
    """
    paths: Json = {}
    schemas: Json = {"Error": _ERROR, "Status": _STATUS}
    for name, model in sorted(manager.models.items()):
        version = _newest(model)
        loaded = version.model if version is not None else None  # it may be unloaded meanwhile
        if loaded is not None:
            _add_model(name, loaded.signatures, paths, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Served models",
            "version": "1",
            "description": "TensorFlow Serving's REST API for the models of this server.",
        },
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _newest(model: ServedModel) -> Version | None:
    return next((version for version in model.statuses() if version.state is State.AVAILABLE), None)


def _add_model(name: str, signatures: Mapping[str, Any], paths: Json, schemas: Json) -> None:
    base = f"/v1/models/{quote(name, safe='')}"
    paths[base] = {"get": _operation(f"Versions of {name} and their states.", name, "#/components/schemas/Status")}
    paths[f"{base}/metadata"] = {"get": _operation(f"Signatures of {name}.", name, None)}
    for verb, (request, response) in _verbs(name, signatures).items():
        operation = _operation(_SUMMARIES[verb].format(name), name, None)
        key = re.sub(r"[^A-Za-z0-9._-]", "_", name) + f".{verb}"
        schemas[f"{key}.request"], schemas[f"{key}.response"] = request, response
        operation["requestBody"] = {"required": True, "content": _content(f"#/components/schemas/{key}.request")}
        operation["responses"]["200"]["content"] = _content(f"#/components/schemas/{key}.response")
        paths[f"{base}:{verb}"] = {"post": operation}
        paths[f"{base}/versions/{{version}}:{verb}"] = {"post": operation, "parameters": [_VERSION]}


_SUMMARIES = {
    "predict": "Call a signature of {}.",
    "classify": "Classes of examples, by {}.",
    "regress": "Values of examples, by {}.",
    "explain": "What the answers of {} rest on.",
}


def _verbs(name: str, signatures: Mapping[str, Any]) -> dict[str, tuple[Json, Json]]:
    """Verb -> schemas of request and response, for the verbs that the model can answer."""
    callable_ones = [signature for signature in signatures.values() if signature.inputs and signature.outputs]
    found = {"predict": _prediction(callable_ones, DEFAULT_SIGNATURE, "predictions")}
    for verb, method_name in (("classify", inference.CLASSIFY), ("regress", inference.REGRESS)):
        fitting = [signature.name for signature in callable_ones if _fits(method_name, signature)]
        if fitting:
            found[verb] = _examples_request(fitting), _results(verb)
    if EXPLAIN_SIGNATURE in signatures:
        found["explain"] = _prediction([signatures[EXPLAIN_SIGNATURE]], EXPLAIN_SIGNATURE, "explanations")
    return found


def _fits(method_name: str, signature: Any) -> bool:
    try:
        inference.output_aliases(method_name, signature.proto)
    except ServingError:
        return False
    return all(info.dtype == dtypes.STRING for info in signature.proto.inputs.values())  # serialized tf.Examples


def _prediction(signatures: Iterable[Any], default: str, rows_key: str) -> tuple[Json, Json]:
    requests: list[Json] = []
    responses: list[Json] = []
    for signature in signatures:
        inputs, outputs = signature.proto.inputs, signature.proto.outputs
        named = {"signature_name": {"const": signature.name}}
        row = _request_tensors(inputs, 1)
        rows = [{"type": "array", "minItems": 1, "items": each} for each in _with_bare(row)]
        for key, forms in (("instances", rows), ("inputs", _with_bare(_request_tensors(inputs, 0)))):
            requests.append(
                {
                    "title": f"{signature.name}, {'by rows' if key == 'instances' else 'by columns'}",
                    **_object({**named, key: {"anyOf": forms}}),
                    "required": [key] if signature.name == default else ["signature_name", key],
                    "additionalProperties": False,
                }
            )
        responses.append(_object({rows_key: {"type": "array", "items": _response_tensors(outputs)}}))
        responses.append(_object({"outputs": _response_tensors(outputs)}))
    return {"oneOf": requests}, {"anyOf": responses}


def _object(properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": sorted(properties)}


def _request_tensors(tensors: Mapping[str, Any], skip: int) -> Json:
    """Tensors by alias, each as nested lists; `skip` leaves out the batch."""
    return _object({alias: _tensor(info, skip) for alias, info in sorted(tensors.items())}) | {
        "additionalProperties": False
    }


def _with_bare(schema: Json) -> list[Json]:
    """The forms of a request's values: where there is one input only, it may come without its name."""
    properties = schema["properties"]
    return [schema, *properties.values()] if len(properties) == 1 else [schema]


def _response_tensors(tensors: Mapping[str, Any]) -> Json:
    """The same of a response, where a single output has no name."""
    found = {
        alias: _nested(info, _BYTES if alias.endswith("_bytes") else {"type": "string"})
        for alias, info in sorted(tensors.items())
    }
    return next(iter(found.values())) if len(found) == 1 else _object(found)


def _nested(info: Any, string: Json) -> Json:
    """A value, or lists of them that are as deep as it happens to be."""
    sizes = ["?" if dim.size < 0 else str(dim.size) for dim in info.tensor_shape.dim]
    shape = "any shape" if info.tensor_shape.unknown_rank else f"shape ({', '.join(sizes)})"
    return {
        "anyOf": [_value(info.dtype, string), {"type": "array"}],
        "description": f"{dtypes.name(info.dtype)} of {shape}",
    }


def _tensor(info: Any, skip: int) -> Json:
    if info.tensor_shape.unknown_rank:
        return _nested(info, _STRING)
    schema = value = _value(info.dtype, _STRING)
    for dim in reversed(info.tensor_shape.dim[skip:]):
        schema = {"type": "array", "items": schema}
        if dim.size >= 0:
            schema |= {"minItems": dim.size, "maxItems": dim.size}
        elif schema["items"] is not value:
            schema["minItems"] = 1  # of an empty list nobody knows the lists that it does not hold
    return schema


def _value(number: int, string: Json) -> Json:
    if number in _FLOATS:
        return {"type": "number", "format": _FLOATS[number]}
    if number == dtypes.BOOL:
        return {"type": "boolean"}
    if number == dtypes.STRING:
        return string
    dtype = dtypes.NUMPY.get(number)
    if dtype is not None and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return {"type": "integer", "format": dtype.name, "minimum": int(limits.min), "maximum": int(limits.max)}
    return {"not": {}, "description": f"{dtypes.name(number)} has no JSON form: use gRPC"}


def _examples_request(signature_names: list[str]) -> Json:
    kinds: list[Json] = [{"type": "number"}, {"type": "boolean"}, _STRING]
    values = {"anyOf": [*kinds, *({"type": "array", "items": kind} for kind in kinds)]}
    example = {"type": "object", "additionalProperties": values}
    return {
        "type": "object",
        "properties": {
            "signature_name": {"enum": signature_names},
            "context": example,
            "examples": {"type": "array", "minItems": 1, "items": example},
        },
        "required": ["examples"] if DEFAULT_SIGNATURE in signature_names else ["signature_name", "examples"],
    }


def _results(verb: str) -> Json:
    pair = {"type": "array", "prefixItems": [{"type": "string"}, {"type": "number"}], "minItems": 2, "maxItems": 2}
    item: Json = {"type": "array", "items": pair} if verb == "classify" else {"type": "number"}
    return _object({"results": {"type": "array", "items": item}})


def _operation(summary: str, tag: str, response: str | None) -> Json:
    answer: Json = {"description": "The answer."}
    answer["content"] = _content(response) if response else {"application/json": {"schema": {"type": "object"}}}
    error = {"description": "What is wrong.", "content": _content("#/components/schemas/Error")}
    return {"summary": summary, "tags": [tag], "responses": {"200": answer, "4XX": error, "5XX": error}}


def _content(reference: str) -> Json:
    return {"application/json": {"schema": {"$ref": reference}}}
