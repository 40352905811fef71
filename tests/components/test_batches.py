"""The batches of a run: every example once, the same order after a stop, a part for each worker."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from components.errors import ConfigError, DataError
from components.train.batches import Batches, DatasetBatches, TrainBatches
from components.train.cluster import rows_of


def make_batches(num_examples: int = 50, **settings: Any) -> TrainBatches:
    rows = np.arange(num_examples)
    return TrainBatches({"x": rows}, rows * 2, rows.astype(np.float32) + 1, **{"batch_size": 8, "seed": 0, **settings})


def batches_from(batches: Batches, step: int, number: int) -> list[list[int]]:
    """The features of some batches."""
    taken = itertools.islice(batches.from_step(step).as_numpy_iterator(), number)
    return [(batch[0]["x"] if isinstance(batch, tuple) else batch).tolist() for batch in taken]


def epoch_of(batches: TrainBatches, epoch: int) -> list[int]:
    steps = batches.steps_per_epoch
    return [row for batch in batches_from(batches, epoch * steps, steps) for row in batch]


def test_features_labels_and_weights_stay_together() -> None:
    for features, labels, weights in make_batches().from_step(0).take(9).as_numpy_iterator():
        np.testing.assert_array_equal(labels, features["x"] * 2)
        np.testing.assert_array_equal(weights, features["x"] + 1)


def test_an_epoch_with_whole_batches_visits_no_example_twice() -> None:
    batches = make_batches()
    assert batches.steps_per_epoch == 6
    assert batches.from_step(0).element_spec[0]["x"].shape == (8,)
    rows = epoch_of(batches, 0)
    assert len(rows) == len(set(rows)) == 48
    assert rows != sorted(rows)


@pytest.mark.parametrize(("num_examples", "sizes"), [(50, [8] * 6 + [2]), (48, [8] * 6), (49, [8] * 6 + [1])])
def test_an_epoch_with_the_last_batch_visits_every_example_once(num_examples: int, sizes: list[int]) -> None:
    batches = make_batches(num_examples, last_batch="keep")
    assert batches.steps_per_epoch == len(sizes)
    for epoch in range(3):
        assert sorted(epoch_of(batches, epoch)) == list(range(num_examples))
    two_epochs = batches_from(batches, 0, 2 * len(sizes))
    assert [len(batch) for batch in two_epochs] == 2 * sizes


def test_examples_left_over_differ_from_epoch_to_epoch() -> None:
    left = [set(range(50)) - set(epoch_of(make_batches(), epoch)) for epoch in range(8)]
    assert len({frozenset(rows) for rows in left}) > 1


def test_the_order_follows_from_seed_and_epoch_alone() -> None:
    assert epoch_of(make_batches(), 3) == epoch_of(make_batches(), 3)
    assert epoch_of(make_batches(), 3) != epoch_of(make_batches(), 4)
    assert epoch_of(make_batches(seed=0), 3) != epoch_of(make_batches(seed=1), 3)


@pytest.mark.parametrize("last_batch", ["drop", "keep"])
def test_a_run_goes_on_at_any_step_as_if_it_had_not_stopped(last_batch: str) -> None:
    whole = batches_from(make_batches(last_batch=last_batch), 0, 20)
    for step in (1, 6, 7, 13):
        assert batches_from(make_batches(last_batch=last_batch), step, 20 - step) == whole[step:]


@pytest.mark.parametrize("num_examples", [50, 49])
@pytest.mark.parametrize("last_batch", ["drop", "keep"])
def test_workers_share_each_batch_without_loss_or_repetition(last_batch: str, num_examples: int) -> None:
    """In parts of 3, 3 and 2 rows; of a last batch of 2 or 1 rows some get none."""
    settings: dict[str, Any] = {"num_examples": num_examples, "last_batch": last_batch}
    whole = make_batches(**settings)
    workers = [
        make_batches(**settings, part_of=lambda num_rows, index=index: rows_of(num_rows, 3, index))
        for index in range(3)
    ]
    steps = whole.steps_per_epoch
    parts = [batches_from(worker, 0, 2 * steps) for worker in workers]
    assert [len(worker[0]) for worker in parts] == [3, 3, 2]
    together = [list(itertools.chain(*of_step)) for of_step in zip(*parts, strict=True)]
    assert together == batches_from(whole, 0, 2 * steps)


def numbers(size: int = 10) -> tf.data.Dataset:
    return tf.data.Dataset.range(size)


def test_a_dataset_is_repeated_in_epochs_with_the_batches_that_it_has() -> None:
    batches = DatasetBatches(numbers().batch(4))
    assert batches.steps_per_epoch == 3
    assert batches_from(batches, 0, 6) == 2 * [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_shuffled_dataset_goes_on_in_its_order() -> None:
    def shuffled() -> DatasetBatches:
        return DatasetBatches(numbers(100).shuffle(100, seed=3).batch(4))

    whole = batches_from(shuffled(), 0, 60)
    assert batches_from(shuffled(), 33, 27) == whole[33:]
    for epoch in (whole[:25], whole[25:50]):
        assert sorted(itertools.chain(*epoch)) == list(range(100))
    assert whole[:25] != whole[25:50]


def test_a_dataset_of_unknown_length_is_counted() -> None:
    batches = DatasetBatches(numbers().batch(3).filter(lambda batch: batch[0] > 0))
    assert batches.steps_per_epoch == 3


def test_an_epoch_may_be_a_part_of_a_dataset_or_go_beyond_it() -> None:
    assert DatasetBatches(numbers().batch(2), 3).steps_per_epoch == 3
    assert DatasetBatches(numbers().batch(2).repeat(), 4).steps_per_epoch == 4
    longer = DatasetBatches(numbers(4).batch(2), 3)
    assert batches_from(longer, 0, 3) == [[0, 1], [2, 3], [0, 1]]


def test_what_makes_no_epoch_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"has no end.*steps_per_epoch=\.\.\."):
        DatasetBatches(numbers().batch(2).repeat())
    with pytest.raises(DataError, match="dataset to train on is empty"):
        DatasetBatches(numbers(0).batch(2))
