"""Malformed requests, led by coverage: Atheris searches for bodies, messages and URLs that reach new lines of the server.

    pip install atheris
    python -m tests.serving.fuzz_requests -max_total_time=600

Options are libFuzzer's. A request may be answered or refused as the client's mistake; anything else ends the campaign
with the input that did it, which is kept in a file. tests/serving/test_fuzz.py is the part that runs in CI.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["serving"]):
    from serving import protos
    from serving.calls import Models
    from serving.rest.rest_api import Request, RestApi
    from serving.rpc.grpc_api import GrpcApi, make_handlers
    from serving.server import ModelServer

from tests.serving.models import copy_half_plus_two, save_rich, write_model_config
from tests.serving.test_fuzz import ACTIONS, CLIENT_CODES, CLIENT_ERRORS, DOCUMENTS

METHODS = [
    *(f"/{protos.PREDICTION_SERVICE}/{name}" for name in ("Predict", "Classify", "Regress", "MultiInference")),
    f"/{protos.PREDICTION_SERVICE}/GetModelMetadata",
    f"/{protos.MODEL_SERVICE}/GetModelStatus",
]


class Call:
    """What a handler asks of a grpc.ServicerContext, and what it says at last."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.code: Any = None

    def time_remaining(self) -> None:
        return None

    def add_callback(self, callback: Any) -> bool:
        return True

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def set_code(self, code: Any) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        details.encode()  # what cannot be sent would be the server's fault

    def set_trailing_metadata(self, metadata: Any) -> None:
        pass


def answer(coroutine: Any) -> Any:
    """What a coroutine returns that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits, though nothing is batched")


def try_rest(api: RestApi, method: str, target: str, body: bytes) -> None:
    """Send a request to the REST API, past HTTP."""
    response = answer(api.handle(Request(method, target, {}, body)))
    assert response.status == 200 or response.status in CLIENT_ERRORS, (response.status, response.body)
    if response.status != 200 and method != "OPTIONS":
        assert set(json.loads(response.body.decode(errors="replace"))) == {"error"}, response.body


def try_grpc(handlers: list[Any], method: str, body: bytes) -> None:
    """Send a message to a gRPC handler, past grpcio."""
    call = Call(method)
    handler = next(found for found in (each.service(call) for each in handlers) if found is not None)
    handler.unary_unary(body, call)
    assert call.code is None or call.code in CLIENT_CODES, call.code


def seeds(folder: Path) -> None:
    """Good requests to begin with: what kind, which path, the body."""
    bodies = {f"rest{index}": (0, json.dumps(document).encode()) for index, document in enumerate(DOCUMENTS)}
    message = protos.PredictRequest()
    message.model_spec.name = "half"
    message.inputs["x"].dtype = 1
    message.inputs["x"].tensor_shape.dim.add().size = 2
    message.inputs["x"].float_val.extend([1.0, 2.0])
    bodies["grpc"] = (1, message.SerializeToString())
    bodies["url"] = (2, b"/v1/models/half/versions/1:predict")
    for name, (kind, body) in bodies.items():
        (folder / name).write_bytes(bytes([kind, 0]) + body)


def main() -> None:
    """Run the campaign; does not return."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_rich(folder / "rich" / "1")
        copy_half_plus_two(folder / "half" / "1")
        config = write_model_config(folder, {"rich": "rich", "half": "half"})
        corpus = folder / "corpus"
        corpus.mkdir()
        seeds(corpus)
        with ModelServer(model_config_file=config) as server:
            models = Models(server.manager, [server.metrics.called])
            rest = RestApi(models, lambda: False, metrics=server.metrics)
            handlers = make_handlers(GrpcApi(models, metrics=server.metrics))

            def one(data: bytes) -> None:
                kind, choice, body = data[:1], sum(data[1:2]), data[2:]
                if kind == b"\1":
                    try_grpc(handlers, METHODS[choice % len(METHODS)], body)
                elif kind == b"\2":
                    target = body.decode("latin-1")
                    try_rest(rest, ("GET", "POST", "OPTIONS")[choice % 3], f"/v1/{target}", b'{"instances": [1]}')
                else:
                    try_rest(rest, "POST", ACTIONS[choice % len(ACTIONS)], body)

            atheris.Setup([*sys.argv, str(corpus)], one)
            atheris.Fuzz()


if __name__ == "__main__":
    main()
