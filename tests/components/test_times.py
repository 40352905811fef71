"""Splits by time, against sorting in numpy and Python's own datetimes."""

from __future__ import annotations

from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest

from components.config import SplitConfig
from components.errors import DataError
from components.ingest.splits import TEST, TRAIN, VALIDATION
from components.ingest.times import TimeSplit

NAIVE = [
    datetime(2013, 10, 31, 23, 59, 59, 999999),
    datetime(2013, 11, 1),
    datetime(2013, 12, 1),
    datetime(2013, 12, 2),
]
UTC = [each.replace(tzinfo=timezone.utc) for each in NAIVE]


def batch_of(values: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"at": values})


def splits_of(values: Any, **settings: Any) -> list[int]:
    split = TimeSplit(SplitConfig(method="time", column="at", **settings))
    if split.needs_fit:
        split.fit([batch_of(values)])
    return split.assign(batch_of(values)).tolist()


@pytest.mark.parametrize(
    "values",
    [
        pa.array(NAIVE, pa.timestamp("us")),
        pa.array(NAIVE, pa.timestamp("ns")),
        pa.array([each.isoformat() for each in NAIVE]),
        pa.array([each.isoformat(" ") for each in NAIVE], pa.large_string()),
        pa.array([each.isoformat() for each in NAIVE]).dictionary_encode(),
        pa.array([each.date() for each in NAIVE], pa.date32()),
        pa.array([each.date() for each in NAIVE], pa.date64()),
        pa.array([each.date().isoformat() for each in NAIVE], pa.string_view()),
        pa.array(UTC, pa.timestamp("s", "UTC")),
        pa.array([f"{each.isoformat()}Z" for each in NAIVE]),
    ],
    ids=lambda values: str(values.type),
)
def test_a_row_at_a_cut_off_belongs_to_the_later_split(values: pa.Array) -> None:
    found = splits_of(values, validation_from="2013-11-01", test_from="2013-12-01")
    assert found == [TRAIN, VALIDATION, TEST, TEST]


@pytest.mark.parametrize(
    "values",
    [
        pa.array([9, 10, 20, 21]),
        pa.array([9, 10, 20, 21], pa.uint8()),
        pa.array([9.5, 10.0, 20.0, np.inf]),
        pa.array([Decimal("9.99"), Decimal("10.00"), Decimal("20.00"), Decimal("20.01")]),
    ],
    ids=lambda values: str(values.type),
)
def test_cut_offs_may_be_numbers(values: pa.Array) -> None:
    assert splits_of(values, validation_from=10, test_from=20) == [TRAIN, VALIDATION, TEST, TEST]


def test_whole_numbers_are_told_apart_beyond_those_of_a_float() -> None:
    first = 2**60
    found = splits_of(pa.array([first, first + 1, first + 2]), validation_from=first + 1, test_from=first + 2)
    assert found == [TRAIN, VALIDATION, TEST]


def test_zones_are_heeded() -> None:
    new_york = ZoneInfo("America/New_York")
    late = datetime(2013, 10, 31, 23, 59, tzinfo=new_york)
    times = [late.astimezone(timezone.utc) + timedelta(minutes=minutes) for minutes in (0, 1, 300)]
    in_new_york, in_utc = (pa.array(times, pa.timestamp("us", zone)) for zone in ("America/New_York", "UTC"))
    cut_off = {"validation_from": "2013-10-01", "test_from": "2013-11-01"}
    assert splits_of(in_new_york, **cut_off) == [VALIDATION, TEST, TEST]
    assert splits_of(in_utc, **cut_off) == [TEST, TEST, TEST]
    with_zone = {"validation_from": "2013-10-01T00:00:00Z", "test_from": "2013-11-01T00:00:00-04:00"}
    for values in (in_new_york, in_utc, pa.array([each.astimezone(new_york).isoformat() for each in times])):
        assert splits_of(values, **with_zone) == [VALIDATION, TEST, TEST]


@pytest.mark.parametrize(("validation", "test"), [(0.1, 0.2), (0.3, 0.3), (0.0, 0.5), (0.01, 0.0)])
def test_shares_are_the_last_rows_in_the_order_of_time(validation: float, test: float) -> None:
    days = np.random.default_rng(0).permutation(1000)
    times = [date(2000, 1, 1) + timedelta(days=int(day)) for day in days]
    found = np.array(splits_of(pa.array(times), validation=validation, test=test))
    num_test, num_validation = round(1000 * test), round(1000 * validation)
    expected = np.where(
        days >= 1000 - num_test, TEST, np.where(days >= 1000 - num_test - num_validation, VALIDATION, TRAIN)
    )
    np.testing.assert_array_equal(found, expected)


