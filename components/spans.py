"""Spans and versions in `data.path`, with the meaning that they have in TFX's ExampleGen.

    data/{SPAN}/v{VERSION}/*.csv       data/day-{YYYY}-{MM}-{DD}/*.csv       data/{SPAN:4}.parquet

A span is a group of examples, such as a day's; a version is another state of the same span. `{SPAN}` and `{VERSION}` are
whole numbers, of as many digits as a width says; `{YYYY}`, `{MM}` and `{DD}` together are a date and stand in place of
`{SPAN}`: its number is that of its days since 1970-01-01. Read is the newest span (or those of a window) that has files, and
of each the newest version. Source: https://www.tensorflow.org/tfx/guide/examplegen.
"""

from __future__ import annotations

import dataclasses
import datetime
import glob
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Protocol

from components.errors import DataError

if TYPE_CHECKING:
    from components.config import DataConfig

_SPEC = re.compile(r"\{(SPAN|VERSION|YYYY|MM|DD)(?::([^{}]*))?\}", re.IGNORECASE)
_DATE = {"YYYY": 4, "MM": 2, "DD": 2}
_FIRST_DAY = datetime.date(1970, 1, 1).toordinal()
_MOST_TOLD = 5


@dataclass(frozen=True)
class Input:
    """One path to read.

    Attributes:
        path: File, folder or glob, without spans and versions to be found.
        split: What all its rows belong to; None: something else decides.
        span: Its number, days since 1970-01-01 where the path has a date; None: the path has none.
        version: Its number.
    """

    path: str | None
    split: str | None = None
    span: int | None = None
    version: int | None = None

    def record(self) -> dict[str, Any]:
        """What is known, as JSON-able values."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


class Listing(Protocol):
    """What lies where."""

    def names(self, folder: str) -> Iterable[str]:
        """Files and folders in a folder; none if there is no such folder."""

    def files(self, path: str) -> Sequence[str]:
        """The files that a path, folder or glob names."""


def refuse_odd_pattern(
    paths: Mapping[Any, str | None], *, span: int | str | None, window: int | None, allow_gaps: bool
) -> None:
    """Refuse what cannot be meant by the paths of a configuration, and by the spans that it asks for.

    Raises:
        ValueError: saying what to write.
    """
    patterns = [_Pattern(path) for path in paths.values() if path is not None]
    with_span = [pattern for pattern in patterns if pattern.has_span]
    if not with_span:
        given = {"span": span is not None, "window": window is not None, "allow_gaps": allow_gaps}
        for name in (name for name, is_given in given.items() if is_given):
            raise ValueError(f"nothing reads {name}: path has no {{SPAN}} or {{YYYY}}{{MM}}{{DD}}")
        return
    if len(with_span) < len(patterns):
        raise ValueError("the path of one split has a span and that of another has none: write it into all or none")
    if allow_gaps and window is None:
        raise ValueError("nothing reads allow_gaps without window")
    for pattern in with_span:
        pattern.number(span)


def find_inputs(config: DataConfig, listing: Listing) -> list[Input]:
    """What there is to read now, spans in ascending order.

    Args:
        config: Paths, span, window, splits.
        listing: Of the disk or store that `data.path` lies on.

    Raises:
        DataError: no span matches, or not the one or as many as asked for; splits have different spans or share a file.
    """
    chosen = {
        split: [Input(path)] if path is None else _Choice(_Pattern(path), config, listing).inputs()
        for split, path in config.path_patterns.items()
    }
    read = {split: [(each.span, each.version) for each in inputs] for split, inputs in chosen.items()}
    if len({tuple(each) for each in read.values()}) > 1:
        told = "; ".join(f"{split} {', '.join(_told(*each) for each in spans)}" for split, spans in read.items())
        raise DataError(
            f"data.path: the splits would be of different spans ({told}). Complete the newest, or set data.span."
        )
    inputs = [dataclasses.replace(each, split=split) for split, found in chosen.items() for each in found]
    if config.split.method == "path":
        _refuse_shared_files(inputs, listing)
    if config.split.method == "span":
        return list(_newest_for_test(inputs, config.split.validation_spans, config.split.test_spans))
    return inputs


class _Pattern:
    """A path with spans and versions to be found.

    Raises:
        ValueError: it makes no sense.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        specs = [(found[1].upper(), found[2], found[0]) for found in _SPEC.finditer(path)]
        names = [name for name, _, _ in specs]
        self.is_dated = not _DATE.keys().isdisjoint(names)
        self.has_span = self.is_dated or "SPAN" in names
        for name, width, written in specs:
            if not written.startswith(f"{{{name}"):
                raise ValueError(f"path: write {{{name}}} in capitals, received {written}")
            if names.count(name) > 1:
                raise ValueError(f"path: {{{name}}} stands in {path} more than once")
            if width is not None and (name in _DATE or not width.isdecimal() or int(width) < 1):
                widths = "has its own width" if name in _DATE else "takes a number of digits as in {SPAN:4}"
                raise ValueError(f"path: {{{name}}} {widths}, received {written}")
        if self.is_dated and "SPAN" in names:
            raise ValueError(f"path: {path} has both {{SPAN}} and a date; a date is the span. Leave out one")
        if self.is_dated and not set(names) >= _DATE.keys():
            raise ValueError(f"path: a date needs {{YYYY}}, {{MM}} and {{DD}}, received {path}")
        if "VERSION" in names and not self.has_span:
            raise ValueError(f"path: {{VERSION}} is the version of a span, and {path} has no {{SPAN}} and no date")
        if re.search(r"\{(SPAN|VERSION)\}\{", path):
            raise ValueError(f"path: a number that another follows needs a width, as in {{SPAN:4}}, received {path}")
        with_specs = [number for number, part in enumerate(path.split("/")) if _SPEC.search(part)]
        for number, part in enumerate(path.split("/")[: max(with_specs, default=-1) + 1]):
            if "**" in part or (number in with_specs and "[" in part):
                raise ValueError(f"path: up to the last span or version only * and ? stand for others, received {path}")

    def number(self, span: int | str | None) -> int | None:
        """The number of a span as a configuration gives it.

        Raises:
            ValueError: it is a date where the path has numbers, or the other way round.
        """
        if span is None or (isinstance(span, int) and not self.is_dated):
            return span
        try:
            if self.is_dated and isinstance(span, str):
                return datetime.date.fromisoformat(span).toordinal() - _FIRST_DAY
        except ValueError:
            pass
        kind = "a date as 2013-11-01" if self.is_dated else "a number"
        raise ValueError(f"span: {self.path} needs {kind}, received {span!r}")

    def name(self, number: int) -> str:
        """A span as one writes it."""
        return datetime.date.fromordinal(number + _FIRST_DAY).isoformat() if self.is_dated else str(number)

    def matches(self, listing: Listing) -> Iterator[dict[str, str]]:
        """What stands for each span and version, as it is written there."""
        parts = self.path.split("/")
        fixed = next(i for i, part in enumerate(parts) if _SPEC.search(part) or glob.has_magic(part))
        last = max(i for i, part in enumerate(parts) if _SPEC.search(part))
        folder = "/".join(parts[:fixed]) or ("/" if fixed else ".")
        yield from _walk(listing, folder, parts[fixed : last + 1], {})

    def numbers(self, texts: Mapping[str, str]) -> tuple[int, int | None]:
        """Span and version.

        Raises:
            DataError: the date does not exist.
        """
        version = int(texts["VERSION"]) if "VERSION" in texts else None
        if not self.is_dated:
            return int(texts["SPAN"]), version
        year, month, day = (texts[name] for name in _DATE)
        try:
            return datetime.date(int(year), int(month), int(day)).toordinal() - _FIRST_DAY, version
        except ValueError as error:
            raise DataError(
                f"data.path: {self.filled(texts)} has no date: {year}-{month}-{day} does not exist. Rename it."
            ) from error

    def filled(self, texts: Mapping[str, str]) -> str:
        """The path of one span and version."""
        return _SPEC.sub(lambda found: texts[found[1]], self.path)


