"""KServe's Python server with a custom predictor, as its documentation has it."""

from __future__ import annotations

import json
import sys

import keras
import numpy as np
from kserve import Model, ModelServer


class KerasModel(Model):
    def __init__(self, name: str, keras_file: str) -> None:
        super().__init__(name)
        self.keras_file = keras_file
        self.load()

    def load(self) -> bool:
        self.model = keras.models.load_model(self.keras_file)
        self.ready = True
        return self.ready

    def predict(self, payload, headers=None, response_headers=None):
        x = np.array(payload["instances"], np.float32)
        return {"predictions": self.model(x, training=False).numpy().tolist()}


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    server = ModelServer(http_port=arguments["ports"][0], enable_grpc=False, enable_latency_logging=False)
    server.start([KerasModel("model", arguments["keras_file"])])
