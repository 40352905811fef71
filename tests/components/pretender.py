"""A search whose trials are computed from their settings in a moment, without a process or a network."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from components.config import TuneConfig
from components.tune.workers import Epoch, Outcome, Trial

RATE = "train.optimizer.learning_rate"
SPACE = {RATE: {"low": 1e-4, "high": 1e-1, "log": True}, "model.args.units": [2, 4, 8]}


def config_of(**settings: Any) -> TuneConfig:
    train = {"epochs": 4, "optimizer": {"learning_rate": 0.001}, "model": {"args": {"units": 2}}, "xla": "off"}
    return TuneConfig.model_validate(
        {"trials": 8, "space": SPACE, "primary_metric": "auc", "seed": 1, "train": train, **settings}
    )


class Pretender:
    """A worker without a process: what it reports is computed from the settings."""

    def __init__(self, examples: Path, transform: Path, place: int, num_workers: int) -> None:
        self.connection, self._theirs = multiprocessing.Pipe()
        self.is_alive = True

    def start(self, trial: Trial) -> None:
        self._messages = self.train(trial)
        self._theirs.send(next(self._messages))

    def train(self, trial: Trial) -> Iterator[Any]:
        """Better the nearer the learning rate is to 0.01, and the more units there are."""
        rate, units = trial.config.optimizer.learning_rate, trial.config.model.args["units"]
        value = 0.0
        for epoch in range(1, trial.config.epochs + 1):
            value = 1 - abs(rate - 0.01) * 5 - 0.1 / units - 0.1 / epoch
            if (yield Epoch(epoch, value)) and epoch < trial.config.epochs:
                yield Outcome("pruned", epochs=epoch)
        yield Outcome("complete", value=value, epochs=trial.config.epochs)

    def hear(self) -> Any:
        return self.connection.recv()

    def answer(self, *, stop: bool) -> None:
        self._theirs.send(self._messages.send(stop))

    def end(self) -> None:
        self.connection.close()
        self._theirs.close()
