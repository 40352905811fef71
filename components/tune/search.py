"""The search: trials trained side by side in processes of their own, until there are enough of them."""

from __future__ import annotations

import dataclasses
import shutil
import time
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from components import progress
from components.artifacts import disk_errors_explained
from components.config import TuneConfig
from components.search_space import num_trials, with_settings
from components.tune.study import Study, TrialRecord, best_of, metric_of
from components.tune.workers import Epoch, Outcome, Trial, Worker

if TYPE_CHECKING:
    import optuna

STUDY = "study.db"
# If so many have failed and none has not, the next ones would fail, too.
_MOST_FAILED_AT_FIRST = 3


def search(
    config: TuneConfig, *, examples: Path, transform: Path, folder: Path, numbers: range | None = None
) -> list[TrialRecord]:
    """Run the trials that `folder` does not hold yet, each from where it was.

    With one at a time they are the same in every run, also in one that was killed and went on.

    Args:
        config: The space, and how it is searched.
        examples: Artifact of `ingest`.
        transform: Artifact of `transform`.
        folder: Where the search is kept: `study.db`, and the checkpoints of the trials that are not at their end.
        numbers: Of the trials to run; default: all.

    Returns:
        Those that have ended, by number. There are few if the first ones have all failed.
    """
    with disk_errors_explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        study = Study(config, folder / STUDY, range(num_trials(config)) if numbers is None else numbers)
        run = _Search(config, study, examples, transform, folder)
        try:
            run.until_done()
            return study.records()
        finally:
            run.close()
            study.close()


@dataclasses.dataclass(frozen=True)
class _Running:
    trial: optuna.Trial
    scratch: Path
    since: float


class _Search:
    """One run of the search, with the workers that train."""

    def __init__(self, config: TuneConfig, study: Study, examples: Path, transform: Path, folder: Path) -> None:
        self._config, self._study, self._folder = config, study, folder
        self._examples, self._transform = examples, transform
        self._records = study.records()
        self._workers: dict[int, Worker] = {}
        self._running: dict[int, _Running] = {}
        self._since = time.monotonic()

    def until_done(self) -> None:
        """Start trials and hear of them until none is left."""
        while True:
            for place in range(self._config.parallel):
                if place not in self._running and (trial := self._next_trial()) is not None:
                    self._start(place, trial)
            if not self._running or self._is_hopeless():
                return
            places = {self._workers[place].connection: place for place in self._running}
            for ready in connection.wait(list(places)):
                self._hear(places[ready])  # type: ignore[index]

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers.values():
            worker.end()

    def _next_trial(self) -> optuna.Trial | None:
        timeout_s = self._config.timeout_s
        if timeout_s is not None and time.monotonic() - self._since > timeout_s:
            return None
        return self._study.next_trial()

    def _is_hopeless(self) -> bool:
        return len(self._records) >= _MOST_FAILED_AT_FIRST and all(each.state == "failed" for each in self._records)

    def _start(self, place: int, trial: optuna.Trial) -> None:
        scratch = self._folder / "trials" / str(trial.number)
        running = _Running(trial, scratch, time.monotonic())
        try:
            config = with_settings(self._config.train, self._study.settings_of(trial))
        except ValidationError as error:  # by three settings or more together, which nobody has tried before
            self._end(running, Outcome("failed", "; ".join(each["msg"] for each in error.errors())))
            return
        self._running[place] = running
        self._free_worker(place).start(Trial(config, metric_of(self._config), scratch))

    def _free_worker(self, place: int) -> Worker:
        worker = self._workers.get(place)
        if worker is None or not worker.is_alive:
            if worker is not None:
                worker.end()
            worker = self._workers[place] = Worker(self._examples, self._transform, place, self._config.parallel)
        return worker

    def _hear(self, place: int) -> None:
        running, worker = self._running[place], self._workers[place]
        heard = worker.hear()
        if isinstance(heard, Epoch):
            worker.answer(stop=self._study.is_to_stop(running.trial, heard))
            self._report(running, f"epoch {heard.number}  {heard.value:.4f}")
        else:
            del self._running[place]
            self._end(running, heard)

    def _end(self, running: _Running, outcome: Outcome) -> None:
        self._study.end(running.trial, outcome, time.monotonic() - running.since)
        self._records = self._study.records()
        shutil.rmtree(running.scratch, ignore_errors=True)
        self._report(running, f"{outcome.state}  {outcome.reason}".rstrip())

    def _report(self, running: _Running, message: str) -> None:
        number, metric = self._study.number_of(running.trial), metric_of(self._config)
        best = best_of(self._records, metric)
        so_far = f"  best {metric} {best.value:.4f} (trial {best.number})" if best else ""
        progress.report(f"trial {number} ({number + 1} of {num_trials(self._config)}): {message}{so_far}")
