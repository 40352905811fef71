from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from click.testing import CliRunner

from components import artifacts
from components.config import ValidateConfig
from components.examples import MISSING_INT, ExamplesInfo, Feature
from components.statistics import Statistics, StatisticsBuilder, to_json
from components.statistics.page import html
from components.validate import ValidateResult
from pipelines.statistics import main

EVIL = "<script>alert('x')</script>"
INFO = ExamplesInfo(
    {
        "n": Feature("int"),
        "word": Feature("string"),
        EVIL: Feature("float"),
        "text": Feature("string"),
        "image": Feature("uint8", (2, 2, 1)),
        "empty": Feature("float"),
    },
    "n",
    "multiclass",
    None,
    {},
)


def _statistics(shift: int = 0) -> Statistics:
    builder = StatisticsBuilder(INFO, text_features=["text"], max_top_values=100, num_quantiles=20)
    builder.update(
        {
            "n": np.array([0, 0, 0, MISSING_INT]),
            "word": np.array([b"red", EVIL.encode(), b"\xff\xfe", b""], object),
            EVIL: np.array([1, 2, 3, np.inf], np.float32) + shift,
            "text": np.array([b"two words", b"words", b"", EVIL.encode()], object),
            "image": np.zeros((4, 2, 2, 1), np.uint8),
            "empty": np.full(4, np.nan, np.float32),
        }
    )
    return builder.finish()


def test_sides_stand_beside_each_other_and_data_is_escaped():
    text = html({"train": _statistics(), "test": _statistics(40)})
    text.encode()
    assert EVIL not in text
    assert text.count("<script>") == 1
    assert re.search(r"(src|href)=", text) is None
    row = text[text.index('<tbody data-name="&lt;script') :]
    row = row[: row.index("</tbody>")]
    assert [cell in row for cell in ("<td>train</td>", "<td>test</td>", "<td>43</td>")] == [True, True, False]
    assert re.findall(r"<td>(inf)</td>", row) == ["inf", "inf"]
    for heading in ("Numeric features", "Categorical features", "Texts", "Images"):
        assert text.count(f"<h2>{heading}</h2>") == 1
    for picture in re.findall(r"<svg.*?</svg>", text):
        ElementTree.fromstring(picture)


def test_many_missing_values_and_zeros_are_marked():
    text = html({"train": _statistics()})
    row = text[text.index('data-name="n"') :]
    row = row[: row.index("</tbody>")]
    assert '<strong class="alarm">25.00%</strong>' in row
    assert '<strong class="alarm">100.00%</strong>' in row


def test_columns_of_what_does_not_occur_are_left_out():
    assert "<th>infinite</th>" in html({"train": _statistics()})
    finite = html({"train": {"n": _statistics()["n"]}})
    assert [f"<th>{column}</th>" in finite for column in ("infinite", "weighted", "mean")] == [False, False, True]


def test_a_feature_that_a_side_lacks_is_told():
    side = _statistics()
    text = html({"old": {name: found for name, found in side.items() if name != "word"}, "new": side})
    row = text[text.index('data-name="word"') :]
    assert "<td>old</td><td>absent</td>" in row[: row.index("</tbody>")]


def _artifact(folder: Path, sides: dict[str, Statistics], slices: dict[str, Statistics] | None = None) -> None:
    with artifacts.writing(folder, step="validate", inputs={}, config=ValidateConfig()) as out:
        (out.path / "statistics.json").write_text(to_json(sides))
        if slices is not None:
            (out.path / "slices.json").write_text(to_json(slices))
        out.result = ValidateResult(num_examples={}, label="n", num_classes=None, warnings=[], anomalies=[])


def test_the_command_shows_splits_of_one_run_and_a_split_of_two(tmp_path):
    for run in ("a", "b"):
        (tmp_path / run).mkdir()
        _artifact(tmp_path / run / "statistics", {"train": _statistics(), "test": _statistics()})
    page = tmp_path / "page.html"
    done = CliRunner().invoke(main, [str(tmp_path / "a"), "--output", str(page)])
    assert done.exit_code == 0, done.output
    assert "<td>test</td>" in page.read_text()
    pair = [str(tmp_path / "a"), str(tmp_path / "b" / "statistics"), "--output", str(page)]
    assert CliRunner().invoke(main, pair).exit_code == 0
    assert f"<td>B: {tmp_path / 'b' / 'statistics'}</td>" in page.read_text()
    page.unlink()
    done = CliRunner().invoke(main, [*pair, "--split", "tets"])
    assert done.exit_code == 2
    assert "has no split 'tets'. Did you mean 'test'?" in done.output
    assert not page.exists()


def test_the_command_shows_a_slice(tmp_path):
    sides = {"train": _statistics(), "test": _statistics()}
    _artifact(tmp_path / "statistics", sides, {"train/word=red": _statistics(7)})
    page = tmp_path / "page.html"
    arguments = [str(tmp_path), "--output", str(page), "--slice"]
    done = CliRunner().invoke(main, [*arguments, "word=read"])
    assert done.exit_code == 2
    assert "has no slice 'word=read'. Did you mean 'word=red'?" in done.output
    assert CliRunner().invoke(main, [*arguments, "word=red"]).exit_code == 0
    assert "<td>train</td>" in page.read_text()
    assert "<td>test</td>" not in page.read_text()
    assert "<td>8</td>" in page.read_text()
