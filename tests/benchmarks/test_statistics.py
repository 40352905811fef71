from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from benchmarks import statistics


def test_the_table_has_the_rows_and_columns_asked_for_and_is_the_same_each_time():
    first, second = (list(statistics.make_batches(70_000)) for _ in range(2))
    assert [batch.num_rows for batch in first] == [65_536, 4_464]
    assert first[0].num_columns == statistics.NUM_COLUMNS
    assert first == second


@pytest.mark.parametrize("engine", ["arrow", "numpy", "pandas"])
def test_each_engine_is_measured(engine):
    done = CliRunner().invoke(statistics.main, ["--one", "1000", engine])
    assert done.exit_code == 0, done.output
    measured = json.loads(done.output.splitlines()[-1])
    assert 0 < measured["seconds"] < 60
    assert measured["extra_mib"] >= 0
