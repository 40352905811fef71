"""How the server listens and loads: what `ModelServer` can be told besides the models. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from serving.access.tls import TlsFile


@dataclass(frozen=True)
class GrpcSettings:
    """How gRPC is served.

    Attributes:
        socket_path: a Unix socket to listen on as well.
        max_threads: the threads that answer requests; None means four for each CPU.
        channel_arguments: gRPC core's options for the server, such as `("grpc.max_connection_age_ms", 2000)`.
        health_service: whether grpc.health.v1.Health is served.
        reflection_service: whether the services can be listed and described (grpc.reflection.v1alpha).
        tensor_content: whether Predict answers with `tensor_content` in place of `float_val` and its like.
        max_message_bytes: a larger request is refused.
        tls: key and certificates; None serves in plain text.
    """

    socket_path: str = ""
    max_threads: int | None = None
    channel_arguments: Sequence[tuple[str, str | int]] = ()
    health_service: bool = False
    reflection_service: bool = False
    tensor_content: bool = False
    max_message_bytes: int = 2**31 - 1
    tls: TlsFile | None = None


@dataclass(frozen=True)
class RestSettings:
    """How REST is served.

    Attributes:
        num_threads: the threads that answer requests; None means four for each CPU.
        cors: whether pages of other origins may read the answers.
        strict_json: whether NaN and Infinity become null in answers.
        max_body_bytes: a larger request is refused; None refuses none.
        max_connections: a connection past these is refused; None refuses none.
        idle_seconds: a kept connection without a request is closed after this; None never closes it.
        io_seconds: the time for the head of a request, for the next piece of its body, and for the client to take up
            the answer; None waits for ever.
        metrics_path: where Prometheus finds the metrics; empty means nowhere.
        tls: key and certificates; None serves in plain text.
    """

    num_threads: int | None = None
    cors: bool = False
    strict_json: bool = False
    max_body_bytes: int | None = None
    max_connections: int | None = None
    idle_seconds: float | None = None
    io_seconds: float | None = 60.0
    metrics_path: str = ""
    tls: TlsFile | None = None


@dataclass(frozen=True)
class LoadSettings:
    """How versions are loaded.

    Attributes:
        num_threads: how many versions load at the same time; each takes its memory.
        backend: one of backends.BACKENDS: what executes versions.
        prefer_tflite_model: whether `auto` takes a model.tflite that lies beside a SavedModel.
        trial_load: whether a version is loaded in a process of its own first: `always`, `never`, or `auto`, only LiteRT's.
        trial_load_timeout_seconds: when that process is given up, and the version with it.
        tags: the tags of the graph in the SavedModel.
        warmup: whether a version's warm-up requests are replayed before it serves.
        warmup_iterations: how often each of them is.
        session_config_file: a TensorFlow ConfigProto in protobuf's text format.
        intra_op_threads: the threads that share the work of one operation; None leaves it to the runtime.
        gpu_memory_fraction: the share of the GPU's memory to take; None leaves it to TensorFlow.
    """

    num_threads: int = 1
    backend: str = "auto"
    prefer_tflite_model: bool = False
    trial_load: str = "auto"
    trial_load_timeout_seconds: float = 600.0
    tags: Sequence[str] = ("serve",)
    warmup: bool = True
    warmup_iterations: int = 1
    session_config_file: Path | None = None
    intra_op_threads: int | None = None
    gpu_memory_fraction: float | None = None
