"""Replays the warm-up requests that a SavedModel brings along, before it serves.

Source: tensorflow_serving/servables/tensorflow/saved_model_warmup_util.cc. A TFRecord file of at most 1000
PredictionLog records; a file that cannot be replayed fails the load.
"""

from __future__ import annotations

from pathlib import Path

from serving import tfrecord
from serving.errors import invalid_argument
from serving.inference import CLASSIFY, REGRESS, infer, infer_all
from serving.served_model import DEFAULT_SIGNATURE, Model
from serving.tensors import decode

WARMUP_FILE = Path("assets.extra") / "tf_serving_warmup_requests"
_MAX_RECORDS = 1000
_METHODS = {"classify_log": CLASSIFY, "regress_log": REGRESS}


def replay(model: Model, path: Path, iterations: int = 1) -> int:
    """Run the requests of a version's warm-up file, if it has one.

    Args:
        model: the loaded model.
        path: its version directory.
        iterations: how often each request is replayed.

    Returns:
        The number of records in the file; those of other calls (SessionRun) are counted, and passed over.

    Raises:
        ServingError: the file is damaged or too long, or the model refuses one of the requests.
    """
    file = path / WARMUP_FILE
    if not file.is_file():
        return 0
    count = 0
    for data in tfrecord.read(file):
        count += 1
        if count > _MAX_RECORDS:
            raise invalid_argument(f"{file} holds more than {_MAX_RECORDS} warm-up records; keep the first ones")
        for _ in range(iterations):
            _replay_one(model, data)
    return count


def _replay_one(model: Model, data: bytes) -> None:
    from serving.protos import PredictionLog

    log = PredictionLog.FromString(data)
    kind = log.WhichOneof("log_type")
    if kind == "multi_inference_log":
        request = log.multi_inference_log.request
        infer_all(model, request.tasks, request.input)
    elif kind in _METHODS:
        request = getattr(log, kind).request
        infer(model, _METHODS[kind], request.model_spec.signature_name, request.input)
    elif kind == "predict_log":
        request = log.predict_log.request
        inputs = {alias: decode(tensor) for alias, tensor in request.inputs.items()}
        model.run(request.model_spec.signature_name or DEFAULT_SIGNATURE, inputs, list(request.output_filter))
