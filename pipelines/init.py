"""Make a new project: `python -m pipelines.init NAME`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import keyword
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import click

from pipelines.exits import reported

Task = Literal["binary", "multiclass", "regression"]

TEMPLATE = Path(__file__).parent / "template"
MAX_NAME = 40  # Kubernetes allows 63 characters, and appends some of its own.
_NAME = re.compile(r"[a-z][a-z0-9]*([_-][a-z0-9]+)*")
_PROJECT = "headrace"


def create(folder: Path, *, task: Task = "binary") -> list[Path]:
    """Make a project with its own config, data source and model: all of it, or nothing.

    Args:
        folder: The folder to make; its name is that of the project, its config and its served model.
        task: What the model predicts.

    Returns:
        The files, relative to the folder.

    Raises:
        ConfigError: the name cannot be that of a project and a package, or there is something in the folder.
        ArtifactError: the disk does not let us.

    Example:
        >>> create(Path("demo"), task="regression")
    """
    from components.artifacts import disk_errors_explained, replacing_directory

    folder = folder.absolute()
    words = {
        "project_name": folder.name,
        "package_name": _package_name(folder.name),
        "headrace_version": _version(),
        "headrace_origin": headrace_requirement(),
    }
    with disk_errors_explained(folder):
        _check_free(folder)
    with replacing_directory(folder) as project:
        files = dict(_files(words, task))
        for place, text in files.items():
            (project / place).parent.mkdir(parents=True, exist_ok=True)
            (project / place).write_text(text, encoding="utf-8")
    return sorted(files)


def _files(words: Mapping[str, str], task: Task) -> Iterator[tuple[Path, str]]:
    from pipelines.config import schema_text

    for file in sorted(TEMPLATE.rglob("*")):
        place = file.relative_to(TEMPLATE)
        if not file.is_file() or "__pycache__" in place.parts:
            continue
        if place.parent == Path("configs"):
            if place.stem != task:
                continue
            place = place.with_stem("project_name")
        yield Path(_filled(str(place), words)), _filled(file.read_text(encoding="utf-8"), words)
    yield Path("configs/schema.json"), schema_text()


def _filled(text: str, words: Mapping[str, str]) -> str:
    for placeholder, word in words.items():
        text = text.replace(placeholder, word)
    return text


def _package_name(name: str) -> str:
    """The name of a project's package.

    Raises:
        ConfigError: neither a project nor a package can have it.
    """
    from components.errors import ConfigError

    if not _NAME.fullmatch(name) or len(name) > MAX_NAME:
        near = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-0123456789")[:MAX_NAME].rstrip("-")
        hint = f" Did you mean '{near}'?" if near else ""
        raise ConfigError(
            f"'{name}' cannot be the name of a project. It is made of a-z, 0-9 and single - or _ between them, begins with "
            f"a letter and has at most {MAX_NAME} characters.{hint}"
        )
    package = name.replace("-", "_")
    if why := _why_taken(package):
        raise ConfigError(f"'{name}' cannot be the name of a project: {why}. Choose another, such as '{name}-model'.")
    return package


def _why_taken(package: str) -> str | None:
    if keyword.iskeyword(package):
        return f"'{package}' is a word of Python"
    if package in {"build", "runs", "serving_models"} | {each.name for each in TEMPLATE.iterdir()}:
        return f"its folder '{package}' is for something else"
    if package in sys.stdlib_module_names:
        return f"Python has a module '{package}'"
    spec = importlib.util.find_spec(package)
    if spec is not None and spec.origin is not None:  # A mere folder has no origin, and may be the one to fill.
        return f"there is a module '{package}' already, {spec.origin}"
    return None


def _check_free(folder: Path) -> None:
    from components.errors import ConfigError

    if folder == Path.cwd():
        raise ConfigError("The project would replace the folder one is in. Give the name of a new one.")
    if folder.is_dir() and (found := min(folder.iterdir(), default=None)):
        raise ConfigError(f"{folder} is not empty: it holds {found.name}. Give a name that is not in use here.")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file. Give a name that is not in use here.")


def _version() -> str:
    from components.errors import ConfigError

    try:
        return importlib.metadata.version(_PROJECT)
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"{_PROJECT} is not installed, so that no project can depend on it. In its folder: pip install -e ."
        ) from error


def headrace_requirement() -> str:
    """What `pip install` is told to get this same headrace again; from where it came, its metadata says (PEP 610)."""
    for installed in importlib.metadata.distributions(name=_PROJECT):
        if record := installed.read_text("direct_url.json"):
            return _requirement(json.loads(record))
    return f"{_PROJECT}=={_version()}"


def _requirement(origin: Mapping[str, Any]) -> str:
    url = origin["url"]
    if origin.get("dir_info", {}).get("editable"):
        return f"-e {url}"
    if vcs := origin.get("vcs_info"):
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return f"{_PROJECT} @ {url}"


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("folder", metavar="NAME", type=click.Path(path_type=Path))
@click.option("--task", type=click.Choice(get_args(Task)), default="binary", help="What its model predicts.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(folder: Path, task: Task, debug: bool) -> None:
    """Make a new project with its own config, data source, model, tests and CI.

    NAME is the folder to make, and the name of the project.

    Exit codes: 0 done, 1 failed, 2 the name cannot be taken.
    """
    with reported(debug=debug):
        files = create(folder, task=task)
        click.echo(f"Made {folder} with {len(files)} files. Next:\n")
        click.echo(
            f"  cd {folder}\n  make test     # installs it, and tests it\n  make run      # trains and pushes the model"
        )
        click.echo("\nREADME.md says what is where.")
        if "file:" in (requirement := headrace_requirement()):
            click.echo(
                f"\nheadrace came from a disk of this machine ({requirement}). Before another one, such as CI, can install "
                "the project, write into requirements.txt from where it gets headrace."
            )


if __name__ == "__main__":
    main(prog_name="python -m pipelines.init")
