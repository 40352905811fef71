"""Faults of the real server: memory of unloaded versions, directories that change or go, damaged files, kill -9."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving.backends import load as backends
from serving.client import RestClient
from serving.errors import Code, ServingError
from serving.server import ModelServer, load_version
from serving.settings import LoadSettings
from tests.serving import fuzz_models, models
from tests.serving.models import X, Y, litert_bytes, save_layer_as_onnx
from tests.serving.test_cli import Process

# Loads ten versions, one after the other, each with 80 MB of weights and a constant of 8 MB, and prints what the process
# holds before the first, at each, and after the last.
MEMORY_SCRIPT = """
import sys
from pathlib import Path
from serving.backends import memory
memory.set_up()
import numpy as np
import tensorflow as tf
from serving.served_model import ModelConfig, ServedModel
from serving.server import load_version
from serving.versions import latest

class Export(tf.Module):
    def __init__(self):
        self.weights = tf.Variable(tf.random.normal([20 * 2**20]))
    @tf.function(input_signature=[tf.TensorSpec([], tf.int32, name="index")])
    def serve(self, index):
        return {"y": self.weights[index] + tf.constant(np.arange(2 * 2**20, dtype=np.float32))[index]}

def megabytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20

base_path = Path(sys.argv[1])
export = Export()
tf.saved_model.save(export, base_path / "export", signatures=export.serve)
expected = float(export.serve(7)["y"])
del export
served = ServedModel(ModelConfig("m", base_path, latest(1), {}), load_version)
for number in range(11):  # the first one brings in what TensorFlow keeps for good
    (base_path / str(number)).symlink_to(base_path / "export")
    served.refresh()
    with served.lease(None) as version:
        assert version.number == number
        assert version.loaded.run("serving_default", {"index": np.int32(7)[...]})["y"] == expected
    del version
    print(megabytes())
