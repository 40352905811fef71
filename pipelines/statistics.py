"""What is known of the data, on one page: `headrace statistics A [B]`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from components.environment import import_tensorflow
from pipelines.exits import reported

if TYPE_CHECKING:
    from components.statistics import Statistics


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("first", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("second", required=False, type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--split", default="train", help="Which split of FIRST and SECOND stands side by side.")
@click.option("--slice", "slice_name", metavar="FEATURE=VALUE", help="The rows with that value only.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), default="statistics.html", help="The page.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(first: Path, second: Path | None, split: str, slice_name: str | None, output: Path, debug: bool) -> None:
    """Write a page with the statistics of FIRST, its splits side by side; with SECOND, of one split of the two.

    Each is the folder of a run, or of what its step `validate` made.
    """
    with reported(debug=debug):
        import_tensorflow()
        from components.statistics.page import html

        if second is None:
            sides = _splits(first, slice_name)
        else:
            folders = {f"A: {first}": first, f"B: {second}": second}
            sides = {name: _one(folder, split, slice_name) for name, folder in folders.items()}
        output.write_text(html(sides))
        click.echo(f"Wrote {output}")


def _splits(folder: Path, slice_name: str | None) -> dict[str, Statistics]:
    """The statistics of each split, or of the one slice in each split that has it."""
    from components import artifacts
    from components.errors import ConfigError, did_you_mean
    from components.statistics import STATISTICS_FILE, load_slices, load_statistics

    artifact = folder if (folder / STATISTICS_FILE).exists() else folder / "statistics"
    artifacts.open_artifact(artifact, step="validate")
    splits = load_statistics(artifact)
    if slice_name is None:
        return splits
    slices = load_slices(artifact)
    names = dict.fromkeys(name.partition("/")[2] for name in slices)
    if slice_name not in names:
        raise ConfigError(
            f"--slice: {folder} has no slice '{slice_name}'.{did_you_mean(slice_name, names)} Slices are those of "
            "evaluate.slices."
        )
    return {split: slices[key] for split in splits if (key := f"{split}/{slice_name}") in slices}


def _one(folder: Path, split: str, slice_name: str | None) -> Statistics:
    from components.errors import ConfigError, did_you_mean

    splits = _splits(folder, slice_name)
    if split not in splits:
        raise ConfigError(f"--split: {folder} has no split '{split}'.{did_you_mean(split, splits)}")
    return splits[split]
