"""`python -m serving`: the embedded model server, with the flags of TF Serving's tensorflow_model_server.

Example:
    python -m serving --model_name=taxi --model_base_path=pushed/taxi --port=8500 --rest_api_port=8501
    python -m serving --model_config_file=models.config --model_config_file_poll_wait_seconds=60
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from serving.server import ModelServer


@click.command()
@click.option("--model_name", default="default", show_default=True, help="Name of the model in requests.")
@click.option(
    "--model_base_path",
    default=None,
    type=click.Path(path_type=Path),
    help="Directory that holds the version directories, such as 1/saved_model.pb.",
)
@click.option(
    "--model_config_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=None,
    help="Models to serve instead of --model_base_path: a ModelServerConfig in protobuf's text format.",
)
@click.option(
    "--model_config_file_poll_wait_seconds",
    default=0.0,
    show_default=True,
    help="Seconds between looks at --model_config_file; 0 reads it once.",
)
@click.option(
    "--allow_version_labels_for_unavailable_models",
    is_flag=False,
    flag_value="true",
    type=bool,
    default=False,
    show_default=True,
    help="Let the model config give a new label to a version that is not available yet, as it must at the start.",
)
@click.option(
    "--max_num_load_retries",
    type=click.IntRange(min=0),
    default=5,
    show_default=True,
    help="How often a version that does not load is tried again.",
)
@click.option(
    "--load_retry_interval_micros",
    type=click.IntRange(min=0),
    default=60_000_000,
    show_default=True,
    help="Microseconds between these tries.",
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
    "--file_system_poll_wait_seconds",
    default=1.0,
    show_default=True,
    help="Seconds between looks for new versions; 0 looks once.",
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
    "--shadow_label",
    default="",
    help="Repeat calls on the version with this label and compare the answers: GET /shadow.  [default: none]",
)
@click.option(
    "--shadow_sampling_rate",
    type=click.FloatRange(0, 1),
    default=1.0,
    show_default=True,
    help="Share of the calls that is repeated.",
)
@click.option(
    "--drain_grace_seconds", default=10.0, show_default=True, help="Seconds that requests get to finish after SIGTERM."
)
def main(**flags: Any) -> None:
    """Serve SavedModels over TF Serving's gRPC and REST APIs.

    SIGTERM drains: /healthz/ready turns to 503, no new connections are taken, requests under way finish.
    """
    if flags["port"] == flags["rest_api_port"] != 0:
        raise click.UsageError(f"--port and --rest_api_port are both {flags['port']}; gRPC and REST need a port each")
    if flags["model_base_path"] is None and flags["model_config_file"] is None:
        raise click.UsageError("give --model_base_path (and --model_name) for one model, or --model_config_file")
    if not flags["model_name"]:
        raise click.UsageError("--model_name is empty; requests need a name to call the model by")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for number in (signal.SIGTERM, signal.SIGINT):  # until it serves; loading may take minutes
        signal.signal(number, lambda number, _: sys.exit(128 + number))

    from serving.errors import ServingError
    from serving.served_model import State

    server = _make_server(flags)
    try:
        server.start()
    except (ServingError, OSError) as error:
        raise click.ClickException(str(error)) from error
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    serving = [
        f"model {name} versions {[version.number for version in model.statuses() if version.state is State.AVAILABLE]}"
        for name, model in server.manager.models.items()
    ]
    ports = f"gRPC port {server.grpc_port} REST port {server.rest_port}"
    click.echo(f"serving {', '.join(serving) or 'no model'} {ports}")
    sys.stdout.flush()
    stopping.wait()
    server.stop(flags["drain_grace_seconds"])
    logging.shutdown()
    os._exit(0)  # a request that outlived the grace period must not keep the process


def _make_server(flags: Mapping[str, Any]) -> ModelServer:
    from serving.server import ModelServer

    timeout_ms = flags["rest_api_timeout_in_ms"]
    return ModelServer(
        flags["model_name"],
        flags["model_base_path"] if flags["model_config_file"] is None else None,  # TF Serving's image gives both
        model_config_file=flags["model_config_file"],
        model_config_file_poll_wait_seconds=flags["model_config_file_poll_wait_seconds"],
        allow_version_labels_for_unavailable_models=flags["allow_version_labels_for_unavailable_models"],
        max_num_load_retries=flags["max_num_load_retries"],
        load_retry_interval_seconds=flags["load_retry_interval_micros"] / 1e6,
        grpc_port=flags["port"],
        rest_port=flags["rest_api_port"],
        host="",
        poll_wait_seconds=flags["file_system_poll_wait_seconds"],
        rest_timeout_seconds=timeout_ms / 1000 if timeout_ms > 0 else None,
        request_log_file=flags["request_log_file"],
        request_log_sampling_rate=flags["request_log_sampling_rate"],
        shadow_label=flags["shadow_label"],
        shadow_sampling_rate=flags["shadow_sampling_rate"],
    )


if __name__ == "__main__":
    main()
