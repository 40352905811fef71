from __future__ import annotations

import time

import numpy as np
import pyarrow as pa
import pytest

from components.config import SplitConfig
from components.errors import DataError
from components.ingest.splits import TEST, TRAIN, VALIDATION, assign, row_shares
from components.split_config import SplitPaths


def _people(count: int) -> pa.RecordBatch:
    rng = np.random.default_rng(0)
    return pa.RecordBatch.from_pydict(
        {
            "person": pa.array([f"p{n}" for n in rng.integers(0, count // 4, count)]),
            "age": pa.array(rng.integers(0, 10**9, count)),
            "height": pa.array(rng.normal(size=count)),
        }
    )


def test_shares_are_about_as_asked():
    assigned = assign(_people(20_000), SplitConfig(validation=0.2, test=0.1), seed=0)
    assert np.bincount(assigned) / 20_000 == pytest.approx([0.7, 0.2, 0.1], abs=0.01)


def test_rows_of_a_key_stay_together_and_whole_rows_do_not():
    batch = _people(2000)
    persons = np.array(batch.column("person").to_pylist())
    by_key = assign(batch, SplitConfig(key=["person"]), seed=0)
    by_row = assign(batch, SplitConfig(), seed=0)
    assert all(len(set(by_key[persons == person])) == 1 for person in set(persons))
    assert any(len(set(by_row[persons == person])) > 1 for person in set(persons))


def test_a_row_keeps_its_split_as_data_grows_and_columns_move():
    batch = _people(1000)
    whole = row_shares(batch, [], seed=3)
    np.testing.assert_array_equal(row_shares(batch.slice(700), [], seed=3), whole[700:])
    np.testing.assert_array_equal(row_shares(batch.select(["height", "age", "person"]), [], seed=3), whole)
    assert (row_shares(batch, [], seed=4) != whole).all()


def test_the_hash_is_fixed_for_good():
    batch = pa.RecordBatch.from_pydict({"a": [1, None], "b": ["x", "y"]})
    assert row_shares(batch, [], seed=0).tolist() == pytest.approx([0.3438655410753261, 0.2561174105657821], abs=1e-15)


def test_an_integer_and_the_same_float_are_one_value():
    ints, floats = ({"a": pa.array([1, 2, None], kind)} for kind in (pa.int64(), pa.float64()))
    shares = [row_shares(pa.RecordBatch.from_pydict(columns), [], seed=0).tolist() for columns in (ints, floats)]
    assert shares[0] == shares[1]


def test_missing_is_not_the_empty_string_and_values_do_not_run_together():
    batch = pa.RecordBatch.from_pydict({"a": ["", None, "xy", "x"], "b": ["", "", "z", "yz"]})
    assert len(set(row_shares(batch, [], seed=0).tolist())) == 4


def test_images_are_hashed_by_their_bytes():
    images = np.zeros((3, 2, 2, 1), np.uint8)
    images[1, 0, 0, 0] = 1
    batch = pa.RecordBatch.from_pydict({"image": pa.FixedShapeTensorArray.from_numpy_ndarray(images)})
    shares = row_shares(batch, [], seed=0)
    assert shares[0] == shares[2] != shares[1]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([{"a": 1}, {"a": 2}, {"a": 1}, None]),
        pa.array([[1, 2], [3], [1, 2], None]),
        pa.array([(1, 2, 3), (1, 2, 4), (1, 2, 3), None], pa.month_day_nano_interval()),
        pa.array([b"\xff", b"\xfe", b"\xff", None]).dictionary_encode(),
        pa.array([b"\xff", b"\xfe", b"\xff", None], pa.binary(1)),
        pa.array([b"\xff", b"\xfe", b"\xff", None], pa.binary_view()),
    ],
    ids=lambda column: str(column.type),
)
def test_columns_that_arrow_has_no_text_for_are_hashed_by_their_values(column):
    shares = row_shares(pa.RecordBatch.from_pydict({"x": column}), [], seed=0)
    assert shares[0] == shares[2]
    assert len(set(shares.tolist())) == 3


def test_a_hundred_thousand_rows_take_seconds_at_most():
    batch = _people(100_000)
    start = time.perf_counter()
    assign(batch, SplitConfig(), seed=0)
    assert time.perf_counter() - start < 5


def test_each_row_is_test_in_one_fold_and_validation_by_its_hash_alone():
    batch = _people(20_000)
    folds = [assign(batch, SplitConfig(method="fold", num_folds=4, fold=k, validation=0.25), seed=0) for k in range(4)]
    np.testing.assert_array_equal(sum((each == TEST).astype(int) for each in folds), np.ones(20_000))
    for each in folds:
        assert np.bincount(each) / 20_000 == pytest.approx([0.5625, 0.1875, 0.25], abs=0.01)
    # Validation rows are the same in all folds but the one that tests them.
    number_of_times = sum((each == VALIDATION).astype(int) for each in folds)
    assert set(number_of_times.tolist()) == {0, 3}
    np.testing.assert_array_equal(
        assign(batch.slice(700), SplitConfig(method="fold", num_folds=4, fold=1), 0),
        assign(batch, SplitConfig(method="fold", num_folds=4, fold=1), 0)[700:],
    )


def test_the_folds_of_rows_are_fixed_for_good():
    batch = pa.RecordBatch.from_pydict({"a": list(range(12))})
    of_fold = [assign(batch, SplitConfig(method="fold", num_folds=3, fold=k), seed=0) == TEST for k in range(3)]
    assert np.argmax(of_fold, axis=0).tolist() == np.floor(row_shares(batch, [], seed=0) * 3).astype(int).tolist()


def test_entities_stay_in_one_fold():
    batch = _people(2000)
    persons = np.array(batch.column("person").to_pylist())
    folds = assign(batch, SplitConfig(method="fold", key=["person"]), seed=0)
    assert all(len(set(folds[persons == person])) == 1 for person in set(persons))


@pytest.mark.parametrize(
    ("config", "carved"),
    [
        (SplitConfig(method="path", paths=SplitPaths(train="a", test="b"), validation=0.2), 0.2),
        (SplitConfig(method="path", paths=SplitPaths(train="a", validation="c", test="b")), 0.0),
        (SplitConfig(method="span", validation=0.3), 0.3),
        (SplitConfig(method="span", validation_spans=2), 0.0),
    ],
)
def test_rows_belong_to_where_their_file_lies_and_validation_is_carved_if_nothing_names_it(config, carved):
    batch = _people(20_000)
    assert set(assign(batch, config, 0, "test").tolist()) == {TEST}
    assert set(assign(batch, config, 0, "validation").tolist()) == {VALIDATION}
    of_train = np.bincount(assign(batch, config, 0, "train"), minlength=3) / 20_000
    assert of_train == pytest.approx([1 - carved, carved, 0], abs=0.01)


@pytest.mark.parametrize("name", ["validation", "valid", "val", "eval", "dev", " Dev "])
def test_names_of_the_split_column(name):
    batch = pa.RecordBatch.from_pydict({"part": ["train", name, "test", "train"]})
    config = SplitConfig(method="column", column="part")
    assert assign(batch, config, seed=0).tolist() == [TRAIN, VALIDATION, TEST, TRAIN]


@pytest.mark.parametrize(("values", "shown"), [(["train", "holdout"], "'holdout'"), (["train", None], "None")])
def test_an_unknown_split_name_is_refused(values, shown):
    batch = pa.RecordBatch.from_pydict({"part": pa.array(values)})
    with pytest.raises(DataError, match=f"column 'part' holds {shown}, which names no split"):
        assign(batch, SplitConfig(method="column", column="part"), seed=0)
