"""The command line of the model server: TF Serving's flags by topic, ours beside them, and what is done with the rest.

Source: tensorflow_serving/model_servers/main.cc. A boolean flag may stand alone (`--enable_batching`) or have a value
(`--enable_batching=false`), and an empty value (`--ssl_config_file=`) counts as none, as there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

# Flags of TF Serving that have nothing to do here: their values are dropped, with a warning that says why.
IGNORED = {
    "flush_filesystem_caches": "local folders have no cache of TensorFlow's",
    "num_unload_threads": "a version is unloaded by the thread that used it last",
    "remove_unused_fields_from_bundle_metagraph": "the graph is not kept after it is loaded",
    "tensorflow_inter_op_parallelism": "a request runs in the thread that answers it",
    "xla_cpu_compilation_enabled": "XLA compiles what the model marks for it",
    "xla_gpu_compilation_enabled": "XLA compiles what the model marks for it",
    "mixed_precision": "a model computes in the types it was saved with",
    "enable_profiler": "the profiler service is not served",
    "thread_pool_factory_config_file": "TensorFlow's own thread pools are used",
    "skip_initialize_tpu": "there are no TPUs here",
    "num_tflite_pools": "each model has one pool",
    "num_tflite_interpreters_per_pool": "it follows the number of CPUs",
    "use_saved_model": "what a version holds and --backend decide",
}

# Those that must not be dropped in silence, for the server would do something else than was asked for.
REFUSED = {
    "use_alts_credentials": "ALTS exists on Google's cloud only; encrypt with --ssl_config_file",
    "platform_config_file": "give what it says by --batching_parameters_file, --tensorflow_session_config_file, "
    "--saved_model_tags and --enable_model_warmup",
}


class Option(click.Option):
    """An option with the topic under which `--help` lists it."""

    def __init__(self, *arguments: Any, topic: str, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.topic = topic


class Command(click.Command):
    """A command whose `--help` is ordered by topic."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of each topic, in the order in which they were declared."""
        topics: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                topics.setdefault(getattr(parameter, "topic", "Other"), []).append(record)
        for topic, records in topics.items():
            with formatter.section(topic):
                formatter.write_dl(records)


models, loading, batching, grpc_flag, rest, security, limits, monitoring, logs = (
    functools.partial(click.option, cls=Option, topic=topic)
    for topic in (
        "Models",
        "Loading",
        "Batching",
        "gRPC",
        "REST",
        "Security",
        "Limits",
        "Monitoring",
        "Logs and shutdown",
    )
)
# As arguments of a flag: true, false, or nothing after it.
BOOLEAN: dict[str, Any] = {"is_flag": False, "flag_value": "true", "type": bool, "show_default": True}


class File(click.Path):
    """A file that must be there; the empty string means none."""

    name = "file"

    def __init__(self) -> None:
        super().__init__(exists=True, dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path, or None."""
        return None if value == "" else super().convert(value, param, ctx)


class Port(click.ParamType):
    """A TCP port. 0 turns the protocol off, as in TF Serving; `auto` takes a free one."""

    name = "port"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """The number, or "auto"."""
        if value == "auto":
            return "auto"
        port = click.IntRange(0, 65535).convert(value, param, ctx)
        assert isinstance(port, int)
        return port


class ChannelArguments(click.ParamType):
    """gRPC core's options as TF Serving writes them: `key=value,key=value`; whole numbers are passed as such."""

    name = "key=value,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[tuple[str, str | int], ...]:
        """The pairs."""
        if not isinstance(value, str):
            return tuple(value)
        pairs: list[tuple[str, str | int]] = []
        for entry in filter(None, value.split(",")):
            key, equals, text = entry.partition("=")
            if not equals or not key:
                self.fail(f"{entry!r} is not key=value, such as grpc.max_connection_age_ms=2000", param, ctx)
            try:
                pairs.append((key, int(text)))
            except ValueError:
                pairs.append((key, text))
        return tuple(pairs)


def _ignore(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        name = str(parameter.name)
        click.echo(f"Warning: --{name} is ignored: {IGNORED[name]}", err=True)


def _refuse(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value not in (None, "", "false"):
        name = str(parameter.name)
        raise click.UsageError(f"--{name} is not supported: {REFUSED[name]}")


def other_flags(command: Decorated) -> Decorated:
    """Add TF Serving's flags that this server takes and drops, or knows and refuses."""
    for names, callback in ((IGNORED, _ignore), (REFUSED, _refuse)):
        for name in names:
            command = click.option(
                f"--{name}",
                is_flag=False,
                flag_value="true",
                default=None,
                hidden=True,
                expose_value=False,
                callback=callback,
            )(command)
    return command
