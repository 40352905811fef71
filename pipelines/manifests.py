"""Write what puts a pushed model on a cluster or a machine: `python -m pipelines.manifests [CONFIG] [key=value ...]`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipelines.exits import reported

if TYPE_CHECKING:
    from pipelines.config import Config

_NEXT_STEP = {
    "kubernetes": "kubectl apply -k {output}/overlays/dev",
    "kserve": "kubectl apply -f {output}/inferenceservice.yaml",
    "compose": "docker compose -f {output}/compose.yaml up",
    "training": "kubectl apply -f {output}",
    "spark": "kubectl apply -f {output}/ingest.yaml",
}


def load_manifest_config(path: Path | None, overrides: Sequence[str], root: type[Config]) -> Config:
    """Read the settings of the manifests: defaults, then the YAML file if there is one, then the overrides.

    Args:
        path: The YAML file.
        overrides: `key=value`.
        root: Class of the settings: `ServingManifestConfig`, `TrainingManifestConfig` or `SparkManifestConfig`.

    Raises:
        ConfigError: anything is wrong; every problem is listed with its place.
    """
    from pipelines.config import validated
    from pipelines.config_sources import Settings, read_settings

    if path is not None:
        settings = read_settings(path, overrides)
    else:
        settings = Settings(Path("command line"), {}, {}, [])
        for override in overrides:
            settings.override(override)
    return validated(settings, root)


def render(target: str, path: Path | None, overrides: Sequence[str]) -> dict[str, str]:
    """The files for a target, as path -> text, from the settings as `load_manifest_config` reads them.

    Raises:
        ConfigError: the settings are wrong, or the target cannot do what they say.
    """
    from components.errors import ConfigError

    if target == "training":
        from components.launch.manifests import TrainingManifestConfig, admin_objects
        from serving.manifests.documents import to_yaml

        objects = admin_objects(load_manifest_config(path, overrides, TrainingManifestConfig))
        return {name: to_yaml(documents) for name, documents in objects.items()}
    if target == "spark":
        return {"ingest.yaml": _spark(path, overrides)}
    from serving.manifests import render as serving
    from serving.manifests.config import ServingManifestConfig

    try:
        return serving.render(load_manifest_config(path, overrides, ServingManifestConfig), target)
    except ValueError as error:
        raise ConfigError(f"--target {target}: {error}.") from error


def _spark(path: Path | None, overrides: Sequence[str]) -> str:
    from components.spark.application import SparkManifestConfig, spark_application
    from pipelines.config import load_config
    from serving.manifests.documents import to_yaml

    settings = load_manifest_config(path, overrides, SparkManifestConfig)
    experiment = load_config(settings.config)
    return to_yaml([spark_application(settings, experiment.name, experiment.step_config("data"))])


def write_whole(files: Mapping[str, str], output: Path) -> None:
    """Make `output` a folder of exactly these files, all of them or none.

    Args:
        files: Path in the folder -> text, which begins with the header of documents.HEADER.
        output: The folder; what an earlier call wrote there goes.

    Raises:
        ConfigError: it holds files that are not ours.
        ArtifactError: the disk does not let us.
    """
    from components.artifacts import disk_errors_explained
    from components.errors import ConfigError
    from serving.errors import ServingError
    from serving.manifests import folder

    with disk_errors_explained(output):
        try:
            folder.write(files, output.absolute())
        except ServingError as error:
            raise ConfigError(f"{error.message}.") from error


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("arguments", nargs=-1, metavar="[CONFIG] [key=value ...]")
@click.option("--target", type=click.Choice(list(_NEXT_STEP)), default="kubernetes", help="What to write for.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("deploy"), help="Folder to write.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(arguments: tuple[str, ...], target: str, output: Path, debug: bool) -> None:
    """Write the manifests of a served model: TF Serving or the embedded server, stable and canary.

    CONFIG is a YAML file with the settings (docs/deploying.md), key=value overrides one. At least:

        headrace manifests model_name=chicago_taxi model_uri=pvc://models/chicago_taxi

    Or what distributed training needs to be applied once (docs/distributed.md):

        headrace manifests --target training namespace=team-a image=ghcr.io/acme/headrace:1

    Or the ingest of a config on the Spark operator (docs/spark.md):

        headrace manifests --target spark config=taxi.yaml namespace=team-a image=ghcr.io/acme/headrace-spark:1 claim=runs
    """
    with reported(debug=debug):
        from pipelines.config import split_given

        files = render(target, *split_given(arguments))
        write_whole(files, output)
        click.echo(f"Wrote {len(files)} files. To use them: {_NEXT_STEP[target].format(output=output)}")


if __name__ == "__main__":
    main(prog_name="python -m pipelines.manifests")
