"""Write the Kubeflow pipeline of a configuration: `python -m pipelines.compile [CONFIG] [section.key=value ...]`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipelines.exits import reported

if TYPE_CHECKING:
    from pipelines.config import PipelineConfig


# Of a run's own parameters together (MaxParameterBytes of the API server; twice that since 2.16): what is baked into the
# pipeline, such as the configuration, does not count.
MOST_PARAMETER_BYTES = 10_000
# MAX_ARG_STRLEN of Linux is 128 KiB; a step gets its inputs as one argument, in which its artifacts are described, too.
MOST_ARGUMENT_BYTES = 112 * 1024
# etcd takes 1.5 MiB an object, and Kubeflow's workflow holds a pipeline up to three times: in its templates, and in its
# status as inputs of a step's two pods (https://github.com/kubeflow/pipelines/issues/13738).
MOST_PIPELINE_BYTES = 512 * 1024


def compile_pipeline(config: PipelineConfig, *, image: str | None = None) -> str:
    """The pipeline of a configuration as YAML: the same configuration and code give the same text on every machine.

    Args:
        config: The whole configuration.
        image: The image that every step runs in; default: headrace:<version>.

    Example:
        >>> Path("pipeline.yaml").write_text(compile_pipeline(config))

    Raises:
        ConfigError: the pipeline is too large for Kubeflow, or a secret that it needs is not there.
    """
    import yaml
    from google.protobuf import json_format

    from pipelines.training import build_pipeline

    class Dumper(yaml.SafeDumper):
        """Writes texts of several lines, which are code and configuration here, as they are."""

    def represent_text(dumper: yaml.SafeDumper, text: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, represent_text)
    _check_secrets(config)
    pipeline = build_pipeline(config, image=image)
    spec, platform = map(json_format.MessageToDict, (pipeline.pipeline_spec, pipeline.platform_spec))
    check_sizes(spec, platform)
    header = (
        f"# Kubeflow pipeline '{config.name}'. Made by python -m pipelines.compile: change the configuration, not this."
    )
    documents = [spec, platform] if platform else [spec]
    return f"{header}\n" + yaml.dump_all(documents, Dumper=Dumper, sort_keys=True, allow_unicode=True, width=120)


def _check_secrets(config: PipelineConfig) -> None:
    """Refuse a notification whose secrets the exit handler would look for in vain."""
    from components.errors import ConfigError
    from pipelines.kubeflow.config import SUMMARY

    pod = config.kubeflow.pod(SUMMARY)
    for name in config.notify.variables:
        if name not in {*pod.secret_env, *pod.env}:
            raise ConfigError(
                f"notify reads ${name}, which the pod of '{SUMMARY}' would not have. Set "
                f"kubeflow.steps.{SUMMARY}.secret_env: {{{name}: {{secret: NAME, key: KEY}}}}, a secret in the cluster."
            )


def check_sizes(spec: Mapping[str, Any], platform: Mapping[str, Any]) -> None:
    """Refuse what Kubeflow would only refuse when the run starts, or when a step does.

    Raises:
        ConfigError: naming the part that is too large, and what to do.
    """
    from components.errors import ConfigError

    parameters = spec["root"].get("inputDefinitions", {}).get("parameters", {})
    given = {name: parameter.get("defaultValue") for name, parameter in parameters.items()}
    if (size := _json_bytes(given)) > MOST_PARAMETER_BYTES:
        name = max(given, key=lambda name: _json_bytes(given[name]))
        raise ConfigError(
            f"The pipeline's run-time parameters are {size:,} characters long, most of it '{name}'; Kubeflow takes "
            f"{MOST_PARAMETER_BYTES:,}. Give a shorter value, such as a folder or a glob in place of a list."
        )
    # The step that reads a long setting is named before `push`, which is given the whole configuration.
    constants = sorted(_constants(spec), key=lambda each: each[0] == "push")
    for task, values in constants:
        if (size := _json_bytes(values)) > MOST_ARGUMENT_BYTES:
            raise ConfigError(
                f"Step '{task}' would be given {size:,} bytes, {_largest(values)}; Linux takes "
                f"{MOST_ARGUMENT_BYTES:,} in one argument. Move it into a file that the step reads."
            )
    if (size := _json_bytes(spec) + _json_bytes(platform)) > MOST_PIPELINE_BYTES:
        largest = max(constants, key=lambda each: (each[0] != "push", _json_bytes(each[1])))
        raise ConfigError(
            f"The pipeline is {size:,} bytes long; of more than {MOST_PIPELINE_BYTES:,} Kubeflow makes a workflow that "
            f"etcd may refuse. The largest step is '{largest[0]}', {_largest(largest[1])}."
        )


def _constants(spec: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each task's name and the values that it is given at compile time."""
    for component in (spec["root"], *spec["components"].values()):
        for name, task in component.get("dag", {}).get("tasks", {}).items():
            parameters = task.get("inputs", {}).get("parameters", {})
            given = {key: value["runtimeValue"] for key, value in parameters.items() if "runtimeValue" in value}
            yield name, {key: value.get("constant") for key, value in given.items()}


def _largest(values: Mapping[str, Any]) -> str:
    """What takes most of a task's values; of a configuration, the setting."""
    name = max(values, key=lambda key: _json_bytes(values[key]))
    if name != "config":
        return f"most of it '{name}'"
    settings = json.loads(values[name])
    key = max(settings, key=lambda key: _json_bytes(settings[key]))
    return f"{_json_bytes(settings[key]):,} of them its setting '{key}'"


def _json_bytes(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("arguments", nargs=-1, metavar="[CONFIG] [section.key=value ...]")
@click.option("--output", type=click.Path(path_type=Path), default=Path("pipeline.yaml"), help="File to write.")
@click.option("--image", help="Image that every step runs in.  [default: headrace:<version>]")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(arguments: tuple[str, ...], output: Path, image: str | None, debug: bool) -> None:
    """Write the Kubeflow pipeline of a configuration as YAML.

    CONFIG is a YAML file (default: the only one in configs/, or chicago_taxi.yaml); section.key=value overrides a setting.
    """
    with reported(debug=debug):
        from pipelines.config import load_config, split_arguments
        from pipelines.local import write_whole

        path, overrides = split_arguments(arguments)
        text = compile_pipeline(load_config(path, overrides), image=image)
        output.parent.mkdir(parents=True, exist_ok=True)
        write_whole(output, text)
        click.echo(f"Wrote {output}. To run it: python -m pipelines.submit --host URL, or upload it in Kubeflow's UI.")


if __name__ == "__main__":
    main(prog_name="python -m pipelines.compile")