class _Choice:
    """The spans of one pattern that a configuration asks for."""

    def __init__(self, pattern: _Pattern, config: DataConfig, listing: Listing) -> None:
        self._pattern, self._config, self._listing = pattern, config, listing

    def inputs(self) -> list[Input]:
        if not self._pattern.has_span:
            return [Input(self._pattern.path)]
        there = self._there()
        last = self._pattern.number(self._config.span)
        wanted = [span for span in sorted(there, reverse=True) if last is None or span <= last]
        window = self._config.window or 1
        found: list[Input] = []
        for span in wanted:
            newest = self._newest_version(span, there[span])
            found += [] if newest is None else [newest]
            if len(found) == window or (newest is None and span == last):
                break
        self._check(found, last, sorted(there))
        return found[::-1]

    def _there(self) -> dict[int, dict[int | None, set[str]]]:
        """Span -> version -> paths that stand for them."""
        there: dict[int, dict[int | None, set[str]]] = defaultdict(lambda: defaultdict(set))
        for texts in self._pattern.matches(self._listing):
            span, version = self._pattern.numbers(texts)
            there[span][version].add(self._pattern.filled(texts))
        return there

    def _newest_version(self, span: int, versions: Mapping[int | None, set[str]]) -> Input | None:
        """The newest version that has files."""
        for version in sorted(versions, key=lambda number: -1 if number is None else number, reverse=True):
            paths = sorted(path for path in versions[version] if self._listing.files(path))
            if len(paths) > 1:
                raise DataError(
                    f"data.path: span {self._told(span, version)} is there twice, as {paths[0]} and {paths[1]}. Delete one, "
                    "or give the width of the numbers, as in {SPAN:4}."
                )
            if paths:
                return Input(paths[0], span=span, version=version)
        return None

    def _check(self, found: Sequence[Input], last: int | None, there: Sequence[int]) -> None:
        path, window = self._pattern.path, self._config.window or 1
        spans = [each.span for each in found if each.span is not None]
        if last is not None and (not spans or spans[0] != last):
            raise DataError(
                f"data.span: {path} has no files of span {self._pattern.name(last)}; there {self._list(there)}. "
                "Correct data.span, or put the data there."
            )
        if not spans:
            raise DataError(f"data.path: no file matches {path}; there {self._list(there)}. Correct the path.")
        if len(spans) < window:
            raise DataError(
                f"data.window: {window} spans are asked for, and {path} has {len(spans)} with files"
                f"{'' if last is None else f' up to {self._pattern.name(last)}'}: {self._names(sorted(spans))}. Lower it."
            )
        apart = [(older, newer) for newer, older in itertools.pairwise(spans) if newer - older > 1]
        if apart and not self._config.allow_gaps:
            older, newer = (self._pattern.name(span) for span in apart[0])
            raise DataError(
                f"data.window: {path} has no files of spans between {older} and {newer}. Put them there, or set "
                f"data.allow_gaps: true, which takes the newest {window} that there are."
            )

    def _list(self, there: Sequence[int]) -> str:
        """Which spans there are, in a sentence."""
        if not there:
            return "is none"
        return f"{'is' if len(there) == 1 else 'are'} {self._names(there)}"

    def _names(self, spans: Sequence[int]) -> str:
        told = [self._pattern.name(span) for span in spans[-_MOST_TOLD:]]
        return ("... " if len(spans) > _MOST_TOLD else "") + ", ".join(told)

    def _told(self, span: int, version: int | None) -> str:
        return _told(self._pattern.name(span), version)


