"""What a client learns about a served model; the same from REST and from gRPC."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serving import dtypes

_NUMBERS = {f"DT_{name.upper()}": number for number, name in dtypes.NAMES.items()}


@dataclass(frozen=True)
class VersionStatus:
    """One version of a model on the server.

    Attributes:
        version: its number; None from a KServe server, whose models have none.
        state: START, LOADING, AVAILABLE, UNLOADING or END.
        error_code: OK, or why it could not be loaded, such as INVALID_ARGUMENT.
        error_message: the same in words.
    """

    version: int | None
    state: str
    error_code: str = "OK"
    error_message: str = ""


@dataclass(frozen=True)
class TensorInfo:
    """One input or output of a signature.

    Attributes:
        dtype: TensorFlow's name, such as `DT_FLOAT`.
        shape: the dimensions, -1 where any size goes; None when even the rank is open.
    """

    dtype: str
    shape: tuple[int, ...] | None

    @property
    def number(self) -> int:
        """TensorFlow's number of the type; 0 for a type that serving.dtypes does not know."""
        return _NUMBERS.get(self.dtype, 0)


@dataclass(frozen=True)
class SignatureInfo:
    """One signature: input and output alias -> TensorInfo. Empty where the server has no metadata."""

    inputs: Mapping[str, TensorInfo]
    outputs: Mapping[str, TensorInfo]


@dataclass(frozen=True)
class ModelMetadata:
    """The signatures of the version that answered, by name."""

    version: int
    signatures: Mapping[str, SignatureInfo]


@dataclass(frozen=True)
class Classification:
    """One class of an example and its score; an empty label or 0 where the signature gives none."""

    label: str
    score: float


@dataclass(frozen=True)
class Regression:
    """The value of an example."""

    value: float


def metadata_from_json(version: str | int, signatures: Mapping[str, Any]) -> ModelMetadata:
    """Read SignatureDefs in protobuf's JSON form, as the REST metadata call answers them."""
    return ModelMetadata(int(version), {name: _signature(value) for name, value in signatures.items()})


def _signature(value: Mapping[str, Any]) -> SignatureInfo:
    return SignatureInfo(
        inputs={alias: _tensor(info) for alias, info in value.get("inputs", {}).items()},
        outputs={alias: _tensor(info) for alias, info in value.get("outputs", {}).items()},
    )


def _tensor(info: Mapping[str, Any]) -> TensorInfo:
    dtype, shape = info.get("dtype", "DT_INVALID"), info.get("tensor_shape", {})  # protobuf leaves out what is zero
    if shape.get("unknown_rank"):
        return TensorInfo(dtype, None)
    return TensorInfo(dtype, tuple(int(dim.get("size", 0)) for dim in shape.get("dim", [])))
