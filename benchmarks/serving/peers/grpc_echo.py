"""The floor of a gRPC server over grpcio: bytes come and go back unread."""

from __future__ import annotations

import json
import sys
from concurrent import futures

import grpc

if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=10))
    echo = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
    handlers = grpc.method_handlers_generic_handler("tensorflow.serving.PredictionService", {"Predict": echo})
    server.add_generic_rpc_handlers((handlers,))
    server.add_insecure_port(f"127.0.0.1:{arguments['ports'][0]}")
    server.start()
    server.wait_for_termination()
