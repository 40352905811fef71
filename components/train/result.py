"""What the step `train` returns; without TensorFlow, for those who only pass it on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainResult:
    """What training gave.

    Attributes:
        num_parameters: Trainable parameters.
        epochs: Epochs run.
        best_epoch: The epoch, from 1, whose weights were kept.
        validation: Metrics of the validation split with these weights.
        xla: `on`, or why the step ran without it.
        num_replicas: Devices that shared each batch.
        skipped_steps: Steps left out since they held NaN or Inf.
    """

    num_parameters: int
    epochs: int
    best_epoch: int
    validation: dict[str, float | None]
    xla: str
    num_replicas: int
    skipped_steps: int
