"""BentoML with a Keras model, as its documentation has it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import bentoml
import numpy as np

arguments = json.loads(os.environ.get("BENCHMARK_ARGUMENTS") or sys.argv[1])


@bentoml.service(workers=1, traffic={"timeout": 120}, logging={"access": {"enabled": False}})
class KerasService:
    def __init__(self) -> None:
        import keras

        self.model = keras.models.load_model(arguments["keras_file"])

    @bentoml.api(
        batchable="max_batch_size" in arguments,
        max_batch_size=arguments.get("max_batch_size", 100),
        max_latency_ms=60_000,
    )
    def predict(self, x: np.ndarray) -> np.ndarray:
        return self.model(x.astype(np.float32), training=False).numpy()


if __name__ == "__main__":
    os.environ["BENCHMARK_ARGUMENTS"] = sys.argv[1]
    os.environ["BENTOML_DO_NOT_TRACK"] = "True"
    place = ["--host", "127.0.0.1", "--port", str(arguments["ports"][0]), "--working-dir", str(Path(__file__).parent)]
    command = str(Path(sys.executable).with_name("bentoml"))
    os.execv(command, [command, "serve", "bentoml_server:KerasService", *place])
