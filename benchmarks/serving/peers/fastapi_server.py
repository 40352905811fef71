"""FastAPI with a Keras model, as people write it; `call` says how the model is called."""

from __future__ import annotations

import json
import sys

import keras
import numpy as np
import tensorflow as tf
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

arguments = json.loads(sys.argv[1])
app = FastAPI()
if arguments["call"] == "signature":
    loaded = tf.saved_model.load(arguments["base_path"] + "/1")
    signature = loaded.signatures["serving_default"]

    def call(x):
        return signature(x=tf.constant(x))["output_0"].numpy()

else:
    model = keras.models.load_model(arguments["keras_file"])

    def call(x):
        if arguments["call"] == "predict":
            return model.predict(x, verbose=0)
        return model(x, training=False).numpy()


class Request(BaseModel):
    instances: list


@app.post("/predict")
def predict(request: Request):
    return {"predictions": call(np.array(request.instances, np.float32)).tolist()}


uvicorn.run(app, host="127.0.0.1", port=arguments["ports"][0], access_log=False)
