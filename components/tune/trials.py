"""One trial: the training of the step `train`, with its settings, told to stop where it is not worth going on."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import keras
import tensorflow as tf

from components import progress
from components.config import TrainConfig
from components.errors import HeadraceError
from components.preprocessing import Preprocessing
from components.train import devices
from components.train.step import Run, keras_settings
from components.tune.workers import Epoch, Outcome, Trial

Tell = Callable[[Epoch], bool]


def run_trial(trial: Trial, *, examples: Path, transform: Path, tell: Tell) -> Outcome:
    """Train once; an error is an outcome, too. A trial that was killed goes on from its last whole epoch.

    Args:
        trial: What to train.
        examples: Artifact of `ingest`.
        transform: Artifact of `transform`.
        tell: Called after each epoch; what it returns is whether to stop.
    """
    config = _for_a_trial(trial.config)
    report = _Report(trial.metric, tell)
    try:
        devices.prepare(config)
        with keras_settings(config), progress.shown_by(lambda _: None):
            run = Run(config, Preprocessing.load(transform), examples, trial.scratch)
            result = run.until_done([report])
    except HeadraceError as error:
        return Outcome("failed", str(error))
    except Exception as error:
        traceback.print_exc()
        return Outcome("failed", f"{type(error).__name__}: {error}")
    value = result.validation[trial.metric]
    if value is None:
        return Outcome("failed", f"validation {trial.metric} is not defined", epochs=result.epochs)
    state: Literal["pruned", "complete"] = "pruned" if report.has_stopped else "complete"
    return Outcome(state, "", value, result.epochs, result.best_epoch, result.num_parameters)


def share_gpus(place: int) -> None:
    """Use one of the GPUs, if there are any, and no more of its memory than it takes."""
    if gpus := tf.config.list_physical_devices("GPU"):
        mine = gpus[place % len(gpus)]
        tf.config.set_visible_devices([mine], "GPU")
        tf.config.experimental.set_memory_growth(mine, True)


def _for_a_trial(config: TrainConfig) -> TrainConfig:
    """The configuration in one process, and without what is of use for the final model only."""
    changes: dict[str, Any] = {"tensorboard": False, "layer_statistics": []}
    if config.strategy == "multi_worker":
        changes |= {"strategy": "one_device", "num_workers": None}
    return config.model_copy(update=changes)


class _Report(keras.callbacks.Callback):
    """Tells the metric after each epoch, and stops the training if told so."""

    def __init__(self, metric: str, tell: Tell) -> None:
        super().__init__()
        self.has_stopped = False
        self._metric, self._tell = metric, tell

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        stop = self._tell(Epoch(epoch + 1, (logs or {}).get(f"val_{self._metric}", math.nan)))
        # Nothing is saved by stopping at the end.
        if stop and epoch + 1 < self.params["epochs"]:
            self.has_stopped = self.model.stop_training = True
