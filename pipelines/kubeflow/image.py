"""Build the one image of the project: `headrace image build --base IMAGE@sha256:... [--push]`."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from pipelines.exits import reported

BUILDERS = ("buildah", "podman", "docker")
_PINNED = re.compile(r"(\S+@)?sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class Image:
    """An image that was built.

    Attributes:
        tag: The name that it was given.
        image_id: Digest of its configuration, by which the builder knows it.
        reference: `name@sha256:...`, by which whoever can pull it gets exactly this one; None if it was not pushed.
    """

    tag: str
    image_id: str
    reference: str | None


def build_image(
    context: Path, *, base: str, tag: str, builder: str, push: bool = False, builder_arguments: Sequence[str] = ()
) -> Image:
    """Build the Containerfile of a folder.

    Args:
        context: The folder, which is the build context, too.
        base: The image to build on, pinned: `name@sha256:...`, or a local one by its ID, `sha256:...`.
        tag: The name of the new image.
        builder: One of BUILDERS.
        push: Send it to the registry that `tag` names.
        builder_arguments: Further arguments of the builder, such as `--network host`.

    Raises:
        ConfigError: `base` is not pinned, or the folder has no Containerfile.
        HeadraceError: the builder failed.
    """
    from components.errors import ConfigError

    if not _PINNED.fullmatch(base):
        raise ConfigError(
            f"--base: {base} may be another image tomorrow. Add its digest, {base}@sha256:..., which "
            f"`docker buildx imagetools inspect {base}` or `skopeo inspect docker://{base}` shows; a local image goes "
            "by its ID, sha256:..."
        )
    file = context / "Containerfile"
    if not file.is_file():
        raise ConfigError(f"--context: {context.absolute()} has no Containerfile. Give the folder of one.")
    with tempfile.TemporaryDirectory() as folder:
        id_file = Path(folder, "id")
        arguments = ["--file", str(file), "--tag", tag, "--build-arg", f"BASE={base}", "--iidfile", str(id_file)]
        _run(builder, "build", *arguments, *builder_arguments, str(context))
        image_id = id_file.read_text().strip()
    return Image(tag, image_id, _push(builder, tag) if push else None)


def find_builder(wanted: str | None = None) -> str:
    """The builder that was asked for, else the first of BUILDERS that this machine has.

    Raises:
        HeadraceError: it is not there.
    """
    from components.errors import HeadraceError

    for builder in [wanted] if wanted else BUILDERS:
        if shutil.which(builder):
            return builder
    missing = f"no {wanted}" if wanted else "none of " + ", ".join(BUILDERS)
    raise HeadraceError(
        f"There is {missing} on the PATH to build the image with. Install one of {', '.join(BUILDERS)}."
    )


def _push(builder: str, tag: str) -> str:
    """Push an image and return the reference by which the registry knows it."""
    from components.errors import HeadraceError

    name, colon, version = tag.rpartition(":")
    repository = name if colon and "/" not in version else tag  # a port has a colon, too
    if builder != "docker":
        with tempfile.TemporaryDirectory() as folder:
            _run(builder, "push", "--digestfile", f"{folder}/digest", tag)
            return f"{repository}@{Path(folder, 'digest').read_text().strip()}"
    _run(builder, "push", tag)
    short = repository.removeprefix("docker.io/").removeprefix("library/")  # as Docker shows it
    for line in _run(builder, "image", "inspect", "--format", '{{join .RepoDigests "\\n"}}', tag).split():
        if line.startswith(f"{short}@"):
            return f"{repository}@{line.partition('@')[2]}"
    raise HeadraceError(
        f"{tag} was pushed, but docker knows no digest of it in {repository}: look there, or push again."
    )


def _run(builder: str, command: str, *arguments: str) -> str:
    """Run a command of the builder; what it prints goes to standard error, except for that of `image`, which is returned."""
    from components.errors import HeadraceError

    stdout = subprocess.PIPE if command == "image" else 2
    done = subprocess.run([builder, command, *arguments], stdout=stdout, text=True)
    if done.returncode:
        raise HeadraceError(f"`{builder} {command}` ended with exit code {done.returncode}; what it said is above.")
    return done.stdout or ""


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
def main() -> None:
    """The container image in which every step, the trainer and the server run."""


@main.command()
@click.option("--base", required=True, help="Image to build on, by digest: docker.io/library/python@sha256:...")
@click.option("--tag", help="Name of the image.  [default: headrace:<version>]")
@click.option("--builder", type=click.Choice(BUILDERS), help="What builds it.  [default: the first that is there]")
@click.option(
    "--context", type=click.Path(path_type=Path), default=Path(), help="Folder of the Containerfile, and all it copies."
)
@click.option("--push", is_flag=True, help="Push it to the registry that --tag names.")
@click.option(
    "--builder-arg",
    "builder_arguments",
    multiple=True,
    help="Handed to the builder as it is, such as --builder-arg=--network=host; may be given several times.",
)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def build(
    base: str,
    tag: str | None,
    builder: str | None,
    context: Path,
    push: bool,
    builder_arguments: tuple[str, ...],
    debug: bool,
) -> None:
    """Build the image, and print its ID or, with --push, name@digest for `headrace compile --image`.

    pip takes its settings from build arguments, as in --builder-arg=--build-arg=PIP_INDEX_URL.
    """
    with reported(debug=debug):
        if tag is None:
            from pipelines.training import default_image

            tag = default_image()
        image = build_image(
            context,
            base=base,
            tag=tag,
            builder=find_builder(builder),
            push=push,
            builder_arguments=builder_arguments,
        )
        click.echo(image.reference or image.image_id)


if __name__ == "__main__":
    main(prog_name="python -m pipelines.kubeflow.image")
