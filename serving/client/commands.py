"""The command `python -m serving.client`, which asks a served model.

The exit codes are 0 for done; 1 for what the server, or a look at the request, refused; 2 for wrong options; 3 for what
may go well later: a server that cannot be reached, is overloaded, not ready or too slow.

Example:
    python -m serving.client predict --url http://127.0.0.1:8501 --model taxi --json '{"instances": [{"miles": 1.5}]}'
    python -m serving.client predict --url 127.0.0.1:8500 --model taxi --input trips.csv --output tips.parquet
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from serving.client import connect
from serving.errors import Code, ServingError

if TYPE_CHECKING:
    from serving.client.base import Client

_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".npy", ".npz")
_LATER = frozenset((Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED, Code.DEADLINE_EXCEEDED))
_HINTS = {
    Code.UNAVAILABLE: "Is the server up, and is this the port of REST (http://...) or of gRPC (host:port)?",
    Code.DEADLINE_EXCEEDED: "--timeout gives it longer.",
    Code.UNAUTHENTICATED: "Give a token with --token-file.",
    Code.PERMISSION_DENIED: "Is this the right token?",
}


class _TryLater(click.ClickException):
    exit_code = 3


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except ServingError as error:
        kind = _TryLater if error.code in _LATER else click.ClickException
        raise kind(" ".join(f"{error} {_HINTS.get(error.code, '')}".split())) from error
    except (OSError, ImportError, UnicodeDecodeError) as error:
        raise click.ClickException(str(error)) from error


def _headers(context: click.Context, parameter: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    for value in values:
        if not value.partition("=")[0] or "=" not in value:
            raise click.BadParameter(f"a header is NAME=VALUE, but got {value!r}")
    return dict(value.split("=", 1) for value in values)


def _check_suffix(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    if path is not None and path.suffix not in _SUFFIXES:
        raise click.BadParameter(f"{path} must end in one of {', '.join(_SUFFIXES)}")
    return path


_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_CONNECTION = (
    click.option("--url", required=True, help="http(s)://host:port for REST; host:port or grpcs://host:port for gRPC."),
    click.option(
        "--retries",
        type=click.IntRange(min=0),
        default=3,
        show_default=True,
        help="How often to try again when the server is not there.",
    ),
    click.option("--token", help="Bearer token. Others on this machine can see it: rather --token-file."),
    click.option("--token-file", type=_FILE, help="File with the bearer token."),
    click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", callback=_headers, help="Sent along."),
    click.option("--ca-file", type=_FILE, help="Certificates that the server's has to be signed by (PEM)."),
    click.option("--client-cert", type=_FILE, help="Certificate of the client (PEM)."),
    click.option("--client-key", type=_FILE, help="Its private key (PEM)."),
)
_MODEL = click.option("--model", "model", required=True, help="Name of the model.")
_AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def _with(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def _timeout(seconds: float) -> Callable[[Any], Any]:
    option = click.FloatRange(min=0, min_open=True)
    return click.option(
        "--timeout", "timeout_seconds", type=option, default=seconds, show_default=True, help="Seconds for everything."
    )


_VERSION = _with(
    _MODEL,
    click.option("--version", type=int, help="Version of the model.  [default: the newest]"),
    click.option("--version-label", help="Label of a version, such as stable; instead of --version."),
)
_SIGNATURE = click.option(
    "--signature", "signature_name", default="serving_default", show_default=True, help="Signature to call."
)
_EXAMPLES = _with(
    _VERSION,
    _SIGNATURE,
    click.option("--json", "body", help='The body of a REST request: {"examples": [{"feature": value}, ...]}.'),
    click.option("--input", "input_file", type=_FILE, help="A file with the same."),
    _timeout(10.0),
)


def _connected(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the client in place of the options of the connection."""

    @functools.wraps(command)
    def run(
        url: str,
        retries: int,
        token: str | None,
        token_file: Path | None,
        headers: dict[str, str],
        ca_file: Path | None,
        client_cert: Path | None,
        client_key: Path | None,
        **arguments: Any,
    ) -> None:
        from serving.client.base import TlsFiles
        from serving.client.retry import RetryPolicy

        if token is not None and token_file is not None:
            raise click.UsageError("give --token or --token-file, not both")
        with _failures():
            if token_file is not None:
                token = token_file.read_text().strip()
            try:
                tls = TlsFiles(ca_file, client_cert, client_key) if ca_file or client_cert or client_key else None
                client = connect(url, token=token, headers=headers, tls=tls, retry=RetryPolicy(max_retries=retries))
            except ValueError as error:
                raise click.UsageError(str(error)) from error
            with client:
                if arguments.get("version") is not None and arguments.get("version_label") is not None:
                    raise click.UsageError("give --version or --version-label, not both")
                command(client, **arguments)

    return _with(*_CONNECTION)(run)


