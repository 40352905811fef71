"""The builder that takes batches of examples and adds up the statistics of their features."""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from components.errors import DataError
from components.examples import MISSING_INT, ExamplesInfo, Feature
from components.keyed_moments import KeyedMoments
from components.statistics.counts import TopCounts
from components.statistics.features import Statistics
from components.statistics.files import Files
from components.statistics.images import Images
from components.statistics.moments import Moments
from components.statistics.numbers import Numbers, WeightedNumbers
from components.statistics.quantiles import Quantiles
from components.statistics.rows import RowCounts, column_of_arrow
from components.statistics.strings import Lengths, Strings
from components.statistics.texts import Texts
from components.tokens import name_of
from components.transform_config import NOTHING_MORE, Tokenization, TransformNeeds

MAX_SLICES = 50

_EXACT_QUANTILES_UP_TO = 1_000_000
_MIN_LABEL_VALUES = 100_000
_ARROW_KINDS: dict[str, tuple[pa.DataType, Any]] = {
    "int": (pa.int64(), MISSING_INT),
    "float": (pa.float32(), np.nan),
    "string": (pa.binary(), b""),
}
_SLICE_SETTINGS: dict[str, Any] = {"max_top_values": 100, "num_quantiles": 100, "max_exact_values": 10_000}


