"""Statistics of each feature: mergeable, bounded in memory, computed in one pass.

They are used three times: to validate, to set the state of the preprocessing layers, and as the baseline that served
requests are compared with.

Quantiles are exact up to a bound and then thinned by a rule without chance, for the same rows must give the same bytes
(the KLL sketch of Apache DataSketches draws random numbers and takes no seed). Counts of values are exact up to a bound,
and beyond it too low by no more than what was forgotten. Distinct values beyond it are estimated by a theta sketch, which
does not depend on the order of the rows.
"""

from components.statistics.builder import StatisticsBuilder
from components.statistics.features import (
    LOW_CARDINALITY,
    SLICES_FILE,
    STATISTICS_FILE,
    FeatureStatistics,
    Statistics,
    TokenCounts,
    WeightedStatistics,
    class_values,
    from_json,
    load_slices,
    load_statistics,
    to_json,
)

__all__ = [
    "LOW_CARDINALITY",
    "SLICES_FILE",
    "STATISTICS_FILE",
    "FeatureStatistics",
    "Statistics",
    "StatisticsBuilder",
    "TokenCounts",
    "WeightedStatistics",
    "class_values",
    "from_json",
    "load_slices",
    "load_statistics",
    "to_json",
]