def _told(span: Any, version: int | None) -> str:
    return str(span) if version is None else f"{span} version {version}"


def _walk(listing: Listing, folder: str, parts: Sequence[str], texts: dict[str, str]) -> Iterator[dict[str, str]]:
    if not parts:
        yield texts
        return
    head, rest = parts[0], parts[1:]
    if not (_SPEC.search(head) or glob.has_magic(head)):
        yield from _walk(listing, f"{folder.rstrip('/')}/{head}", rest, texts)
        return
    pattern = _regular_expression(head)
    for name in sorted(listing.names(folder)):
        found = re.fullmatch(pattern, name) if _SPEC.search(head) else fnmatchcase(name, head)
        if found:
            groups = found.groupdict() if isinstance(found, re.Match) else {}
            yield from _walk(listing, f"{folder.rstrip('/')}/{name}", rest, {**texts, **groups})


def _regular_expression(part: str) -> str:
    """Of a part of a path; a span or version is a group of its name."""
    expression, end = "", 0
    for found in _SPEC.finditer(part):
        width = _DATE.get(found[1], found[2])
        digits = "[0-9]+" if width is None else f"[0-9]{{{width}}}"
        expression += f"{_escaped(part[end : found.start()])}(?P<{found[1]}>{digits})"
        end = found.end()
    return expression + _escaped(part[end:])


def _escaped(text: str) -> str:
    return "".join({"*": ".*", "?": "."}.get(character, re.escape(character)) for character in text)


def _refuse_shared_files(inputs: Sequence[Input], listing: Listing) -> None:
    owner: dict[str, str | None] = {}
    for each in inputs:
        for file in listing.files(str(each.path)):
            if owner.setdefault(file, each.split) != each.split:
                raise DataError(
                    f"data.split.paths: {file} is in both {owner[file]} and {each.split}. Make the globs tell them apart."
                )


def _newest_for_test(inputs: Sequence[Input], num_validation: int, num_test: int) -> Iterator[Input]:
    for number, each in enumerate(inputs):
        age = len(inputs) - 1 - number
        split = "test" if age < num_test else "validation" if age < num_test + num_validation else "train"
        yield dataclasses.replace(each, split=split)
