"""How rows are divided into train, validation and test, and how it is checked that the parts are apart (`data.split`)."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from components.section import Count, Fraction, Section, refuse_unread


def read_time(text: str) -> datetime:
    """A date or time in ISO 8601; a date is its first instant.

    Raises:
        ValueError: it is none.
    """
    try:
        # Python 3.10 knows no Z.
        return datetime.fromisoformat(f"{text[:-1]}+00:00" if text.endswith(("Z", "z")) else text)
    except ValueError as error:
        raise ValueError(f"must be a number, or a date or time in ISO 8601 as 2013-11-01, received {text!r}") from error


def _moment(value: int | float | str) -> int | float | str:
    if isinstance(value, str):
        read_time(value)
    return value


Moment = Annotated[int | float | str, AfterValidator(_moment)]

# Validation rows that neither a column nor a path nor a span names are chosen by hash.
_READ_BY = {
    "hash": ("key", "validation", "test"),
    "fold": ("key", "validation", "num_folds", "fold"),
    "column": ("key", "validation", "column"),
    "time": ("validation", "test", "column", "validation_from", "test_from"),
    "path": ("key", "validation", "paths"),
    "span": ("key", "validation", "validation_spans", "test_spans"),
}


class SplitPaths(Section):
    """Files of each split, as globs below `data.path`."""

    train: str | None = Field(None, description="The train rows' files.")
    validation: str | None = Field(None, description="Without it, a share of the train rows is taken by hash.")
    test: str | None = Field(None, description="The test rows' files.")


class SplitConfig(Section):
    """How rows are divided into train, validation and test."""

    method: Literal["hash", "column", "time", "path", "span", "fold"] = Field(
        "hash",
        description="hash: by a stable hash of the row or of `key`; column: `column` says it; time: by what `column` says "
        "of when it was; path: by the file a row lies in; span: the newest spans of data.window are test; fold: one of "
        "`num_folds` by hash is test.",
    )
    key: list[str] = Field(
        [],
        description="All but time: columns that name an entity, whose rows stay together where a hash decides; empty: "
        "whole row.",
    )
    validation: Fraction = Field(
        0.1,
        description="Share of the rows (hash, time); of the train rows (fold, and the others where nothing names "
        "validation rows).",
    )
    test: Fraction = Field(0.1, description="hash, time: share of the rows.")
    column: str = Field(
        "split",
        description="column: the one whose values are train, validation (or eval, dev, val) and test; time: the one of "
        "dates, times or numbers.",
    )
    validation_from: Moment | None = Field(
        None, description="time: first moment of the validation rows, in place of a share: 2013-10-01 or a number."
    )
    test_from: Moment | None = Field(None, description="time: first moment of the test rows, in place of a share.")
    paths: SplitPaths = Field(SplitPaths(), description="path: globs below data.path.")
    validation_spans: Annotated[int, Field(ge=0)] = Field(
        0, description="span: spans before those of test whose rows are validation; 0: a share of the rest, by hash."
    )
    test_spans: Count = Field(1, description="span: newest spans whose rows are test.")
    num_folds: Annotated[int, Field(ge=2)] = Field(5, description="fold: how many; each row is test in one of them.")
    fold: Annotated[int, Field(ge=0)] = Field(0, description="fold: the one that is test, from 0.")

    @model_validator(mode="after")
    def _leaves_rows_to_train_on(self) -> SplitConfig:
        by_share = "test" in self._read() and self.validation + self.test >= 1
        if by_share or ("validation" in self._read() and self.validation >= 1):
            raise ValueError("validation + test must be below 1, or no rows are left to train on")
        return self

    @model_validator(mode="after")
    def _options_have_a_reader(self) -> SplitConfig:
        unread = [name for name in type(self).model_fields if name not in {"method", *self._read()}]
        refuse_unread(self, unread, f"method: {self.method}")
        return self

    @model_validator(mode="after")
    def _fold_exists(self) -> SplitConfig:
        if self.fold >= self.num_folds:
            raise ValueError(f"fold must be below num_folds, {self.num_folds}, received {self.fold}")
        return self

    @model_validator(mode="after")
    def _paths_are_there(self) -> SplitConfig:
        if self.method == "path" and not (self.paths.train and self.paths.test):
            raise ValueError("method: path needs paths.train and paths.test, as in {train: 'train/*', test: 'test/*'}")
        return self

    @model_validator(mode="after")
    def _cut_offs_ascend(self) -> SplitConfig:
        if self.validation_from is None or self.test_from is None:
            return self
        first, second = (read_time(v) if isinstance(v, str) else v for v in (self.validation_from, self.test_from))
        try:
            ascends = first < second  # type: ignore[operator]
        except TypeError as error:
            raise ValueError(
                "validation_from and test_from must both be numbers, or times both with a zone or none"
            ) from error
        if not ascends:
            raise ValueError(f"validation_from {self.validation_from} must be before test_from {self.test_from}")
        return self

    def _read(self) -> set[str]:
        """The options that something reads."""
        replaced = {
            "validation": self.validation_from is not None
            or self.paths.validation is not None
            or self.validation_spans > 0,
            "test": self.test_from is not None,
        }
        return {name for name in _READ_BY[self.method] if not replaced.get(name)}


class LeakageConfig(Section):
    """What is in more than one split: the same entity, or an exact duplicate row (`validate` tells of it)."""

    check: bool = Field(True, description="Whether to look.")
    key: list[str] = Field([], description="Columns that name an entity; default: those of data.split.key.")