# numpy._core was numpy.core before numpy 2.
_ARRAYS = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
    *((f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
}


class StatisticsBuilder:
    """Takes batches of examples and adds up their statistics.

    Args:
        info: The columns.
        text_features: String features whose words are counted.
        max_top_values: Distinct values (or words) kept for each feature; of the label, at least 100,000.
        num_quantiles: Resolution of the quantiles.
        max_exact_values: Numbers of each feature up to which quantiles are exact; beyond, a tenth of them is kept.
        weight: Numeric feature that holds the weight of each row.
        slices: String or integer features; the rows of each of their values have statistics of their own, of lower
            resolution. Of more than 50 values, the 50 smallest have: whatever the order of the rows, the same ones.
        needs: What operations of `transform` need beside; of features that the columns have.

    Example:
        >>> builder = StatisticsBuilder(info, text_features=[], max_top_values=1000, num_quantiles=100)
        >>> builder.update(read_arrays(examples, "train"))
        >>> builder.finish()["fare"].mean
    """

    def __init__(
        self,
        info: ExamplesInfo,
        *,
        text_features: Sequence[str],
        max_top_values: int,
        num_quantiles: int,
        max_exact_values: int = _EXACT_QUANTILES_UP_TO,
        weight: str | None = None,
        slices: Sequence[str] = (),
        needs: TransformNeeds = NOTHING_MORE,
    ) -> None:
        self._info, self._text_features, self._weight = info, list(text_features), weight
        self._features = {
            name: _accumulator(
                feature,
                name in text_features,
                # Every class of the label is needed, however few values are kept of other features.
                max(max_top_values, _MIN_LABEL_VALUES) if name == info.label else max_top_values,
                num_quantiles,
                max_exact_values,
            )
            for name, feature in info.features.items()
        }
        for name in self._features.keys() & set(needs.files):
            self._features[name] = Files(is_list=info.features[name].shape == (None,))
        self._tokens = {
            (each.feature, name_of(each.tokenization)): Texts(
                max_top_values,
                is_list=info.features[each.feature].shape == (None,),
                tokenization=each.tokenization,
            )
            for each in needs.tokens
        }
        self._keyed = {(each.number, each.key): KeyedMoments(max_top_values) for each in needs.moments}
        self._slices: dict[str, dict[int | bytes, StatisticsBuilder]] = {name: {} for name in slices}

    def update(self, batch: Mapping[str, np.ndarray]) -> None:
        """Add a batch, as `examples.read_arrays` gives it; features that it lacks are passed over.

        Raises:
            DataError: a row has no weight, or one that is negative or infinite.
        """
        weights = self._weights_of(batch[self._weight]) if self._weight and self._weight in batch else None
        for name, accumulator in self._features.items():
            if name in batch and len(batch[name]):
                accumulator.update(batch[name], weights)
        for (name, _), tokens in self._tokens.items():
            if name in batch and len(batch[name]):
                tokens.update(batch[name], None)
        for (number, key), moments in self._keyed.items():
            if number in batch and key in batch:
                moments.update(batch[number], batch[key])
        for name in self._slices.keys() & batch.keys():
            values = batch[name].ravel()
            for value, rows in _rows_by_value(values):
                if (builder := self._slice(name, value)) is not None:
                    builder.update({key: column[rows] for key, column in batch.items()})

    def update_arrow(self, batch: pa.RecordBatch) -> None:
        """Add an Arrow record batch: nulls are missing, numbers are taken as 64-bit integers and 32-bit floats.

        Raises:
            DataError: as `update`.
        """
        if not batch.num_rows:
            return
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        weights = None
        if self._weight and self._weight in columns:
            column = columns[self._weight].cast(pa.float64()).fill_null(np.nan)
            weights = self._weights_of(column.to_numpy(zero_copy_only=False))
        for name, accumulator in self._features.items():
            if name in columns:
                accumulator.update_arrow(columns[name], weights)
        for (name, _), tokens in self._tokens.items():
            if name in columns:
                tokens.update_arrow(columns[name], None)
        for (number, key), moments in self._keyed.items():
            if number in columns and key in columns:
                moments.update(self._values(number, columns), self._values(key, columns))
        for name in self._slices.keys() & columns.keys():
            for value, rows in _rows_by_value(self._values(name, columns)):
                if (builder := self._slice(name, value)) is not None:
                    builder.update_arrow(batch.take(pa.array(rows)))

    def merge(self, other: StatisticsBuilder) -> None:
        """Add what another builder of the same settings has seen, in any order of merging."""
        for name, accumulator in self._features.items():
            accumulator.merge(other._features[name])
        for name_and_way, tokens in self._tokens.items():
            tokens.merge(other._tokens[name_and_way])
        for number_and_key, moments in self._keyed.items():
            moments.merge(other._keyed[number_and_key])
        for name, builders in other._slices.items():
            for value, builder in builders.items():
                if (mine := self._slice(name, value)) is not None:
                    mine.merge(builder)

    def finish(self) -> Statistics:
        """The statistics of all that was added."""
        return {
            name: dataclasses.replace(
                accumulator.finish(),
                shape=self._info.features[name].shape,
                token_counts={way: each.finish_tokens() for (of, way), each in self._tokens.items() if of == name},
                moments_by_key={key: each.finish() for (of, key), each in self._keyed.items() if of == name},
            )
            for name, accumulator in self._features.items()
        }

    def finish_slices(self) -> dict[str, Statistics]:
        """The statistics of each slice, by `feature=value`."""
        return {
            f"{name}={_as_text(value)}": builders[value].finish()
            for name, builders in self._slices.items()
            for value in sorted(builders)
        }

    def to_bytes(self) -> bytes:
        """The state, for a process that merges it with others."""
        return pickle.dumps(self, protocol=5)

    @staticmethod
    def from_bytes(state: bytes) -> StatisticsBuilder:
        """Inverse of `to_bytes`; nothing but statistics is ever loaded.

        Raises:
            DataError: the bytes are no state of a builder.
        """
        try:
            builder = _Unpickler(io.BytesIO(state)).load()
        except Exception as error:  # Damaged pickles raise errors of nearly every kind.
            raise DataError(
                f"These {len(state)} bytes are no state of statistics ({error}). Compute it again."
            ) from error
        if not isinstance(builder, StatisticsBuilder):
            raise DataError(f"These {len(state)} bytes are no state of statistics. Compute it again.")
        return builder

    def _values(self, name: str, columns: Mapping[str, pa.Array]) -> np.ndarray:
        """A column of single values as a numpy array, with what stands for missing ones."""
        kind, missing = _ARROW_KINDS[self._info.features[name].type]
        return np.asarray(column_of_arrow(columns[name], kind, missing, None).values)

    def _weights_of(self, column: np.ndarray) -> np.ndarray:
        weights = column.astype(np.float64).reshape(-1)
        bad = ~(np.isfinite(weights) & (weights >= 0))
        if bad.any():
            raise DataError(
                f"validate.weight_feature: {int(bad.sum())} rows have a '{self._weight}' that is missing, negative or "
                "infinite. Correct them, or leave those rows out."
            )
        return weights

    def _slice(self, name: str, value: Any) -> StatisticsBuilder | None:
        """The builder of a slice. The smallest values never leave, so what remains has seen all its rows."""
        builders = self._slices[name]
        if value not in builders:
            if len(builders) >= MAX_SLICES and value > max(builders):
                return None
            builders[value] = StatisticsBuilder(
                self._info, text_features=self._text_features, weight=self._weight, **_SLICE_SETTINGS
            )
            if len(builders) > MAX_SLICES:
                del builders[max(builders)]
        return builders[value]


_CLASSES = (ExamplesInfo, Feature, StatisticsBuilder, Images, Lengths, Moments, Numbers, Quantiles, RowCounts, Strings)
_MORE_CLASSES = (Files, KeyedMoments, Texts, Tokenization, TopCounts, WeightedNumbers)
_LOADABLE = _ARRAYS | {(each.__module__, each.__name__) for each in (*_CLASSES, *_MORE_CLASSES)}


class _Unpickler(pickle.Unpickler):
    """Loads the classes of statistics, and arrays; a pickle may name any function otherwise."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _LOADABLE:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _accumulator(
    feature: Feature, is_text: bool, max_top_values: int, num_quantiles: int, max_exact_values: int
) -> Any:
    is_list = feature.shape == (None,)
    if feature.type == "uint8":
        return Images(tuple(size or 0 for size in feature.shape))  # an image is no list
    if feature.type == "string":
        return (Texts if is_text else Strings)(max_top_values, is_list=is_list)
    return Numbers(feature.type, max_top_values, num_quantiles, max_exact_values, is_list=is_list)


def _as_text(value: int | bytes) -> str:
    return str(value) if isinstance(value, int) else value.decode("utf-8", "backslashreplace")


def _rows_by_value(values: np.ndarray) -> Iterator[tuple[Any, np.ndarray]]:
    """Each value of a slice feature with the numbers of its rows; a missing value makes no slice."""
    names, places = np.unique(values, return_inverse=True)
    order = np.argsort(places, kind="stable")
    starts = np.searchsorted(places[order], np.arange(len(names) + 1))
    for place, value in enumerate(names.tolist()):
        if value not in (MISSING_INT, b""):
            yield value, order[starts[place] : starts[place + 1]]
