"""Tiny steps with real artifacts, and a process that runs them: `python -m tests.pipelines.fakes RUNS_DIR`."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from components import artifacts
from components.artifacts import Output
from components.external import PUSH_RECORD
from pipelines.config import PipelineConfig
from pipelines.local import run
from pipelines.steps import STEPS, Step, steps_of

Work = Callable[[Output, dict[str, Path], Any], dict[str, Any]]


def write_words(output: Output, inputs: dict[str, Path], config: Any) -> dict[str, Any]:
    """A file that depends on the inputs and the config."""
    words = [(path / "words").read_text() for path in inputs.values()] + [config.model_dump_json()]
    (output.path / "words").write_text("\n".join(words))
    return {"num_words": len(words)}


@dataclasses.dataclass(frozen=True)
class FakeStep(Step):
    """A step that does `work` in place of a real one's, and notes in `calls` that it ran."""

    work: Work = write_words
    calls: list[str] = dataclasses.field(default_factory=list, compare=False)

    def load(self) -> Callable[..., Any]:
        """The function that does it."""

        def step(*, config: Any, **paths: Path) -> None:
            self.calls.append(self.name)
            inputs = {name: paths[name] for name in self.inputs}
            with artifacts.writing(paths[self.output], step=self.name, inputs=inputs, config=config) as output:
                result = self.work(output, inputs, config)
                output.result = dataclasses.make_dataclass("Result", result)(**result)

        return step


def settings(**sections: Any) -> dict[str, Any]:
    """The fewest settings that make a config, and `sections` over them."""
    fewest = {
        "name": "tiny",
        "data": {"path": "data.csv", "task": "binary"},
        "evaluate": {"thresholds": [{"metric": "auc", "min": 0.5}]},
    }
    return fewest | sections


def config_of(**sections: Any) -> PipelineConfig:
    """A small config."""
    return PipelineConfig.model_validate(settings(**sections))


# Those of a run in which nothing is tuned.
UNTUNED = steps_of(config_of())


def table(*works: Work, calls: list[str] | None = None) -> tuple[FakeStep, ...]:
    """Three steps in a row and one behind the gate; `works` replace what the first ones do."""
    calls = [] if calls is None else calls
    rows: list[tuple[str, tuple[str, ...], str, str, bool]] = [
        ("make", (), "made", "compress", False),
        ("shape", ("made",), "shaped", "export", False),
        ("judge", ("shaped",), "judged", "verify", False),
        ("ship", ("shaped", "judged"), "shipped", "push", True),
    ]
    chosen = [*works, *[write_words, write_words, bless, write_words][len(works) :]]
    return tuple(FakeStep(*row, work=work, calls=calls) for row, work in zip(rows, chosen, strict=True))


def bless(output: Output, inputs: dict[str, Path], config: Any) -> dict[str, Any]:
    """A verdict that opens the gate."""
    return write_words(output, inputs, config) | {"blessed": True, "reasons": ["auc 0.9 is at least 0.5"]}


def refuse(output: Output, inputs: dict[str, Path], config: Any) -> dict[str, Any]:
    """A verdict that closes the gate."""
    return write_words(output, inputs, config) | {"blessed": False, "reasons": ["auc 0.4 is below 0.5"]}


def quiet() -> Console:
    """A console that keeps what is printed in `.file`."""
    return Console(file=io.StringIO(), width=160, highlight=False)


EVALUATION = {
    "metrics": {"test": {"auc": 0.94, "loss": 0.33}, "validation": {"auc": 0.95, "loss": 0.31}},
    "slices": [
        {"feature": "payment_type", "value": "Other", "num_examples": 60, "metrics": {"auc": 0.65}},
        {"feature": "payment_type", "value": "Cash", "num_examples": 900, "metrics": {"auc": 0.71}},
        {"feature": "payment_type", "value": "Card", "num_examples": 800, "metrics": {"auc": 0.93}},
    ],
    "baseline": {"auc": 0.5},
    "primary_metric": "auc",
}


