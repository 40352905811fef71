"""TF Serving's gRPC API as people serve it by hand: make_ndarray, a call of the signature, make_tensor_proto."""

from __future__ import annotations

import json
import sys
from concurrent import futures

import grpc
import tensorflow as tf
from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc


class PredictionService(prediction_service_pb2_grpc.PredictionServiceServicer):
    def __init__(self, path: str) -> None:
        self.model = tf.saved_model.load(path)
        self.signature = self.model.signatures["serving_default"]

    def Predict(self, request, context):  # noqa: N802
        inputs = {name: tf.constant(tf.make_ndarray(proto)) for name, proto in request.inputs.items()}
        response = predict_pb2.PredictResponse()
        for name, value in self.signature(**inputs).items():
            response.outputs[name].CopyFrom(tf.make_tensor_proto(value.numpy()))
        return response


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=10))
    service = PredictionService(arguments["base_path"] + "/1")
    prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(service, server)
    server.add_insecure_port(f"127.0.0.1:{arguments['ports'][0]}")
    server.start()
    server.wait_for_termination()
