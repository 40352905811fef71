"""Raw features to model inputs by fitted operations.

They are rebuilt from `transform.json`, which holds the operations with everything that was learned from the train split's
statistics: means, boundaries, vocabularies, weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from components.examples import ExamplesInfo, read_info, write_info
from components.preprocessing.categories import CrossOp, HashOp, VocabularyOp
from components.preprocessing.dates import DateOp
from components.preprocessing.images import ImageOp
from components.preprocessing.numbers import (
    BucketizeOp,
    LogOp,
    MinMaxOp,
    NormalizeByKeyOp,
    NormalizeOp,
    NumberOp,
    RobustOp,
)
from components.preprocessing.text import TextOp
from models.spec import FeatureSpec, OutputSpec

FILE = "transform.json"


OPS: dict[str, type[keras.layers.Layer]] = {
    "normalize": NormalizeOp,
    "normalize_by_key": NormalizeByKeyOp,
    "min_max": MinMaxOp,
    "robust": RobustOp,
    "log": LogOp,
    "impute": NumberOp,
    "bucketize": BucketizeOp,
    "vocabulary": VocabularyOp,
    "hash": HashOp,
    "cross": CrossOp,
    "text": TextOp,
    "date": DateOp,
    "image": ImageOp,
}
# What TFLite's and ONNX's plain runtimes can run inside the model file, of features that are no strings.
CONVERTIBLE_OPS = frozenset({"normalize", "min_max", "robust", "log", "impute", "image"})


@dataclass(frozen=True)
class FittedOp:
    """One operation with everything it learned.

    Attributes:
        op: A key of `OPS`.
        inputs: Raw features that it reads, or where there is none of that name, the outputs of other operations.
        params: Arguments of the operation's class.
        output: What it gives, as model builders are told.
    """

    op: str
    inputs: tuple[str, ...]
    params: dict[str, Any]
    output: FeatureSpec


class Preprocessing:
    """Raw features to model inputs, and labels to class ids.

    Attributes:
        info: The raw features, the label and the task.
        fitted: Output name -> operation.
        classes: Class names in the order of their ids; empty for regression.
        layers: Output name -> Keras layer; a SavedModel that calls this object must track them.
    """

    def __init__(self, info: ExamplesInfo, fitted: Mapping[str, FittedOp], classes: list[str | int]) -> None:
        self.info, self.fitted, self.classes = info, dict(fitted), list(classes)
        self.layers = {
            name: OPS[f.op](
                **f.params, dtype="float32" if f.output.dtype == "float32" else None, name=f"preprocess_{name}"
            )
            for name, f in self.fitted.items()
        }
        for layer in self.layers.values():
            # Keras numbers layers through the whole process, and a SavedModel has their names in its graph.
            for number, inner in enumerate(layer._flatten_layers(include_self=False)):
                inner.name = f"inner_{number}"
        self._run = tf.function(self.__call__, input_signature=[self.raw_signature()])

    def __call__(self, raw: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Transform a batch of raw features; ones that no operation reads are ignored."""
        outputs: dict[str, tf.Tensor] = {}
        # Those that read the outputs of others come last.
        for name in sorted(self.fitted, key=lambda name: not self._reads_raw_only(name)):
            values = [raw[i] if i in self.info.inputs else outputs[i] for i in self.fitted[name].inputs]
            outputs[name] = self.layers[name](values if len(values) > 1 else values[0])
        return {name: outputs[name] for name in self.fitted}

    @property
    def input_spec(self) -> dict[str, FeatureSpec]:
        """What the model is fed."""
        return {name: op.output for name, op in self.fitted.items()}

    @property
    def output_spec(self) -> OutputSpec:
        """What the model predicts."""
        return OutputSpec(task=self.info.task, num_classes=max(len(self.classes), 1))

    @property
    def is_convertible(self) -> bool:
        """Whether TFLite and ONNX can hold the preprocessing: no strings, no lookups."""
        numeric = all(self.info.features[name].type != "string" for name in self.raw_inputs)
        return numeric and all(op.op in CONVERTIBLE_OPS for op in self.fitted.values())

    @property
    def raw_inputs(self) -> list[str]:
        """The raw features that are read, sorted."""
        return sorted({name for op in self.fitted.values() for name in op.inputs if name in self.info.inputs})

    def _reads_raw_only(self, name: str) -> bool:
        return all(source in self.info.inputs for source in self.fitted[name].inputs)

    def raw_signature(self) -> dict[str, tf.TensorSpec]:
        """Name -> TensorSpec of the raw features that are read, batch dimension unknown."""
        specs = {}
        for name in self.raw_inputs:
            feature = self.info.features[name]
            specs[name] = tf.TensorSpec((None, *feature.shape), RAW_DTYPES[feature.type], name=name)
        return specs

    def encode_labels(self, labels: np.ndarray) -> np.ndarray:
        """Class ids `(num_examples,)` int64; for regression the values as float32.

        Raises:
            KeyError: a label is none of the classes. `validate` has refused such data before.
        """
        if self.info.task == "regression":
            return labels.astype(np.float32)
        ids = {value: i for i, value in enumerate(self.classes)}
        if labels.dtype == object:
            return np.array([ids[label.decode()] for label in labels], np.int64)
        if self.info.classes is not None:
            return labels.astype(np.int64)
        return np.array([ids[label] for label in labels.tolist()], np.int64)

    def transform_in_batches(self, raw: Mapping[str, np.ndarray], batch_size: int = 4096) -> dict[str, np.ndarray]:
        """A whole split, transformed in memory."""
        used = {name: raw[name] for name in self.raw_inputs}
        num_examples = len(next(iter(used.values())))
        parts = [
            self._run({name: tf.constant(values[start : start + batch_size]) for name, values in used.items()})
            for start in range(0, max(num_examples, 1), batch_size)
        ]
        return {name: np.concatenate([part[name].numpy() for part in parts]) for name in self.fitted}

    def save(self, directory: Path) -> None:
        """Write `transform.json` and, beside it, what is known of the raw features."""
        write_info(directory, self.info)
        ops = {
            name: {
                "op": op.op,
                "inputs": list(op.inputs),
                "params": op.params,
                "output": {**vars(op.output), "shape": list(op.output.shape)},
            }
            for name, op in self.fitted.items()
        }
        content = {"classes": self.classes, "ops": ops}
        (directory / FILE).write_text(json.dumps(content, indent=1, ensure_ascii=False))

    @classmethod
    def load(cls, directory: Path) -> Preprocessing:
        """Read what `save` wrote."""
        content = json.loads((directory / FILE).read_text())
        fitted = {
            name: FittedOp(
                op=op["op"],
                inputs=tuple(op["inputs"]),
                params=op["params"],
                output=FeatureSpec(**{**op["output"], "shape": tuple(op["output"]["shape"])}),
            )
            for name, op in content["ops"].items()
        }
        return cls(read_info(directory), fitted, content["classes"])


RAW_DTYPES = {"int": tf.int64, "float": tf.float32, "string": tf.string, "uint8": tf.uint8}