HISTORY = [{"train_loss": 0.5, "validation_auc": 0.91}, {"train_loss": 0.4, "validation_auc": None}]


def real_table(*, blessed: bool = True) -> tuple[FakeStep, ...]:
    """Stand-ins for STEPS that leave artifacts which the real steps would take for their own."""

    def evaluate(output: Output, inputs: dict[str, Path], config: Any) -> dict[str, Any]:
        return EVALUATION | write_words(output, inputs, config) | {"blessed": blessed, "reasons": ["auc 0.94 >= 0.5"]}

    def push(output: Output, inputs: dict[str, Path], config: Any) -> dict[str, Any]:
        version = Path(config.destination, config.name, "1")
        (version / PUSH_RECORD).parent.mkdir(parents=True, exist_ok=True)
        (version / "saved_model.pb").write_text("graph")
        digest = artifacts.read_manifest(inputs["model"]).digest
        (version / PUSH_RECORD).write_text(json.dumps({"model_digest": digest}))
        pushed = {"version_path": str(version.absolute()), "version": 1, "model_name": config.name, "formats": ["x"]}
        return write_words(output, inputs, config) | pushed

    def verify(output: Output, inputs: dict[str, Path], config: Any) -> dict[str, Any]:
        keras = {"num_examples": 64, "value": 0.94, "calibration_error": 0.02}
        return write_words(output, inputs, config) | {"metric": "auc", "keras": keras, "formats": [], "server": {}}

    def monitor(output: Output, inputs: dict[str, Path], config: Any) -> dict[str, Any]:
        return write_words(output, inputs, config) | {"status": "ok", "num_examples": 64, "alarms": []}

    def compress(output: Output, inputs: dict[str, Path], config: Any) -> dict[str, Any]:
        return write_words(output, inputs, config) | {"formats": []}

    def optimize(output: Output, inputs: dict[str, Path], config: Any) -> dict[str, Any]:
        return write_words(output, inputs, config) | {"stages": []}

    def train(output: Output, inputs: dict[str, Path], config: Any) -> dict[str, Any]:
        (output.path / "history.json").write_text(json.dumps(HISTORY))
        return write_words(output, inputs, config) | {"epochs": len(HISTORY)}

    works = {"train": train, "evaluate": evaluate, "optimize": optimize, "compress": compress, "verify": verify}

    def deploy(output: Output, inputs: dict[str, Path], config: Any) -> dict[str, Any]:
        return write_words(output, inputs, config) | {"version": 1, "stable": 1, "canary": None, "canary_share": 0.0}

    works |= {"push": push, "deploy": deploy, "monitor": monitor}
    return tuple(FakeStep(**dataclasses.asdict(step), work=works.get(step.name, write_words)) for step in STEPS)


def train_slowly(output: Output, inputs: dict[str, Path], config: Any) -> dict[str, Any]:
    """Ten epochs, each on top of the checkpoint of the one before."""
    checkpoint = output.scratch / "checkpoint"
    output.scratch.mkdir(parents=True, exist_ok=True)
    weights = json.loads(checkpoint.read_text()) if checkpoint.is_file() else []
    started_from = len(weights)
    for epoch in range(started_from, 10):
        (output.path / "half").write_text("not whole yet")
        weights.append(epoch * 7)
        checkpoint.with_suffix(".new").write_text(json.dumps(weights))
        checkpoint.with_suffix(".new").replace(checkpoint)
        print(f"epoch {epoch}", flush=True)
        time.sleep(0.05)
    (output.path / "half").unlink(missing_ok=True)
    (output.path / "words").write_text(json.dumps(weights))
    print(f"started from {started_from}", flush=True)
    return {"num_epochs": len(weights)}


if __name__ == "__main__":
    steps = table(write_words, train_slowly)
    sys.exit(run(config_of(), runs_dir=Path(sys.argv[1]), steps=steps, explain=True).exit_code)
