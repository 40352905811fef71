"""The fitted preprocessing: the one implementation that training, evaluation and the served signature all run.

It is rebuilt from `transform.json`, which holds the operations with everything that was learned from the train split's
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

from components.examples import MISSING_INT, ExamplesInfo, read_info, write_info
from models.spec import FeatureSpec, OutputSpec

FILE = "transform.json"


class NormalizeOp(keras.layers.Layer):
    """`(x - mean) / std` of scalars as `(batch, 1)`, or of fixed-shape tensors; missing values become 0."""

    def __init__(self, *, mean: float, std: float, log: bool, missing_indicator: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.mean, self.std, self.log, self.missing_indicator = mean, std or 1.0, log, missing_indicator

    def call(self, raw: tf.Tensor) -> tf.Tensor:
        missing, x = split_missing(raw)
        if self.log:
            x = tf.math.log1p(tf.maximum(x, 0.0))
        x = tf.where(missing, 0.0, (x - self.mean) / self.std)
        if x.shape.rank > 1:
            return x
        columns = [x, tf.cast(missing, tf.float32)] if self.missing_indicator else [x]
        return tf.stack(columns, axis=1)


class BucketizeOp(keras.layers.Layer):
    """Index of the quantile bucket as `(batch, 1)` int64; the last index stands for missing values."""

    def __init__(self, *, boundaries: list[float], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.boundaries = boundaries
        self.discretization = keras.layers.Discretization(bin_boundaries=boundaries)

    def call(self, raw: tf.Tensor) -> tf.Tensor:
        missing, x = split_missing(raw)
        buckets = tf.cast(self.discretization(x), tf.int64)
        return tf.where(missing, np.int64(len(self.boundaries) + 1), buckets)[:, tf.newaxis]


class VocabularyOp(keras.layers.Layer):
    """Index in the vocabulary as `(batch, 1)` int64; 0 stands for any other value."""

    def __init__(self, *, vocabulary: list[Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        is_text = isinstance(vocabulary[0], str)
        # Keras reserves -1 for out-of-vocabulary integers and refuses it as an entry; the lookup itself never meets ours.
        self.lookup = (
            keras.layers.StringLookup(vocabulary=vocabulary, num_oov_indices=1)
            if is_text
            else keras.layers.IntegerLookup(vocabulary=vocabulary, num_oov_indices=1, oov_token=MISSING_INT)
        )

    def call(self, raw: tf.Tensor) -> tf.Tensor:
        return self.lookup(raw)[:, tf.newaxis]


class HashOp(keras.layers.Layer):
    """Hash bin as `(batch, 1)` int64."""

    def __init__(self, *, num_bins: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hashing = keras.layers.Hashing(num_bins=num_bins)

    def call(self, raw: tf.Tensor) -> tf.Tensor:
        text = raw if raw.dtype == tf.string else tf.strings.as_string(raw)
        return tf.cast(self.hashing(text), tf.int64)[:, tf.newaxis]


class TextOp(keras.layers.Layer):
    """Word ids as `(batch, length)` int64, or TF-IDF weights as `(batch, vocabulary + 1)` float32."""

    def __init__(self, *, vocabulary: list[str], output: str, length: int, idf: list[float], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if output == "ids":
            self.vectorize = keras.layers.TextVectorization(vocabulary=vocabulary, output_sequence_length=length)
        else:
            self.vectorize = keras.layers.TextVectorization(
                vocabulary=vocabulary, output_mode="tf_idf", idf_weights=np.asarray(idf, np.float32)
            )

    def call(self, raw: tf.Tensor) -> tf.Tensor:
        return self.vectorize(raw)


class ImageOp(keras.layers.Layer):
    """uint8 images `(batch, height, width, channels)` as float32, scaled, resized and normalised per channel."""

    def __init__(self, *, size: list[int] | None, mean: list[float], std: list[float], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.size, self.mean, self.std = size, np.asarray(mean, np.float32), np.asarray(std, np.float32)

    def call(self, raw: tf.Tensor) -> tf.Tensor:
        x = tf.cast(raw, tf.float32) * (1.0 / 255.0)
        if self.size is not None and tuple(self.size) != tuple(x.shape[1:3]):
            x = tf.image.resize(x, self.size)
        return (x - self.mean) / self.std


OPS: dict[str, type[keras.layers.Layer]] = {
    "normalize": NormalizeOp,
    "bucketize": BucketizeOp,
    "vocabulary": VocabularyOp,
    "hash": HashOp,
    "text": TextOp,
    "image": ImageOp,
}
# What TFLite's and ONNX's plain runtimes can run inside the model file.
CONVERTIBLE_OPS = frozenset({"normalize", "image"})


@dataclass(frozen=True)
class FittedOp:
    """One operation with everything it learned.

    Attributes:
        op: A key of `OPS`.
        input: Raw feature that it reads.
        params: Arguments of the operation's class.
        output: What it gives, as model builders are told.
    """

    op: str
    input: str
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
        return {name: self.layers[name](raw[op.input]) for name, op in self.fitted.items()}

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
        return all(op.op in CONVERTIBLE_OPS for op in self.fitted.values())

    @property
    def raw_inputs(self) -> list[str]:
        """The raw features that are read, sorted."""
        return sorted({op.input for op in self.fitted.values()})

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
            for start in range(0, num_examples, batch_size)
        ]
        return {name: np.concatenate([part[name].numpy() for part in parts]) for name in self.fitted}

    def save(self, directory: Path) -> None:
        """Write `transform.json` and, beside it, what is known of the raw features."""
        write_info(directory, self.info)
        ops = {
            name: {
                "op": op.op,
                "input": op.input,
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
                input=op["input"],
                params=op["params"],
                output=FeatureSpec(**{**op["output"], "shape": tuple(op["output"]["shape"])}),
            )
            for name, op in content["ops"].items()
        }
        return cls(read_info(directory), fitted, content["classes"])


RAW_DTYPES = {"int": tf.int64, "float": tf.float32, "string": tf.string, "uint8": tf.uint8}


def split_missing(raw: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Where a numeric tensor has no value, and the tensor as float32 with 0 there."""
    missing = tf.math.is_nan(raw) if raw.dtype.is_floating else tf.equal(raw, MISSING_INT)
    return missing, tf.where(missing, 0.0, tf.cast(raw, tf.float32))
