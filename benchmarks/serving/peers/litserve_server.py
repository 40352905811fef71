"""LitServe with a Keras model, as its documentation has it."""

from __future__ import annotations

import json
import sys

import litserve
import numpy as np


class KerasApi(litserve.LitAPI):
    def __init__(self, keras_file: str, **settings) -> None:
        super().__init__(**settings)
        self.keras_file = keras_file

    def setup(self, device) -> None:
        import keras

        self.model = keras.models.load_model(self.keras_file)

    def decode_request(self, request):
        return np.array(request["instances"], np.float32)

    def predict(self, x):
        if isinstance(x, list):  # a batch of requests
            x = np.concatenate(x)
            return list(self.model(x, training=False).numpy()[:, None])
        return self.model(x, training=False).numpy()

    def batch(self, inputs):
        return inputs

    def unbatch(self, output):
        return output

    def encode_response(self, output):
        return {"predictions": output.tolist()}


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    api = KerasApi(
        arguments["keras_file"],
        max_batch_size=arguments.get("max_batch_size", 1),
        batch_timeout=arguments.get("batch_timeout_s", 0.0),
    )
    server = litserve.LitServer(api, accelerator="cpu", timeout=120)
    server.run(
        host="127.0.0.1", port=arguments["ports"][0], generate_client_file=False, log_level="warning", access_log=False
    )
