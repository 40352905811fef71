"""The embedded model server, with the flags of TF Serving's tensorflow_model_server: `python -m serving`.

Example:
    python -m serving --model_name=taxi --model_base_path=pushed/taxi --port=8500 --rest_api_port=8501
    python -m serving --model_config_file=models.config --model_config_file_poll_wait_seconds=60
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from serving import flags as flag
from serving.backends import memory

if TYPE_CHECKING:
    from serving.access.limits import Gate
    from serving.batching.parameters import BatchingParameters
    from serving.monitoring.tracing import Tracing
    from serving.server import ModelServer


def _print_versions(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        from importlib.metadata import version

        click.echo(f"TensorFlow ModelServer: {version('headrace')} (headrace)")
        click.echo(f"TensorFlow Library: {version('tensorflow')}")
        context.exit()


@click.command(cls=flag.Command, context_settings={"help_option_names": ["-h", "--help"]})
@flag.models("--model_name", default="default", show_default=True, help="Name of the model in requests.")
@flag.models(
    "--model_base_path",
    default=None,
    help="Directory that holds the version directories, such as 1/saved_model.pb; or s3:// or gs://, which is copied.",
)
@flag.models(
    "--model_config_file",
    type=flag.File(),
    help="Models to serve instead of --model_base_path: a ModelServerConfig in protobuf's text format.",
)
@flag.models(
    "--model_config_file_poll_wait_seconds",
    default=0.0,
    show_default=True,
    help="Seconds between looks at --model_config_file; 0 reads it once.",
)
@flag.models(
    "--allow_version_labels_for_unavailable_models",
    **flag.BOOLEAN,
    default=False,
    help="Let the model config give a new label to a version that is not available yet, as it must at the start.",
)
@flag.models(
    "--saved_model_tags", default="serve", show_default=True, help="Tags of the graph in the SavedModel: tag,tag."
)
@flag.models(
    "--enable_signature_method_name_check",
    **flag.BOOLEAN,
    default=False,
    help="Refuse Classify and Regress of signatures saved for another method; those of TF2 all say predict.",
)
@flag.models(
    "--backend",
    type=click.Choice(["auto", "saved_model", "litert", "onnx"]),
    default="auto",
    show_default=True,
    help="What executes models: TensorFlow, LiteRT (model.tflite) or ONNX Runtime (model.onnx); auto takes what is there, "
    "a SavedModel first.",
)
@flag.models(
    "--prefer_tflite_model",
    **flag.BOOLEAN,
    default=False,
    help="Let --backend=auto take a model.tflite that lies beside a SavedModel.",
)
@flag.loading(
    "--trial_load",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    show_default=True,
    help="Load a version in a process of its own first, which a damaged file may end; auto does so for LiteRT files.",
)
@flag.loading(
    "--trial_load_timeout_seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="After this the process is ended, and the version counts as one that does not load.",
)
@flag.loading(
    "--file_system_poll_wait_seconds",
    default=1.0,
    show_default=True,
    help="Seconds between looks for new versions; 0 looks once.",
)
@flag.loading(
    "--num_load_threads",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Versions that load at the same time; 0 and 1 load one after another.",
)
@flag.loading(
    "--max_num_load_retries",
    type=click.IntRange(min=0),
    default=5,
    show_default=True,
    help="How often a version that does not load is tried again.",
)
@flag.loading(
    "--load_retry_interval_micros",
    type=int,
    default=60_000_000,
    show_default=True,
    help="Microseconds between these tries; less than 0 does not wait.",
)
@flag.loading(
    "--enable_model_warmup", **flag.BOOLEAN, default=True, help="Replay a version's warm-up requests before it serves."
)
@flag.loading(
    "--num_request_iterations_for_warmup",
    type=int,
    default=0,
    show_default=True,
    help="How often each of them is replayed; 0 is once.",
)
@flag.loading("--tensorflow_session_config_file", type=flag.File(), help="A ConfigProto in protobuf's text format.")
@flag.loading(
    "--tensorflow_intra_op_parallelism",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Threads that share the work of one operation; 0 leaves it to TensorFlow.",
)
@flag.loading(
    "--tensorflow_session_parallelism",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="The same, by its older name.",
)
@flag.loading(
    "--per_process_gpu_memory_fraction",
    type=click.FloatRange(0, 1),
    default=0.0,
    show_default=True,
    help="Share of the GPU's memory to take; 0 leaves it to TensorFlow.",
)
@flag.batching(
    "--enable_batching", **flag.BOOLEAN, default=False, help="Let requests wait for each other to run as one."
)
@flag.batching(
    "--batching_parameters_file",
    type=flag.File(),
    help="BatchingParameters in protobuf's text format, instead of the defaults.",
)
@flag.batching(
    "--enable_per_model_batching_parameters",
    **flag.BOOLEAN,
    default=False,
    help="Take them from batching_params.pbtxt in the version's directory, all but the threads; without it no batching.",
)
@flag.grpc_flag(
    "--port", type=flag.Port(), default=8500, show_default=True, help="gRPC port; 0 opens none, auto a free one."
)
@flag.grpc_flag("--grpc_socket_path", default="", help="Unix socket on which gRPC listens as well.")
@flag.grpc_flag(
    "--grpc_max_threads",
    type=click.IntRange(min=1),
    default=None,
    help="Threads that answer gRPC requests; by default 4 for each CPU.",
)
@flag.grpc_flag(
    "--grpc_channel_arguments",
    type=flag.ChannelArguments(),
    default=(),
    help="Options of gRPC core, such as grpc.max_connection_age_ms=2000.",
)
@flag.grpc_flag("--enable_grpc_healthcheck_service", **flag.BOOLEAN, default=False, help="Serve grpc.health.v1.Health.")
@flag.grpc_flag(
    "--enable_grpc_reflection", **flag.BOOLEAN, default=False, help="Let clients list and describe the services."
)
@flag.grpc_flag(
    "--enable_serialization_as_tensor_content",
    **flag.BOOLEAN,
    default=False,
    help="Answer Predict with tensor_content in place of float_val and its like.",
)
@flag.rest(
    "--rest_api_port",
    type=flag.Port(),
    default=8501,
    show_default=True,
    help="REST port; 0 opens none, auto a free one.",
)
@flag.rest(
    "--rest_api_num_threads",
    type=click.IntRange(min=1),
    default=None,
    help="Threads that answer REST requests; by default 4 for each CPU.",
)
@flag.rest(
    "--rest_api_timeout_in_ms",
    default=30_000,
    show_default=True,
    help="Milliseconds after which a REST request is answered with 504; 0 waits for ever.",
)
@flag.rest(
    "--rest_api_enable_cors_support",
    **flag.BOOLEAN,
    default=False,
    help="Let pages of other origins read the answers (CORS).",
)
@flag.rest("--strict_json", **flag.BOOLEAN, default=False, help="Answer with null in place of NaN and Infinity.")
@flag.security("--ssl_config_file", type=flag.File(), help="TLS on gRPC: an SSLConfig in protobuf's text format.")
@flag.security("--rest_api_ssl_config_file", type=flag.File(), help="TLS on REST; may be the same file.")
@flag.security(
    "--auth_token_file",
    type=flag.File(),
    help="Tokens, one a line, of which requests need one: Authorization: Bearer TOKEN.",
)
@flag.limits(
    "--max_request_bytes",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Refuse larger requests; 0 refuses none.",
)
@flag.limits(
    "--max_concurrent_requests",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Refuse requests while so many are under way; 0 refuses none.",
)
@flag.limits(
    "--rate_limit_requests_per_second",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Refuse requests past this rate, that of each token if there are tokens; 0 refuses none.",
)
@flag.limits(
    "--rate_limit_burst",
    type=click.IntRange(min=1),
    default=None,
    help="Requests that may come at once; by default those of one second.",
)
@flag.limits(
    "--rest_max_connections",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Refuse REST connections past these; 0 refuses none.",
)
@flag.limits(
    "--rest_idle_timeout_seconds",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Close a kept REST connection without a request after this; 0 keeps it.",
)
@flag.limits(
    "--rest_io_timeout_seconds",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    help="Close a REST connection whose client sends no more of its request, or takes up no more of the answer, for "
    "this long; 0 waits for ever.",
)
@flag.monitoring(
    "--monitoring_config_file",
    type=flag.File(),
    help="Metrics for Prometheus on the REST port: a MonitoringConfig in protobuf's text format.",
)
@flag.monitoring(
    "--otlp_traces_endpoint",
    default="",
    help="Send OpenTelemetry traces here, as OTLP over HTTP: http://collector:4318/v1/traces.  [default: none]",
)
@flag.monitoring(
    "--trace_sampling_rate",
    type=click.FloatRange(0, 1),
    default=1.0,
    show_default=True,
    help="Share of the traces that is sampled; requests with a traceparent follow theirs.",
)
@flag.logs(
    "--request_log_file",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    help="Log requests and their answers here; what is rotated out of it stands beside it, with its time.",
)
@flag.logs(
    "--request_log_format",
    type=click.Choice(["tfrecord", "parquet"]),
    default=None,
    help="TFRecord of PredictionLog, or Parquet; by default parquet if the file is named .parquet.",
)
@flag.logs(
    "--request_log_max_bytes",
    type=click.IntRange(min=1),
    default=256 << 20,
    show_default=True,
    help="Size of a file above which the next one begins.",
)
@flag.logs(
    "--request_log_max_seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=3600.0,
    show_default=True,
    help="Age of a file above which the next one begins; a Parquet file can be read from then on.",
)
@flag.logs(
    "--request_log_max_files",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Files kept, the oldest deleted first; 0 keeps all.",
)
@flag.logs(
    "--request_log_sampling_rate",
    type=click.FloatRange(0, 1),
    default=1.0,
    show_default=True,
    help="Share of the requests that is logged; by their x-request-id, if they have one.",
)
@flag.logs(
    "--shadow_label",
    default="",
    help="Repeat calls on the version with this label and compare the answers: GET /shadow.  [default: none]",
)
@flag.logs(
    "--shadow_sampling_rate",
    type=click.FloatRange(0, 1),
    default=1.0,
    show_default=True,
    help="Share of the calls that is repeated.",
)
@flag.logs(
    "--drain_grace_seconds", default=10.0, show_default=True, help="Seconds that requests get to finish after SIGTERM."
)
@flag.other_flags
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_versions,
    help="Show the versions and exit.",
)
def main(**flags: Any) -> None:
    """Serve SavedModels over TF Serving's gRPC and REST APIs.

    SIGTERM drains: /healthz/ready turns to 503, no new connections are taken, requests under way finish. A second one
    ends at once.
    """
    flag.check_needs(click.get_current_context())
    if flags["port"] == flags["rest_api_port"] not in (0, "auto"):
        raise click.UsageError(f"--port and --rest_api_port are both {flags['port']}; gRPC and REST need a port each")
    if flags["port"] == 0 and flags["rest_api_port"] == 0 and not flags["grpc_socket_path"]:
        raise click.UsageError("give --port, --rest_api_port or --grpc_socket_path; without any, nobody can ask")
    if not flags["model_base_path"] and flags["model_config_file"] is None:
        raise click.UsageError("give --model_base_path (and --model_name) for one model, or --model_config_file")
    if not flags["model_name"]:
        raise click.UsageError("--model_name is empty; requests need a name to call the model by")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")  # as in training, whatever the processor
    memory.set_up()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("serving").setLevel(logging.INFO)  # not the root's level, which absl changes under TensorFlow
    for number in (signal.SIGTERM, signal.SIGINT):  # until it serves; loading may take minutes
        signal.signal(number, lambda number, _: sys.exit(128 + number))

    from serving.errors import ServingError
    from serving.served_model import State

    try:
        server = _make_server(flags)
        server.start()
    except (ServingError, OSError) as error:
        raise click.ClickException(str(error)) from error
    wait_for_signal = _told_to_stop()
    serving = [
        f"model {name} versions {[version.number for version in model.statuses() if version.state is State.AVAILABLE]}"
        for name, model in server.manager.models.items()
    ]
    ports = {"gRPC": server.grpc_port, "REST": server.rest_port}
    where = " ".join(f"{name} port {port}" for name, port in ports.items() if port is not None)
    click.echo(f"serving {', '.join(serving) or 'no model'} {where}".rstrip())
    sys.stdout.flush()
    wait_for_signal()
    server.stop(flags["drain_grace_seconds"])
    logging.shutdown()
    os._exit(0)  # a request that outlived the grace period must not keep the process


def _told_to_stop() -> Callable[[], None]:
    """From now on SIGTERM and SIGINT are remembered, and a second one ends the process; returns how to wait for the first.

    Python runs a handler in the main thread, which is not woken by a signal that the system gave to another thread, and
    which may hold the lock of a threading.Event at that moment, so that setting it there would wait for ever.
    """
    received: list[int] = []

    def note(number: int, _: object) -> None:
        if received:
            os._exit(128 + number)
        received.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def wait() -> None:
        while not received:
            os.read(reading, 1)

    return wait


def tensorflow_model_server() -> None:
    """The console command of that name: the same, but REST is off unless --rest_api_port asks for it, as in the binary."""
    main(prog_name="tensorflow_model_server", default_map={"rest_api_port": 0})


def _make_server(flags: Mapping[str, Any]) -> ModelServer:
    from serving.access.limits import ConcurrencyLimit
    from serving.access.tls import TlsFile
    from serving.monitoring.monitoring_config import read_monitoring_config
    from serving.request_log.log import Rotation
    from serving.server import ModelServer
    from serving.settings import GrpcSettings, LoadSettings, RestSettings

    tls = {name: TlsFile(flags[name]) for name in ("ssl_config_file", "rest_api_ssl_config_file") if flags[name]}
    timeout_ms, max_concurrent = flags["rest_api_timeout_in_ms"], flags["max_concurrent_requests"]
    monitoring = flags["monitoring_config_file"]
    return ModelServer(
        flags["model_name"],
        _base_path(flags) if flags["model_config_file"] is None else None,  # TF Serving's image gives both
        model_config_file=flags["model_config_file"],
        model_config_file_poll_wait_seconds=flags["model_config_file_poll_wait_seconds"],
        allow_version_labels_for_unavailable_models=flags["allow_version_labels_for_unavailable_models"],
        check_method_names=flags["enable_signature_method_name_check"],
        max_num_load_retries=flags["max_num_load_retries"],
        load_retry_interval_seconds=max(flags["load_retry_interval_micros"], 0) / 1e6,
        grpc_port=_port(flags["port"]),
        rest_port=_port(flags["rest_api_port"]),
        host="",
        poll_wait_seconds=flags["file_system_poll_wait_seconds"],
        rest_timeout_seconds=timeout_ms / 1000 if timeout_ms > 0 else None,
        request_log_file=flags["request_log_file"],
        request_log_sampling_rate=flags["request_log_sampling_rate"],
        request_log_format=flags["request_log_format"],
        request_log_rotation=Rotation(
            max_bytes=flags["request_log_max_bytes"],
            max_seconds=flags["request_log_max_seconds"],
            max_files=flags["request_log_max_files"],
        ),
        shadow_label=flags["shadow_label"],
        shadow_sampling_rate=flags["shadow_sampling_rate"],
        batching=_batching(flags),
        per_model_batching=flags["enable_per_model_batching_parameters"],
        gate=_gate(flags),
        concurrency_limit=ConcurrencyLimit(max_concurrent) if max_concurrent else None,
        tracing=_tracing(flags["otlp_traces_endpoint"], flags["trace_sampling_rate"]),
        load_settings=LoadSettings(
            num_threads=max(flags["num_load_threads"], 1),
            backend=flags["backend"],
            prefer_tflite_model=flags["prefer_tflite_model"],
            trial_load=flags["trial_load"],
            trial_load_timeout_seconds=flags["trial_load_timeout_seconds"],
            tags=flags["saved_model_tags"].split(","),
            warmup=flags["enable_model_warmup"],
            warmup_iterations=max(flags["num_request_iterations_for_warmup"], 1),
            session_config_file=flags["tensorflow_session_config_file"],
            intra_op_threads=flags["tensorflow_intra_op_parallelism"]
            or flags["tensorflow_session_parallelism"]
            or None,
            gpu_memory_fraction=flags["per_process_gpu_memory_fraction"] or None,
        ),
        grpc_settings=GrpcSettings(
            socket_path=flags["grpc_socket_path"],
            max_threads=flags["grpc_max_threads"],
            channel_arguments=flags["grpc_channel_arguments"],
            health_service=flags["enable_grpc_healthcheck_service"],
            reflection_service=flags["enable_grpc_reflection"],
            tensor_content=flags["enable_serialization_as_tensor_content"],
            max_message_bytes=flags["max_request_bytes"] or 2**31 - 1,
            tls=tls.get("ssl_config_file"),
        ),
        rest_settings=RestSettings(
            num_threads=flags["rest_api_num_threads"],
            cors=flags["rest_api_enable_cors_support"],
            strict_json=flags["strict_json"],
            max_body_bytes=flags["max_request_bytes"] or None,
            max_connections=flags["rest_max_connections"] or None,
            idle_seconds=flags["rest_idle_timeout_seconds"] or None,
            io_seconds=flags["rest_io_timeout_seconds"] or None,
            metrics_path=read_monitoring_config(monitoring) if monitoring else "",
            tls=tls.get("rest_api_ssl_config_file"),
        ),
    )


def _tracing(endpoint: str, sampling_rate: float) -> Tracing | None:
    if not endpoint:
        return None
    if not endpoint.startswith(("http://", "https://")):
        raise click.UsageError(
            f"--otlp_traces_endpoint is a URL such as http://collector:4318/v1/traces, not {endpoint}"
        )
    try:
        from serving.monitoring.tracing import Tracing, otlp_processor
    except ModuleNotFoundError as error:
        raise click.UsageError(f"--otlp_traces_endpoint: {error}; pip install 'headrace[otel]'") from error
    return Tracing(otlp_processor(endpoint), sampling_rate)


def _port(value: int | str) -> int | None:
    """A port as ModelServer takes it: 0 for a free one, None for none."""
    return 0 if value == "auto" else int(value) or None


def _base_path(flags: Mapping[str, Any]) -> Path:
    from serving import object_store

    path: str = flags["model_base_path"]
    return (
        object_store.follow(path, flags["file_system_poll_wait_seconds"]) if object_store.is_uri(path) else Path(path)
    )


def _batching(flags: Mapping[str, Any]) -> BatchingParameters | None:
    from serving.batching.parameters import BatchingParameters, read_parameters

    if not flags["enable_batching"]:
        return None
    if flags["batching_parameters_file"] is None:
        return BatchingParameters(thread_pool_name="model_server_batch_threads")
    return read_parameters(flags["batching_parameters_file"])


def _gate(flags: Mapping[str, Any]) -> Gate | None:
    from serving.access.auth import BearerTokens
    from serving.access.limits import Gate, RateLimit

    token_file, rate = flags["auth_token_file"], flags["rate_limit_requests_per_second"]
    if token_file is None and not rate:
        return None
    return Gate(
        BearerTokens(token_file) if token_file else None,
        RateLimit(rate, flags["rate_limit_burst"] or max(int(rate), 1)) if rate else None,
    )


if __name__ == "__main__":
    main()
