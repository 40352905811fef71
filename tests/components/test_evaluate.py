"""The gate: metrics by slice, thresholds, the champion, and blessing with reasons."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from components import artifacts, metrics
from components.config import EvaluateConfig
from components.errors import ConfigError, HeadraceError
from components.evaluate import EvaluateResult, ask_saved_model
from components.examples import read_arrays
from components.external import PUSH_RECORD
from components.model_files import Predictor, load_model
from components.preprocessing import Preprocessing
from tests.conftest import StepRun


def evaluate(taxi: StepRun, path: Path, **settings: Any) -> EvaluateResult:
    config = EvaluateConfig.model_validate({"thresholds": [{"metric": "auc", "min": 0.1}], **settings})
    return taxi.call("evaluate", path, config)


def test_metrics_are_those_of_the_models_answers(taxi: StepRun, tmp_path: Path) -> None:
    result = evaluate(taxi, tmp_path / "evaluation", slices=["payment_type"])
    preprocessing = Preprocessing.load(taxi.path("transform"))
    raw = read_arrays(taxi.path("examples"), "test")
    answers = Predictor(load_model(taxi.path("model")), preprocessing.output_spec)(
        preprocessing.transform_in_batches(raw)
    )
    labels = raw["big_tipper"]
    assert result.metrics["test"] == pytest.approx(metrics.compute("binary", labels, answers), rel=1e-6)
    cash = next(piece for piece in result.slices if piece["value"] == "Cash")
    rows = raw["payment_type"] == b"Cash"
    assert cash["num_examples"] == rows.sum()
    assert cash["metrics"]["accuracy"] == pytest.approx((answers[rows].argmax(axis=1) == labels[rows]).mean())
    assert sum(piece["num_examples"] for piece in result.slices) == len(labels)
    assert json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())["metrics"] == result.metrics
    confusion = result.confusion_matrix
    assert confusion is not None and confusion["classes"] == ["no", "yes"]
    assert np.trace(confusion["rows"]) / np.sum(confusion["rows"]) == result.metrics["test"]["accuracy"]
    assert [sum(row) for row in confusion["rows"]] == np.bincount(labels).tolist()
    assert result.roc_curve == metrics.roc_curve(labels, answers)


@pytest.mark.parametrize(
    ("threshold", "blessed"),
    [
        ({"metric": "auc", "min": 0.6}, True),
        ({"metric": "auc", "min": 0.9999}, False),
        ({"metric": "loss", "max": 5.0}, True),
        ({"metric": "loss", "max": 1e-6}, False),
        ({"metric": "auc", "above_baseline": 0.1}, True),
        ({"metric": "auc", "above_baseline": 0.4999}, False),
        ({"metric": "loss", "above_baseline": 5.0}, False),
        ({"metric": "accuracy", "min": 0.5}, True),
        # In the credit-card slice payment tells nothing: an area that the whole split reaches is out of reach there.
        ({"metric": "auc", "min": 0.75, "slices": True}, False),
    ],
    ids=str,
)
def test_thresholds_decide(taxi: StepRun, tmp_path: Path, threshold: dict[str, Any], blessed: bool) -> None:
    result = evaluate(taxi, tmp_path / "evaluation", thresholds=[threshold], slices=["payment_type"])
    assert result.blessed is blessed
    assert any(reason.startswith("failed: ") for reason in result.reasons) is not blessed
    assert all(threshold["metric"] in reason for reason in result.reasons)


@pytest.mark.parametrize(("metric", "sign"), [("accuracy", 1), ("loss", -1)])
def test_the_worst_slices_come_first(taxi: StepRun, tmp_path: Path, metric: str, sign: int) -> None:
    threshold = {"metric": metric, "min": -1.0, "max": 100.0}
    result = evaluate(taxi, tmp_path / "evaluation", thresholds=[threshold], slices=["payment_type"])
    values = [sign * piece["metrics"][metric] for piece in result.slices]
    assert len(values) > 2 and values == sorted(values)


def test_a_slice_is_held_against_its_own_majority(taxi: StepRun, tmp_path: Path) -> None:
    """Of the cash trips hardly one is tipped: what beats the whole split's majority may beat nothing there."""
    threshold = {"metric": "accuracy", "above_baseline": 0.02, "slices": True}
    result = evaluate(taxi, tmp_path / "evaluation", thresholds=[threshold], slices=["payment_type"])
    cash = next(piece for piece in result.slices if piece["value"] == "Cash")
    assert cash["baseline"]["accuracy"] > 0.99 > result.baseline["accuracy"]
    assert cash["metrics"]["accuracy"] - result.baseline["accuracy"] > 0.02
    assert next(reason for reason in result.reasons if "Cash" in reason).startswith("failed: ")


