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
        processes: Processes of each contender, one after the other: one differs from the next by where its memory lies.
        rounds: Rounds of each process, in each of which every contender has a turn.
        steps: Steps a turn; `None`: what the workload says.
        threads: Threads of every contender.
        interpreters: Environment (`project`, `torch`, `jax`) to Python interpreter.
        timeout_s: Longest that a contender may take to start or for a turn.
    """

    processes: int
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
    with tempfile.TemporaryDirectory() as folder:
        field_ = _Field(model, steps, settings, Path(folder), show)
        entries = {name: field_.choose(name) for name in contenders}
        for process in range(settings.processes):
            with contextlib.ExitStack() as stack:
                runners = field_.start_all(entries, stack)
                for number in range(settings.rounds):
                    _play_round(entries, runners, steps, process * settings.rounds + number)
                    show(f"{model}: process {process + 1}, round {number + 1} of {settings.rounds}")
                for name, runner in runners.items():
                    entries[name]["processes"].append({**runner.ready, "turns": runner.turns})
    return {
        "batch_size": WORKLOADS[model].batch_size,
        "steps_per_turn": steps,
        "num_parameters": entries[REFERENCE]["processes"][0]["num_parameters"],
        "load_average": [load_before, os.getloadavg()[0]],
        "contenders": entries,
    }


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


def _play_round(entries: dict[str, dict[str, Any]], runners: dict[str, Runner], steps: int, number: int) -> None:
    """One turn each, in an order that differs from round to round; who fails is out."""
    names = list(runners)
    random.Random(number).shuffle(names)
    for name in names:
        try:
            runners[name].turns.append(runners[name].play(steps))
        except ContenderError as error:
            if name == REFERENCE:
                raise
            del runners[name]
            entries[name] = {"status": f"failed in round {number + 1}: {error}"}


@dataclass
class _Field:
    """The contenders of one model, and where they leave their files."""

    model: str
    steps: int
    settings: Settings
    folder: Path
    show: Show
    reference: dict[str, Any] | None = None
    num_started: int = 0

    def choose(self, name: str) -> dict[str, Any]:
        """An entry for a contender: with the settings that are fastest in a trial if there is a choice."""
        variants = [dict(variant) for variant in CONTENDERS[name].variants(self.model, self.steps)]
        entry: dict[str, Any] = {"status": "ok", "variant": variants[0], "trial": [], "processes": []}
        if len(variants) == 1:
            return entry
        with contextlib.ExitStack() as stack:
            tried: list[tuple[dict[str, Any], Runner]] = []
            for variant in variants:
                try:
                    tried.append((variant, self.start(name, variant, stack)))
                except ContenderError as error:
                    entry["status"] = str(error)
            if not tried:
                return entry
            trial = _trial(tried, self.steps)
        best = min(trial, key=lambda result: result["step_ms"])
        return {**entry, "status": "ok", "variant": best["variant"], "trial": trial}

    def start_all(self, entries: dict[str, dict[str, Any]], stack: contextlib.ExitStack) -> dict[str, Runner]:
        """A process of each contender that takes part; who cannot start is out."""
        runners = {}
        for name, entry in entries.items():
            if entry["status"] == "ok":
                try:
                    runners[name] = self.start(name, entry["variant"], stack)
                except ContenderError as error:
                    if name == REFERENCE:
                        raise
                    entries[name] = {"status": str(error)}
        return runners

    def start(self, name: str, variant: dict[str, Any], stack: contextlib.ExitStack) -> Runner:
        """Start a process that ends with the stack, and let it take a turn to warm up.

        Raises:
            ContenderError: see `Runner.play`; or it trains another model than the reference does.
        """
        told = f"{self.model}: starting {name} {variant or ''}".rstrip()
        self.show(told)
        try:
            runner = self._start(name, {**dict(CONTENDERS[name].settings), **variant}, stack)
            check_same_model(runner.ready, self.reference or runner.ready)
            runner.play(self.steps)
        except ContenderError as error:
            self.show(f"{told}: {error}")
            raise
        if name == REFERENCE:
            self.reference = runner.ready
        return runner

    def _start(self, name: str, given: dict[str, Any], stack: contextlib.ExitStack) -> Runner:
        """Start a process and wait for its first step."""
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
        stack.callback(runner.end)
        runner.ready = runner.answer()["ready"]
        return runner
