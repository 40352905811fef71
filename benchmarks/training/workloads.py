"""What is trained: three architectures of the zoo, their synthetic data, loss and optimizer. Needs numpy alone.

Keras is imported where a model is built, since a contender without Keras reads the rest of this file, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from models.spec import FeatureSpec, OutputSpec

NUM_BATCHES = 16
SEED = 0
NUM_CHECKED = 16
_LOGITS = "checked logits"

Batch = tuple[dict[str, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Workload:
    """A model with everything that every contender must have alike.

    Attributes:
        builder: Module of `models` whose `build` makes it.
        features: Its inputs.
        output: What it predicts.
        args: Arguments of the builder.
        optimizer: `adamw` or `sgd`, with `learning_rate` and `weight_decay` or `momentum`.
        batch_size: Examples a step.
        steps: Steps a turn, unless the command line says otherwise.
    """

    builder: str
    features: Mapping[str, FeatureSpec]
    output: OutputSpec
    args: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    batch_size: int
    steps: int


_ADAMW = {"name": "adamw", "learning_rate": 1e-3, "weight_decay": 0.01}
_CATEGORIES = (1000, 500, 200, 100, 50, 20, 10, 5)

WORKLOADS: dict[str, Workload] = {
    "resnet": Workload(
        builder="resnet",
        features={"image": FeatureSpec((32, 32, 3), "float32")},
        output=OutputSpec("multiclass", 10),
        args={"stage_sizes": (3, 3, 3), "stage_widths": (16, 32, 64)},
        optimizer={"name": "sgd", "learning_rate": 0.05, "momentum": 0.9},
        batch_size=128,
        steps=8,
    ),
    "transformer": Workload(
        builder="transformer",
        features={"text": FeatureSpec((128,), "int64", num_categories=8000, is_sequence=True)},
        output=OutputSpec("multiclass", 8),
        args={"num_layers": 2, "hidden_dim": 128, "num_heads": 4, "mlp_dim": 512, "dropout": 0.1},
        optimizer=_ADAMW,
        batch_size=32,
        steps=32,
    ),
    "mlp": Workload(
        builder="tabular",
        features={
            "measures": FeatureSpec((16,), "float32"),
            **{f"category{i}": FeatureSpec((1,), "int64", num_categories=n) for i, n in enumerate(_CATEGORIES)},
        },
        output=OutputSpec("binary", 2),
        args={"hidden_dims": (256, 128), "embedding_dim": 16, "dropout": 0.1},
        optimizer=_ADAMW,
        batch_size=1024,
        steps=64,
    ),
}


def make_data(workload: Workload) -> Batch:
    """Features and labels, `(NUM_BATCHES, batch_size, ...)`; classes int64 `(..., )`, binary float32 `(..., 1)`."""
    rng = np.random.default_rng(SEED)
    leading = (NUM_BATCHES, workload.batch_size)
    x: dict[str, np.ndarray] = {}
    for name, spec in workload.features.items():
        shape = (*leading, *lengths(spec))
        if spec.num_categories is None:
            x[name] = rng.normal(size=shape).astype(np.float32)
        else:
            x[name] = rng.integers(1, spec.num_categories, size=shape)
        if spec.is_sequence:
            # Half full at least, so that there is padding to mask.
            length = shape[-1]
            x[name] *= np.arange(length) < rng.integers(length // 2, length + 1, size=(*leading, 1))
    if workload.output.task == "binary":
        return x, rng.integers(0, 2, size=(*leading, 1)).astype(np.float32)
    return x, rng.integers(0, workload.output.num_classes, size=leading)


def lengths(feature: FeatureSpec) -> tuple[int, ...]:
    """The shape of a feature none of whose lengths varies."""
    return tuple(length for length in feature.shape if length is not None)


def endless(data: Batch) -> Iterator[Batch]:
    """The batches, again and again."""
    x, y = data
    while True:
        for i in range(NUM_BATCHES):
            yield {name: values[i] for name, values in x.items()}, y[i]


def checked_inputs(data: Batch) -> dict[str, np.ndarray]:
    """The examples whose logits every contender must agree on."""
    return {name: values[0, :NUM_CHECKED] for name, values in data[0].items()}


def keras_model(workload: Workload) -> Any:
    """The network, on whichever backend Keras runs."""
    import importlib

    import keras

    keras.utils.set_random_seed(SEED)
    build = importlib.import_module(f"models.{workload.builder}").build
    return build(workload.features, workload.output, **workload.args)


def keras_optimizer(workload: Workload) -> Any:
    """Its Keras optimizer."""
    import keras

    kinds = {"adamw": keras.optimizers.AdamW, "sgd": keras.optimizers.SGD}
    settings = dict(workload.optimizer)
    return kinds[settings.pop("name")](**settings)


def keras_loss(workload: Workload) -> Any:
    """Its Keras loss on logits."""
    import keras

    if workload.output.task == "binary":
        return keras.losses.BinaryCrossentropy(from_logits=True)
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def num_parameters(model: Any) -> int:
    """Trainable weights of a Keras model."""
    return int(sum(np.prod(weight.shape) for weight in model.trainable_weights))


def check_keras(model: Any, data: Batch, reference: Path) -> float:
    """Give the model the weights of `reference` and return how far its logits are from those there.

    The first to come, without a file there yet, writes it.

    Returns:
        The largest absolute difference of a logit.
    """
    import keras

    if not reference.exists():
        rng = np.random.default_rng(SEED)
        # What starts at zero would hide a difference behind it.
        values = [w if w.any() else rng.normal(scale=0.05, size=w.shape).astype(w.dtype) for w in model.get_weights()]
        model.set_weights(values)
        logits = keras.ops.convert_to_numpy(model(checked_inputs(data), training=False))
        arrays: dict[str, Any] = {weight.path: value for weight, value in zip(model.weights, values, strict=True)}
        np.savez(reference, **arrays, **{_LOGITS: logits})
        return 0.0
    weights, logits = read_reference(reference)
    model.set_weights([weights[weight.path] for weight in model.weights])
    ours = keras.ops.convert_to_numpy(model(checked_inputs(data), training=False))
    return float(np.abs(ours - logits).max())


def read_reference(reference: Path) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Weights by their Keras paths, and logits `(NUM_CHECKED, num_logits)`."""
    with np.load(reference) as file:
        arrays = dict(file)
    return arrays, arrays.pop(_LOGITS)
