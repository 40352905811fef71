"""A search in the pipeline that kfp.local runs for real, over tiny steps: trials, what is chosen, and who is told of it."""

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from pipelines.config import PipelineConfig, load_config
from pipelines.local import write_best
from pipelines.training import run_local
from pipelines.tuned import tuned_config
from tests.pipelines.test_kfp_run import project  # noqa: F401

TRIAL = """
import dataclasses

from components import artifacts


@dataclasses.dataclass(frozen=True)
class Result:
    number: str


def trial(*, examples, transform, trial, number, config):
    inputs = {"examples": examples, "transform": transform}
    with artifacts.writing(trial, step="trial", inputs=inputs, config=config) as output:
        output.result = Result(number)
    return output.result
"""
TUNE = """
import dataclasses

from components import artifacts


@dataclasses.dataclass(frozen=True)
class Result:
    settings: dict
    numbers: list
    metric: str = "auc"
    value: float = 0.9
    value_as_written: float = 0.8
    trial: int = 2
    num_trials: dict = dataclasses.field(default_factory=lambda: {"complete": 3})


def tune(*, examples, transform, tuned, config, trials=()):
    inputs = {"examples": examples, "transform": transform}
    with artifacts.writing(tuned, step="tune", inputs=inputs, config=config) as output:
        (output.path / "trials").mkdir()
        (output.path / "trials/report.html").write_text("<html>")
        numbers = [artifacts.open_artifact(path, step="trial").result["number"] for path in trials]
        output.result = Result({"train.optimizer.learning_rate": 0.05, "model.args.units": 4}, numbers)
    return output.result
"""


def test_trials_in_pods_of_their_own_and_the_steps_after_them_have_the_best_settings(project: Path) -> None:  # noqa: F811
    (project / "components/trial.py").write_text(TRIAL)
    (project / "components/tune.py").write_text(TUNE)
    tune: dict[str, Any] = {"trials": 3, "sampler": "random", "pruner": "none", "on_kubeflow": "parallel_for"}
    config = PipelineConfig.model_validate(
        {
            "name": "tiny_run",
            "data": {"path": "data.csv", "task": "binary"},
            "evaluate": {"thresholds": [{"metric": "auc", "min": 0.8}]},
            "tune": tune | {"space": {"train.optimizer.learning_rate": [0.001, 0.05], "model.args.units": [2, 4]}},
        }
    )
    result = run_local(config, project / "runs", console=Console(file=io.StringIO()))
    assert result.exit_code == 0
    tuned = result.result_of("tune")
    assert tuned is not None and tuned["numbers"] == ["0", "1", "2"]
    best = tuned_config(config, tuned["settings"])
    for name in ("train", "optimize", "push"):
        step = result.result_of(name)
        assert step is not None
        assert step["settings"] == best.step_config(name).model_dump(mode="json")
    write_best(config, result.run_dir, tuned["settings"])
    assert load_config(result.run_dir / "best.yaml") == best
    assert best.train.optimizer.learning_rate == 0.05
