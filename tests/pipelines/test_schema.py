"""`headrace schema`: infer, diff and update, on statistics that `validate` might have left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from components.schema import load_schema
from components.statistics import FeatureStatistics, to_json
from pipelines.schema import main

TAXI = Path(__file__).parents[2] / "configs" / "chicago_taxi.yaml"
SCHEMA = """\
# Written by hand.
features:
  word: {type: string, domain: [a]}  # the words
  fare:
    type: float   # in dollars
    max: 3
  y: {type: int, not_in_environment: [serving], min_fraction: 1.0}
"""


def _run(*arguments: Any) -> tuple[int, str]:
    outcome = CliRunner().invoke(main, [str(each) for each in arguments], prog_name="headrace schema")
    return outcome.exit_code, outcome.output


def _statistics(run: Path, **features: FeatureStatistics) -> Path:
    label = FeatureStatistics("int", 4, 0, min=0, max=1, num_unique=2, top_values=((0, 2), (1, 2)))
    folder = run / "statistics"
    folder.mkdir(parents=True)
    (folder / "statistics.json").write_text(to_json({"train": {**features, "y": label}}))
    (folder / "manifest.json").write_text(json.dumps(_MANIFEST))
    return run


_MANIFEST: dict[str, Any] = {
    "step": "validate",
    "fingerprint": "0",
    "made_from": {},
    "files": {},
    "digest": "0",
    "result": {"label": "y"},
    "format_version": 1,
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    words = FeatureStatistics("string", 4, 0, num_unique=2, top_values=(("b", 3), ("a", 1)))
    return _statistics(tmp_path / "run", word=words, fare=FeatureStatistics("float", 4, 1, min=1, max=5))


@pytest.fixture
def schema(tmp_path: Path) -> Path:
    file = tmp_path / "mine.yaml"
    file.write_text(SCHEMA)
    return file


def test_infer_writes_the_same_bytes_each_time_and_never_over_a_file(run: Path, tmp_path: Path) -> None:
    assert _run("infer", run, "-o", tmp_path / "a.yaml")[0] == 0
    text = (tmp_path / "a.yaml").read_text()
    assert _run("infer", run / "statistics") == (0, text)
    assert "  word: {type: string, min_fraction: 1.0, domain: [a, b]}\n" in text
    assert "  fare: {type: float, min_fraction: 0.67}\n" in text
    assert "  y: {type: int, not_in_environment: [serving], min_fraction: 1.0}\n" in text
    code, output = _run("infer", run, "-o", tmp_path / "a.yaml")
    assert (code, (tmp_path / "a.yaml").read_text()) == (2, text)
    assert "is there already" in output


def test_infer_of_a_config_reads_its_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(TAXI.parents[1])
    code, output = _run("infer", TAXI, "data.drop=[tips]", "-o", tmp_path / "taxi.yaml")
    assert code == 0, output
    features = load_schema(tmp_path / "taxi.yaml").features
    assert features["pickup_census_tract"].min_fraction == 0
    assert features["big_tipper"].not_in_environment == ["serving"]
    assert "tips" not in features


def test_diff_of_schemas_is_by_meaning(schema: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(
        "features:\n  y: {min_fraction: 1, type: int, not_in_environment: [serving]}\n"
        "  fare: {type: float, max: 3.0, min_count: 0}\n  word: {domain: ['a'], type: string}\n"
    )
    assert _run("diff", schema, other) == (0, "")
    other.write_text(
        "dataset: {min_examples: 7}\n"
        "features:\n  word: {type: string, domain: [c]}\n  fare: {type: float, max: 4}\n  new: {type: int}\n"
    )
    code, output = _run("diff", schema, other)
    assert code == 1
    assert output.splitlines() == [
        "dataset.min_examples: None -> 7",
        "word.domain: -'a' +'c'",
        "fare.max: 3.0 -> 4.0",
        "- y: {'type': 'int', 'not_in_environment': ['serving'], 'min_fraction': 1.0}",
        "+ new: {'type': 'int'}",
    ]


def test_diff_of_data_is_its_anomalies(run: Path, schema: Path) -> None:
    code, output = _run("diff", schema, run)
    assert code == 1
    assert [line.rpartition("[")[2] for line in output.splitlines()] == [
        "ENUM_TYPE_UNEXPECTED_STRING_VALUES]",
        "FLOAT_TYPE_BIG_FLOAT]",
    ]
    served = _statistics(
        run.parent / "served", word=FeatureStatistics("string", 4, 0), fare=FeatureStatistics("float", 4, 0)
    )
    schema.write_text(SCHEMA.replace("not_in_environment: [serving]", "in_environment: [training]"))
    assert _run("diff", schema, served, "--environment", "serving") == (0, "")


def test_update_keeps_comments_and_order_and_lets_the_data_pass(run: Path, schema: Path) -> None:
    assert _run("update", schema, run, "--dry-run")[0] == 0
    assert schema.read_text() == SCHEMA
    code, output = _run("update", schema, run)
    assert code == 0
    assert "word: domain ['b'] [ENUM_TYPE_UNEXPECTED_STRING_VALUES, train split]" in output
    expected = SCHEMA.replace("domain: [a]}  #", "domain: [a, b]} #").replace("max: 3", "max: 5")
    assert schema.read_text() == expected
    assert _run("diff", schema, run) == (0, "")
    assert _run("update", schema, run) == (0, "Nothing to change.\n")


def test_update_of_some_features_or_kinds_alone(run: Path, schema: Path) -> None:
    _run("update", schema, run, "--feature", "fare", "--kind", "ENUM_TYPE_UNEXPECTED_STRING_VALUES")
    assert schema.read_text() == SCHEMA
    _run("update", schema, run, "--feature", "fare")
    assert schema.read_text() == SCHEMA.replace("max: 3", "max: 5")


def test_update_adds_new_columns_and_deprecates_lost_ones(schema: Path, tmp_path: Path) -> None:
    run = _statistics(tmp_path / "other", fare=FeatureStatistics("int", 4, 0), new=FeatureStatistics("float", 4, 4))
    assert _run("update", schema, run)[0] == 0
    features = load_schema(schema).features
    assert features["word"].lifecycle == "deprecated"
    assert (features["fare"].type, features["fare"].max) == ("int", None)
    assert (features["new"].type, features["new"].min_fraction) == ("float", 0)
    assert _run("diff", schema, run) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["infer", "{run}", "seed=3"], "is a folder, which no setting changes"),
        (["diff", "{schema}", "nowhere"], "nowhere has no statistics.json"),
        (["diff", "nowhere.yaml", "{run}"], "A: nowhere.yaml cannot be read"),
        (["update", "{schema}", "{run}", "--kind", "FLOAT_TYPE_BIG_FLOT"], "Did you mean 'FLOAT_TYPE_BIG_FLOAT'?"),
        (["update", "{schema}", "{run}", "--feature", "far"], "Did you mean 'fare'?"),
    ],
    ids=["override", "no-statistics", "no-schema", "kind", "feature"],
)
def test_wrong_arguments_are_told(run: Path, schema: Path, arguments: list[str], message: str) -> None:
    code, output = _run(*(each.format(run=run, schema=schema) for each in arguments))
    assert code == 2
    assert message in output
    assert schema.read_text() == SCHEMA


@pytest.mark.parametrize("command", ["infer", "diff", "update"])
def test_help_has_examples(command: str) -> None:
    code, output = _run(command, "--help")
    assert code == 0
    assert f"headrace schema {command} " in output.partition("Examples:")[2]
