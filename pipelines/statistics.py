"""What is known of the data, on one page: `headrace statistics A [B]`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipelines.exits import reported

if TYPE_CHECKING:
    from components.statistics import Statistics


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("first", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("second", required=False, type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--split", default="train", help="Which split of FIRST and SECOND stands side by side.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), default="statistics.html")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(first: Path, second: Path | None, split: str, output: Path, debug: bool) -> None:
    """Write a page with the statistics of FIRST, its splits side by side; with SECOND, of one split of the two.

    Each is the folder of a run, or of what its step `validate` made.
    """
    with reported(debug=debug):
        from components.statistics.page import html

        output.write_text(html(_splits(first) if second is None else _pair(first, second, split)))
        click.echo(f"Wrote {output}")


def _splits(folder: Path) -> dict[str, Statistics]:
    from components import artifacts
    from components.statistics import STATISTICS_FILE, load_statistics

    artifact = folder if (folder / STATISTICS_FILE).exists() else folder / "statistics"
    artifacts.open_artifact(artifact, step="validate")
    return load_statistics(artifact)


def _pair(first: Path, second: Path, split: str) -> dict[str, Statistics]:
    from components.errors import ConfigError, did_you_mean

    sides = {}
    for place, folder in (("A", first), ("B", second)):
        splits = _splits(folder)
        if split not in splits:
            raise ConfigError(f"--split: {folder} has no split '{split}'.{did_you_mean(split, splits)}")
        sides[f"{place}: {folder}"] = splits[split]
    return sides
