"""Classify, Regress and MultiInference: signatures that take serialized tf.Examples, and the shape their answers must have.

Sources, in tensorflow_serving/servables/tensorflow: classifier.cc, regressor.cc, multi_inference.cc (order of the checks,
messages), util.cc (examples and their context). The method name of a signature is checked only on request, as
there: TF2's exports all say `tensorflow/serving/predict`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from serving import dtypes
from serving.errors import Code, ServingError, invalid_argument
from serving.served_model import DEFAULT_SIGNATURE, Signatures
from serving.tensors import object_array

CLASSIFY = "tensorflow/serving/classify"
REGRESS = "tensorflow/serving/regress"
_KINDS = {CLASSIFY: "classification", REGRESS: "regression"}
_INPUTS, _CLASSES, _SCORES, _OUTPUTS = "inputs", "classes", "scores", "outputs"


@dataclass(frozen=True)
class Inference:
    """One signature called on a batch of examples.

    Attributes:
        method_name: CLASSIFY or REGRESS.
        signature_name: the signature called.
        inputs: `inputs`: serialized tf.Examples `(batch,)`.
        outputs: of CLASSIFY `classes` (strings) or `scores` (float32) or both, `(batch, num_classes)` each; of REGRESS
            `outputs`, float32, `(batch,)` or `(batch, 1)`.
    """

    method_name: str
    signature_name: str
    inputs: Mapping[str, np.ndarray]
    outputs: Mapping[str, np.ndarray]

    @property
    def labels(self) -> np.ndarray:
        """The labels of a CLASSIFY, `(batch, num_classes)`; empty ones when the signature gives none."""
        if _CLASSES in self.outputs:
            return self.outputs[_CLASSES]
        return np.full(self.outputs[_SCORES].shape, b"", dtype=object)

    @property
    def scores(self) -> np.ndarray:
        """The scores of a CLASSIFY, `(batch, num_classes)`; zeros when the signature gives none."""
        if _SCORES in self.outputs:
            return self.outputs[_SCORES]
        return np.zeros(self.outputs[_CLASSES].shape, dtype=np.float32)

    @property
    def values(self) -> np.ndarray:
        """The values of a REGRESS, `(batch,)`."""
        return self.outputs[_OUTPUTS].reshape(-1)


def infer(
    model: Signatures, method_name: str, signature_name: str, message: Any, check_method_names: bool = False
) -> Inference:
    """Answer a Classify or Regress request.

    Args:
        model: the loaded model.
        method_name: CLASSIFY or REGRESS.
        signature_name: the signature to call; empty means the default one.
        message: the request's `Input`.
        check_method_names: whether a signature must have been saved for the method.

    Raises:
        ServingError: INVALID_ARGUMENT without such a signature or examples, or when the answer has another shape or
            type than the method's; FAILED_PRECONDITION for a signature that lacks the method's aliases.
    """
    name, inputs, aliases = plan(model.signatures, method_name, signature_name, message, check_method_names)
    return checked(method_name, name, inputs, model.run(name, inputs, aliases))


def plan(
    signatures: Mapping[str, Any],
    method_name: str,
    signature_name: str,
    message: Any,
    check_method_names: bool = False,
) -> tuple[str, dict[str, np.ndarray], tuple[str, ...]]:
    """The call that answers a Classify or Regress request: signature, inputs, outputs; for the rest see `infer`."""
    name = signature_name or DEFAULT_SIGNATURE
    if name not in signatures:
        raise invalid_argument(f"No signature was found with the name: {name}")
    aliases = output_aliases(method_name, signatures[name].proto, check_method_names)
    return name, {_INPUTS: serialized_examples(message)}, aliases


def infer_all(
    model: Signatures, tasks: Iterable[Any], message: Any, check_method_names: bool = False
) -> list[Inference]:
    """Answer a MultiInference request: all tasks on the same examples.

    Args:
        model: the loaded model.
        tasks: `InferenceTask` messages.
        message: the request's `Input`.
        check_method_names: as of `infer`.

    Raises:
        ServingError: as `infer`; INVALID_ARGUMENT for tasks of several models or the same signature twice, UNIMPLEMENTED
            for another method name.
    """
    planned: dict[str, tuple[str, tuple[str, ...]]] = {}
    model_names = set()
    for task in tasks:
        model_names.add(task.model_spec.name)
        if not task.model_spec.name:
            raise invalid_argument("Found ModelSpec with an empty model name.")
        if len(model_names) > 1:
            raise invalid_argument("All ModelSpecs in a MultiInferenceRequest must access the same model name.")
        name = task.model_spec.signature_name or DEFAULT_SIGNATURE
        if name in planned:
            raise invalid_argument(f"Duplicate evaluation of signature: {name}")
        if name not in model.signatures:
            raise invalid_argument(f"Requested signature not found in model graph: {name}")
        aliases = output_aliases(task.method_name, model.signatures[name].proto, check_method_names)
        planned[name] = task.method_name, aliases
    inputs = {_INPUTS: serialized_examples(message)}
    return [
        checked(method, name, inputs, model.run(name, inputs, aliases)) for name, (method, aliases) in planned.items()
    ]


def serialized_examples(message: Any) -> np.ndarray:
    """The examples of an `Input`, `(batch,)`; the context comes first in each, so that the example's own values win."""
    kind = message.WhichOneof("kind")
    examples = getattr(message, kind).examples if kind else ()
    if not examples:
        raise invalid_argument("Input is empty.")
    context = message.example_list_with_context.context.SerializeToString()
    return object_array([context + example.SerializeToString() for example in examples])


