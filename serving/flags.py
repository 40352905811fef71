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
from click.core import ParameterSource

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

# A flag -> the one without which nothing reads it: an error.
NEEDS = {
    "batching_parameters_file": "enable_batching",  # TF Serving's own refusal: server.cc
    "trace_sampling_rate": "otlp_traces_endpoint",
    "rate_limit_burst": "rate_limit_requests_per_second",
    "shadow_sampling_rate": "shadow_label",
    "request_log_format": "request_log_file",
    "request_log_max_bytes": "request_log_file",
    "request_log_max_seconds": "request_log_file",
    "request_log_max_files": "request_log_file",
    "request_log_sampling_rate": "request_log_file",
    "strict_json": "rest_api_port",
    "rest_api_ssl_config_file": "rest_api_port",
    "rest_max_connections": "rest_api_port",
    "rest_idle_timeout_seconds": "rest_api_port",
    "rest_io_timeout_seconds": "rest_api_port",
}
# The same of flags that TF Serving takes in silence: a warning.
NEEDS_AS_TF_SERVING = {
    "enable_per_model_batching_parameters": "enable_batching",
    "model_config_file_poll_wait_seconds": "model_config_file",
    "allow_version_labels_for_unavailable_models": "model_config_file",
    "num_request_iterations_for_warmup": "enable_model_warmup",
    "rest_api_num_threads": "rest_api_port",
    "rest_api_timeout_in_ms": "rest_api_port",
    "rest_api_enable_cors_support": "rest_api_port",
    "monitoring_config_file": "rest_api_port",
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


def check_needs(context: click.Context) -> None:
    """Complain of flags on the command line that do nothing without another one.

    Raises:
        click.UsageError: one of `NEEDS`.
    """

    def is_idle(name: str, needed: str) -> bool:
        is_given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE and context.params[name]
        return bool(is_given) and not context.params[needed]

    for name, needed in NEEDS.items():
        if is_idle(name, needed):
            raise click.UsageError(f"--{name} does nothing without --{needed}; give both")
    for name, needed in NEEDS_AS_TF_SERVING.items():
        if is_idle(name, needed):
            click.echo(f"Warning: --{name} is ignored without --{needed}", err=True)


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
