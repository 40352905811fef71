"""Clients for TF Serving's APIs, and a command that asks a served model for predictions.

Example:
    python -m serving.client predict --url http://127.0.0.1:8501 --model taxi --json '{"instances": [{"miles": 1.5}]}'
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from serving.errors import Code, ServingError

if TYPE_CHECKING:
    from serving.grpc_client import GrpcClient
    from serving.rest_client import RestClient

__all__ = ["Code", "GrpcClient", "RestClient", "ServingError", "connect", "main"]


def __getattr__(name: str) -> Any:
    """The client classes, imported when first asked for: `--help` needs neither numpy nor grpc."""
    if name == "GrpcClient":
        from serving.grpc_client import GrpcClient

        return GrpcClient
    if name == "RestClient":
        from serving.rest_client import RestClient

        return RestClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def connect(url: str) -> GrpcClient | RestClient:
    """A client for a URL: REST for http:// and https://, gRPC for `host:port`."""
    from serving.grpc_client import GrpcClient
    from serving.rest_client import RestClient

    return RestClient(url) if "://" in url else GrpcClient(url)


@click.group()
def main() -> None:
    """Talk to a model server: TF Serving, or the embedded one."""


@main.command()
@click.option("--url", required=True, help="http://host:port for REST, host:port for gRPC.")
@click.option("--model", required=True, help="Name of the model.")
@click.option("--version", type=int, default=None, help="Version of the model.  [default: the newest]")
@click.option("--signature", default="serving_default", show_default=True, help="Signature to call.")
@click.option(
    "--json", "body", required=True, help='The body of a REST request: {"instances": ...} or {"inputs": ...}.'
)
@click.option("--timeout", default=10.0, show_default=True, help="Seconds to wait for the answer.")
def predict(url: str, model: str, version: int | None, signature: str, body: str, timeout: float) -> None:
    """Ask a model for predictions and print the answer as TF Serving's REST API does."""
    from serving import dtypes, json_request, json_response

    numbers = {f"DT_{name.upper()}": number for number, name in dtypes.NAMES.items()}
    try:
        document = json_request.parse_object(body.encode())
        with connect(url) as client:
            signatures = client.metadata(model, version=version, timeout_seconds=timeout).signatures
            if signature not in signatures:
                raise click.ClickException(f"model {model} has no signature {signature!r}, only {sorted(signatures)}")
            types = {alias: numbers[info.dtype] for alias, info in sorted(signatures[signature].inputs.items())}
            inputs, body_format = json_request.parse_inputs(document, types)
            outputs = client.predict(model, inputs, signature_name=signature, version=version, timeout_seconds=timeout)
    except (ServingError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    write = json_response.predictions if body_format == json_request.ROW else json_response.columns
    click.echo(write(outputs))


if __name__ == "__main__":
    main()
