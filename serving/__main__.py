"""`python -m serving`: the embedded model server, with the flags of TF Serving's tensorflow_model_server.

Example:
    python -m serving --model_name=taxi --model_base_path=pushed/taxi --port=8500 --rest_api_port=8501
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from pathlib import Path

import click


@click.command()
@click.option("--model_name", default="default", show_default=True, help="Name of the model in requests.")
@click.option(
    "--model_base_path",
    required=True,
    type=click.Path(path_type=Path),
    help="Directory that holds the version directories, such as 1/saved_model.pb.",
)
@click.option("--port", default=8500, show_default=True, help="gRPC port; 0 takes a free one.")
@click.option("--rest_api_port", default=8501, show_default=True, help="REST port; 0 takes a free one.")
@click.option(
    "--rest_api_timeout_in_ms",
    default=30_000,
    show_default=True,
    help="Milliseconds after which a REST request is answered with 504; 0 waits for ever.",
)
@click.option(
    "--file_system_poll_wait_seconds", default=1.0, show_default=True, help="Seconds between looks for new versions."
)
@click.option(
    "--request_log_file",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    help="Append predict requests to this file (TFRecord of PredictionLog).",
)
@click.option(
    "--request_log_sampling_rate",
    type=click.FloatRange(0, 1),
    default=1.0,
    show_default=True,
    help="Share of the requests that is logged.",
)
@click.option(
    "--drain_grace_seconds", default=10.0, show_default=True, help="Seconds that requests get to finish after SIGTERM."
)
def main(
    model_name: str,
    model_base_path: Path,
    port: int,
    rest_api_port: int,
    rest_api_timeout_in_ms: int,
    file_system_poll_wait_seconds: float,
    request_log_file: Path | None,
    request_log_sampling_rate: float,
    drain_grace_seconds: float,
) -> None:
    """Serve a SavedModel over TF Serving's gRPC and REST APIs.

    SIGTERM drains: /healthz/ready turns to 503, no new connections are taken, requests under way finish.
    """
    if port == rest_api_port != 0:
        raise click.UsageError(f"--port and --rest_api_port are both {port}; gRPC and REST need a port each")
    if not model_name:
        raise click.UsageError("--model_name is empty; requests need a name to call the model by")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())

    from serving.errors import ServingError
    from serving.served_model import State
    from serving.server import ModelServer

    server = ModelServer(
        model_name,
        model_base_path,
        grpc_port=port,
        rest_port=rest_api_port,
        host="",
        poll_wait_seconds=file_system_poll_wait_seconds,
        rest_timeout_seconds=rest_api_timeout_in_ms / 1000 if rest_api_timeout_in_ms > 0 else None,
        request_log_file=request_log_file,
        request_log_sampling_rate=request_log_sampling_rate,
    )
    try:
        server.start()
    except (ServingError, OSError) as error:
        raise click.ClickException(str(error)) from error
    serving = [v.number for v in server.manager.statuses(model_name, None) if v.state is State.AVAILABLE]
    click.echo(
        f"serving model {model_name} versions {serving} gRPC port {server.grpc_port} REST port {server.rest_port}"
    )
    sys.stdout.flush()
    stopping.wait()
    server.stop(drain_grace_seconds)
    logging.shutdown()
    os._exit(0)  # a request that outlived the grace period must not keep the process


if __name__ == "__main__":
    main()
