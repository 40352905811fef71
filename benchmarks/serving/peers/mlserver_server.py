"""MLServer with a custom runtime, as its documentation has it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse


class KerasRuntime(MLModel):
    async def load(self) -> bool:
        import keras

        self.model = keras.models.load_model(self.settings.parameters.uri)
        return True

    async def predict(self, payload):
        x = self.decode(payload.inputs[0], default_codec=NumpyCodec)
        y = self.model(x, training=False).numpy()
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("output_0", y)])


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    http_port, grpc_port, metrics_port = arguments["ports"]
    folder = Path(f"mlserver_{http_port}")
    folder.mkdir()
    settings = {
        "host": "127.0.0.1",
        "http_port": http_port,
        "grpc_port": grpc_port,
        "metrics_port": metrics_port,
        "parallel_workers": 0,  # its documentation's way to keep a small model in the server's process
    }
    model = {
        "name": "model",
        "implementation": "mlserver_server.KerasRuntime",
        "parameters": {"uri": arguments["keras_file"]},
        "max_batch_size": arguments.get("max_batch_size", 0),
        "max_batch_time": arguments.get("batch_timeout_s", 0.0),
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    (folder / "model-settings.json").write_text(json.dumps(model))
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    command = str(Path(sys.executable).with_name("mlserver"))
    os.execv(command, [command, "start", str(folder)])
