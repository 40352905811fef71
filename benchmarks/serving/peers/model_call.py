"""A model called without a server. Each line of the input is a number of seconds; answered by what was reached."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np


def signature_call(path: Path):
    """What TensorFlow's documentation calls a SavedModel by."""
    import tensorflow as tf

    model = tf.saved_model.load(str(path))
    signature = model.signatures["serving_default"]
    return lambda x, _keep=model: signature(x=tf.constant(x))["output_0"].numpy()


def model_run(path: Path):
    """What the embedded server's protocols call."""
    from serving.backends.saved_model import SavedModel

    model = SavedModel(path)
    return lambda x: model.run("serving_default", {"x": x})["output_0"]


def session_callable(path: Path):
    """What that comes down to."""
    from serving.backends.saved_model import SavedModel, SessionRunner

    model = SavedModel(path, SessionRunner)
    call = model._runner._callable(model.signatures["serving_default"], ("output_0",))
    return lambda x: call(x)[0]


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    call = globals()[arguments["call"]](Path(arguments["base_path"]) / "1")
    rows = [row[None] for row in np.load("rows.npy")]
    print(json.dumps({"answers": np.concatenate([call(row) for row in rows]).tolist()}), flush=True)
    for line in sys.stdin:
        latencies, started, cpu_started = [], time.perf_counter(), time.process_time()
        end = started + float(line)
        while (begun := time.perf_counter()) < end:
            call(rows[len(latencies) % len(rows)])
            latencies.append(time.perf_counter() - begun)
        cpu_s = time.process_time() - cpu_started
        print(json.dumps({"latencies_s": latencies, "wall_s": begun - started, "cpu_s": cpu_s}), flush=True)
