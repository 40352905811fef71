"""The signatures of a loaded model, and what every back end checks of their inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from serving import dtypes
from serving.errors import Code, ServingError, invalid_argument
from serving.tensors import decode, object_array, to_bytes


class TensorSpec(NamedTuple):
    """An input or output of a model that is no SavedModel.

    Attributes:
        name: the tensor's name in the file.
        dtype: TensorFlow's number of the dtype (see dtypes.py).
        shape: `-1` where any size goes.
    """

    name: str
    dtype: int
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Signature:
    """One SignatureDef of a model.

    Attributes:
        name: its key in the model, such as `serving_default`.
        inputs: input alias -> TensorFlow's number of the dtype (see dtypes.py).
        outputs: the output aliases.
        defaults: the values of inputs that a caller may leave out.
        proto: the SignatureDef itself.
    """

    name: str
    inputs: Mapping[str, int]
    outputs: tuple[str, ...]
    defaults: Mapping[str, np.ndarray]
    proto: Any

    @classmethod
    def from_proto(cls, name: str, proto: Any) -> Signature:
        """Read a SignatureDef."""
        own = type(proto)()
        own.CopyFrom(proto)  # a message that lies in another keeps all of that in memory: the whole graph
        inputs = {alias: info.dtype for alias, info in sorted(own.inputs.items())}
        defaults = {alias: decode(tensor) for alias, tensor in own.defaults.items()}
        return cls(name, inputs, tuple(sorted(own.outputs)), defaults, own)

    @classmethod
    def from_specs(cls, name: str, inputs: Mapping[str, TensorSpec], outputs: Mapping[str, TensorSpec]) -> Signature:
        """The signature of a model that brings no SignatureDef.

        Args:
            name: its key, such as `serving_default`.
            inputs: input alias -> tensor.
            outputs: output alias -> tensor.
        """
        from serving.protos import SignatureDef

        proto = SignatureDef(method_name="tensorflow/serving/predict")
        for infos, specs in ((proto.inputs, inputs), (proto.outputs, outputs)):
            for alias, spec in specs.items():
                infos[alias].name, infos[alias].dtype = spec.name, spec.dtype
                infos[alias].tensor_shape.SetInParent()  # a scalar's, which has no dimensions
                for size in spec.shape:
                    infos[alias].tensor_shape.dim.add().size = size
        return cls.from_proto(name, proto)


class SignatureModel:
    """A loaded model; a back end adds how its signatures are executed and released.

    Args:
        signatures: name -> signature.
        note: what a client should know whose inputs do not fit, for the end of the message.
    """

    def __init__(self, signatures: Mapping[str, Signature], note: str = "") -> None:
        self.signatures = signatures
        self._note = note

    def run(
        self, signature_name: str, inputs: Mapping[str, np.ndarray], outputs: Sequence[str] = (), context: Any = None
    ) -> dict[str, np.ndarray]:
        """Call a signature.

        Args:
            signature_name: such as `serving_default` or `serve_examples`.
            inputs: one array for each input alias; those with a default may be left out.
            outputs: the aliases to compute; none means all.
            context: not used: the call is made at once.

        Returns:
            Output alias -> array; strings are object arrays of bytes.

        Raises:
            ServingError: FAILED_PRECONDITION without such a signature, INVALID_ARGUMENT for inputs or outputs that do
                not fit it, else the code with which the runtime failed.
        """
        return self.execute(*self.check(signature_name, inputs, outputs))

    def check(
        self, signature_name: str, inputs: Mapping[str, np.ndarray], outputs: Sequence[str] = ()
    ) -> tuple[Signature, dict[str, np.ndarray], tuple[str, ...]]:
        """What `run` does before it executes: find the signature, complete the inputs, choose the outputs.

        Raises:
            ServingError: FAILED_PRECONDITION or INVALID_ARGUMENT, as `run`.
        """
        signature = self.signatures.get(signature_name)
        if signature is None:
            raise ServingError(Code.FAILED_PRECONDITION, f'Serving signature key "{signature_name}" not found.')
        feeds = _complete_inputs(signature, inputs, self._note)
        return signature, feeds, _wanted_outputs(signature, outputs)

    def execute(
        self, signature: Signature, feeds: dict[str, np.ndarray], outputs: tuple[str, ...]
    ) -> dict[str, np.ndarray]:
        """What `run` does after `check`."""
        values = self._execute(signature, feeds, outputs)
        return {alias: np.asarray(value) for alias, value in zip(outputs, values, strict=True)}

    def _execute(self, signature: Signature, feeds: dict[str, np.ndarray], outputs: tuple[str, ...]) -> Sequence[Any]:
        """The values of `outputs`, in order, for complete inputs of the right types."""
        raise NotImplementedError

    def close(self) -> None:
        """Release the model; a call after this fails."""
        raise NotImplementedError


def _complete_inputs(signature: Signature, inputs: Mapping[str, np.ndarray], note: str) -> dict[str, np.ndarray]:
    given = {**signature.defaults, **inputs} if signature.defaults else inputs
    if given.keys() != signature.inputs.keys():
        extra = sorted(inputs.keys() - signature.inputs.keys())
        missing = sorted(signature.inputs.keys() - given.keys())
        raise invalid_argument(
            f"input size does not match signature: {len(inputs)}!={len(signature.inputs)} "
            f"len({{{','.join(sorted(inputs))}}}) != len({{{','.join(signature.inputs)}}}). "
            f"Sent extra: {{{','.join(extra)}}}. Missing but required: {{{','.join(missing)}}}.{note}"
        )
    return {alias: _checked(alias, given[alias], number, note) for alias, number in signature.inputs.items()}


def _checked(alias: str, array: np.ndarray, number: int, note: str) -> np.ndarray:
    expected = dtypes.DECODED.get(number)
    if expected is None or (array.dtype != expected and not (number == dtypes.STRING and array.dtype.kind in "SU")):
        raise invalid_argument(f"Expects arg[{alias}] to be {dtypes.name(number)} but {array.dtype} is provided{note}")
    return _checked_strings(alias, array) if number == dtypes.STRING else array


def _checked_strings(alias: str, array: np.ndarray) -> np.ndarray:
    try:
        return object_array([to_bytes(value) for value in array.flat]).reshape(array.shape)
    except TypeError as error:
        raise invalid_argument(f"input {alias}: {error}") from error


def _wanted_outputs(signature: Signature, outputs: Sequence[str]) -> tuple[str, ...]:
    for index, alias in enumerate(outputs):
        if alias not in signature.outputs:
            raise invalid_argument(
                f"output tensor alias not found in signature: {alias} Outputs expected to be in the set "
                f"{{{','.join(signature.outputs)}}}."
            )
        if alias in outputs[:index]:
            raise invalid_argument(f"duplicate output tensor alias: {alias}")
    return tuple(sorted(outputs)) or signature.outputs
