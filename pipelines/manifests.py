"""Write what puts a pushed model on a cluster or a machine: `python -m pipelines.manifests [CONFIG] [key=value ...]`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipelines.exits import reported

if TYPE_CHECKING:
    from serving.manifests.config import ServingManifestConfig

_NEXT_STEP = {
    "kubernetes": "kubectl apply -k {output}/overlays/dev",
    "kserve": "kubectl apply -f {output}/inferenceservice.yaml",
    "compose": "docker compose -f {output}/compose.yaml up",
}


def load_manifest_config(path: Path | None, overrides: Sequence[str]) -> ServingManifestConfig:
    """Read the settings of the manifests: defaults, then the YAML file if there is one, then the overrides.

    Raises:
        ConfigError: anything is wrong; every problem is listed with its place.
    """
    from pipelines.config import validated
    from pipelines.config_sources import Settings, read_settings
    from serving.manifests.config import ServingManifestConfig

    if path is not None:
        settings = read_settings(path, overrides)
    else:
        settings = Settings(Path("command line"), {}, {}, [])
        for override in overrides:
            settings.override(override)
    return validated(settings, ServingManifestConfig)


def write_whole(files: Mapping[str, str], output: Path) -> None:
    """Make `output` a folder of exactly these files, all of them or none.

    Args:
        files: Path in the folder -> text, which begins with the header of documents.HEADER.
        output: The folder; what an earlier call wrote there goes.

    Raises:
        ConfigError: it holds files that are not ours.
        ArtifactError: the disk does not let us.
    """
    from components.artifacts import disk_errors_explained, replace_directory

    output = output.absolute()
    temporary = output.with_name(f".{output.name}.tmp-{os.getpid()}")
    with disk_errors_explained(output):
        _refuse_foreign_files(output)
        try:
            for name, text in files.items():
                file = temporary / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
            replace_directory(temporary, output)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _refuse_foreign_files(output: Path) -> None:
    from components.errors import ConfigError
    from serving.manifests.documents import HEADER

    for file in sorted(file for file in output.rglob("*") if file.is_file()):
        with file.open("rb") as opened:
            if opened.read(len(HEADER)) == HEADER.encode():
                continue
        raise ConfigError(
            f"{output} holds files that are not made by this command, such as {file.relative_to(output)}, and is replaced "
            "as a whole. Give another --output, or move them; an overlay of yours can name ours from outside."
        )


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("arguments", nargs=-1, metavar="[CONFIG] [key=value ...]")
@click.option("--target", type=click.Choice(list(_NEXT_STEP)), default="kubernetes", help="What to write for.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("deploy"), help="Folder to write.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(arguments: tuple[str, ...], target: str, output: Path, debug: bool) -> None:
    """Write the manifests of a served model: TF Serving or the embedded server, stable and canary.

    CONFIG is a YAML file with the settings (docs/deploying.md), key=value overrides one. At least:

        headrace manifests model_name=chicago_taxi model_uri=pvc://models/chicago_taxi
    """
    with reported(debug=debug):
        from components.errors import ConfigError
        from pipelines.config import split_given
        from serving.manifests.render import render

        config = load_manifest_config(*split_given(arguments))
        try:
            files = render(config, target)
        except ValueError as error:
            raise ConfigError(f"--target {target}: {error}.") from error
        write_whole(files, output)
        click.echo(f"Wrote {len(files)} files. To use them: {_NEXT_STEP[target].format(output=output)}")


if __name__ == "__main__":
    main(prog_name="python -m pipelines.manifests")
