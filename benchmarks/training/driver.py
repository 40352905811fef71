"""Starts one process for each contender and gives them turns, so that the machine's noise falls on all alike."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.training.contenders import CONTENDERS, REFERENCE
from benchmarks.training.workloads import WORKLOADS

PROJECT = Path(__file__).resolve().parents[2]
TRIAL_ROUNDS = 2
MAX_FORWARD_DIFFERENCE = 1e-3
_PAUSE_S = 0.05

Show = Callable[[str], None]


class ContenderError(Exception):
    """A contender cannot take part; the text says why."""


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        rounds: Rounds, in each of which every contender has a turn.
        steps: Steps a turn; `None`: what the workload says.
        threads: Threads of every contender.
        interpreters: Environment (`project`, `torch`, `jax`) to Python interpreter.
        timeout_s: Longest that a contender may take to start or for a turn.
    """

    rounds: int
    steps: int | None
    threads: int
    interpreters: Mapping[str, str]
    timeout_s: float = 900.0


@dataclass
class Runner:
    """A contender in its process.

    Attributes:
        ready: What it told when it had started.
        turns: What it answered to each turn that counts.
    """

    process: subprocess.Popen[str]
    log: Path
    timeout_s: float
    ready: dict[str, Any] = field(default_factory=dict)
    turns: list[dict[str, Any]] = field(default_factory=list)

    def play(self, num_steps: int) -> dict[str, Any]:
        """Let it take `num_steps` steps while the others sleep, and return its answer.

        Raises:
            ContenderError: it fails, ends, or takes too long.
        """
        # Thread pools of the one before spin for some milliseconds more.
        time.sleep(_PAUSE_S)
        stdin = self.process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):
            stdin.write(json.dumps({"steps": num_steps}) + "\n")
            stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Its next answer; see `play`."""
        stdout = self.process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], self.timeout_s)[0]:
            raise ContenderError(f"no answer in {self.timeout_s:g} s")
        line = stdout.readline()
        if not line:
            lines = self.log.read_text(errors="replace").strip().splitlines() or [""]
            raise ContenderError(f"ended with code {self.process.wait()}: {lines[-1][:300]}")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise ContenderError(answer["failed"])
        return answer

    def end(self) -> None:
        """End the process and take its leave."""
        self.process.kill()
        self.process.communicate()


def measure(models: Iterable[str], contenders: Iterable[str], settings: Settings, show: Show) -> dict[str, Any]:
    """Measure each model with each contender.

    Args:
        models: Names in WORKLOADS.
        contenders: Names in CONTENDERS; the reference takes part in any case.
        settings: How to measure.
        show: Takes a line on what goes on.

    Returns:
        Model -> what `_measure_model` gives.

    Raises:
        ContenderError: the reference fails; or a contender trains another model than the reference does.
    """
    names = [REFERENCE, *(name for name in contenders if name != REFERENCE)]
    return {model: _measure_model(model, names, settings, show) for model in models}


def _measure_model(model: str, contenders: list[str], settings: Settings, show: Show) -> dict[str, Any]:
    steps = settings.steps or WORKLOADS[model].steps
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        field_ = _Field(model, steps, settings, Path(folder), stack)
        entries = {name: _enter(field_, name, show) for name in contenders}
        for number in range(settings.rounds):
            _play_round(entries, steps, number)
            show(f"{model}: round {number + 1} of {settings.rounds}")
    return {
        "batch_size": WORKLOADS[model].batch_size,
        "steps_per_turn": steps,
        "num_parameters": entries[REFERENCE]["runner"].ready["num_parameters"],
        "load_average": [load_before, os.getloadavg()[0]],
        "contenders": {name: _record(entry) for name, entry in entries.items()},
    }


def _enter(field_: _Field, name: str, show: Show) -> dict[str, Any]:
    """Start a contender, with the settings that are fastest in a trial if there is a choice."""
    contender = CONTENDERS[name]
    variants = [dict(variant) for variant in contender.variants(field_.model, field_.steps)]
    tried: list[tuple[dict[str, Any], Runner]] = []
    failure = ""
    for variant in variants:
        told = f"{field_.model}: starting {name} {variant or ''}".rstrip()
        show(told)
        try:
            runner = field_.start(name, {**dict(contender.settings), **variant})
            check_same_model(runner.ready, field_.reference or runner.ready)
            runner.play(field_.steps)
            tried.append((variant, runner))
        except ContenderError as error:
            failure = str(error)
            show(f"{told}: {failure}")
            if name == REFERENCE:
                raise
    if not tried:
        return {"status": failure}
    trial = _trial(tried, field_.steps) if len(tried) > 1 else []
    best = min(range(len(tried)), key=lambda i: trial[i]["step_ms"]) if trial else 0
    for index, (_, runner) in enumerate(tried):
        if index != best:
            runner.end()
    variant, runner = tried[best]
    if name == REFERENCE:
        field_.reference = runner.ready
    return {"status": "ok", "variant": variant, "trial": trial, "runner": runner}


def _trial(tried: list[tuple[dict[str, Any], Runner]], steps: int) -> list[dict[str, Any]]:
    times = [[runner.play(steps)["wall_s"] for _, runner in tried] for _ in range(TRIAL_ROUNDS)]
    best = [min(column) for column in zip(*times, strict=True)]
    return [
        {"variant": variant, "step_ms": 1000 * wall_s / steps} for (variant, _), wall_s in zip(tried, best, strict=True)
    ]


def check_same_model(ready: Mapping[str, Any], reference: Mapping[str, Any]) -> None:
    """Refuse a contender that trains something else.

    Raises:
        ContenderError: the number of weights, or the logits from the same weights, differ from the reference's.
    """
    if ready["num_parameters"] != reference["num_parameters"]:
        raise ContenderError(
            f"trains another model: {ready['num_parameters']} parameters, not {reference['num_parameters']}"
        )
    if not ready["forward_difference"] <= MAX_FORWARD_DIFFERENCE:
        raise ContenderError(f"trains another model: its logits differ by {ready['forward_difference']:.2g}")


def _play_round(entries: dict[str, dict[str, Any]], steps: int, number: int) -> None:
    """One turn each, in an order that differs from round to round; who fails is out."""
    names = [name for name, entry in entries.items() if "runner" in entry]
    random.Random(number).shuffle(names)
    for name in names:
        runner: Runner = entries[name]["runner"]
        try:
            runner.turns.append(runner.play(steps))
        except ContenderError as error:
            if name == REFERENCE:
                raise
            entries[name] = {"status": f"failed in round {number + 1}: {error}"}


def _record(entry: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a contender: plain numbers."""
    if "runner" not in entry:
        return entry
    runner: Runner = entry.pop("runner")
    return {**entry, **runner.ready, "turns": runner.turns}


