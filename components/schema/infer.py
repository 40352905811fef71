"""A schema from statistics: tight where data stays as it is, and loose where the next span may well differ."""

from __future__ import annotations

import math
from typing import Any

from components.schema.spec import FeatureSchema, Schema
from components.statistics import LOW_CARDINALITY, FeatureStatistics, Statistics


def infer_schema(train: Statistics, label: str) -> Schema:
    """A schema that the train split keeps: types, shapes, presence, and the values of strings that have few.

    As TFDV's, it has no bounds of numbers, since the next span has other extremes. A feature that every row has must
    always be there; of one that some rows lack, at least 0.9 of its share. The label is not in serving.
    """
    features = {name: infer_feature(seen) for name, seen in train.items()}
    features[label] = features[label].model_copy(update={"not_in_environment": ["serving"]})
    return Schema(features=features)


def infer_feature(seen: FeatureStatistics) -> FeatureSchema:
    """What one feature looks like by its statistics."""
    share = seen.present / seen.count if seen.count else 0.0
    fields: dict[str, Any] = {"min_fraction": math.floor(share * 90) / 100 if seen.missing else 1.0}
    if None in seen.shape and seen.min_num_values:
        fields["min_values"] = 1
    # YAML holds no bytes that are not text; `validate` refuses them with a better message.
    all_kept = seen.num_unique == len(seen.top_values) and not seen.num_invalid_utf8
    if seen.type == "string" and all_kept and 0 < len(seen.top_values) <= LOW_CARDINALITY:
        fields["domain"] = sorted(str(value) for value, _ in seen.top_values)
    return FeatureSchema(type=seen.type, shape=seen.shape, **fields)
