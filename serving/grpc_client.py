"""A client for TF Serving's gRPC API.

Making the first client of a process takes about 7 s when TensorFlow is not loaded yet (see protos.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc
import numpy as np
from google.protobuf import json_format

from serving.errors import Code, ServingError
from serving.model_info import ModelMetadata, VersionStatus, metadata_from_json
from serving.tensors import decode, encode_content

_OPTIONS = (("grpc.max_receive_message_length", 2**31 - 1), ("grpc.max_send_message_length", 2**31 - 1))


class GrpcClient:
    """Calls a model server over gRPC. May be shared by threads.

    Args:
        target: `host:port`.

    Example:
        >>> with GrpcClient("127.0.0.1:8500") as client:
        ...     client.predict("taxi", {"miles": np.array([[1.5]], np.float32)})
    """

    def __init__(self, target: str) -> None:
        from serving import protos

        self._protos = protos
        self._channel = grpc.insecure_channel(target, options=_OPTIONS)
        self._predict = self._method("PredictionService/Predict", protos.PredictResponse)
        self._status = self._method("ModelService/GetModelStatus", protos.GetModelStatusResponse)
        self._metadata = self._method("PredictionService/GetModelMetadata", protos.GetModelMetadataResponse)

    def _method(self, name: str, response_type: Any) -> Any:
        return self._channel.unary_unary(
            f"/tensorflow.serving.{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=response_type.FromString,
        )

    def predict(
        self,
        model_name: str,
        inputs: Mapping[str, np.ndarray],
        *,
        signature_name: str = "serving_default",
        version: int | None = None,
        timeout_seconds: float = 10.0,
    ) -> dict[str, np.ndarray]:
        """Call a signature.

        Args:
            model_name: the model.
            inputs: input alias -> array; strings as object arrays of bytes or str.
            signature_name: the signature to call.
            version: a version number; None means the newest.
            timeout_seconds: for the whole call.

        Returns:
            Output alias -> array; strings are object arrays of bytes.

        Raises:
            ServingError: what the server answered, UNAVAILABLE when it cannot be reached, DEADLINE_EXCEEDED.
        """
        request = self._protos.PredictRequest()
        _fill_spec(request.model_spec, model_name, version)
        request.model_spec.signature_name = signature_name
        for alias, array in inputs.items():
            encode_content(np.asarray(array), request.inputs[alias])
        response = _call(self._predict, request, timeout_seconds)
        return {alias: decode(tensor) for alias, tensor in response.outputs.items()}

    def status(self, model_name: str, *, timeout_seconds: float = 10.0) -> list[VersionStatus]:
        """The versions of a model that the server knows.

        Raises:
            ServingError: see predict; NOT_FOUND for an unknown model.
        """
        request = self._protos.GetModelStatusRequest()
        _fill_spec(request.model_spec, model_name, None)
        response = _call(self._status, request, timeout_seconds)
        states = self._protos.ModelVersionStatus.State
        return [
            VersionStatus(
                item.version, states.Name(item.state), Code(item.status.error_code).name, item.status.error_message
            )
            for item in response.model_version_status
        ]

    def metadata(self, model_name: str, *, version: int | None = None, timeout_seconds: float = 10.0) -> ModelMetadata:
        """The signatures of a model.

        Raises:
            ServingError: see predict; NOT_FOUND when no such version is loaded.
        """
        request = self._protos.GetModelMetadataRequest(metadata_field=["signature_def"])
        _fill_spec(request.model_spec, model_name, version)
        response = _call(self._metadata, request, timeout_seconds)
        signatures = self._protos.SignatureDefMap()
        response.metadata["signature_def"].Unpack(signatures)
        as_json = json_format.MessageToDict(signatures, preserving_proto_field_name=True)
        return metadata_from_json(response.model_spec.version.value, as_json.get("signature_def", {}))

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def __enter__(self) -> GrpcClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _fill_spec(spec: Any, model_name: str, version: int | None) -> None:
    spec.name = model_name
    if version is not None:
        spec.version.value = version


def _call(method: Any, request: Any, timeout_seconds: float) -> Any:
    try:
        return method(request, timeout=timeout_seconds)
    except grpc.RpcError as error:
        raise ServingError(Code(error.code().value[0]), error.details() or "") from error
