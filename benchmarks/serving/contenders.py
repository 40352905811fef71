"""Who takes part: the embedded server, its peers, and what no server can do without."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving.environments import PROJECT
from benchmarks.serving.load import Exchange, LoadError, WrongAnswerError
from benchmarks.serving.workloads import INPUT, TOLERANCE, Served

REST, GRPC, CALL = "REST", "gRPC", "call"
OURS, BATCHING = "headrace", "headrace_batching"
GRPC_METHOD = "/tensorflow.serving.PredictionService/Predict"
BATCHING_PARAMETERS = """max_batch_size { value: 32 }
batch_timeout_micros { value: 0 }
num_batch_threads { value: 2 }
max_enqueued_batches { value: 1000 }
"""
_SCRIPTS = Path(__file__).parent / "peers"


@dataclass(frozen=True)
class Dialect:
    """How a server is asked over HTTP.

    Attributes:
        path: Of the prediction.
        body: Row of numbers -> what is sent as JSON.
        values: JSON of the answer -> the output's row.
    """

    path: str
    body: Callable[[list[Any]], Any]
    values: Callable[[Any], Any]


@dataclass(frozen=True)
class Contender:
    """A server, or a model called without one.

    Attributes:
        script: In peers/; `None` for `python -m serving`.
        environment: Whose interpreter runs it.
        settings: Arguments of the script, or flags.
        rest: How it is asked over HTTP, if it is.
        grpc: Whether it is asked over gRPC.
        is_echo: Whether its answers hold no prediction.
        is_peer: Whether the goals compare with it.
    """

    script: str | None = None
    environment: str = PROJECT
    settings: Mapping[str, Any] = field(default_factory=dict)
    rest: Dialect | None = None
    grpc: bool = False
    is_echo: bool = False
    is_peer: bool = False

    @property
    def protocols(self) -> tuple[str, ...]:
        """Those that it is measured over; CALL alone where there is no server."""
        found = tuple(name for name, there in ((REST, self.rest), (GRPC, self.grpc)) if there)
        return found or (CALL,)

    def command(self, interpreter: str, served: Served, ports: list[int]) -> list[str]:
        """What starts it; HTTP is on the first port (gRPC, where there is no HTTP), gRPC on the second."""
        if self.script is None:
            flags = {"model_name": "model", "model_base_path": served.base_path, "file_system_poll_wait_seconds": 0}
            flags |= {"rest_api_port": ports[0], "port": ports[1], **self.settings}
            return [interpreter, "-m", "serving", *(f"--{name}={value}" for name, value in flags.items())]
        arguments = {"ports": ports, "base_path": str(served.base_path), "keras_file": str(served.keras_file)}
        return [interpreter, str(_SCRIPTS / f"{self.script}.py"), json.dumps({**arguments, **self.settings})]

    def exchanges(self, protocol: str, rows: np.ndarray, answers: np.ndarray) -> list[Exchange]:
        """A request for each row, with the check of its answer."""
        pairs = zip(rows, answers, strict=True)
        if protocol == GRPC:
            return [_grpc_exchange(row, answer, self.is_echo) for row, answer in pairs]
        assert self.rest is not None
        return [_rest_exchange(self.rest, row, answer, self.is_echo) for row, answer in pairs]


def _rest_exchange(dialect: Dialect, row: np.ndarray, expected: np.ndarray, is_echo: bool) -> Exchange:
    # Through float64, which prints three decimals, not float32's nearest number.
    body = json.dumps(dialect.body(row.astype(np.float64).round(3).tolist())).encode()
    head = f"POST {dialect.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"

    def check(answer: bytes) -> None:
        try:
            document = json.loads(answer)
            values = document if is_echo else dialect.values(document)
        except (ValueError, LookupError, TypeError) as error:
            raise LoadError(f"the server answered {answer[:300]!r}") from error
        if not is_echo:
            compare(values, expected)

    return Exchange(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body, check)


def _grpc_exchange(row: np.ndarray, expected: np.ndarray, is_echo: bool) -> Exchange:
    from serving.protos import PredictRequest, PredictResponse
    from serving.tensors import decode, encode_content

    message = PredictRequest()
    message.model_spec.name, message.model_spec.signature_name = "model", "serving_default"
    encode_content(row[None], message.inputs[INPUT])
    request = message.SerializeToString()

    def check(answer: bytes) -> None:
        if is_echo:
            if answer != request:
                raise WrongAnswerError("the echo differs from the request")
            return
        outputs = PredictResponse.FromString(answer).outputs
        if list(outputs) != ["output_0"]:
            raise WrongAnswerError(f"the outputs are {list(outputs)}")
        compare(decode(outputs["output_0"]), expected)

    return Exchange(request, check)


def compare(values: Any, expected: np.ndarray) -> None:
    """See that values are those expected.

    Raises:
        WrongAnswerError: they are not.
    """
    try:
        found = np.asarray(values, np.float32).reshape(-1)
    except ValueError as error:
        raise WrongAnswerError(f"the answer is {str(values)[:200]}") from error
    if found.shape != expected.reshape(-1).shape or not np.allclose(found, expected.reshape(-1), atol=TOLERANCE):
        raise WrongAnswerError(f"the answer is {found[:10].tolist()}, not {expected.reshape(-1)[:10].tolist()}")


_TF_SERVING = Dialect(
    "/v1/models/model:predict", lambda row: {"instances": [row]}, lambda document: document["predictions"]
)
_PLAIN = Dialect("/predict", _TF_SERVING.body, _TF_SERVING.values)
_BENTOML = Dialect("/predict", lambda row: {"x": [row]}, lambda document: document)


def _v2(row: list[Any]) -> dict[str, Any]:
    array = np.array(row)
    tensor = {"name": INPUT, "datatype": "FP32", "shape": [1, *array.shape], "data": array.ravel().tolist()}
    return {"id": "1", "inputs": [tensor]}


_V2 = Dialect("/v2/models/model/infer", _v2, lambda document: document["outputs"][0]["data"])
_BATCHES = {"max_batch_size": 32, "batch_timeout_s": 0.002}

CONTENDERS: dict[str, Contender] = {
    OURS: Contender(rest=_TF_SERVING, grpc=True),
    BATCHING: Contender(
        settings={"enable_batching": "true", "batching_parameters_file": "batching.config"}, rest=_TF_SERVING, grpc=True
    ),
    "usual_servicer": Contender("usual_servicer", grpc=True),
    "grpc_echo": Contender("grpc_echo", grpc=True, is_echo=True),
    "kserve": Contender("kserve_server", "kserve", rest=_TF_SERVING, is_peer=True),
    "mlserver": Contender("mlserver_server", "mlserver", rest=_V2, is_peer=True),
    "bentoml": Contender("bentoml_server", "bentoml", rest=_BENTOML, is_peer=True),
    "litserve": Contender("litserve_server", "litserve", rest=_PLAIN, is_peer=True),
    "fastapi_predict": Contender("fastapi_server", "fastapi", {"call": "predict"}, rest=_PLAIN, is_peer=True),
    "fastapi_call": Contender("fastapi_server", "fastapi", {"call": "model"}, rest=_PLAIN, is_peer=True),
    "fastapi_signature": Contender("fastapi_server", "fastapi", {"call": "signature"}, rest=_PLAIN),
    "mlserver_batching": Contender("mlserver_server", "mlserver", _BATCHES, rest=_V2),
    "bentoml_batching": Contender("bentoml_server", "bentoml", _BATCHES, rest=_BENTOML),
    "litserve_batching": Contender("litserve_server", "litserve", _BATCHES, rest=_PLAIN),
    "http_echo": Contender("http_echo", rest=_TF_SERVING, is_echo=True),
    "signature_call": Contender("model_call", settings={"call": "signature_call"}),
    "model_run": Contender("model_call", settings={"call": "model_run"}),
    "session_callable": Contender("model_call", settings={"call": "session_callable"}),
}
