"""The schema of data: `headrace schema infer | diff | update`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from components.environment import import_tensorflow
from pipelines.exits import reported

if TYPE_CHECKING:
    from components.schema import Schema
    from components.schema.spec import Environment
    from components.statistics import Statistics

DIFFERENT = 1
_HELP = {"help_option_names": ["-h", "--help"], "show_default": True}
_debug = click.option("--debug", is_flag=True, help="Show the traceback of an error.")
_environment = click.option(
    "--environment", type=click.Choice(["training", "serving"]), default="training", help="Where the data is from."
)


@click.group(context_settings=_HELP)
def main() -> None:
    """Infer, compare and relax the schema that data must keep. docs/schema.md has all that a schema can say."""


@main.command(context_settings=_HELP)
@click.argument("source", metavar="RUN_OR_CONFIG")
@click.argument("overrides", nargs=-1, metavar="[section.key=value ...]")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Where to write it; without it: standard output.")
@_debug
def infer(source: str, overrides: tuple[str, ...], output: Path | None, debug: bool) -> None:
    """Write the schema that a train split keeps, to be edited.

    RUN_OR_CONFIG is the folder of a run, or of its statistics, or a config, of which ingest and validate are then run in
    a temporary folder. A schema that is there already is not overwritten.

    \b
    Examples:
      headrace schema infer runs/chicago_taxi -o schema.yaml
      headrace schema infer configs/chicago_taxi.yaml data.path=new.csv
    """
    with reported(debug=debug):
        from components.errors import ConfigError
        from components.schema.files import schema_text
        from serving.atomic import write_text

        if output is not None and output.exists():
            raise ConfigError(f"--output: {output} is there already. Give another name, or take it away.")
        if Path(source).is_dir():
            if overrides:
                raise ConfigError(f"{source} is a folder, which no setting changes, received {' '.join(overrides)}.")
            text = schema_text(_inferred(_statistics_folder(source)))
        else:
            text = schema_text(_inferred_of_config(source, overrides))
        if output is None:
            click.echo(text, nl=False)
        else:
            write_text(output, text)
            click.echo(f"Wrote {output}. Edit it, and name it in validate.schema_path.")


@main.command(context_settings=_HELP)
@click.argument("a")
@click.argument("b")
@_environment
@_debug
def diff(a: str, b: str, environment: Environment, debug: bool) -> None:
    """Say in what the schemas A and B differ by meaning, or what data departs from schema A in.

    A is a schema. B is a schema, or the folder of a run or of its statistics: then the anomalies are printed.

    \b
    Examples:
      headrace schema diff schema.yaml new_schema.yaml
      headrace schema diff schema.yaml runs/chicago_taxi --environment serving

    Exit codes: 0 no difference; 1 some, or it failed; 2 a schema is wrong.
    """
    with reported(debug=debug):
        lines = list(_differences(a, b, environment))
        for line in lines:
            click.echo(line)
    raise SystemExit(DIFFERENT if lines else 0)


@main.command(context_settings=_HELP)
@click.argument("schema", type=click.Path(path_type=Path))
@click.argument("statistics")
@click.option("--kind", "kinds", multiple=True, help="Only anomalies of this kind; may be given again.")
@click.option("--feature", "features", multiple=True, help="Only of this feature; may be given again.")
@_environment
@click.option("--dry-run", is_flag=True, help="Only say what would change.")
@_debug
def update(
    schema: Path,
    statistics: str,
    kinds: tuple[str, ...],
    features: tuple[str, ...],
    environment: Environment,
    dry_run: bool,
    debug: bool,
) -> None:
    """Relax SCHEMA until the data of STATISTICS passes; its comments and order stay.

    STATISTICS is the folder of a run or of its statistics. Look at `headrace schema diff SCHEMA STATISTICS` first: what
    is an error in the data should be mended there.

    \b
    Examples:
      headrace schema update schema.yaml runs/chicago_taxi --dry-run
      headrace schema update schema.yaml runs/chicago_taxi --kind ENUM_TYPE_UNEXPECTED_STRING_VALUES --feature company
    """
    with reported(debug=debug):
        from components.anomalies import KINDS
        from components.errors import ConfigError, did_you_mean
        from components.schema import load_schema
        from serving.atomic import write_text

        for kind in kinds:
            if kind not in KINDS:
                raise ConfigError(f"--kind: there is no anomaly '{kind}'.{did_you_mean(kind, KINDS)}")
        load_schema(schema, setting="SCHEMA")
        splits = _splits(statistics)
        known = {*load_schema(schema).features, *(name for split in splits.values() for name in split)}
        for name in features:
            if name not in known:
                raise ConfigError(f"--feature: there is no feature '{name}'.{did_you_mean(name, known)}")
        from components.schema.update import update_schema

        text, told = update_schema(
            schema.read_text(),
            splits,
            environment=environment,
            kinds=kinds,
            features=features,
        )
        for line in told or ("Nothing to change.",):
            click.echo(line)
        if not dry_run:
            write_text(schema, text)


def _differences(a: str, b: str, environment: Environment) -> Iterable[str]:
    from components.schema import load_schema
    from components.schema.diff import differences

    schema = load_schema(Path(a), setting="A")
    if Path(b).is_file() and Path(b).suffix != ".json":
        return differences(schema, load_schema(Path(b), setting="B"))
    splits = _splits(b)
    from components.schema.checks import compare

    return [
        f"{anomaly.split} split, '{anomaly.feature}': {anomaly.message} [{anomaly.kind}]"
        for split, statistics in splits.items()
        for anomaly in compare(statistics, schema, split=split, supplied=True, environment=environment)
    ]


def _statistics_folder(place: str) -> Path:
    """The folder of the statistics that a path stands for."""
    from components.errors import ConfigError

    for folder in (Path(place), Path(place, "statistics"), Path(place).parent):
        if (folder / "statistics.json").is_file():
            return folder
    raise ConfigError(f"{place} has no statistics.json. Give the folder of a run that validated its data.")


def _splits(place: str) -> dict[str, Statistics]:
    folder = _statistics_folder(place)
    import_tensorflow()
    from components.statistics import load_statistics

    return load_statistics(folder)


def _inferred(folder: Path) -> Schema:
    """The schema of the train split of a statistics artifact."""
    splits = _splits(str(folder))
    from components import artifacts
    from components.schema.infer import infer_schema

    label = artifacts.read_manifest(folder).result["label"]
    return infer_schema(splits["train"], label)


def _inferred_of_config(source: str, overrides: tuple[str, ...]) -> Schema:
    from pipelines.config import load_config

    config = load_config(source, overrides)
    import_tensorflow()
    from components.examples import read_info
    from components.ingest import ingest
    from components.schema.infer import infer_schema
    from components.shard_statistics import build_statistics

    with tempfile.TemporaryDirectory() as folder:
        examples = Path(folder, "examples")
        ingest(examples=examples, config=config.step_config("data"))
        info = read_info(examples)
        # Not the whole step: data that is not fit to train on has a schema, too.
        train = build_statistics(examples, info, config.step_config("validate"), Path(folder, "scratch"))[
            "train"
        ].finish()
        return infer_schema(train, info.label)


if __name__ == "__main__":
    main(prog_name="headrace schema")
