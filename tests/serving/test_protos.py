"""TF Serving's messages: no TensorFlow for them, and the same ones when TensorFlow comes before or after."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from serving import protos

OURS = """
from serving.client import GrpcClient
from serving import protos
with GrpcClient("127.0.0.1:1"):
    request = protos.PredictRequest()
"""
THEIRS = """
import tensorflow
from tensorflow_serving.apis.predict_pb2 import PredictRequest
"""
SAME = """
request.inputs["x"].CopyFrom(tensorflow.make_tensor_proto([1.5]))
assert PredictRequest.FromString(request.SerializeToString()).inputs["x"].float_val == [1.5]
assert type(request) is PredictRequest
"""


def run_python(code: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_no_tensorflow(tmp_path: Path) -> None:
    run_python(
        OURS + "import sys\nassert not {'tensorflow', 'tensorflow_serving', 'keras'} & set(sys.modules)", tmp_path
    )


@pytest.mark.parametrize(("first", "second"), [(OURS, THEIRS), (THEIRS, OURS)], ids=["before", "after"])
def test_tensorflow_in_the_same_process(first: str, second: str, tmp_path: Path) -> None:
    run_python(first + second + SAME, tmp_path)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protos.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ImportError, match=r"from tensorflow_serving.apis.none_pb2, which is not installed; pip install"
    ):
        protos._register("tensorflow_serving.apis.none_pb2")
