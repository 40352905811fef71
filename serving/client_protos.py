"""TF Serving's messages for the gRPC client, without loading TensorFlow.

Importing a generated module of tensorflow_serving imports tensorflow.core, and that runs tensorflow/__init__.py (5 s).
But the descriptors that such a module registers are bytes in its source; so they are read from there, with those of the
modules it imports, and registered as it would. protobuf has one class for each descriptor, so whoever imports the
generated modules later, or did before, has the same classes; no module is loaded or replaced.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pool, message_factory

_APIS = (
    "classification",
    "get_model_metadata",
    "get_model_status",
    "inference",
    "model_management",
    "predict",
    "regression",
)


@functools.cache
def message_class(name: str) -> Any:
    """The class of a message.

    Args:
        name: its name in the package tensorflow.serving, such as `PredictRequest`.

    Raises:
        ImportError: the packages tensorflow and tensorflow-serving-api are not there, or not as they are known.
    """
    for api in _APIS:
        _register(f"tensorflow_serving.apis.{api}_pb2")
    descriptor = descriptor_pool.Default().FindMessageTypeByName(f"tensorflow.serving.{name}")
    return message_factory.GetMessageClass(descriptor)


@functools.cache
def _register(module: str) -> None:
    tree = ast.parse(_source(module).read_bytes())
    for imported in _imported(tree):
        _register(imported)
    descriptor_pool.Default().AddSerializedFile(_serialized(tree, module))


def _source(module: str) -> Path:
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    for location in (spec.submodule_search_locations if spec else None) or ():
        path = Path(location, *rest).with_suffix(".py")
        if path.is_file():
            return path
    raise ImportError(
        f"the gRPC client reads TF Serving's messages from {module}, which is not installed; "
        "pip install tensorflow tensorflow-serving-api, or use REST"
    )


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name.endswith("_pb2"))


def _serialized(tree: ast.Module, module: str) -> bytes:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "AddSerializedFile"
        ):
            return ast.literal_eval(node.args[0])
    raise ImportError(f"{module} has no serialized descriptor where protoc writes it; its protoc is not known")
