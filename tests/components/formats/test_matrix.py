"""Every model in every format: it works within a bound, works once it is split, or is refused with the reason."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from tests.components.formats import matrix
from tests.components.formats.optional import needs
from tests.processor import int8_saturates

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "export.md"


COLUMNS = [
    pytest.param(column, id=column.name, marks=[needs(package) for package in column.packages])
    for column in matrix.COLUMNS
]
PACKAGES = {package for column in matrix.COLUMNS for package in column.packages}


@pytest.mark.slow
@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("row", matrix.MODELS)
def test_a_cell_is_what_it_is_expected_to_be(row: str, column: matrix.Column) -> None:
    done = matrix.outcome(row, column)
    expected = matrix.EXPECTED.get((row, column.name), matrix.Expected(column.success, ""))
    assert done.status == expected.status, done.note
    if expected.bound is None:
        assert expected.reason in done.note
        assert bool(expected.reason) == bool(done.note), "a note that nobody expects"
    if done.status == "cannot":
        assert done.size_bytes == 0
    elif column.name == "coreml" and sys.platform != "darwin":
        assert done.size_bytes > 0
        assert np.isnan(done.difference)
    elif column.name.startswith(("onnx", "openvino")) and "int8" in column.name and int8_saturates():
        assert np.isfinite(done.difference)
    else:
        assert done.difference <= matrix.bound(row, column)
        # A bound of its own that the column's would do for hides what it was made for.
        assert expected.bound is None or done.difference > column.bound


@pytest.mark.slow
@pytest.mark.parametrize("row", matrix.MODELS)
def test_each_form_is_smaller_than_the_one_before(row: str) -> None:
    columns = [column for column in matrix.COLUMNS if column.name.startswith("tflite_")]
    sizes = {column.name: matrix.outcome(row, column).size_bytes for column in columns}
    assert 0 < sizes["tflite_dynamic_range"] < sizes["tflite_float16"] < sizes["tflite_float32"]


def test_the_expected_cells_are_cells() -> None:
    names = {column.name for column in matrix.COLUMNS}
    assert not [cell for cell in matrix.EXPECTED if cell[0] not in matrix.MODELS or cell[1] not in names]


@pytest.mark.slow
@pytest.mark.skipif(
    any(needs(package).args[0] for package in PACKAGES), reason=f"not all installed: {', '.join(sorted(PACKAGES))}"
)
def test_the_document_has_the_table_of_this_run() -> None:
    assert matrix.read_table(DOCUMENT.read_text()) == matrix.table(), f"run {matrix.COMMAND}"


def test_writing_changes_only_what_is_between_the_marks() -> None:
    text = f"# Before\n\n{matrix.START}\nold\n{matrix.END}\n\nafter\n"
    written = matrix.written_into(text, "| new |")
    assert written == text.replace("old", "| new |")
    assert matrix.read_table(written) == "| new |"
