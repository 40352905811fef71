"""The step `ingest` by itself, as a SparkApplication runs it: `python -m components.ingest --config JSON --examples DIR`."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from pydantic import ValidationError

from components.config import DataConfig
from components.errors import ConfigError, HeadraceError
from components.ingest import ingest


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", required=True, help="The section `data` with its seed, as JSON.")
@click.option("--examples", required=True, type=click.Path(path_type=Path), help="Where the examples will stand.")
def main(config: str, examples: Path) -> None:
    """Read the source once and write its rows as examples."""
    try:
        result = ingest(examples=examples, config=_parsed(config))
    except HeadraceError as error:
        print(f"Error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from error
    counts = ", ".join(f"{number} {split}" for split, number in result.num_examples.items())
    click.echo(f"{examples}: {counts}")


def _parsed(text: str) -> DataConfig:
    try:
        return DataConfig.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(f"--config is no section `data`: {error}") from error


if __name__ == "__main__":
    main(prog_name="python -m components.ingest")
