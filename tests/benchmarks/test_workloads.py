"""Every contender gets the same data, and weights whose logits are compared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.training import workloads
from benchmarks.training.workloads import NUM_BATCHES, WORKLOADS


@pytest.mark.parametrize("name", WORKLOADS)
def test_data_fit_the_features_and_repeat(name: str) -> None:
    workload = WORKLOADS[name]
    x, y = workloads.make_data(workload)
    assert set(x) == set(workload.features)
    for feature, spec in workload.features.items():
        assert x[feature].shape == (NUM_BATCHES, workload.batch_size, *spec.shape)
        assert x[feature].dtype == spec.dtype
        if spec.num_categories is not None:
            assert x[feature].min() >= 0 and x[feature].max() < spec.num_categories
        np.testing.assert_array_equal(x[feature], workloads.make_data(workload)[0][feature])
    assert y.shape[:2] == (NUM_BATCHES, workload.batch_size)
    assert len(np.unique(y)) == workload.output.num_classes


def test_sequences_are_padded_behind_their_tokens_and_never_empty() -> None:
    ids = workloads.make_data(WORKLOADS["transformer"])[0]["text"].reshape(-1, 128)
    lengths = (ids != 0).sum(axis=1)
    assert lengths.min() >= 64 and lengths.max() == 128
    np.testing.assert_array_equal(ids != 0, np.arange(128) < lengths[:, None])


def test_batches_come_again_in_their_order() -> None:
    data = workloads.make_data(WORKLOADS["mlp"])
    batches = workloads.endless(data)
    labels = [next(batches)[1] for _ in range(NUM_BATCHES + 1)]
    np.testing.assert_array_equal(labels[NUM_BATCHES], labels[0])
    assert not np.array_equal(labels[1], labels[0])


@pytest.mark.parametrize(("name", "expected"), [("resnet", 272_282), ("transformer", 1_438_216), ("mlp", 100_305)])
def test_parameters(name: str, expected: int) -> None:
    assert workloads.num_parameters(workloads.keras_model(WORKLOADS[name])) == expected


def test_logits_are_compared_from_the_same_weights(tmp_path: Path) -> None:
    workload, file = WORKLOADS["mlp"], tmp_path / "reference.npz"
    data = workloads.make_data(workload)
    first, second = workloads.keras_model(workload), workloads.keras_model(workload)
    assert workloads.check_keras(first, data, file) == 0.0
    weights, logits = workloads.read_reference(file)
    assert logits.shape == (workloads.NUM_CHECKED, 1)
    assert all(value.any() for value in weights.values()), "what is zero hides differences"
    second.set_weights([np.ones_like(w) for w in second.get_weights()])
    assert workloads.check_keras(second, data, file) < 1e-5
    np.savez(file, **weights, **{workloads._LOGITS: logits + np.float32(0.5)})
    assert workloads.check_keras(second, data, file) == pytest.approx(0.5, abs=1e-5)