def _check_one(body: str | None, input_file: Path | None) -> None:
    if (body is None) == (input_file is None):
        raise click.UsageError("give the request with --json or with --input")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Talk to a model server: TF Serving, the embedded one, or one of KServe's v1 protocol.

    Exit codes: 0 done, 1 refused, 2 wrong options, 3 not reachable, not ready or too slow: later it may go well.
    """


@main.command(context_settings={"help_option_names": ["-h", "--help"]})  # `headrace predict` is this alone
@_connected
@_VERSION
@_SIGNATURE
@click.option("--json", "body", help='The body of a REST request: {"instances": ...} or {"inputs": ...}.')
@click.option(
    "--input",
    "input_file",
    type=_FILE,
    callback=_check_suffix,
    help="A file with the same (.json), or with rows: .jsonl (an instance a line), .csv and .parquet (a column for each "
    "input), .npy and .npz. Rows are sent in batches.",
)
@click.option(
    "--output",
    "output_file",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=_check_suffix,
    help="Where to write the outputs, in any of these formats.  [default: JSON, printed]",
)
@click.option("--output-filter", multiple=True, metavar="OUTPUT", help="An output to answer.  [default: all]")
@click.option("--batch-size", type=click.IntRange(min=1), default=256, show_default=True, help="Rows in a request.")
@_timeout(60.0)
def predict(
    client: Client,
    model: str,
    body: str | None,
    input_file: Path | None,
    output_file: Path | None,
    output_filter: tuple[str, ...],
    batch_size: int,
    **options: Any,
) -> None:
    """Ask a model for predictions, and print the answer as TF Serving's REST API does, or write it to a file."""
    from serving.client import files as client_files

    _check_one(body, input_file)
    signature = client.signature(model, **options)
    if input_file is None:
        request = client_files.from_json((body or "").encode(), signature)
    else:
        request = client_files.read(input_file, signature)
    if request.in_batches:
        outputs = client.predict_rows(
            model, request.inputs, output_filter=output_filter, batch_size=batch_size, **options
        )
    else:
        outputs = client.predict(model, request.inputs, output_filter=output_filter, **options)
    if output_file is None:
        click.echo(client_files.to_json(outputs, request.layout))
    else:
        client_files.write(output_file, outputs, request.layout)


@main.command()
@_connected
@_EXAMPLES
def classify(client: Client, model: str, body: str | None, input_file: Path | None, **options: Any) -> None:
    """Ask a model for the classes of examples."""
    from serving.client import files as client_files

    _check_one(body, input_file)
    examples, context = client_files.examples(input_file.read_bytes() if input_file else (body or "").encode())
    click.echo(client_files.classifications_json(client.classify(model, examples, context=context, **options)))


@main.command()
@_connected
@_EXAMPLES
def regress(client: Client, model: str, body: str | None, input_file: Path | None, **options: Any) -> None:
    """Ask a model for the values of examples."""
    from serving.client import files as client_files

    _check_one(body, input_file)
    examples, context = client_files.examples(input_file.read_bytes() if input_file else (body or "").encode())
    click.echo(client_files.regressions_json(client.regress(model, examples, context=context, **options)))


@main.command()
@_connected
@_MODEL
@click.option("--version", type=int, help="Version of the model.  [default: all]")
@_timeout(10.0)
@_AS_JSON
def status(client: Client, model: str, version: int | None, as_json: bool, **options: Any) -> None:
    """Print the versions of a model and their states."""
    versions = client.status(model, version=version, **options)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(each) for each in versions]))
        return
    rows = [("version", "state", "error", "")]
    for each in versions:
        number = "-" if each.version is None else str(each.version)
        rows.append((number, each.state, each.error_code, each.error_message))
    click.echo(_table(rows))


@main.command()
@_connected
@_VERSION
@_timeout(10.0)
@_AS_JSON
def metadata(client: Client, model: str, as_json: bool, **options: Any) -> None:
    """Print the signatures of a model, with the types and shapes of their inputs and outputs."""
    found = client.metadata(model, **options)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(found)))
        return
    rows = [("signature", "", "name", "type", "shape")]
    for name, signature in sorted(found.signatures.items()):
        for direction, tensors in (("input", signature.inputs), ("output", signature.outputs)):
            for alias, info in sorted(tensors.items()):
                shape = "any" if info.shape is None else str(list(info.shape))
                rows.append((name, direction, alias, info.dtype.removeprefix("DT_").lower(), shape))
    click.echo(f"model {model}, version {found.version}\n{_table(rows)}")


@main.command()
@_connected
@_VERSION
@_timeout(60.0)
def wait(client: Client, model: str, **options: Any) -> None:
    """Wait until a model is ready; 0 when it is, 3 when time is over, 1 when it could not be loaded."""
    client.wait_until_ready(model, **options)


@main.command()
@_connected
@click.option(
    "--config", "config_file", required=True, type=_FILE, help="ModelServerConfig as text: all models to serve."
)
@_timeout(60.0)
def reload(client: Client, config_file: Path, **options: Any) -> None:
    """Give the server another list of models (gRPC only). Models that it leaves out are unloaded."""
    for name, increase in client.reload(config_file.read_text(), **options).items():
        click.echo(f"{name} +{increase}")


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
