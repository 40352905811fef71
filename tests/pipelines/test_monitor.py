from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from components.errors import ConfigError, DataError, HeadraceError
from pipelines import alarm, monitor
from pipelines.config import load_config
from tests.pipelines import fakes

DAY = 86_400.0
ALARM = {"kind": "skew", "name": "fare", "where": ""}


@dataclass
class _Step:
    """The step `monitor`, which finds what it is told."""

    inputs: tuple[str, ...] = ()
    output: str = "monitoring"
    section: str = "monitor"
    alarms: list[Any] = field(default_factory=lambda: [ALARM])
    fails: Exception | None = None

    def load(self) -> Any:
        def run(*, monitoring: Path, config: Any) -> Any:
            if self.fails:
                raise self.fails
            monitoring.mkdir(exist_ok=True)
            status = "alarm" if self.alarms else "ok"
            report = {"model": "m", "time_seconds": 1.0, "status": status, "num_requests": 3, "num_examples": 9}
            (monitoring / "monitor.json").write_text(json.dumps(report | {"alarms": self.alarms}))
            return self

        return run


class _Place:
    def __init__(self, folder: Path) -> None:
        self.folder, self.now, self.step = folder, 1000.0, _Step()

    def look(self, **on_alarm: Any) -> int:
        return monitor.look(
            load_config(self.config(**on_alarm)),
            runs_dir=self.folder / "runs",
            run_arguments=["my.yaml", "train.epochs=3"],
            step=self.step,
            clock=lambda: self.now,
        )

    def config(self, **on_alarm: Any) -> Path:
        path = self.folder / "my.yaml"
        path.write_text(yaml.safe_dump(fakes.settings(monitor={"on_alarm": on_alarm})))
        return path

    def program(self, text: str) -> list[str]:
        return [sys.executable, "-c", text]

    @property
    def calls(self) -> list[str]:
        file = self.folder / "calls"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Place:
    monkeypatch.chdir(tmp_path)
    return _Place(tmp_path)


NOTE = "import sys; open('calls', 'a').write(sys.stdin.read() + chr(10))"


