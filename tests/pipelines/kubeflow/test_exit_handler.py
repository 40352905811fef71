"""The end of a run on Kubeflow: from the steps' notes, or from what the API says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from components.config import NotifyConfig
from components.errors import ConfigError, DataError
from pipelines import notify
from pipelines.kubeflow import exit_handler
from pipelines.kubeflow.exit_handler import finish, noted
from pipelines.notify import Ending
from tests.pipelines import fakes

if TYPE_CHECKING:
    from tests.pipelines.fake_kfp import FakeApi


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Ending]:
    """What would have been sent."""
    endings: list[Ending] = []
    monkeypatch.setattr(notify, "notify", lambda config, ending: endings.append(ending) or ["notify.slack failed: 404"])
    return endings


@pytest.fixture
def ended(tmp_path: Path) -> Any:
    """Calls `finish` and returns the summary."""

    def end(state: str, records: Path | str = "", message: str | None = None) -> str:
        config = NotifyConfig(name="taxi", min_slice_examples=50).model_dump_json()
        pages = {name: str(tmp_path / name) for name in ("summary", "report")}
        finish(config=config, records=str(records), run_id="r-1", state=state, message=message, **pages)
        assert (tmp_path / "report").read_text().startswith("<!doctype html>")
        return (tmp_path / "summary").read_text()

    return end


def _note(folder: Path, **steps: dict[str, Any]) -> Path:
    for name, result in steps.items():
        with noted(name, str(folder)) as note:
            note.update(result)
    return folder


def test_a_step_that_failed_is_named_with_its_reason(tmp_path: Path, told: list[Ending], ended: Any) -> None:
    records = _note(tmp_path / "records", ingest={}, validate={})
    with pytest.raises(DataError), noted("transform", str(records)):
        raise DataError("column 'fare' is all | zero")
    text = ended("FAILED", records)
    assert [(end.state, end.step, end.reasons) for end in told] == [
        ("failed", "transform", ("column 'fare' is all | zero",))
    ]
    assert text.startswith(
        "# taxi failed in step transform\n\ncolumn 'fare' is all | zero  \nRun: r-1\n\nnotify.slack failed"
    )
    assert "| transform | failed |" in text
    assert "column 'fare' is all \\| zero |" in text
    assert exit_handler.not_sent(records) == ["notify.slack failed: 404"]


def test_a_step_that_was_killed_is_named(tmp_path: Path, told: list[Ending], ended: Any) -> None:
    records = _note(tmp_path / "records", ingest={})
    started = noted("validate", str(records))
    started.__enter__()
    ended("FAILED", records)
    assert (told[0].step, told[0].reasons[0][:33]) == ("validate", "It ended without an error of its ")


def test_one_task_of_several_that_a_step_has_is_named(tmp_path: Path, told: list[Ending], ended: Any) -> None:
    records = _note(tmp_path / "records", ingest={}, **{"convert-tflite": {}})
    with pytest.raises(DataError), noted("convert-onnx", str(records)):
        raise DataError("no such operation")
    ended("FAILED", records)
    assert (told[0].step, told[0].reasons) == ("convert-onnx", ("no such operation",))


def test_a_model_that_is_not_blessed_is_told_with_its_metrics(tmp_path: Path, told: list[Ending], ended: Any) -> None:
    verdict = fakes.EVALUATION | {"blessed": False, "reasons": ["passed: loss", "failed: auc 0.94, at least 0.95"]}
    text = ended("SUCCEEDED", _note(tmp_path / "records", train={}, evaluate=verdict))
    assert (told[0].state, told[0].reasons) == ("not_blessed", ("failed: auc 0.94, at least 0.95",))
    assert told[0].metrics == {"auc": 0.94, "loss": 0.33}
    assert "| validate | reused |  |  |" in text
    assert "| tune |" not in text
    assert "| auc * | 0.9500 | 0.9400 | 0.6500 | 0.7100 | 0.5000 |" in text


@pytest.mark.parametrize(
    ("state", "exit_state"),
    [
        ("SUCCEEDED", "succeeded"),
        ("COMPLETE", "succeeded"),
        ("Canceled", "cancelled"),
        ("FAILED", "failed"),
        ("?", "failed"),
    ],
)
def test_the_states_of_every_version_are_known(
    tmp_path: Path, told: Any, ended: Any, state: str, exit_state: str
) -> None:
    ended(state, _note(tmp_path / "records", evaluate=fakes.EVALUATION | {"blessed": True, "reasons": []}))
    assert told[0].state == exit_state


def test_a_run_that_came_to_no_step_says_what_kubeflow_says(tmp_path: Path, told: list[Ending], ended: Any) -> None:
    ended("FAILED", tmp_path / "records", message="image cannot be pulled")
    ended("FAILED", tmp_path / "records")
    assert [(end.step, end.reasons) for end in told] == [
        (None, ("image cannot be pulled",)),
        (None, ("Kubeflow says FAILED.",)),
    ]


def test_without_notes_the_api_is_asked(
    kfp_server: FakeApi, told: list[Ending], ended: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.pipelines.fake_kfp import node

    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", kfp_server.url)
    kfp_server.nodes = [
        node("ingest", "Failed", "Error (exit code 1)", number=1),
        node("ingest", "Succeeded", number=2, part="retried"),
        node("train", "Failed", "OOMKilled (exit code 137)", number=3),
    ]
    ended("FAILED")
    assert (told[0].state, told[0].step, told[0].reasons) == ("failed", "train", ("OOMKilled (exit code 137)",))

    kfp_server.nodes = [node("evaluate", "Succeeded", number=1)]
    ended("SUCCEEDED")
    kfp_server.nodes.append(node("push", "Succeeded", number=2))
    ended("SUCCEEDED")
    assert [end.state for end in told[1:]] == ["not_blessed", "succeeded"]


def test_where_nobody_knows_the_steps_the_end_is_told_all_the_same(
    kfp_server: FakeApi, told: list[Ending], ended: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", kfp_server.url)
    kfp_server.let_in = lambda headers: False
    text = ended("FAILED")
    assert (told[0].state, told[0].reasons[0]) == ("failed", "Kubeflow says FAILED.")
    assert told[0].reasons[1].startswith("What became of each step is not known here: ")
    assert "answered 401" in text


class _StepError(DataError):
    pass


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (ConfigError("model.name: there is no 'resnett'.\n  Known: resnet"), ConfigError),
        (_StepError("no such column"), DataError),
        (ValueError("want 3"), None),
    ],
    ids=["config", "of a step's own", "defect"],
)
def test_an_error_for_the_user_comes_back_as_it_was(tmp_path: Path, raised: Exception, expected: Any) -> None:
    _note(tmp_path, ingest={})
    with pytest.raises(type(raised)), noted("train", str(tmp_path)):
        raise raised
    error = exit_handler.noted_error(tmp_path)
    assert type(error) is (expected or type(None))
    assert error is None or str(error) == str(raised)


def test_nothing_is_noted_where_there_is_no_place_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with noted("train", ""):
        assert list(tmp_path.iterdir()) == []
    with noted("train", str(tmp_path / "r")) as note:
        note["loss"] = 0.5
    assert json.loads((tmp_path / "r/train.json").read_text())["result"] == {"loss": 0.5}