def test_rows_of_one_time_stay_together_and_the_later_split_gets_them() -> None:
    found = np.array(splits_of(pa.array([1] * 70 + [2] * 20 + [3] * 10), validation=0.05, test=0.05))
    assert [np.unique(part).tolist() for part in np.split(found, [70, 90])] == [[TRAIN], [VALIDATION], [TEST]]


def test_a_share_beside_a_cut_off_is_of_the_rows_before_it() -> None:
    found = splits_of(pa.array(range(100)), validation=0.1, test_from=60)
    assert found == [TRAIN] * 50 + [VALIDATION] * 10 + [TEST] * 40
    found = splits_of(pa.array(range(100)), test=0.1, validation_from=60)
    assert found == [TRAIN] * 60 + [VALIDATION] * 30 + [TEST] * 10


def test_the_cut_offs_that_shares_led_to_are_known() -> None:
    split = TimeSplit(SplitConfig(method="time", column="at", validation=0.25, test=0.25))
    split.fit([batch_of(pa.array(UTC[:2])), batch_of(pa.array(UTC[2:]))])
    assert split.record() == {"test": "2013-12-02T00:00:00+00:00", "validation": "2013-12-01T00:00:00+00:00"}
    split = TimeSplit(SplitConfig(method="time", column="at", test_from=7, validation=0.0))
    split.fit([batch_of(pa.array([1, 7, 9]))])
    assert split.record() == {"test": 7, "validation": None}


CUT_OFFS = {"validation_from": "2013-10-01", "test_from": "2013-11-01"}


@pytest.mark.parametrize(
    ("values", "settings", "message"),
    [
        (
            pa.array([*NAIVE, None]),
            CUT_OFFS,
            r"1 of the 5 rows of a batch have no time in column 'at', and so no split",
        ),
        (pa.array(["2013-10-01", ""]), CUT_OFFS, "1 of the 2 rows .* have no time"),
        (pa.array([1.0, np.nan, None]), {"validation_from": 1, "test_from": 2}, "2 of the 3 rows .* have no time"),
        (pa.array(["2013-10-01", "soon"]), CUT_OFFS, "column 'at' holds 'soon', which is no date or time in ISO 8601"),
        (pa.array(["2013-10-01", "2013-10-01T00:00:00Z"]), CUT_OFFS, "times with a zone and times without"),
        (pa.array([True, False]), CUT_OFFS, "column 'at' is bool, by which no time can be told"),
        (pa.array([2**64 - 1], pa.uint64()), {"validation_from": 1, "test_from": 2}, "column 'at': Integer value"),
        (pa.array([1, 2]), CUT_OFFS, r"validation_from: column 'at' holds numbers, received '2013-10-01'"),
        (
            pa.array(NAIVE),
            {"validation_from": 1, "test_from": 2},
            "validation_from: column 'at' holds times, received 1",
        ),
        (
            pa.array(NAIVE),
            {"validation_from": "2013-10-01T00:00:00Z", "test_from": "2013-11-01T00:00:00Z"},
            "validation_from: .* has a zone, the times of column 'at' have none",
        ),
    ],
    ids=str,
)
def test_times_that_cannot_be_compared(values: pa.Array, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        splits_of(values, **settings)


def test_a_column_that_changes_its_mind_is_refused() -> None:
    split = TimeSplit(SplitConfig(method="time", column="at", **CUT_OFFS))
    split.assign(batch_of(["2013-10-01T00:00:00"]))
    with pytest.raises(DataError, match="column 'at' holds times first, times with a zone later"):
        split.assign(batch_of(["2013-10-01T00:00:00Z"]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"test_from": "soon"}, "must be a number, or a date or time in ISO 8601 as 2013-11-01, received 'soon'"),
        ({"validation_from": "2013-11-01", "test_from": "2013-11-01"}, "must be before test_from 2013-11-01"),
        ({"validation_from": 3, "test_from": "2013-11-01"}, "must both be numbers, or times"),
        ({"validation_from": "2013-10-01", "test_from": "2013-11-01T00:00:00Z"}, "must both be numbers, or times"),
        ({"validation": 0.5, "test": 0.5}, "must be below 1"),
    ],
    ids=str,
)
def test_cut_offs_that_make_no_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SplitConfig(method="time", column="at", **settings)