def test_one_failed_check_is_enough_to_refuse(taxi: StepRun, tmp_path: Path) -> None:
    thresholds = [{"metric": "auc", "min": 0.1}, {"metric": "auc", "min": 0.9999}]
    result = evaluate(taxi, tmp_path / "evaluation", thresholds=thresholds)
    assert [reason.split(":")[0] for reason in result.reasons] == ["passed", "failed"]
    assert not result.blessed


def test_small_slices_are_shown_and_not_gated(taxi: StepRun, tmp_path: Path) -> None:
    threshold = {"metric": "accuracy", "min": 0.5, "slices": True}
    many = evaluate(taxi, tmp_path / "a", thresholds=[threshold], slices=["payment_type"], min_slice_examples=1)
    few = evaluate(taxi, tmp_path / "b", thresholds=[threshold], slices=["payment_type"], min_slice_examples=50)
    assert many.slices == few.slices
    assert len(many.reasons) == len(many.slices) + 1 > len(few.reasons)


@pytest.fixture(scope="module")
def champion(taxi: StepRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The taxi model pushed under the record of another training."""
    base = tmp_path_factory.mktemp("served") / "taxi"
    pushed = Path(taxi.result("push").version_path)
    shutil.copytree(pushed, base / "7")
    record = json.loads((base / "7" / PUSH_RECORD).read_text())
    (base / "7" / PUSH_RECORD).write_text(json.dumps({**record, "model_digest": "of another training"}))
    return base


@pytest.mark.parametrize(("least", "blessed"), [(0.0, True), (-0.1, True), (0.01, False)])
def test_the_challenger_must_improve_on_the_champion(
    taxi: StepRun, tmp_path: Path, champion: Path, least: float, blessed: bool
) -> None:
    comparison = {"metric": "auc", "min_improvement": least}
    result = evaluate(taxi, tmp_path / "evaluation", champion=comparison, champion_path=str(champion))
    assert result.champion is not None
    assert result.champion["version"] == "7"
    assert result.champion["metrics"]["auc"] == pytest.approx(result.metrics["test"]["auc"], abs=1e-6)
    assert result.blessed is blessed
    assert "champion version 7" in result.reasons[-1]


def test_a_model_is_not_its_own_champion(taxi: StepRun, tmp_path: Path) -> None:
    own = Path(taxi.result("push").version_path).parent
    result = evaluate(taxi, tmp_path / "evaluation", champion={"metric": "auc"}, champion_path=str(own))
    assert result.champion is None
    assert result.reasons[-1] == "passed: there is no champion to compare with"


def test_a_champion_of_other_classes_cannot_be_compared(taxi: StepRun, tmp_path: Path, champion: Path) -> None:
    other = tmp_path / "served" / "1"
    shutil.copytree(champion / "7", other)
    record = json.loads((other / PUSH_RECORD).read_text())
    (other / PUSH_RECORD).write_text(json.dumps({**record, "classes": ["a", "b"]}))
    with pytest.raises(HeadraceError, match="its classes are"):
        evaluate(taxi, tmp_path / "evaluation", champion={"metric": "auc"}, champion_path=str(other.parent))
    assert not (tmp_path / "evaluation").exists()


def test_the_champion_is_asked_with_raw_features(taxi: StepRun, champion: Path) -> None:
    preprocessing = Preprocessing.load(taxi.path("transform"))
    raw = read_arrays(taxi.path("examples"), "test")
    answers = ask_saved_model(champion / "7", raw, preprocessing, batch_size=100)
    expected = Predictor(load_model(taxi.path("model")), preprocessing.output_spec)(
        preprocessing.transform_in_batches(raw)
    )
    np.testing.assert_allclose(answers, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"thresholds": [{"metric": "acuracy", "min": 0.5}]}, "no metric 'acuracy'. Did you mean 'accuracy'"),
        ({"champion": {"metric": "macro_f1"}}, "evaluate.champion: a binary task has no metric 'macro_f1'"),
        ({"slices": ["payment"]}, "'payment' is no string or integer feature. Did you mean 'payment_type'"),
        ({"slices": ["fare"]}, "'fare' is no string or integer feature"),
    ],
    ids=str,
)
def test_unknown_metrics_and_features_are_refused(
    taxi: StepRun, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluate(taxi, tmp_path / "evaluation", **settings)


def test_a_threshold_without_a_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot fail"):
        EvaluateConfig.model_validate({"thresholds": [{"metric": "auc"}]})


def test_evaluation_refuses_a_model_that_is_not_what_was_written(taxi: StepRun, tmp_path: Path) -> None:
    damaged = tmp_path / "model"
    shutil.copytree(taxi.path("model"), damaged)
    content = bytearray((damaged / "model.keras").read_bytes())
    content[len(content) // 2] ^= 1
    (damaged / "model.keras").write_bytes(content)
    inputs = {"examples": taxi.path("examples"), "transform": taxi.path("transform"), "model": damaged}
    with pytest.raises(artifacts.ArtifactError, match=r"model\.keras is not what was written"):
        taxi.call("evaluate", tmp_path / "evaluation", **inputs)
