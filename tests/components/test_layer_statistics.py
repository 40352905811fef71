from __future__ import annotations

import json
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

from components.train.layer_statistics import NUM_BINS, LayerStatistics, measure, measure_weights, write_summaries


class Split(layers.Layer):
    """Gives a dictionary of numbers and truth values, and a second output."""

    def call(self, inputs: Any) -> Any:
        return {"signs": inputs > 0, "double": 2 * inputs}, inputs


class Net(keras.Model):
    """Dense with known weights, then ReLU twice; and moving statistics that training would change."""

    def __init__(self) -> None:
        super().__init__()
        self.split, self.norm = Split(name="split"), layers.BatchNormalization(name="norm")
        self.dense = layers.Dense(
            2, name="dense", kernel_initializer="ones", bias_initializer=lambda *_, **__: [0.0, -3.0]
        )
        self.relu = layers.ReLU(name="relu")

    def call(self, inputs: Any) -> Any:
        self.norm(inputs)
        return self.relu(self.relu(self.dense(self.split(inputs)[1])) - 1)


X = np.array([[1.0, 2.0], [-1.0, 3.0], [2.0, 2.0]], np.float32)


@pytest.fixture(scope="module")
def model() -> keras.Model:
    net = Net()
    net(X)
    return net


def test_by_hand():
    """Of 1, 2, 3, 0, 0 and what is not finite."""
    actual = LayerStatistics.of(np.array([[1, 2, 3, 0], [0, np.nan, np.inf, -np.inf]], np.float16))
    assert (actual.count, actual.mean, actual.min, actual.max) == (8, 1.2, 0.0, 3.0)
    assert actual.std == pytest.approx(np.sqrt((0.04 + 0.64 + 3.24 + 2 * 1.44) / 5))
    assert (actual.zero_share, actual.non_finite_share) == (2 / 8, 3 / 8)
    np.testing.assert_allclose(actual.histogram_edges, np.arange(31) / 10)
    counts = np.zeros(NUM_BINS)
    counts[[0, 10, 20, 29]] = [2, 1, 1, 1]
    np.testing.assert_array_equal(actual.histogram_counts, counts)


def test_numbers_that_are_all_the_same():
    actual = LayerStatistics.of([7, 7, 7])
    assert (actual.mean, actual.std, actual.min, actual.max) == (7, 0, 7, 7)
    assert (actual.histogram_edges[0], actual.histogram_edges[-1]) == (6.5, 7.5)
    assert (actual.histogram_counts[15], sum(actual.histogram_counts)) == (3, 3)


def test_the_largest_floats():
    """Their difference is no float32."""
    largest = float(np.finfo(np.float32).max)
    actual = LayerStatistics.of(np.array([-largest, largest], np.float32))
    assert (actual.mean, actual.std) == (0, largest)
    assert (actual.histogram_counts[0], actual.histogram_counts[-1]) == (1, 1)


@pytest.mark.parametrize(("values", "share"), [([np.nan, np.inf], 1.0), ([], 0.0)])
def test_nothing_finite(values, share):
    actual = LayerStatistics.of(np.array(values, np.float32))
    assert actual == LayerStatistics(len(values), None, None, None, None, 0.0, share, (), ())


def test_json():
    actual = LayerStatistics.of([0.0, 30.0])
    assert json.loads(json.dumps(actual.as_dict(), allow_nan=False)) == {
        "count": 2,
        "mean": 15.0,
        "std": 15.0,
        "min": 0.0,
        "max": 30.0,
        "zero_share": 0.5,
        "non_finite_share": 0.0,
        "histogram_edges": [float(edge) for edge in range(31)],
        "histogram_counts": [1, *[0] * 28, 1],
    }


def test_outputs_of_layers(model):
    """Sums 3, 2, 4; minus 0 and 3: (3, 0), (2, -1), (4, 1); after the first ReLU (3, 0), (2, 0), (4, 1)."""
    before = [np.array(variable) for variable in model.variables]
    statistics = measure(model, ["dense", "relu", "split"], X)
    assert list(statistics) == ["split[0][double]", "split[1]", "dense", "relu", "relu:2"]
    assert (statistics["dense"].mean, statistics["dense"].min, statistics["dense"].max) == (1.5, -1, 4)
    assert (statistics["relu"].zero_share, statistics["relu:2"].zero_share) == (2 / 6, 3 / 6)
    assert statistics["split[0][double]"].max == 6
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)


def test_outputs_of_a_graph_of_named_features():
    inputs = {name: keras.Input((1,), name=name) for name in ("a", "b")}
    both = layers.Concatenate(name="both")(list(inputs.values()))
    model = keras.Model(inputs, layers.Dropout(0.9, name="drop")(both))
    statistics = measure(model, ["*"], {"a": np.array([[1.0], [2.0]]), "b": np.array([[3.0], [np.nan]])})
    assert [(name, each.mean, each.non_finite_share) for name, each in statistics.items()] == [
        ("both", 2.0, 0.25),
        ("drop", 2.0, 0.25),
    ]


def test_no_such_layer(model):
    with pytest.raises(ValueError, match=r"no layer of model 'net[_0-9]*' matches 'dens': did you mean 'dense'"):
        measure(model, ["dens"], X)


def test_weights(model):
    statistics = measure_weights(model, ["dense", "relu"])
    kernel, bias = (
        next(each for path, each in statistics.items() if path.endswith(f"dense/{n}")) for n in ("kernel", "bias")
    )
    assert len(statistics) == 2
    assert (kernel.count, kernel.mean, kernel.std) == (4, 1, 0)
    assert (bias.count, bias.min, bias.zero_share) == (2, -3, 0.5)


def test_summaries(tmp_path):
    """TensorBoard reads the same histogram as tf.summary.histogram writes of the numbers."""
    values = np.random.default_rng(0).normal(size=1000)
    dead = np.full(3, np.nan)
    writer = tf.summary.create_file_writer(str(tmp_path))
    with writer.as_default():
        write_summaries({"dense": LayerStatistics.of(values), "dead": LayerStatistics.of(dead)}, 7)
        tf.summary.histogram("reference", values, step=7)
    writer.close()
    events = EventAccumulator(str(tmp_path), size_guidance={"tensors": 0}).Reload()
    tags = {tag: events.Tensors(tag)[0] for tag in events.Tags()["tensors"]}
    read = {tag: tensor_util.make_ndarray(event.tensor_proto) for tag, event in tags.items()}
    np.testing.assert_allclose(read["layers/dense"], read["reference"], atol=1e-12)
    assert events.SummaryMetadata("layers/dense") == events.SummaryMetadata("reference")
    assert {event.step for event in tags.values()} == {7}
    assert read["layers/dense/std"] == pytest.approx(values.std())
    assert {tag for tag in tags if "dead" in tag} == {"layers/dead/zero_share", "layers/dead/non_finite_share"}
    assert read["layers/dead/non_finite_share"] == 1
