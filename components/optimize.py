"""Step `optimize`: the trained model made smaller by further training, stage by stage: distill, prune, cluster, quantize."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import keras
import numpy as np

from components import artifacts, model_files, progress
from components.config import ClusterStage, DistillStage, OptimizeConfig, PruneStage, Stage, TrainConfig
from components.errors import ConfigError
from components.preprocessing import Preprocessing
from components.train.step import Run, build_model, keras_settings
from models import optimization
from models.quantization import QuantizationConfig

FILE = "optimization.json"
_RESULT = "result.json"
_TAKEN_OVER = (
    *("global_batch_size", "gradient_accumulation_steps", "last_batch", "class_weights", "label_smoothing"),
    *("max_bad_steps", "checkpoint_steps", "xla", "debug", "strategy", "num_devices", "steps_per_execution"),
)
# Times that a pruning chooses anew what is zero.
_CHOICES = 50


@dataclass(frozen=True)
class StageResult:
    """What a stage made of the model.

    Attributes:
        method: `distill`, `prune`, `cluster` or `quantize_aware`.
        validation: Metrics of the validation split.
        num_parameters: Numbers in all weights.
        zero_share: Share of the kernels' numbers that are zero.
        distinct_values: Most values that differ within one kernel.
        size_bytes: Of the model file.
        zipped_bytes: Of the model file, deflated.
    """

    method: str
    validation: dict[str, float | None]
    num_parameters: int
    zero_share: float
    distinct_values: int
    size_bytes: int
    zipped_bytes: int


@dataclass(frozen=True)
class OptimizeResult:
    """The stages, in the order in which they ran."""

    stages: list[StageResult]


def optimize(
    *, examples: Path, transform: Path, model: Path, optimized: Path, config: OptimizeConfig
) -> OptimizeResult:
    """Run the stages one after the other; a killed run goes on in the stage and the epoch where it was.

    Args:
        examples: Artifact of `ingest`.
        transform: Artifact of `transform`.
        model: Artifact of `train`.
        optimized: Where the artifact is written: `model.keras`, the trained one if there are no stages, and
            `optimization.json`.
        config: The stages.

    Raises:
        ConfigError: a stage cannot take the model.
        HeadraceError: as `train`.
    """
    inputs = {"examples": examples, "transform": transform, "model": model}
    for path, step in ((examples, "ingest"), (transform, "transform"), (model, "train")):
        artifacts.open_artifact(path, step=step)
    with artifacts.writing(optimized, step="optimize", inputs=inputs, config=config) as out:
        preprocessing = Preprocessing.load(transform)
        before, results = model, []
        for number, stage in enumerate(config.stages, 1):
            progress.report(f"stage {number} of {len(config.stages)}: {stage.method}")
            after = out.scratch / f"stage{number}"
            if not (after / _RESULT).exists():
                _run_stage(stage, config, preprocessing, examples, before, after)
            results.append(StageResult(**json.loads((after / _RESULT).read_text())))
            before = after
        shutil.copy2(before / model_files.FILE, out.path / model_files.FILE)
        out.result = OptimizeResult(results)
        (out.path / FILE).write_text(json.dumps(asdict(out.result), indent=1))
    return out.result


def _run_stage(
    stage: Stage, config: OptimizeConfig, preprocessing: Preprocessing, examples: Path, before: Path, after: Path
) -> None:
    """Train one stage from the model in `before`, and leave its model and its result in `after`, the result last."""
    made: list[optimization.Stage] = []

    def make_model(num_steps: int) -> keras.Model:
        model = model_files.read_model(before / model_files.FILE, model_files.builders_of(config.model_dump()))
        # Stages count calls of the model.
        num_calls = num_steps * settings.gradient_accumulation_steps
        try:
            made.append(_make_stage(stage, model, num_calls, preprocessing))
        except ValueError as error:
            raise ConfigError(f"optimize.stages: {stage.method}: {error}") from error
        for layer, why in made[0].left.items():
            progress.report(f"layer '{layer}' is left as it is: {why}")
        return made[0].model

    settings = train_config(stage, config.train)
    with keras_settings(settings):
        validation = Run(settings, preprocessing, examples, after, make_model).until_done().validation
        model = made[0].finish()
        model_files.save_model(model, after)
    result = _describe(stage.method, model, validation, after / model_files.FILE)
    written = after / f"new-{_RESULT}"
    written.write_text(json.dumps(asdict(result)))
    written.replace(after / _RESULT)


def _make_stage(stage: Stage, model: keras.Model, num_steps: int, preprocessing: Preprocessing) -> optimization.Stage:
    if isinstance(stage, DistillStage):
        output = preprocessing.output_spec
        settings = optimization.DistillationConfig(
            outputs="numbers" if output.task == "regression" else "logits",
            alpha=stage.alpha,
            temperature=stage.temperature,
            features=tuple(stage.features.items()),
        )
        student = build_model(stage.student, preprocessing.input_spec, output)
        return optimization.distill(student, settings, teacher=model)
    if isinstance(stage, PruneStage):
        return optimization.prune(
            model,
            optimization.PruningConfig(
                pattern=stage.pattern,
                sparsity=stage.sparsity,
                scope=stage.scope,
                frequency=max(1, num_steps // _CHOICES),
                skip=tuple(stage.skip),
            ),
            num_steps=num_steps,
        )
    if isinstance(stage, ClusterStage):
        return optimization.cluster(
            model, optimization.ClusteringConfig(num_clusters=stage.num_clusters, skip=tuple(stage.skip))
        )
    return optimization.quantize(
        model,
        QuantizationConfig(
            ranges=stage.ranges,
            start_step=round(stage.start_after * num_steps),
            freeze_step=max(1, round(stage.freeze_after * num_steps)),
            skip=tuple(stage.skip),
        ),
    )


def train_config(stage: Stage, train: TrainConfig) -> TrainConfig:
    """How a stage trains: as the step `train` does, with its own epochs and optimizer, in float32 and to the last epoch.

    Raises:
        ConfigError: the model came with its own optimizer, of which nothing is known, and the stage has none.
    """
    if stage.optimizer is None and train.objective == "model":
        raise ConfigError(
            f"optimize.stages: train.objective is model, so there is no optimizer for '{stage.method}'. Give it one."
        )
    # Weights that have been trained want small steps.
    rate = train.optimizer.learning_rate * stage.learning_rate_factor
    taken_over = train.optimizer.model_copy(update={"learning_rate": rate, "warmup_steps": 0, "layers": []})
    settings = {name: getattr(train, name) for name in _TAKEN_OVER}
    if train.strategy == "multi_worker":
        settings["strategy"] = "one_device"
    return TrainConfig(
        **settings, epochs=stage.epochs, optimizer=stage.optimizer or taken_over, seed=train.seed, model=train.model
    )


def _describe(method: str, model: keras.Model, validation: dict[str, float | None], file: Path) -> StageResult:
    kernels = [np.asarray(weight) for weight in model.trainable_weights if len(weight.shape) > 1]
    numbers = sum(kernel.size for kernel in kernels)
    return StageResult(
        method=method,
        validation=validation,
        num_parameters=model.count_params(),
        zero_share=sum(int((kernel == 0).sum()) for kernel in kernels) / max(numbers, 1),
        distinct_values=max((len(np.unique(kernel)) for kernel in kernels), default=0),
        size_bytes=file.stat().st_size,
        zipped_bytes=optimization.zipped_size(file),
    )
