"""What is served: three Keras models, the rows that clients send and the answers they must get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

INPUT = "x"
NUM_ROWS = 16
# Of an answer from the expected one: other kernels, batches and roundings to six digits, but no other model.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Workload:
    """A model and its requests.

    Attributes:
        build: Makes the Keras model; only layers of Keras itself, since the peers have no more.
        shape: Of one row.
    """

    build: Callable[[], Any]
    shape: tuple[int, ...]

    def rows(self) -> np.ndarray:
        """What clients send, one row a request: float32 of shape `(NUM_ROWS, *shape)`, of three decimals."""
        return np.random.default_rng(0).normal(size=(NUM_ROWS, *self.shape)).round(3).astype(np.float32)


@dataclass(frozen=True)
class Served:
    """A model on disk.

    Attributes:
        base_path: Holds the SavedModel as version 1; its signature `serving_default` takes INPUT.
        keras_file: The same model as Keras saves it.
        rows: What clients send, `(NUM_ROWS, *shape)`.
        answers: What they must get, `(NUM_ROWS, num_outputs)`.
    """

    base_path: Path
    keras_file: Path
    rows: np.ndarray
    answers: np.ndarray


def save(workload: Workload, folder: Path) -> Served:
    """Build a model and save it in both forms."""
    import keras

    keras.utils.set_random_seed(0)
    model = workload.build()
    model.save(folder / "model.keras")
    model.export(folder / "saved_model" / "1", verbose=False)
    rows = workload.rows()
    answers = np.asarray(model(rows, training=False))
    return Served(folder / "saved_model", folder / "model.keras", rows, answers)


def _half_plus_two() -> Any:
    import keras

    model = keras.Sequential([keras.Input((1,), name=INPUT), keras.layers.Dense(1)])
    model.set_weights([np.array([[0.5]]), np.array([2.0])])
    return model


def _mlp() -> Any:
    import keras

    return keras.Sequential(
        [
            keras.Input((32,), name=INPUT),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


def _resnet() -> Any:
    """The zoo's ResNet as the training benchmark has it, 272,282 parameters."""
    import keras

    from models import resnet
    from models.spec import FeatureSpec, OutputSpec

    image = {INPUT: FeatureSpec((32, 32, 3), "float32")}
    network = resnet.build(image, OutputSpec("multiclass", 10), stage_sizes=(3, 3, 3))
    return keras.Model(network.inputs[0], network.outputs[0])


WORKLOADS: dict[str, Workload] = {
    "half_plus_two": Workload(_half_plus_two, (1,)),
    "mlp": Workload(_mlp, (32,)),
    "resnet": Workload(_resnet, (32, 32, 3)),
}
