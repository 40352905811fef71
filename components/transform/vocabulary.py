"""The values of a vocabulary: those of the train split, or given ones."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from components.errors import ConfigError, DataError
from components.examples import Feature
from components.statistics import FeatureStatistics
from components.transform_config import Vocabulary


def vocabulary_of(op: Vocabulary, feature: Feature, stats: FeatureStatistics, where: str) -> list[str | int]:
    """The values in the order of their ids.

    Raises:
        ConfigError: given values are not of the feature's type, empty or twice there; or `max_tokens` is more than the
            statistics keep.
        DataError: no value is left.
    """
    if op.vocabulary:
        return _checked(op.vocabulary, feature, f"{where}.vocabulary")
    if op.vocabulary_path is not None:
        return _checked(_lines(Path(op.vocabulary_path), where), feature, f"{where}.vocabulary_path")
    if stats.top_tokens:
        raise ConfigError(
            f"{where}: an op text reads this feature, so that its words are counted and not its values. Give the "
            "vocabulary, or hash it."
        )
    frequent = [value for value, count in stats.top_values if count >= op.min_count]
    if len(frequent) == len(stats.top_values):
        check_enough_kept(op.max_tokens or 0, len(frequent), stats.num_unique, where)
    if not frequent:
        raise DataError(f"{where}: no value occurs {op.min_count} times in the train split. Lower min_count.")
    return frequent[: op.max_tokens]


def check_enough_kept(wanted: int, kept: int, num_unique: int | None, where: str) -> None:
    """Refuse a `max_tokens` that the statistics cannot fill though the data could."""
    if wanted > kept and num_unique is not None and num_unique > kept:
        raise ConfigError(
            f"{where}.max_tokens: {wanted} values are wanted and the train split has more than the {kept} that the "
            "statistics keep. Raise validate.max_top_values, or lower max_tokens."
        )


def _lines(file: Path, where: str) -> list[str | int]:
    try:
        return [*file.read_text("utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}.vocabulary_path: {file} cannot be read as UTF-8: {error}.") from error


def _checked(values: list[str | int], feature: Feature, where: str) -> list[str | int]:
    typed: list[str | int] = []
    for number, value in enumerate(values, start=1):
        try:
            typed.append(int(value) if feature.type == "int" else str(value))
        except ValueError as error:
            raise ConfigError(f"{where}: value {number}, {value!r}, is no integer, which the feature is.") from error
    if not typed or "" in typed:
        raise ConfigError(f"{where}: there is an empty value, or none at all. An empty string means a missing value.")
    if twice := [str(value) for value, count in Counter(typed).items() if count > 1]:
        raise ConfigError(f"{where}: {', '.join(twice[:5])} is there more than once. Leave out all but one.")
    return typed