@dataclass
class _Field:
    """The contenders of one model, and where they leave their files."""

    model: str
    steps: int
    settings: Settings
    folder: Path
    stack: contextlib.ExitStack
    reference: dict[str, Any] | None = None
    num_started: int = 0

    def start(self, name: str, given: dict[str, Any]) -> Runner:
        """Start a process and wait for its first step.

        Raises:
            ContenderError: see `Runner.play`.
        """
        contender = CONTENDERS[name]
        self.num_started += 1
        log = self.folder / f"{self.num_started}.log"
        environ = {
            **os.environ,
            "KERAS_BACKEND": contender.keras_backend,
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "OMP_NUM_THREADS": str(self.settings.threads),
            # An empty cache for each, so that the start-up holds the compilation.
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / f"{self.num_started}.inductor"),
        }
        arguments = {
            "contender": name,
            "model": self.model,
            "settings": given,
            "threads": self.settings.threads,
            "steps": self.steps,
            "reference": str(self.folder / "reference.npz"),
            "started_at": time.monotonic(),
        }
        command = [
            self.settings.interpreters[contender.environment],
            "-m",
            "benchmarks.training.worker",
            json.dumps(arguments),
        ]
        with log.open("w") as errors:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=environ,
                    cwd=PROJECT,
                )
            except OSError as error:
                raise ContenderError(f"not installed: {error}") from error
        runner = Runner(process, log, self.settings.timeout_s)
        self.stack.callback(runner.end)
        runner.ready = runner.answer()["ready"]
        return runner
