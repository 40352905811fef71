"""What both sides quantize: a trained ResNet, the examples, and the batches in their order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_ARRAYS = ("train_x", "train_y", "test_x", "test_y")


@dataclass(frozen=True)
class Task:
    """A trained network, and how it is trained further.

    Attributes:
        feature: Name of the image.
        model_args: Arguments of `models.resnet.build`.
        weights: The trained ones, in Keras's order.
        train_x: `(num_examples, height, width, channels)` float32.
        train_y: `(num_examples,)` class ids; so for `test_x` and `test_y`.
        epochs: Of quantization-aware training.
        batch_size: Examples a step.
        learning_rate: Of Adam.
        seed: Of the order of the batches.
        num_calibration: Examples that post-training quantization may see.
    """

    feature: str
    model_args: dict[str, Any]
    weights: list[np.ndarray]
    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    epochs: int
    batch_size: int
    learning_rate: float
    seed: int
    num_calibration: int

    @property
    def calibration_x(self) -> np.ndarray:
        """The first rows of a shuffle."""
        return self.train_x[np.random.default_rng(self.seed).permutation(len(self.train_x))[: self.num_calibration]]

    @property
    def num_steps(self) -> int:
        """Of all epochs."""
        return self.epochs * (len(self.train_x) // self.batch_size)

    def batches(self) -> Iterator[np.ndarray]:
        """Rows of each step's batch."""
        rng = np.random.default_rng(self.seed)
        for _ in range(self.epochs):
            order = rng.permutation(len(self.train_x))
            for start in range(0, len(order) - self.batch_size + 1, self.batch_size):
                yield order[start : start + self.batch_size]

    def accuracy(self, answers: np.ndarray) -> float:
        """Share of the test examples whose largest answer is the label."""
        return float((answers.argmax(axis=1) == self.test_y).mean())

    def save(self, folder: Path) -> None:
        """Write it for another process."""
        fields = dict(vars(self))
        arrays = {name: fields.pop(name) for name in _ARRAYS}
        weights = fields.pop("weights")
        np.savez(folder / "task.npz", **arrays, **{f"weight{i:03}": weight for i, weight in enumerate(weights)})
        (folder / "task.json").write_text(json.dumps(fields))

    @classmethod
    def load(cls, folder: Path) -> Task:
        """Read what `save` wrote."""
        with np.load(folder / "task.npz") as file:
            arrays = {name: file[name] for name in _ARRAYS}
            weights = [file[name] for name in sorted(file) if name.startswith("weight")]
        return cls(**json.loads((folder / "task.json").read_text()), **arrays, weights=weights)
