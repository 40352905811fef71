"""Write the Kubeflow pipeline of a configuration: `python -m pipelines.compile [CONFIG] [section.key=value ...]`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipelines.exits import reported

if TYPE_CHECKING:
    from pipelines.config import PipelineConfig


def compile_pipeline(config: PipelineConfig, *, image: str | None = None) -> str:
    """The pipeline of a configuration as YAML: the same configuration and code give the same text on every machine.

    Args:
        config: The whole configuration.
        image: The image that every step runs in; default: headrace:<version>.

    Example:
        >>> Path("pipeline.yaml").write_text(compile_pipeline(config))
    """
    import yaml
    from google.protobuf import json_format

    from pipelines.training import build_pipeline

    class Dumper(yaml.SafeDumper):
        """Writes texts of several lines, which are code and configuration here, as they are."""

    def represent_text(dumper: yaml.SafeDumper, text: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, represent_text)
    spec = json_format.MessageToDict(build_pipeline(config, image=image).pipeline_spec)
    header = (
        f"# Kubeflow pipeline '{config.name}'. Made by python -m pipelines.compile: change the configuration, not this."
    )
    return f"{header}\n" + yaml.dump(spec, Dumper=Dumper, sort_keys=True, allow_unicode=True, width=120)


def _write_whole(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    temporary.replace(path)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("arguments", nargs=-1, metavar="[CONFIG] [section.key=value ...]")
@click.option("--output", type=click.Path(path_type=Path), default=Path("pipeline.yaml"), help="File to write.")
@click.option("--image", help="Image that every step runs in.  [default: headrace:<version>]")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(arguments: tuple[str, ...], output: Path, image: str | None, debug: bool) -> None:
    """Write the Kubeflow pipeline of a configuration as YAML.

    CONFIG is a YAML file (default: configs/chicago_taxi.yaml); section.key=value overrides one of its settings.
    """
    with reported(debug=debug):
        from pipelines.config import load_config, split_arguments

        path, overrides = split_arguments(arguments)
        _write_whole(output, compile_pipeline(load_config(path, overrides), image=image))
        click.echo(f"Wrote {output}. To run it: python -m pipelines.submit --host URL, or upload it in Kubeflow's UI.")


if __name__ == "__main__":
    main(prog_name="python -m pipelines.compile")
