"""The trials of a search, kept by Optuna: which settings come next, which trials go on, and what became of each."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from components.config import Candidates, Range, TuneConfig
from components.metrics import HIGHER_IS_BETTER, improvement
from components.search_space import as_written, combination, ends_of
from components.tune.workers import Epoch, Outcome

_STATES = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}
_OUTCOME = "outcome"


@dataclasses.dataclass(frozen=True)
class TrialRecord:
    """A trial that has ended.

    Attributes:
        number: From 0, in the order in which they began.
        state: complete, pruned or failed.
        reason: Why it failed.
        settings: Path of a setting -> its value.
        value: The metric of the kept weights; that of the last epoch, if it was pruned; `None` if it has failed.
        by_epoch: The metric after each epoch; `None` where it is not defined.
        epochs: Epochs run.
        best_epoch: The epoch, from 1, whose weights were kept.
        num_parameters: Trainable parameters.
        seconds: Wall time.
    """

    number: int
    state: str
    reason: str
    settings: dict[str, Any]
    value: float | None
    by_epoch: list[float | None]
    epochs: int
    best_epoch: int
    num_parameters: int
    seconds: float


class Study:
    """A search on the disk. What is drawn follows from the seed, the trial's number and the trials that have ended.

    Args:
        config: The space, and how it is searched.
        file: SQLite file, which Optuna's tools read.
        numbers: Of the trials that it is to have; Optuna counts from 0.
    """

    def __init__(self, config: TuneConfig, file: Path, numbers: range) -> None:
        self._config, self._numbers = config, numbers
        self._storage = optuna.storages.RDBStorage(f"sqlite:///{file}")
        higher = HIGHER_IS_BETTER[metric_of(config)]
        with _quiet():
            self._study = optuna.create_study(
                storage=self._storage,
                study_name="tune",
                load_if_exists=True,
                direction="maximize" if higher else "minimize",
                pruner=_pruner(config),
            )
        wanted = self._trials()[: len(numbers)]
        self._interrupted = [trial for trial in wanted if trial.state == TrialState.RUNNING]
        self._told = {trial.number: set(trial.intermediate_values) for trial in self._interrupted}

    def next_trial(self) -> optuna.Trial | None:
        """The next one to be trained: one that was interrupted, or a new one; `None` if all have begun."""
        with _quiet():
            if self._interrupted:
                interrupted = self._interrupted.pop(0)
                self._study.sampler = _sampler(self._config, self._numbers[interrupted.number])
                return optuna.Trial(self._study, interrupted._trial_id)
            begun = [trial for trial in self._trials() if trial.state != TrialState.WAITING]
            if len(begun) >= len(self._numbers):
                return None
            number = self._numbers[len(begun)]
            if len(begun) == len(self._trials()) and (settings := self._settings_without_drawing(number)) is not None:
                space = self._config.space
                self._study.enqueue_trial({path: _parameter(space[path], value) for path, value in settings.items()})
            self._study.sampler = _sampler(self._config, number)
            return self._study.ask()

    def _settings_without_drawing(self, number: int) -> dict[str, Any] | None:
        if self._config.sampler == "grid":
            return combination(self._config.space, number)
        return as_written(self._config) if number == 0 else None

    def number_of(self, trial: optuna.Trial) -> int:
        """Its number among all trials of the search."""
        return self._numbers[trial.number]

    def settings_of(self, trial: optuna.Trial) -> dict[str, Any]:
        """Path of each setting of the space -> the value that the trial has."""
        with _quiet():
            return {path: _suggest(trial, path, candidates) for path, candidates in self._config.space.items()}

    def is_to_stop(self, trial: optuna.Trial, epoch: Epoch) -> bool:
        """Note what a trial has reached after an epoch, and say whether to end it there."""
        if epoch.number not in self._told.get(trial.number, ()):
            trial.report(epoch.value, epoch.number)
        return trial.should_prune()

    def end(self, trial: optuna.Trial, outcome: Outcome, seconds: float) -> None:
        """Note how a trial has ended."""
        trial.set_user_attr(_OUTCOME, {**dataclasses.asdict(outcome), "seconds": seconds})
        state = _STATES[outcome.state]
        self._study.tell(trial, outcome.value if state == TrialState.COMPLETE else None, state=state)

    def records(self) -> list[TrialRecord]:
        """The trials that have ended, by number; not those of an earlier search that went on longer."""
        numbered = zip(self._numbers, self._trials(), strict=False)
        return [_record(number, trial, self._config) for number, trial in numbered if trial.state.is_finished()]

    def close(self) -> None:
        """Let go of the file."""
        self._storage.remove_session()
        self._storage.engine.dispose()

    def _trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)


def metric_of(config: TuneConfig) -> str:
    """The metric of the validation split that trials are compared by."""
    return config.metric or config.primary_metric


def best_of(records: Sequence[TrialRecord], metric: str) -> TrialRecord | None:
    """The best trial that was trained to its end; the first of equal ones."""
    best: TrialRecord | None = None
    for record in records:
        if record.state != "complete" or record.value is None:
            continue
        if best is None or best.value is None or improvement(metric, record.value, best.value) > 0:
            best = record
    return best


def _sampler(config: TuneConfig, number: int) -> optuna.samplers.BaseSampler:
    """A sampler of its own for each trial: a search that was killed draws what it would have drawn."""
    seed = int.from_bytes(hashlib.sha256(f"{config.seed}/{number}".encode()).digest()[:4], "big")
    if config.sampler == "tpe":
        return optuna.samplers.TPESampler(seed=seed)
    return optuna.samplers.RandomSampler(seed=seed)


def _pruner(config: TuneConfig) -> optuna.pruners.BasePruner:
    if config.pruner == "median":
        return optuna.pruners.MedianPruner()
    if config.pruner == "hyperband":
        return optuna.pruners.HyperbandPruner()
    return optuna.pruners.NopPruner()


def _suggest(trial: optuna.Trial, path: str, candidates: Candidates) -> Any:
    if not isinstance(candidates, Range):
        return json.loads(trial.suggest_categorical(path, [json.dumps(value) for value in candidates]))
    low, high = ends_of(candidates)
    if candidates.is_whole:
        return trial.suggest_int(path, low, high, step=int(candidates.step or 1), log=candidates.log)
    return trial.suggest_float(path, low, high, step=candidates.step, log=candidates.log)


def _parameter(candidates: Candidates, value: Any) -> Any:
    """A value as Optuna keeps it: lists and sections, which it does not take, as JSON."""
    return value if isinstance(candidates, Range) else json.dumps(value)


def _record(number: int, trial: FrozenTrial, config: TuneConfig) -> TrialRecord:
    outcome = trial.user_attrs[_OUTCOME]
    return TrialRecord(
        number=number,
        settings={
            path: trial.params[path] if isinstance(candidates, Range) else json.loads(trial.params[path])
            for path, candidates in config.space.items()
        },
        by_epoch=[None if math.isnan(value) else value for _, value in sorted(trial.intermediate_values.items())],
        **{**outcome, "value": trial.value},
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without Optuna's log lines and its warnings of what is experimental."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)