def checked(
    method_name: str, signature_name: str, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]
) -> Inference:
    """The answer of a call, if it has the shape and types of its method; for the errors see `infer`."""
    _CHECKS[method_name](outputs, len(inputs[_INPUTS]))
    return Inference(method_name, signature_name, inputs, outputs)


def output_aliases(method_name: str, signature: Any, check_method_name: bool = False) -> tuple[str, ...]:
    """The outputs that a method takes of a SignatureDef."""
    if check_method_name and method_name in _KINDS and signature.method_name != method_name:
        raise invalid_argument(
            f"Expected {_KINDS[method_name]} signature method_name to be {method_name}. Was: {signature.method_name}"
        )
    if method_name == CLASSIFY:
        return _classification_aliases(signature)
    if method_name == REGRESS:
        return _regression_aliases(signature)
    raise ServingError(Code.UNIMPLEMENTED, f"Unsupported signature method_name: {method_name}")


def _classification_aliases(signature: Any) -> tuple[str, ...]:
    _require_one_input(signature)
    if len(signature.outputs) not in (1, 2):
        raise invalid_argument(f"Expected one or two output Tensors, found {len(signature.outputs)}")
    if _INPUTS not in signature.inputs:
        raise _misfit(f"No classification inputs found in SignatureDef: {signature}")
    aliases = tuple(alias for alias in (_CLASSES, _SCORES) if alias in signature.outputs)
    if not aliases:
        raise _misfit(
            f'Expected classification signature outputs to contain at least one of "{_CLASSES}" or "{_SCORES}". '
            f"Signature was: {signature}"
        )
    return aliases


def _regression_aliases(signature: Any) -> tuple[str, ...]:
    _require_one_input(signature)
    if len(signature.outputs) != 1:
        raise invalid_argument("Expected one output Tensor.")
    if _INPUTS not in signature.inputs:
        raise _misfit(f"No regression inputs found in SignatureDef: {signature}")
    if _OUTPUTS not in signature.outputs:
        raise _misfit(f"No regression outputs found in SignatureDef: {signature}")
    return (_OUTPUTS,)


def _require_one_input(signature: Any) -> None:
    if len(signature.inputs) != 1:
        raise invalid_argument("Expected one input Tensor.")


def _misfit(message: str) -> ServingError:
    return ServingError(Code.FAILED_PRECONDITION, message)


def _check_classification(outputs: Mapping[str, np.ndarray], batch_size: int) -> None:
    for alias, number in ((_CLASSES, dtypes.STRING), (_SCORES, dtypes.FLOAT)):
        array = outputs.get(alias)
        if array is None:
            continue
        if array.ndim != 2:
            raise invalid_argument(f"Expected Tensor shape: [batch_size num_classes] but got {_shape(array)}")
        if dtypes.number_of(array) != number:
            raise invalid_argument(f"Expected {alias} Tensor of {_type(number)}. Got: {_type(dtypes.number_of(array))}")
        if len(array) != batch_size:
            raise invalid_argument(f"Expected {alias} output batch size of {batch_size}. Got: {len(array)}")
    if len({array.shape[1] for array in outputs.values()}) > 1:
        raise invalid_argument(
            "Tensors class and score should match in dim_size(1). Got "
            f"{outputs[_CLASSES].shape[1]} vs. {outputs[_SCORES].shape[1]}"
        )


def _check_regression(outputs: Mapping[str, np.ndarray], batch_size: int) -> None:
    array = outputs[_OUTPUTS]
    if array.ndim != 1 and (array.ndim != 2 or array.shape[1] != 1):
        raise invalid_argument(
            f"Expected output Tensor shape to be either [batch_size] or [batch_size, 1] but got {_shape(array)}"
        )
    if len(array) != batch_size:
        raise invalid_argument(f"Input batch size did not match output batch size: {batch_size} vs. {len(array)}")
    if dtypes.number_of(array) != dtypes.FLOAT:
        raise invalid_argument(f"Expected output Tensor of DT_FLOAT.  Got: {_type(dtypes.number_of(array))}")


_CHECKS: dict[str, Callable[[Mapping[str, np.ndarray], int], None]] = {
    CLASSIFY: _check_classification,
    REGRESS: _check_regression,
}


def _shape(array: np.ndarray) -> str:
    return "[" + ",".join(map(str, array.shape)) + "]"


def _type(number: int) -> str:
    """DataType_Name() of TensorFlow."""
    return "DT_" + dtypes.name(number).upper()