served.close()
print(megabytes())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_unloaded_versions_is_given_back(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    _, *loaded, closed = [float(line) for line in done.stdout.splitlines()]
    assert len(loaded) == 10
    assert max(loaded) - min(loaded) < 10, loaded
    assert loaded[-1] - closed > 85


HALVES = np.array([[4.0]], np.float32)


@pytest.fixture
def base_path(tmp_path: Path) -> Path:
    models.copy_half_plus_two(tmp_path / "m" / "1")
    return tmp_path / "m"


@pytest.fixture
def client(base_path: Path) -> Iterator[RestClient]:
    """Of a server that looks for new versions all the time, and waits an hour before it tries a bad one again."""
    options: dict[str, Any] = {
        "poll_wait_seconds": 0.01,
        "max_num_load_retries": 5,
        "load_retry_interval_seconds": 3600,
    }
    with (
        ModelServer("m", base_path, **options) as server,
        RestClient(f"http://127.0.0.1:{server.rest_port}") as running,
    ):
        yield running


def answer(client: RestClient) -> float:
    return float(client.predict("m", {"x": HALVES})["y"][0, 0])


def states(client: RestClient) -> dict[int, str]:
    return {status.version: status.state for status in client.status("m")}


def wait_for(client: RestClient, expected: dict[int, str]) -> None:
    """Wait for the states of the versions, while the model has to answer."""
    deadline = time.monotonic() + 20
    while states(client) != expected:
        assert answer(client) == 4
        assert time.monotonic() < deadline, client.status("m")


def test_version_that_is_copied_in_the_wrong_order_is_served_when_it_is_whole(
    base_path: Path, client: RestClient
) -> None:
    files = ["saved_model.pb", "variables/variables.data-00000-of-00001", "variables/variables.index"]
    for name in files:
        data = (base_path / "1" / name).read_bytes()
        copy = base_path / "2" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        for part in (data[: len(data) // 2], data):
            assert states(client).get(2, "LOADING") in ("LOADING", "END")
            copy.write_bytes(part)
            assert answer(client) == 4
        if name == "saved_model.pb":
            wait_for(client, {1: "AVAILABLE", 2: "LOADING"})
    wait_for(client, {1: "END", 2: "AVAILABLE"})
    assert client.status("m")[0].error_code == "OK"


def test_version_that_is_deleted_while_it_serves(base_path: Path, client: RestClient) -> None:
    shutil.rmtree(base_path / "1")
    assert answer(client) == 4
    models.copy_half_plus_two(base_path / "2")
    wait_for(client, {1: "END", 2: "AVAILABLE"})
    models.copy_half_plus_two(base_path / "3")
    wait_for(client, {1: "END", 2: "END", 3: "AVAILABLE"})
    shutil.rmtree(base_path)
    assert answer(client) == 4


@pytest.mark.parametrize("name", ["model.tflite", "model.onnx"])
def test_file_that_is_overwritten_while_it_is_served(tmp_path: Path, name: str) -> None:
    """A runtime that maps the file into memory would end with SIGBUS."""
    if name == "model.onnx":
        save_layer_as_onnx(tmp_path / name)
    else:
        (tmp_path / name).write_bytes(litert_bytes())
    model = load_version(tmp_path)
    (tmp_path / name).write_bytes(b"")
    np.testing.assert_allclose(model.run("serving_default", {"x": X})["y"], Y, rtol=1e-5)


def test_server_that_is_killed_can_be_started_again_at_once(tmp_path: Path) -> None:
    save_layer_as_onnx(tmp_path / "1" / "model.onnx")
    with Process(f"--model_base_path={tmp_path}") as first:
        url = f"http://127.0.0.1:{first.rest_port}"
        with RestClient(url) as client:
            np.testing.assert_allclose(client.predict("m", {"x": X})["y"], Y, rtol=1e-5)
        first.process.kill()
        first.process.wait()
        ports = [f"--port={first.grpc_port}", f"--rest_api_port={first.rest_port}"]
        with Process(f"--model_base_path={tmp_path}", *ports), RestClient(url) as client:
            np.testing.assert_allclose(client.predict("m", {"x": X})["y"], Y, rtol=1e-5)


def test_damaged_models_are_refused_or_load_and_the_good_one_answers(tmp_path: Path) -> None:
    outcomes = list(fuzz_models.campaign(fuzz_models.make_models(tmp_path), seed=7, cases=42))
    assert [outcome.case for outcome in outcomes] == list(range(42))
    assert {outcome.file for outcome in outcomes} == set(fuzz_models.FILES)
    assert [outcome for outcome in outcomes if outcome.result not in ("refused", "loaded")] == []
    assert sum(outcome.result == "refused" for outcome in outcomes) > 25


@pytest.fixture
def deadly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A version in whose loading other processes die, as a damaged file may make them, and this one does not."""
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.tflite").write_bytes(litert_bytes())
    (tmp_path / "sitecustomize.py").write_text(
        "import ai_edge_litert.interpreter as interpreter, os\ninterpreter.Interpreter = lambda **options: os.abort()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "1"


def test_version_that_would_end_the_process_is_refused(deadly: Path) -> None:
    with pytest.raises(ServingError, match=f"{deadly} cannot be loaded: .* ended by SIGABRT; a file is damaged"):
        load_version(deadly)
    model = load_version(deadly, LoadSettings(trial_load="never"))
    np.testing.assert_allclose(model.run("serving_default", {"x": X})["y"], Y, rtol=1e-5)


def test_trial_load_that_does_not_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "1").mkdir()
    save_layer_as_onnx(tmp_path / "1" / "model.onnx")
    settings = LoadSettings(trial_load="always", trial_load_timeout_seconds=0.5)
    with pytest.raises(ServingError, match=r"not done after 0\.5 s; a larger --trial_load_timeout_seconds") as raised:
        load_version(tmp_path / "1", settings)
    assert raised.value.code is Code.DEADLINE_EXCEEDED


@pytest.mark.parametrize(("trial_load", "is_tried"), [("auto", False), ("always", True), ("never", False)])
def test_other_files_are_tried_when_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trial_load: str, is_tried: bool
) -> None:
    tried: list[Path] = []
    monkeypatch.setattr(backends, "try_to_load", lambda path, settings: tried.append(path))
    save_layer_as_onnx(tmp_path / "model.onnx")
    load_version(tmp_path, LoadSettings(trial_load=trial_load))
    assert tried == [tmp_path] * is_tried
