"""The data source: replace what is read here by your own data.

It yields Arrow record batches of one schema, the same rows each time; `ingest` makes examples of them and splits them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

# Said rather than guessed: a guess follows from the first rows alone.
TYPES = {
    "trip_start_month": pa.int64(),
    "trip_start_day": pa.int64(),
    "trip_start_hour": pa.int64(),
    "trip_miles": pa.float64(),
    "trip_seconds": pa.float64(),
    "payment_type": pa.string(),
    "company": pa.string(),
    "fare": pa.float64(),
    "tips": pa.float64(),
}


def source(*, path: str, tip_limits: Sequence[float] = (0.2,)) -> Iterator[pa.RecordBatch]:
    """Taxi trips, those without a fare left out.

    Args:
        path: The CSV file, `data.path` in the config.
        tip_limits: Shares of the fare, ascending; `tip_level` says how many of them the tip exceeds.

    Yields:
        The columns of the file and `tip_level`.
    """
    with csv.open_csv(path, convert_options=csv.ConvertOptions(column_types=TYPES)) as reader:
        for rows in reader:
            paid = rows.filter(pc.greater(rows["fare"], 0.0))
            tip_shares = np.asarray(paid["tips"]) / np.asarray(paid["fare"])
            yield paid.append_column("tip_level", pa.array(np.digitize(tip_shares, tip_limits, right=True)))
