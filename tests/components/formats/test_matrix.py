"""Every model in every format: it works within a bound, works once it is split, or is refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.components.formats import matrix

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "export.md"


@pytest.mark.parametrize("column", matrix.COLUMNS, ids=lambda column: column.name)
@pytest.mark.parametrize("row", matrix.MODELS)
def test_a_cell_is_what_it_is_expected_to_be(row: str, column: matrix.Column) -> None:
    done = matrix.outcome(row, column)
    expected = matrix.EXPECTED.get((row, column.name), matrix.Expected("works", ""))
    assert done.status == expected.status, done.note
    if expected.bound is None:
        assert expected.reason in done.note
        assert bool(expected.reason) == bool(done.note), "a note that nobody expects"
    if done.status == "cannot":
        assert done.size_bytes == 0
    else:
        assert done.difference <= matrix.bound(row, column)
        # A bound of its own that the column's would do for hides what it was made for.
        assert expected.bound is None or done.difference > column.bound


@pytest.mark.parametrize("row", matrix.MODELS)
def test_each_form_is_smaller_than_the_one_before(row: str) -> None:
    sizes = {column.name: matrix.outcome(row, column).size_bytes for column in matrix.COLUMNS}
    assert 0 < sizes["tflite_dynamic_range"] < sizes["tflite_float16"] < sizes["tflite_float32"]


def test_the_expected_cells_are_cells() -> None:
    names = {column.name for column in matrix.COLUMNS}
    assert not [cell for cell in matrix.EXPECTED if cell[0] not in matrix.MODELS or cell[1] not in names]


def test_the_document_has_the_table_of_this_run() -> None:
    assert matrix.read_table(DOCUMENT.read_text()) == matrix.table(), f"run {matrix.COMMAND}"


def test_writing_changes_only_what_is_between_the_marks() -> None:
    text = f"# Before\n\n{matrix.START}\nold\n{matrix.END}\n\nafter\n"
    written = matrix.written_into(text, "| new |")
    assert written == text.replace("old", "| new |")
    assert matrix.read_table(written) == "| new |"
