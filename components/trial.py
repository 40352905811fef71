"""One trial of a search as an artifact of its own: on Kubeflow each may have a pod of its own."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from components import artifacts
from components.config import TuneConfig
from components.tune.search import search
from components.tune.study import TrialRecord


def trial(*, examples: Path, transform: Path, trial: Path, number: str, config: TuneConfig) -> TrialRecord:
    """Run one trial of a search whose trials do not know each other; it is the one that `tune` would run.

    Args:
        examples: Artifact of `ingest`.
        transform: Artifact of `transform`.
        trial: Where the artifact is written, which is for `tune` to read.
        number: Of the trial, from 0.
        config: The space, and how it is searched.
    """
    inputs = {"examples": examples, "transform": transform}
    for path, step in ((examples, "ingest"), (transform, "transform")):
        artifacts.open_artifact(path, step=step)
    with artifacts.writing(trial, step="trial", inputs=inputs, config=config) as out:
        numbers = range(int(number), int(number) + 1)
        alone = config.model_copy(update={"parallel": 1})
        (record,) = search(alone, examples=examples, transform=transform, folder=out.scratch, numbers=numbers)
        out.result = record
        (out.path / "trial.json").write_text(json.dumps(dataclasses.asdict(record), indent=1))
    return record
