"""The step itself: trials in, the settings of the best one out, with a table and a page of all of them."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components import artifacts
from components.config import TuneConfig
from components.errors import HeadraceError
from components.search_space import as_written
from components.tune import page
from components.tune.search import search
from components.tune.study import TrialRecord, best_of, metric_of

BEST = "best.json"


@dataclass(frozen=True)
class TuneResult:
    """What the search gave.

    Attributes:
        metric: Of the validation split.
        value: What the best trial has reached.
        value_as_written: What the settings as written have reached, if they were a trial.
        trial: Number of the best one, from 0.
        settings: Path of a setting -> its value in the best trial.
        num_trials: complete, pruned, failed -> how many ended so.
    """

    metric: str
    value: float
    value_as_written: float | None
    trial: int
    settings: dict[str, Any]
    num_trials: dict[str, int]


def tune(
    *, examples: Path, transform: Path, tuned: Path, config: TuneConfig, trials: Sequence[Path] = ()
) -> TuneResult:
    """Search the settings with which the model does best on the validation split.

    The search is kept beside the artifact. One that was killed goes on, and so does one that is asked for more trials.

    Args:
        examples: Artifact of `ingest`.
        transform: Artifact of `transform`.
        tuned: Where the artifact is written: `best.json`, and in `trials/` a table and a page of all trials.
        config: The space, and how it is searched.
        trials: Artifacts of `trial`, if they have been run already.

    Raises:
        HeadraceError: no trial came to its end.
    """
    inputs = {"examples": examples, "transform": transform}
    for path, step in ((examples, "ingest"), (transform, "transform"), *((path, "trial") for path in trials)):
        artifacts.open_artifact(path, step=step)
    with artifacts.writing(tuned, step="tune", inputs=inputs, config=config) as out:
        if trials:
            records = [_read(path, config) for path in trials]
            out.result = _write(sorted(records, key=lambda record: record.number), config, out.path)
        else:
            folder = _study_folder(tuned, inputs, config)
            records = search(config, examples=examples, transform=transform, folder=folder)
            out.result = _write(records, config, out.path, folder)
    return out.result


def _read(trial: Path, config: TuneConfig) -> TrialRecord:
    """What became of a trial, its settings in the order of the space, which a manifest does not keep."""
    result = artifacts.read_manifest(trial).result
    return TrialRecord(**{**result, "settings": {path: result["settings"][path] for path in config.space}})


def _study_folder(tuned: Path, inputs: Mapping[str, Path], config: TuneConfig) -> Path:
    """Where the search is kept, under a name by all that its trials follow from; searches of other things are removed."""
    same = TuneConfig.model_fields
    how_long = {name: same[name].default for name in ("trials", "timeout_s", "parallel", "on_kubeflow")}
    parts = artifacts.make_fingerprint_parts(step="tune", inputs=inputs, config=config.model_copy(update=how_long))
    root = tuned.parent / f".{tuned.name}.study"
    folder = root / artifacts.digest_of(parts)[:16]
    for other in root.glob("*"):
        if other != folder:
            shutil.rmtree(other)
    return folder


def _write(records: list[TrialRecord], config: TuneConfig, path: Path, folder: Path | None = None) -> TuneResult:
    metric = metric_of(config)
    best = best_of(records, metric)
    if best is None or best.value is None:
        if folder is not None:
            shutil.rmtree(folder)  # another run shall try again
        reasons = "; ".join(dict.fromkeys(record.reason for record in records if record.reason))
        raise HeadraceError(f"tune: none of {len(records)} trials came to its end: {reasons or 'there was no time'}.")
    written = as_written(config)
    result = TuneResult(
        metric=metric,
        value=best.value,
        value_as_written=next((each.value for each in records if each.settings == written), None),
        trial=best.number,
        settings=best.settings,
        num_trials={
            state: sum(record.state == state for record in records) for state in ("complete", "pruned", "failed")
        },
    )
    (path / BEST).write_text(json.dumps(best.settings, indent=1))
    (path / "trials").mkdir()
    rows = [dataclasses.asdict(record) for record in records]
    (path / "trials" / "trials.json").write_text(json.dumps(rows, indent=1))
    (path / "trials" / "trials.csv").write_text(_as_csv(records))
    (path / "trials" / "report.html").write_text(page.html(records, result, config), encoding="utf-8")
    return result


def _as_csv(records: Sequence[TrialRecord]) -> str:
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    fields = ("number", "state", "value", "epochs", "best_epoch", "num_parameters", "seconds", "reason")
    writer.writerow([*fields, *records[0].settings])
    for record in records:
        writer.writerow([*(getattr(record, name) for name in fields), *record.settings.values()])
    return table.getvalue()
