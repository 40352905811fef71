"""A share of `ingest` as an artifact of its own: on Kubeflow each may have a pod of its own."""

from __future__ import annotations

from pathlib import Path

from components import artifacts
from components.config import DataConfig
from components.ingest import read_rows
from components.ingest.rows import Rows, Share


def encode(*, encoded: Path, number: str, num_shares: str, config: DataConfig) -> Share:
    """Encode every `num_shares`-th batch of the source, from batch `number` on; `ingest` puts the shares together.

    Each share reads the whole source, since types, limits and splits follow from all of it.

    Args:
        encoded: Where the artifact is written, which is for `ingest` to read.
        number: Of the share, from 0.
        num_shares: How many there are.
        config: Source, label, splits.

    Raises:
        ConfigError, DataError: as `ingest`.
    """
    with artifacts.writing(encoded, step="encode", inputs={}, config=config) as out:
        rows = Rows(out.path, config, int(number), int(num_shares))
        warnings = read_rows(rows, config, out.scratch / "data")
        out.result = rows.finish_share(warnings)
    return out.result
