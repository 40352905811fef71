"""What `headrace monitor` does at an alarm: a command, a webhook, a retraining run; each once in a cool-down."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipelines.local import NOT_BLESSED, SUMMARY, write_whole
from pipelines.notify import post

if TYPE_CHECKING:
    from components.config import AlarmConfig

STATE = "alarms.json"
_RUNNERS = {"local": "pipelines.local", "kfp": "pipelines.submit"}
# A retraining counts from its start: one that fails must not be started again at every look.
_FROM_THE_START = "retrain"


def fire(
    config: AlarmConfig,
    report: dict[str, Any],
    *,
    run_arguments: Sequence[str],
    run_dir: Path,
    now_seconds: float,
) -> list[str]:
    """Do what the config asks for, unless it has been done within `cool_down_seconds`.

    Args:
        config: What is to be done.
        report: The content of monitor.json.
        run_arguments: The config and the overrides of the run to start.
        run_dir: Where its artifacts are; alarms.json there remembers when each thing was done.
        now_seconds: Unix time.

    Returns:
        What failed, one line each.

    Raises:
        HeadraceError: the state cannot be read.
    """
    actions: dict[str, Callable[[], None]] = {}
    if config.command:
        actions["command"] = lambda: _run(config.command, json.dumps(report))
    if config.webhook:
        url = config.webhook
        actions["webhook"] = lambda: _post(url, report)
    if config.retrain:
        arguments = ["--runs-dir", str(run_dir.parent)] if config.retrain == "local" else []
        command = [sys.executable, "-m", _RUNNERS[config.retrain], *run_arguments, *arguments, *config.retrain_args]
        summary = run_dir / SUMMARY if config.retrain == "local" else None
        actions["retrain"] = lambda: _retrain(command, summary)
    state_file = run_dir / STATE
    state = _read(state_file)
    failures = []
    for name, action in actions.items():
        wait_seconds = state.get(name, -float("inf")) + config.cool_down_seconds - now_seconds
        if wait_seconds > 0:
            click.echo(f"on_alarm.{name}: was done already; not again for {wait_seconds:.0f} s.")
            continue
        if name == _FROM_THE_START:
            state[name] = now_seconds
            write_whole(state_file, json.dumps(state))
        try:
            action()
        except (OSError, ValueError) as error:
            failures.append(f"monitor.on_alarm.{name} failed: {error}")
        else:
            click.echo(f"on_alarm.{name}: done.")
            state[name] = now_seconds
            write_whole(state_file, json.dumps(state))
    return failures


def _read(state_file: Path) -> dict[str, float]:
    from components.errors import HeadraceError

    try:
        state: dict[str, float] = json.loads(state_file.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise HeadraceError(f"{state_file} is damaged ({error}). Delete it; alarms then start anew.") from error
    return state


def _run(command: Sequence[str], text: str | None, fine: Sequence[int] = (0,)) -> None:
    """Run a program to its end; it says what it has to say to the terminal.

    Raises:
        OSError: it cannot be run, or ends with another exit code.
    """
    code = subprocess.run(command, input=text, text=True, check=False).returncode
    if code not in fine:
        raise OSError(f"{' '.join(command)} ended with exit code {code}")


def _retrain(command: Sequence[str], summary: Path | None) -> None:
    """Run the pipeline; one that has nothing new to learn from is a failure, for the model stays what it is.

    Raises:
        OSError: it cannot be run, fails, or reuses the model.
    """
    _run(command, None, fine=(0, NOT_BLESSED))
    steps = json.loads(summary.read_text())["steps"] if summary else []
    if any(step["name"] == "train" and step["state"] == "reused" for step in steps):
        raise OSError(
            "the data is what the model was trained on, so it was not trained again; bring data.path up to date"
        )


def _post(url: str, report: dict[str, Any]) -> None:
    """Post the alarms; `text` is what chat programs show.

    Raises:
        OSError: there is no answer, or it is no success.
        ValueError: the environment variable is not set, or the URL is none.
    """
    alarms = [f"{each['kind']} of {each['name']}" for each in report["alarms"]]
    text = f"{report['model']}: {len(alarms)} alarms: {', '.join(dict.fromkeys(alarms))}"
    post(url, {"text": text, **{name: report[name] for name in ("model", "time_seconds", "status", "alarms")}})
