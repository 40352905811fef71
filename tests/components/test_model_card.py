"""The model card: everything that is known is in it, what is not known is said, nothing in it is obeyed."""

from __future__ import annotations

from components import model_card
from components.config import CardConfig
from tests.components.origins import origins


def card(**said: str) -> str:
    return model_card.markdown("taxi", CardConfig(**said), origins())


def test_the_card_has_what_the_artifacts_know() -> None:
    lines = card().splitlines()
    for line in (
        "# Model card: taxi",
        "| Network | tabular {'width': 64} |",
        "| Trainable parameters | 15,702 |",
        "| Training | 7 epochs, the weights of epoch 3 |",
        "| Energy used | not measured |",
        "| Version of keras | 3.15.1 |",
        "Source: `csv`, path `trips.csv`, label `tip`, split by hash of `customer`.",
        "| test | 1,100 |",
        "| fare | float |",
        "| metric | train | test | majority answer | champion, version 2 |",
        "| auc | 0.9612 | 0.9612 | 0.5 | 0.95 |",
        "| loss | 0.2 |  |  |  |",
        "- passed: test auc 0.9612, at least 0.9",
        "| saved_model | 491,371 | 0.25 | 0.9612 |  |  | yes |",
        "| tflite_int8 |  |  |  |  |  | no: auc drop is 0.3, at most 0.01 allowed |",
        "- 2 of 2002 files left out",
        "- test split, 'fare': smallest value -1",
        "| data | digest of trips.csv |",
        "| exported | digest of export |",
    ):
        assert line in lines, line


def test_what_its_makers_say_is_in_it_and_what_they_do_not_say_is_named() -> None:
    lines = card(intended_use="Tips of taxi rides.", caveats="Chicago only.").splitlines()
    assert "**Intended use**: Tips of taxi rides." in lines
    assert "**Out of scope use**: not stated (`card.out_of_scope_use`)" in lines
    assert "**Caveats**: Chicago only." in lines


def test_a_value_with_a_bar_or_html_breaks_neither_table_nor_page() -> None:
    text = card(intended_use="<script>alert(1)</script>")
    assert "| company=A \\| <b>B</b> | 60 | 0.65 |" in text.splitlines()
    page = model_card.page("<taxi>", text)
    assert "<td>company=A | &lt;b&gt;B&lt;/b&gt;</td>" in page
    assert "&lt;script&gt;" in page and "<script>" not in page
    assert "<title>Model card: &lt;taxi&gt;</title>" in page


def test_of_many_slices_the_worst_are_shown_and_the_rest_counted() -> None:
    known = origins()
    (one,) = known["evaluation"]["result"]["slices"]
    known["evaluation"]["result"]["slices"] = [one | {"value": number} for number in range(23)]
    lines = model_card.markdown("taxi", CardConfig(), known).splitlines()
    assert sum(line.startswith("| company=") for line in lines) == model_card.NUM_SLICES
    assert "3 more are in `evaluation.json`." in lines
    known["evaluation"]["result"]["slices"] = []
    assert "None were asked for (`evaluate.slices`)." in model_card.markdown("taxi", CardConfig(), known)
