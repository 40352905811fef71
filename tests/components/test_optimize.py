"""The optimize step: its stages chain, go on where they were killed, and leave a model that any later step can read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from components import artifacts, model_files, progress
from components.config import OptimizeConfig, OptimizerConfig, PruneStage, TrainConfig
from components.errors import ConfigError
from components.optimize import FILE, OptimizeResult, optimize, train_config
from models import quantization
from tests.conftest import StepRun

PRUNE: dict[str, Any] = {"method": "prune", "epochs": 1, "sparsity": 0.75, "scope": "layer"}
CLUSTER: dict[str, Any] = {"method": "cluster", "epochs": 1, "num_clusters": 8}
QUANTIZE: dict[str, Any] = {"method": "quantize_aware", "epochs": 1}
DISTILL: dict[str, Any] = {
    "method": "distill",
    "epochs": 4,
    "learning_rate_factor": 1.0,
    "student": {"name": "tabular", "args": {"hidden_dims": [8], "dropout": 0.0, "embedding_dim": 2}},
}


@pytest.fixture
def run_optimize(taxi: StepRun, tmp_path: Path):
    """Optimize the shared taxi model: `run_optimize(stages, name) -> (result, path)`."""
    inputs = {name: taxi.path(name) for name in ("examples", "transform", "model")}

    def run(stages: list[dict[str, Any]], name: str = "optimized") -> tuple[OptimizeResult, Path]:
        config = OptimizeConfig.model_validate({"stages": stages, "train": taxi.config.step_config("train")})
        return optimize(**inputs, optimized=tmp_path / name, config=config), tmp_path / name

    return run


def test_without_stages_the_trained_model_goes_on(run_optimize, taxi: StepRun) -> None:
    result, path = run_optimize([])
    assert result.stages == []
    assert (path / "model.keras").read_bytes() == (taxi.path("model") / "model.keras").read_bytes()
    assert model_files.load_model(path).count_params() == model_files.load_model(taxi.path("model")).count_params()


def test_stages_chain_and_later_ones_keep_what_earlier_ones_made(run_optimize, taxi: StepRun) -> None:
    result, path = run_optimize([PRUNE, CLUSTER, QUANTIZE])
    pruned, clustered, quantized = result.stages
    assert [stage.method for stage in result.stages] == ["prune", "cluster", "quantize_aware"]
    assert pruned.zero_share == pytest.approx(0.75, abs=0.02)
    assert clustered.zero_share >= pruned.zero_share and clustered.distinct_values <= 8 < pruned.distinct_values
    assert quantized.zero_share == pytest.approx(clustered.zero_share, abs=0.02)
    assert clustered.zipped_bytes < pruned.zipped_bytes < 0.8 * pruned.size_bytes
    before = taxi.result("train").validation["auc"]
    assert all(stage.validation["auc"] > before - 0.1 for stage in result.stages)
    assert json.loads((path / FILE).read_text())["stages"][1]["distinct_values"] == clustered.distinct_values
    assert quantization.ranges(model_files.load_model(path))


def test_a_student_of_another_size_learns_from_the_model(run_optimize, taxi: StepRun) -> None:
    result, path = run_optimize([DISTILL])
    assert result.stages[0].num_parameters == model_files.load_model(path).count_params()
    assert result.stages[0].num_parameters < 0.7 * model_files.load_model(taxi.path("model")).count_params()
    assert result.stages[0].validation["auc"] > 0.7


def test_a_killed_run_goes_on_in_the_stage_where_it_was(run_optimize) -> None:
    stages = [PRUNE, {**CLUSTER, "epochs": 2}]
    _, whole = run_optimize(stages, "whole")
    lines: list[str] = []

    def interrupt(message: str) -> None:
        lines.append(message)
        if message.startswith("epoch 2/2"):
            raise KeyboardInterrupt

    with progress.shown_by(interrupt), pytest.raises(KeyboardInterrupt):
        run_optimize(stages)
    with progress.shown_by(lines.append):
        _, resumed = run_optimize(stages)
    assert sum(line.startswith("epoch 1/1") for line in lines) == 1
    assert sum(line.startswith("epoch 1/2") for line in lines) == 1
    assert artifacts.read_manifest(resumed).digest == artifacts.read_manifest(whole).digest


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({**PRUNE, "skip": ["hiden1"]}, r"optimize\.stages: prune: no layer .* matches 'hiden1': did you mean"),
        ({**DISTILL, "features": {"hidden9": "hidden1"}}, r"optimize\.stages: distill: .*hidden9"),
        ({**DISTILL, "student": {"name": "tabluar"}}, "Did you mean 'tabular'"),
    ],
    ids=str,
)
def test_what_a_stage_cannot_take_is_refused_and_nothing_is_left(
    run_optimize, tmp_path: Path, stage: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_optimize([stage])
    assert not (tmp_path / "optimized").exists()


def test_a_stage_trains_as_the_step_train_does_with_smaller_steps() -> None:
    train = TrainConfig(
        epochs=9,
        global_batch_size=64,
        optimizer=OptimizerConfig(name="adamw", learning_rate=0.02, warmup_steps=50, schedule="cosine"),
        strategy="multi_worker",
        num_workers=2,
        precision="mixed_bfloat16",
        seed=7,
    )
    config = train_config(PruneStage(method="prune", epochs=2), train)
    assert (config.epochs, config.global_batch_size, config.seed) == (2, 64, 7)
    assert (config.strategy, config.num_workers, config.precision) == ("one_device", None, "float32")
    assert config.optimizer.learning_rate == pytest.approx(0.002)
    assert (config.optimizer.name, config.optimizer.schedule, config.optimizer.warmup_steps) == ("adamw", "cosine", 0)
    own = OptimizerConfig(name="sgd")
    assert train_config(PruneStage(method="prune", optimizer=own), train).optimizer == own
    with pytest.raises(ConfigError, match=r"there is no optimizer for 'prune'\. Give it one"):
        train_config(PruneStage(method="prune"), TrainConfig(objective="model"))
