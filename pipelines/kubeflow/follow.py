"""Waiting for the end of a Kubeflow run: what becomes of its steps, and why one failed."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from components.errors import HeadraceError, NotBlessedError
from pipelines.kubeflow import kfp_api
from pipelines.steps import STEPS

NUM_LOG_LINES = 30
_FINAL_STATES = ("SUCCEEDED", "FAILED", "SKIPPED", "CANCELED")
_COLOURS = {"succeeded": "green", "skipped": "yellow", "failed": "red", "running": "cyan"}

Show = Callable[[dict[str, str]], None]


def follow(client: Any, run_id: str, *, console: Console, poll_seconds: float) -> None:
    """Wait for the end of a run and show what becomes of its steps.

    `kfp.Client.wait_for_run_completion` would wait for ever for a run that was cancelled, and give up at the first
    answer that is lost on the way.

    Args:
        client: As made by `kfp_api.connect`.
        run_id: The run.
        console: Where to show it: as a table that changes on a terminal, else as a line for each change.
        poll_seconds: Time between two looks.

    Raises:
        NotBlessedError: the run ended well, without a model pushed.
        HeadraceError: the run failed or was cancelled, or the API is gone for twelve looks.
    """
    ask = functools.partial(kfp_api.patiently, client, poll_seconds=poll_seconds)
    run = ask(lambda: client.get_run(run_id))
    names = kfp_api.task_names(ask(lambda: kfp_api.pipeline_of_run(client, run)))
    with _table(console) if console.is_interactive else _lines(console) as show:
        while True:
            states = _states(run, names)
            show(states)
            if run.state in _FINAL_STATES:
                break
            time.sleep(poll_seconds)
            run = ask(lambda: client.get_run(run_id))
    if run.state != "SUCCEEDED":
        host = kfp_api.host_of(client)
        why = _why(client, run, names) if run.state == "FAILED" else ""
        raise HeadraceError(f"Run {run_id} ended as {run.state}.{why} See {kfp_api.run_url(host, run_id)}")
    if "evaluate" in states and states.get("push") != "succeeded":
        raise NotBlessedError(f"Run {run_id} ended well, but its model was not blessed and so not pushed.")


def _states(run: Any, names: Mapping[str, str]) -> dict[str, str]:
    """The state of each step, as `running`, or `3 succeeded, 1 failed` for one that a loop runs several times."""
    by_step: dict[str, list[str]] = {}
    for task in _tasks(run):
        if task.display_name in names and task.state:
            by_step.setdefault(names[task.display_name], []).append(task.state.lower())
    order = {step.name: number for number, step in enumerate(STEPS)}
    return {name: _together(by_step[name]) for name in sorted(by_step, key=lambda name: order.get(name, len(order)))}


def _together(states: list[str]) -> str:
    counts = Counter(states)
    return states[0] if len(counts) == 1 else ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))


def _tasks(run: Any) -> list[Any]:
    return run.run_details.task_details or [] if run.run_details else []


@contextlib.contextmanager
def _lines(console: Console) -> Iterator[Show]:
    shown: dict[str, str] = {}

    def show(states: dict[str, str]) -> None:
        for name, state in states.items():
            if shown.get(name) != state:
                console.print(f"{name:<10} {state}", markup=False, soft_wrap=True)
        shown.update(states)

    yield show


@contextlib.contextmanager
def _table(console: Console) -> Iterator[Show]:
    start = time.monotonic()
    with Live(console=console, auto_refresh=False) as live:

        def show(states: dict[str, str]) -> None:
            table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
            for name, state in states.items():
                table.add_row(name, Text(state, style=_COLOURS.get(state, "")))
            table.add_row("", Text(f"{time.monotonic() - start:.0f} s", style="dim"))
            live.update(table, refresh=True)

        yield show


def _why(client: Any, run: Any, names: Mapping[str, str]) -> str:
    """What is known of a failure: the steps that failed, why, and the end of their logs."""
    said = [run.error.message] if run.error and run.error.message else []
    try:
        last = {attempt.step: attempt for attempt in kfp_api.attempts(client, run.run_id)}
    except HeadraceError:  # the states of the steps are known all the same
        last = {}
    failed = {key: attempt for key, attempt in last.items() if attempt.failed}
    said += [_told(client, run, names.get(key, key), attempt) for key, attempt in failed.items()]
    for task in _tasks(run):
        if task.state == "FAILED" and task.display_name in names.keys() - failed.keys():
            error = f": {task.error.message}" if task.error and task.error.message else ""
            said.append(f"{names[task.display_name]}{error}")
    return "".join(f"\n  {line}" for text in said for line in text.splitlines()) + "\n" if said else ""


def _told(client: Any, run: Any, name: str, attempt: kfp_api.Attempt) -> str:
    """Why a step failed, the end of its log or how to have it, and how to run it here."""
    import kfp_server_api  # type: ignore[import-untyped]
    import urllib3

    told = [f"{name}: {attempt.message}" if attempt.message else name]
    try:
        lines = kfp_api.read_log(client, run, attempt).rstrip().splitlines()[-NUM_LOG_LINES:]
        told += [f"The last lines of its log (pod {attempt.pod}):", *(f"  {line}" for line in lines)]
    except (kfp_server_api.ApiException, urllib3.exceptions.HTTPError) as error:
        told.append(
            f"Kubeflow does not give its log ({getattr(error, 'reason', error)}). While the pod is there: "
            f"kubectl logs -n {attempt.namespace} {attempt.pod} -c main"
        )
    if name in {step.name for step in STEPS}:
        told.append(f"To run it here: headrace replay {run.run_id} {name} --host {kfp_api.host_of(client)}")
    return "\n".join(told)
