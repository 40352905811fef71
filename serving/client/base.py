"""What the clients of both protocols have in common: the calls, their deadlines, the signatures they follow."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from serving.client.inputs import Features, num_rows, to_array, to_features
from serving.client.model_info import Classification, ModelMetadata, Regression, SignatureInfo, VersionStatus
from serving.client.retry import Call, RetryPolicy
from serving.errors import Code, ServingError, invalid_argument

DEFAULT_SIGNATURE = "serving_default"
NO_METADATA = SignatureInfo(inputs={}, outputs={})
Method = Literal["classify", "regress"]
Results = list[tuple[Classification, ...]] | list[Regression]

Self = TypeVar("Self", bound="Client")

_POLL_SECONDS = 0.2
# INVALID_ARGUMENT is what a label answers that no version has yet.
_NOT_READY_YET = frozenset((Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED, Code.NOT_FOUND, Code.INVALID_ARGUMENT))
# How a server, or the decoding of its answer, fails when the signature is not the one that was read before.
_SIGNATURE_MAY_HAVE_CHANGED = frozenset((Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION, Code.INTERNAL))


@dataclass(frozen=True)
class TlsFiles:
    """PEM files of a TLS connection.

    Attributes:
        ca_file: certificates that the server's has to be signed by; None for the system's.
        certificate_file: the client's own certificate, where the server asks for one.
        key_file: its private key.

    Raises:
        ValueError: a certificate without its key, or a key alone.
    """

    ca_file: Path | None = None
    certificate_file: Path | None = None
    key_file: Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError("a client certificate needs both its certificate file and its key file")


@dataclass(frozen=True)
class ModelSpec:
    """Which version of which model a call means: a version, a label, or the newest.

    Raises:
        ValueError: both a version and a label.
    """

    name: str
    version: int | None = None
    version_label: str | None = None

    def __post_init__(self) -> None:
        if self.version is not None and self.version_label is not None:
            raise ValueError(f"give a version ({self.version}) or a version_label ({self.version_label}), not both")


class Client(abc.ABC):
    """Calls a model server: TF Serving, the embedded server, KServe v1. May be shared by threads.

    `timeout_seconds` of a method is for all it does: reading the model's metadata, retries and the waits between them.
    What fails is a ServingError; its `code` is what the server answered, UNAVAILABLE when it cannot be reached, or
    DEADLINE_EXCEEDED. Requests that the server did not take (UNAVAILABLE, RESOURCE_EXHAUSTED) are sent again.

    Args:
        token: sent as `Authorization: Bearer <token>`.
        headers: sent with each request; `Host` names the virtual host for an ingress, and over TLS the one that the
            server's certificate has to be of.
        retry: when to try again.
    """

    def __init__(
        self, *, token: str | None = None, headers: Mapping[str, str] | None = None, retry: RetryPolicy | None = None
    ) -> None:
        self._headers = {name.lower(): value for name, value in (headers or {}).items()}
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"
        self._retry = retry or RetryPolicy()
        self._signatures: dict[tuple[ModelSpec, str], SignatureInfo] = {}

    def predict(
        self,
        model_name: str,
        inputs: Mapping[str, Any],
        *,
        signature_name: str = DEFAULT_SIGNATURE,
        version: int | None = None,
        version_label: str | None = None,
        output_filter: Sequence[str] = (),
        timeout_seconds: float = 10.0,
    ) -> dict[str, np.ndarray]:
        """Call a signature.

        The model's metadata is read once for each signature, and again when a call fails as one does after a new
        version with another signature was loaded.

        Args:
            model_name: the model.
            inputs: input alias -> array, or what numpy makes one of; numbers are converted to the signature's type if
                they fit. Strings as lists or object arrays of bytes or str.
            signature_name: the signature to call.
            version: a version number; the default is the newest.
            version_label: a label of a version, instead of its number.
            output_filter: the outputs to answer; all by default. Over REST the server computes and sends all of them.
            timeout_seconds: for the whole call.

        Returns:
            Output alias -> array; strings are object arrays of bytes. A server without metadata (a KServe Python
            server) does not name a single output, which is then called `predictions`, and its types are those of the
            JSON: int64, float64, bool or strings.

        Raises:
            ServingError: see the class; INVALID_ARGUMENT for what does not fit the signature.
            ValueError: both a version and a label.

        Example:
            >>> client.predict("taxi", {"miles": [[1.5]]}, version_label="stable")
            {'tips': array([[0.3]], dtype=float32)}
        """
        spec = ModelSpec(model_name, version, version_label)
        return self._predict_known(spec, signature_name, inputs, output_filter, self._start(timeout_seconds))

    def predict_rows(
        self,
        model_name: str,
        inputs: Mapping[str, np.ndarray],
        *,
        signature_name: str = DEFAULT_SIGNATURE,
        version: int | None = None,
        version_label: str | None = None,
        output_filter: Sequence[str] = (),
        batch_size: int = 256,
        max_in_flight: int = 4,
        timeout_seconds: float = 60.0,
    ) -> dict[str, np.ndarray]:
        """Call a signature on many rows, in batches of which several are on their way at once.

        Args:
            model_name: see predict, as for the others that are not named here.
            inputs: input alias -> array of shape (rows, ...).
            signature_name: see predict.
            version: see predict.
            version_label: see predict.
            output_filter: see predict.
            batch_size: rows of a request.
            max_in_flight: requests at once.
            timeout_seconds: for all rows together.

        Returns:
            Output alias -> array of shape (rows, ...), in the order of the inputs.

        Raises:
            ServingError: of the first batch that failed, naming its rows; INVALID_ARGUMENT for no rows, or inputs of
                different lengths.
            ValueError: see predict; a size below 1.
        """
        if batch_size < 1 or max_in_flight < 1:
            raise ValueError(f"batch_size ({batch_size}) and max_in_flight ({max_in_flight}) must be at least 1")
        spec = ModelSpec(model_name, version, version_label)
        call = self._start(timeout_seconds)
        signature = self._signature(spec, signature_name, call)
        arrays = {alias: to_array(alias, value, signature) for alias, value in inputs.items()}
        count = num_rows(arrays)

        def predict(start: int) -> dict[str, np.ndarray]:
            end = min(start + batch_size, count)
            batch = {alias: array[start:end] for alias, array in arrays.items()}
            try:
                own = self._start(call.remaining_seconds())  # its own retries, and the deadline of all
                outputs = self._predict_known(spec, signature_name, batch, output_filter, own)
            except ServingError as error:
                raise ServingError(error.code, f"rows {start} to {end - 1}: {error.message}") from error
            if any(array.shape[:1] != (end - start,) for array in outputs.values()):
                shapes = {alias: array.shape for alias, array in outputs.items()}
                raise invalid_argument(f"{end - start} rows were sent, but the outputs have shapes {shapes}")
            return outputs

        with ThreadPoolExecutor(max_in_flight, thread_name_prefix="predict") as executor:
            answers = list(executor.map(predict, range(0, count, batch_size)))  # the first error cancels the others
        try:
            return {alias: np.concatenate([answer[alias] for answer in answers]) for alias in answers[0]}
        except ValueError as error:
            raise invalid_argument(f"the rows of different batches have different shapes: {error}") from error

    def predict_frame(
        self,
        model_name: str,
        frame: Any,
        *,
        signature_name: str = DEFAULT_SIGNATURE,
        version: int | None = None,
        version_label: str | None = None,
        output_filter: Sequence[str] = (),
        batch_size: int = 256,
        max_in_flight: int = 4,
        timeout_seconds: float = 60.0,
    ) -> Any:
        """Call a signature on a table whose columns are its inputs.

        An input takes the column of its name, others are left alone. A column of lists makes an input with more
        dimensions. A single input of shape (rows, n) without a column of its name takes all n columns, in their order.
        Missing values are NaN for floats, and an error for other types.

        Args:
            model_name: see predict_rows, as for the others that are not named here.
            frame: a pandas.DataFrame or pyarrow.Table.
            signature_name: see predict.
            version: see predict.
            version_label: see predict.
            output_filter: see predict.
            batch_size: see predict_rows.
            max_in_flight: see predict_rows.
            timeout_seconds: for the whole frame.

        Returns:
            The same kind of table, with the frame's index: a column for each output; an output of shape (rows, n) makes
            the columns `<output>_0` to `<output>_<n-1>`, one with more dimensions a column of lists.

        Raises:
            ServingError: see predict_rows; INVALID_ARGUMENT, naming the column that does not fit.
            TypeError: the frame is neither.
        """
        from serving.client import frame as client_frame

        spec = ModelSpec(model_name, version, version_label)
        call = self._start(timeout_seconds)
        table = client_frame.to_table(frame)
        outputs = self.predict_rows(
            model_name,
            client_frame.to_inputs(table, self._signature(spec, signature_name, call)),
            signature_name=signature_name,
            version=version,
            version_label=version_label,
            output_filter=output_filter,
            batch_size=batch_size,
            max_in_flight=max_in_flight,
            timeout_seconds=call.remaining_seconds(),
        )
        return client_frame.like(frame, client_frame.from_outputs(outputs))

    def classify(
        self,
        model_name: str,
        examples: Sequence[Mapping[str, Any]],
        *,
        context: Mapping[str, Any] | None = None,
        signature_name: str = DEFAULT_SIGNATURE,
        version: int | None = None,
        version_label: str | None = None,
        timeout_seconds: float = 10.0,
    ) -> list[tuple[Classification, ...]]:
        """Call a classify signature.

        Args:
            model_name: the model.
            examples: for each example, feature name -> value or values: int, float, str or bytes, or arrays of them.
            context: features that all examples share.
            signature_name: the signature to call.
            version: see predict.
            version_label: see predict.
            timeout_seconds: for the whole call.

        Returns:
            For each example its classes, in the order of the model.

        Raises:
            ServingError: see the class; INVALID_ARGUMENT for features that are none, or another kind of signature.
        """
        spec = ModelSpec(model_name, version, version_label)
        return self._classify(spec, signature_name, *_features(examples, context), self._start(timeout_seconds))

    def regress(
        self,
        model_name: str,
        examples: Sequence[Mapping[str, Any]],
        *,
        context: Mapping[str, Any] | None = None,
        signature_name: str = DEFAULT_SIGNATURE,
        version: int | None = None,
        version_label: str | None = None,
        timeout_seconds: float = 10.0,
    ) -> list[Regression]:
        """Call a regress signature; arguments and errors are those of classify.

        Returns:
            The value of each example.
        """
        spec = ModelSpec(model_name, version, version_label)
        return self._regress(spec, signature_name, *_features(examples, context), self._start(timeout_seconds))

    def multi_inference(
        self,
        model_name: str,
        examples: Sequence[Mapping[str, Any]],
        tasks: Mapping[str, Method],
        *,
        context: Mapping[str, Any] | None = None,
        version: int | None = None,
        version_label: str | None = None,
        timeout_seconds: float = 10.0,
    ) -> dict[str, Results]:
        """Call several classify and regress signatures on the same examples in one request. Only gRPC has it.

        Args:
            model_name: the model.
            examples: see classify.
            tasks: signature name -> what it does.
            context: see classify.
            version: see predict.
            version_label: see predict.
            timeout_seconds: for the whole call.

        Returns:
            Signature name -> what classify or regress return.

        Raises:
            ServingError: see classify; UNIMPLEMENTED over REST.
        """
        spec = ModelSpec(model_name, version, version_label)
        return self._multi_inference(spec, tasks, *_features(examples, context), self._start(timeout_seconds))

    def status(
        self, model_name: str, *, version: int | None = None, timeout_seconds: float = 10.0
    ) -> list[VersionStatus]:
        """The versions of a model that the server knows, or the one that is asked for.

        Raises:
            ServingError: see the class; NOT_FOUND for an unknown model or version.
        """
        return self._status(ModelSpec(model_name, version), self._start(timeout_seconds))

    def metadata(
        self,
        model_name: str,
        *,
        version: int | None = None,
        version_label: str | None = None,
        timeout_seconds: float = 10.0,
    ) -> ModelMetadata:
        """The signatures of a model.

        Raises:
            ServingError: see the class; NOT_FOUND when no such version is loaded.
        """
        return self._metadata(ModelSpec(model_name, version, version_label), self._start(timeout_seconds))

    def signature(
        self,
        model_name: str,
        *,
        signature_name: str = DEFAULT_SIGNATURE,
        version: int | None = None,
        version_label: str | None = None,
        timeout_seconds: float = 10.0,
    ) -> SignatureInfo:
        """One signature of a model, as `predict` follows it: without inputs and outputs if the server has no metadata.

        Raises:
            ServingError: see metadata; INVALID_ARGUMENT when there is no such signature.
        """
        spec = ModelSpec(model_name, version, version_label)
        return self._signature(spec, signature_name, self._start(timeout_seconds))

    def wait_until_ready(
        self,
        model_name: str,
        *,
        version: int | None = None,
        version_label: str | None = None,
        timeout_seconds: float = 60.0,
    ) -> None:
        """Wait until the server answers and the model, or the version that is named, is loaded.

        Raises:
            ServingError: DEADLINE_EXCEEDED with what was seen last; FAILED_PRECONDITION when the version could not be
                loaded; what else the server answers, such as UNAUTHENTICATED.
        """
        spec = ModelSpec(model_name, version, version_label)
        call = self._start(timeout_seconds)
        seen = "the server did not answer"
        while True:
            try:
                seen = self._what_is_not_ready(spec, call)
            except ServingError as error:
                if error.code is Code.DEADLINE_EXCEEDED:
                    message = f"model {model_name} was not ready within {timeout_seconds:g} s: {seen}"
                    raise ServingError(error.code, message) from error
                if error.code not in _NOT_READY_YET:
                    raise
                seen = str(error)
            if not seen:
                return
            call.sleep(_POLL_SECONDS)

    def reload(self, model_config: str, *, timeout_seconds: float = 60.0) -> dict[str, int]:
        """Replace the server's list of models. Only gRPC has it.

        Args:
            model_config: a ModelServerConfig in protobuf's text format, as in `--model_config_file`. Models that it
                leaves out are unloaded.
            timeout_seconds: for the whole call; the server answers when the models are loaded.

        Returns:
            The metrics that the server counted during the reload: name -> increase.

        Raises:
            ServingError: see the class; INVALID_ARGUMENT, with the line, when it is no ModelServerConfig; UNIMPLEMENTED
                over REST.
        """
        return self._reload(model_config, self._start(timeout_seconds))

    @abc.abstractmethod
    def close(self) -> None:
        """Close the connections."""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self, timeout_seconds: float) -> Call:
        return Call(self._retry, timeout_seconds)

    def _predict_known(
        self, spec: ModelSpec, signature_name: str, inputs: Mapping[str, Any], output_filter: Sequence[str], call: Call
    ) -> dict[str, np.ndarray]:
        """Predict by the signature that is known; once more if it is no longer that of the server."""
        is_known = (spec, signature_name) in self._signatures
        signature = self._signature(spec, signature_name, call)

        def predict(signature: SignatureInfo) -> dict[str, np.ndarray]:
            arrays = {alias: to_array(alias, value, signature) for alias, value in inputs.items()}
            _check_outputs(signature_name, output_filter, signature)
            return self._predict(spec, signature_name, signature, arrays, output_filter, call)

        try:
            return predict(signature)
        except ServingError as error:
            # Also NO_METADATA holds only if it works: an ingress without a route yet answers as a server without the call.
            self._signatures.pop((spec, signature_name), None)
            if not is_known or error.code not in _SIGNATURE_MAY_HAVE_CHANGED:
                raise
            current = self._signature(spec, signature_name, call)
            if current == signature:
                raise
        return predict(current)

    def _signature(self, spec: ModelSpec, name: str, call: Call) -> SignatureInfo:
        """A signature, read from the server when it is first asked for; NO_METADATA where the server has none."""
        signature = self._signatures.get((spec, name))
        if signature is None:
            metadata = self._metadata_if_any(spec, call)
            if metadata is not None and name not in metadata.signatures:
                raise invalid_argument(
                    f"model {spec.name} has no signature {name!r}, only {sorted(metadata.signatures)}"
                )
            signature = NO_METADATA if metadata is None else metadata.signatures[name]
            self._signatures[spec, name] = signature
        return signature

    def _what_is_not_ready(self, spec: ModelSpec, call: Call) -> str:
        """Why a model is not ready; empty when it is."""
        if spec.version_label is not None:
            self._metadata(spec, call)  # TF Serving's status call takes no notice of labels
            return ""
        versions = self._status(spec, call)
        if any(version.state == "AVAILABLE" for version in versions):
            return ""
        states = ", ".join(
            f"version {version.version} is {version.state} {version.error_message}".strip() for version in versions
        )
        if versions and all(version.state == "END" and version.error_code != "OK" for version in versions):
            raise ServingError(Code.FAILED_PRECONDITION, f"model {spec.name} could not be loaded: {states}")
        return states or f"model {spec.name} has no versions"

    @abc.abstractmethod
    def _predict(
        self,
        spec: ModelSpec,
        signature_name: str,
        signature: SignatureInfo,
        inputs: Mapping[str, np.ndarray],
        output_filter: Sequence[str],
        call: Call,
    ) -> dict[str, np.ndarray]: ...

    @abc.abstractmethod
    def _classify(
        self, spec: ModelSpec, signature_name: str, examples: list[Features], context: Features | None, call: Call
    ) -> list[tuple[Classification, ...]]: ...

    @abc.abstractmethod
    def _regress(
        self, spec: ModelSpec, signature_name: str, examples: list[Features], context: Features | None, call: Call
    ) -> list[Regression]: ...

    @abc.abstractmethod
    def _multi_inference(
        self,
        spec: ModelSpec,
        tasks: Mapping[str, Method],
        examples: list[Features],
        context: Features | None,
        call: Call,
    ) -> dict[str, Results]: ...

    @abc.abstractmethod
    def _status(self, spec: ModelSpec, call: Call) -> list[VersionStatus]: ...

    @abc.abstractmethod
    def _metadata(self, spec: ModelSpec, call: Call) -> ModelMetadata: ...

    @abc.abstractmethod
    def _metadata_if_any(self, spec: ModelSpec, call: Call) -> ModelMetadata | None:
        """The metadata; None where the server has no such call."""

    @abc.abstractmethod
    def _reload(self, model_config: str, call: Call) -> dict[str, int]: ...


def _features(
    examples: Sequence[Mapping[str, Any]], context: Mapping[str, Any] | None
) -> tuple[list[Features], Features | None]:
    return [to_features(example) for example in examples], None if context is None else to_features(context)


def _check_outputs(signature_name: str, output_filter: Sequence[str], signature: SignatureInfo) -> None:
    unknown = sorted(set(output_filter) - set(signature.outputs))
    if unknown and signature != NO_METADATA:
        raise invalid_argument(
            f"signature {signature_name} has no output {unknown[0]!r}, only {sorted(signature.outputs)}"
        )