def test_without_an_alarm_nothing_is_done(place: _Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.step.alarms = []
    assert place.look(command=place.program(NOTE)) == 0
    assert place.calls == []
    assert "ok: 3 requests, 9 examples\n" in capsys.readouterr().out


def test_a_command_reads_the_report_once_in_a_cool_down(place: _Place, capsys: pytest.CaptureFixture[str]) -> None:
    for hours, calls in [(0, 1), (1, 1), (23.9, 1), (24, 2)]:
        place.now = 1000.0 + hours * 3600
        assert place.look(command=place.program(NOTE)) == 4
        assert len(place.calls) == calls
    assert json.loads(place.calls[0])["alarms"] == [ALARM]
    out = capsys.readouterr().out
    assert "alarm: 3 requests, 9 examples; skew of fare" in out
    assert "on_alarm.command: was done already; not again for 82800 s." in out
    place.look(command=place.program(NOTE), cool_down_seconds=0)
    assert len(place.calls) == 3


def test_a_command_that_fails_is_an_error_and_is_tried_again(place: _Place) -> None:
    with pytest.raises(HeadraceError, match=r"monitor.on_alarm.command failed: .* ended with exit code 5"):
        place.look(command=place.program("raise SystemExit(5)"))
    with pytest.raises(HeadraceError, match="No such file or directory: 'no-such-program'"):
        place.look(command=["no-such-program"])
    assert place.look(command=place.program(NOTE)) == 4
    assert len(place.calls) == 1


def test_webhook(place: _Place, hook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    url = hook.url
    hook.answers += [500, 204]
    with pytest.raises(HeadraceError, match="the webhook answered 500"):
        place.look(webhook=url)
    assert place.look(webhook=url) == 4
    [_, (_, received)] = hook.received
    assert received == {
        "text": "m: 1 alarms: skew of fare",
        "model": "m",
        "time_seconds": 1.0,
        "status": "alarm",
        "alarms": [ALARM],
    }
    with pytest.raises(HeadraceError, match="the environment variable HOOK is not set"):
        place.look(webhook="$HOOK", cool_down_seconds=0)
    monkeypatch.setenv("HOOK", url)
    place.look(webhook="$HOOK", cool_down_seconds=0)
    assert len(hook.received) == 3


RUN = """
import json, pathlib, sys
open("calls", "a").write(" ".join(sys.argv[1:]) + chr(10))
pathlib.Path("runs/tiny/summary.json").write_text(json.dumps({{"steps": [{{"name": "train", "state": {state!r}}}]}}))
raise SystemExit({code})
"""


@pytest.mark.parametrize(
    ("retrain", "code", "state", "error"),
    [
        ("local", 0, "done", None),
        ("local", 3, "done", None),
        ("local", 1, "failed", "ended with exit code 1"),
        ("local", 0, "reused", "the data is what the model was trained on"),
        ("kfp", 0, "reused", None),
    ],
)
def test_retraining(
    place: _Place, monkeypatch: pytest.MonkeyPatch, retrain: str, code: int, state: str, error: str | None
) -> None:
    (place.folder / "fake_run.py").write_text(RUN.format(state=state, code=code))
    monkeypatch.setitem(alarm._RUNNERS, retrain, "fake_run")
    settings = {"retrain": retrain, "retrain_args": ["--host", "http://kubeflow"]}
    if error:
        with pytest.raises(HeadraceError, match=f"monitor.on_alarm.retrain failed: .*{error}"):
            place.look(**settings)
    else:
        assert place.look(**settings) == 4
    runs_dir = f"--runs-dir {place.folder / 'runs'} " if retrain == "local" else ""
    assert place.calls == [f"my.yaml train.epochs=3 {runs_dir}--host http://kubeflow"]
    assert place.look(**settings) == 4
    assert len(place.calls) == 1  # a run that failed must not be started at every look


def test_damaged_state(place: _Place) -> None:
    place.look(command=place.program(NOTE))
    (place.folder / "runs/tiny/alarms.json").write_text("{")
    with pytest.raises(HeadraceError, match=r"alarms.json is damaged .* Delete it"):
        place.look(command=place.program(NOTE))


@pytest.mark.parametrize(
    ("on_alarm", "message"),
    [
        ({"webhook": "example.com"}, "must begin with http"),
        ({"retrain": "kfp"}, "needs the address of Kubeflow"),
        ({"retrain_args": ["--debug"]}, "nothing reads retrain_args with retrain: null"),
        ({"retrain": "cluster"}, "local"),
    ],
)
def test_bad_settings(place: _Place, on_alarm: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(place.config(**on_alarm))


def test_watching_goes_on_after_a_failure_and_ends_with_a_wrong_config(capsys: pytest.CaptureFixture[str]) -> None:
    answers: list[Any] = [0, DataError("the log is gone"), 4, ConfigError("no such feature")]
    slept: list[float] = []

    def look_once() -> int:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(ConfigError):
        monitor.watch(look_once, 60, slept.append)
    assert capsys.readouterr().err == "Error: the log is gone\n"
    assert len(slept) == 3
    assert all(59 < seconds <= 60 for seconds in slept)


def test_command_line(place: _Place, monkeypatch: pytest.MonkeyPatch) -> None:
    path = place.config()

    def run(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(monitor.main, [str(path), *arguments])
        return result.exit_code, result.output

    code, output = run()
    assert (code, "Artifact runs/tiny/statistics does not exist" in output) == (1, True)
    assert not (place.folder / "runs").exists()
    monkeypatch.setattr(monitor, "step_named", lambda name: place.step)
    assert run()[0] == 4
    place.step.alarms = []
    assert run()[0] == 0
    assert run("--every", "0")[0] == 2
    code, output = run("monitor.max_lin=1")
    assert (code, "Did you mean 'max_linf'" in output) == (2, True)
