"""TF Serving's messages: no TensorFlow for them, and the same ones when TensorFlow comes before or after."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from serving import protos

PROJECT = Path(__file__).parents[2]
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
NO_TENSORFLOW = """
import sys
assert not {'tensorflow', 'tensorflow_serving', 'keras'} & set(sys.modules)
"""


def run_python(code: str, *, implementation: str = "upb", path: Path = PROJECT) -> str:
    """Run Python code in a process of its own and return what it wrote to standard error."""
    environment = os.environ | {
        "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": implementation,
        "PYTHONPATH": f"{path}{os.pathsep}{PROJECT}",
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("implementation", ["upb", "python"])
def test_no_tensorflow(implementation: str) -> None:
    run_python(OURS + NO_TENSORFLOW, implementation=implementation)


@pytest.mark.parametrize(
    ("first", "second", "implementation"),
    [(OURS, THEIRS, "upb"), (THEIRS, OURS, "upb"), (OURS, THEIRS, "python")],
    ids=["before", "after", "before-python"],
)
def test_tensorflow_in_the_same_process(first: str, second: str, implementation: str) -> None:
    run_python(first + second + SAME, implementation=implementation)


def test_source_of_another_form_is_imported(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("tensorflow_serving")
    assert spec is not None and spec.submodule_search_locations
    shutil.copytree(spec.submodule_search_locations[0], tmp_path / "tensorflow_serving")
    source = tmp_path / "tensorflow_serving/apis/predict_pb2.py"
    text = source.read_text()
    changed = text.replace("_descriptor_pool.Default().AddSerializedFile(", "add(")
    assert changed != text
    source.write_text(
        "from google.protobuf import descriptor_pool\nadd = descriptor_pool.Default().AddSerializedFile\n" + changed
    )
    complaints = run_python(OURS + THEIRS + SAME, path=tmp_path)
    assert complaints.count("predict_pb2 is not in the form that protoc writes; importing it") == 1


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protos.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ImportError, match=r"from tensorflow_serving.apis.none_pb2, which is not installed; pip install"
    ):
        protos._names("tensorflow_serving.apis.none_pb2")
