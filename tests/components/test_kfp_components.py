"""What the wrappers share: what Kubeflow's cache is told of the data, and what its UI is shown."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kfp import dsl

from components import external
from components.config import DataConfig, ValidateConfig
from components.errors import DataError
from components.evaluate import EvaluateResult
from components.kfp_components import log_classification, log_numbers, outside_state


def _of_data(data_path: str = "", **settings: Any) -> str:
    return outside_state("ingest", "data", DataConfig(**settings).model_dump_json(), data_path)


def test_the_cache_is_told_of_the_bytes_of_the_data(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("a,b\n1,2\n")
    before = _of_data(path=str(file))
    assert _of_data(path=str(file)) == before
    assert _of_data(path="elsewhere.csv", data_path=str(file)) == before
    file.write_text("a,b\n1,3\n")
    assert _of_data(path=str(file)) != before


def test_a_sample_set_is_always_the_same() -> None:
    assert _of_data(source="fashion_mnist") == _of_data(source="fashion_mnist")


def test_data_that_cannot_be_read_is_for_the_step_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> dict[str, Any]:
        raise DataError("data.path: x cannot be read")

    monkeypatch.setattr(external, "state", refuse)
    assert _of_data(path="x") != _of_data(path="x")


@pytest.mark.parametrize(
    "settings",
    [{"path": "no-such.csv"}, {"source": "my_data:source"}, {"source": "my_data:source", "path": "x"}],
    ids=str,
)
def test_what_nobody_can_tell_is_never_taken_from_the_cache(settings: dict[str, Any]) -> None:
    assert _of_data(**settings) != _of_data(**settings)


def test_the_cache_is_told_of_the_bytes_of_the_schema(tmp_path: Path) -> None:
    file = tmp_path / "schema.yaml"
    config = ValidateConfig(schema_path=str(file)).model_dump_json()
    states = []
    for text in ("a: int\n", "a: int\n", "a: float\n"):
        file.write_text(text)
        states.append(outside_state("validate", "validate", config, "data.csv"))
    assert states[0] == states[1] != states[2]


def _evaluated(**changed: Any) -> EvaluateResult:
    metrics = {"test": {"auc": 0.75, "loss": None}}
    fields: dict[str, Any] = {"metrics": metrics, "slices": [], "baseline": {}, "champion": None, "reasons": []}
    return EvaluateResult(**fields, blessed=True, primary_metric="auc", **changed)


def test_numbers_are_shown_under_their_path_and_what_is_not_defined_is_not() -> None:
    shown = dsl.Metrics()
    log_numbers(shown, _evaluated())
    assert shown.metadata == {"metrics.test.auc": 0.75, "blessed": 1.0}


def test_a_regression_has_no_curves() -> None:
    shown = dsl.ClassificationMetrics()
    log_classification(shown, _evaluated())
    assert shown.metadata == {}
    log_classification(shown, _evaluated(roc_curve=[(0.5, 0.25, 1.0)]))
    assert list(shown.metadata) == ["confidenceMetrics"]


def test_a_running_step_can_import_it_where_kfp_dsl_has_only_half_of_its_names() -> None:
    code = "import components.kfp_components, pipelines.kubeflow.exit_handler"
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"_KFP_RUNTIME": "true"}, check=True)


def test_kfps_metrics_of_slices_are_still_broken() -> None:
    """When this fails, `evaluate` can show its slices by them, in place of a table in its page."""
    with pytest.raises(AttributeError, match="_sliced_metrics"):
        dsl.SlicedClassificationMetrics().load_roc_readings("fare=1", [[0.5, 1.0, 0.1]])
