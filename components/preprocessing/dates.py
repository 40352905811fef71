"""The operation on dates: parts of ISO 8601 text or of seconds since 1970, by operations that run in the graph.

Source of the calendar: H. Hinnant, "chrono-Compatible Low-Level Date Algorithms"
(https://howardhinnant.github.io/date_algorithms.html), for the years 1 to 9999.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf

from components.transform_config import CYCLES

_FIRST_SECOND, _LAST_SECOND = -62_135_596_800, 253_402_300_799
_DAY = 86_400
_ISO_8601 = (
    r"(\d{4})-?(\d{2})-?(\d{2})"
    r"(?:[T ](\d{2}):?(\d{2})(?::?(\d{2})(?:[.,]\d+)?)?(?: ?(?:[Zz]|([+-])(\d{2}):?(\d{2})?))?)?"
)
_FIELDS = r"\1,\2,\3,\4,\5,\6,\7,\8,\9"


class DateOp(keras.layers.Layer):
    """Parts of dates `(batch,)`: int64 or float32 of seconds, or strings.

    Args:
        parts: Of `transform_config.DatePart`.
        output: `ids`: `(batch, 1)` int64, the last id for missing dates; `number`: `(batch, parts)` float32; `cyclic`:
            `(batch, 2 * parts)` float32, sine and cosine in turn. A missing date has 0 in all of them.
        zone: `utc`, or the parts as `written`.
        since: Seconds since 1970 of the day from which `days_since` counts.
        missing_indicator: Whether a last column says, by 1, where the date is missing.
    """

    def __init__(
        self, *, parts: list[str], output: str, zone: str, since: int, missing_indicator: bool, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.parts, self.output_mode, self.zone, self.since = parts, output, zone, since
        self.missing_indicator = missing_indicator

    def call(self, raw: tf.Tensor) -> tf.Tensor:
        if raw.dtype == tf.string:
            there, seconds = seconds_of_text(raw, as_written=self.zone == "written")
        else:
            there, seconds = seconds_of_numbers(raw)
        values = [self._part(part, seconds) for part in self.parts]
        if self.output_mode == "ids":
            return tf.where(there, values[0], CYCLES[self.parts[0]])[:, tf.newaxis]
        columns = []
        for part, value in zip(self.parts, values, strict=True):
            if self.output_mode == "number":
                columns.append(tf.cast(value, tf.float32))
            else:
                angle = tf.cast(value, tf.float32) * (2 * math.pi / CYCLES[part])
                columns += [tf.sin(angle), tf.cos(angle)]
        columns = [tf.where(there, column, 0.0) for column in columns]
        if self.missing_indicator:
            columns.append(tf.cast(~there, tf.float32))
        return tf.stack(columns, axis=1)

    def _part(self, part: str, seconds: tf.Tensor) -> tf.Tensor:
        """A part, int64; counted from 0 unless it is to be a number; `days_since` float64."""
        day, second = seconds // _DAY, seconds % _DAY
        if part == "days_since":
            return tf.cast(seconds - self.since, tf.float64) / _DAY
        if part == "weekday":
            return (day + 3) % 7  # 1970 began on a Thursday
        if part in ("hour", "minute"):
            return second // 3600 if part == "hour" else second % 3600 // 60
        year, month, day_of_month = date_of_day(day)
        if part == "year":
            return year
        first = {
            "month": month,
            "day": day_of_month,
            "day_of_year": day - day_of_date(year, tf.ones_like(year), tf.ones_like(year)) + 1,
        }[part]
        return first if self.output_mode == "number" else first - 1


def seconds_of_numbers(raw: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Which numbers are seconds in the years 1 to 9999, and these as int64, elsewhere 0."""
    # As a limit of float32 the last second would be rounded up.
    last = _LAST_SECOND if raw.dtype.is_integer else _LAST_SECOND - _DAY
    there = (raw >= _FIRST_SECOND) & (raw <= last)
    whole = raw if raw.dtype.is_integer else tf.floor(raw)
    return there, tf.cast(tf.where(there, whole, tf.zeros_like(whole)), tf.int64)


def seconds_of_text(texts: tf.Tensor, *, as_written: bool) -> tuple[tf.Tensor, tf.Tensor]:
    """Which texts are dates that exist, and their seconds since 1970 as int64, elsewhere 0.

    Taken are `2024-02-29`, with `T` or a space `10:11`, `10:11:12`, `10:11:12.345`, with `Z`, `+05:30`, `+0530` or `+05`
    behind; also without the hyphens and colons. A time without a zone is UTC.
    """
    there = tf.strings.regex_full_match(texts, _ISO_8601)
    fields = tf.strings.regex_replace(tf.where(there, texts, "1970-01-01"), f"^{_ISO_8601}$", _FIELDS)
    fields = tf.strings.split(fields, ",").to_tensor("", shape=[None, 9])
    year, month, day, hour, minute, second, sign, hours_off, minutes_off = tf.unstack(fields, axis=1)
    year, month, day, hour, minute, second, hours_off, minutes_off = (
        tf.strings.to_number(tf.where(tf.equal(field, ""), "0", field), tf.int64)
        for field in (year, month, day, hour, minute, second, hours_off, minutes_off)
    )
    num_day = day_of_date(year, month, day)
    # A day that the month does not have comes back as one of the next.
    exists = tf.reduce_all(tf.equal(tf.stack(date_of_day(num_day)), tf.stack([year, month, day])), axis=0)
    in_range = (hour < 24) & (minute < 60) & (second < 60) & (hours_off < 24) & (minutes_off < 60)
    seconds = num_day * _DAY + hour * 3600 + minute * 60 + second
    if not as_written:
        offset = hours_off * 3600 + minutes_off * 60
        seconds -= tf.where(tf.equal(sign, "-"), -offset, offset)
    within, seconds = seconds_of_numbers(seconds)
    there &= exists & in_range & within
    return there, tf.where(there, seconds, 0)


def day_of_date(year: tf.Tensor, month: tf.Tensor, day: tf.Tensor) -> tf.Tensor:
    """Days since 1970-01-01, int64."""
    year -= tf.cast(month <= 2, tf.int64)
    era, year_of_era = year // 400, year % 400
    day_of_year = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
    return era * 146_097 + year_of_era * 365 + year_of_era // 4 - year_of_era // 100 + day_of_year - 719_468


def date_of_day(day: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Year, month and day of the month of days since 1970-01-01; int64."""
    era, day_of_era = (day + 719_468) // 146_097, (day + 719_468) % 146_097
    year_of_era = (day_of_era - day_of_era // 1460 + day_of_era // 36_524 - day_of_era // 146_096) // 365
    day_of_year = day_of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    shifted = (5 * day_of_year + 2) // 153
    month = (shifted + 2) % 12 + 1
    year = year_of_era + era * 400 + tf.cast(month <= 2, tf.int64)
    return year, month, day_of_year - (153 * shifted + 2) // 5 + 1
