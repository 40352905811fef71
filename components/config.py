"""The configuration of each step: one class a section, checked without importing anything heavy.

A field marked `inherited` is set once at the top of the tree (`seed`, `name`, `model`) and handed to every step that
needs it; writing it into a section is an error.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, field_validator, model_validator

from components.anomalies import FATAL, KINDS
from components.augment_config import Augment
from components.errors import did_you_mean
from components.section import Count as Count
from components.section import Fraction as Fraction
from components.section import Section as Section
from components.section import inherited, without_effect
from components.section import inherited_fields as inherited_fields
from components.section import refuse_unread as _refuse_unread
from components.spans import refuse_odd_pattern
from components.split_config import LeakageConfig as LeakageConfig
from components.split_config import SplitConfig as SplitConfig
from components.transform_config import NOTHING_MORE, TransformNeeds
from components.transform_config import TransformConfig as TransformConfig


def _address(text: str) -> str:
    if not text.startswith(("http://", "https://", "$")):
        raise ValueError(f"must begin with http:// or https://, or be $NAME, received {text!r}")
    return text


def _secret(text: str) -> str:
    if not (text.startswith("$") and text[1:].isidentifier()):
        raise ValueError("is a secret: write $NAME, and put it into the environment variable NAME")
    return text


Pattern = Annotated[str, Field(min_length=1)]


def _anomaly_kind(text: str) -> str:
    if text not in KINDS:
        raise ValueError(f"is no kind of anomaly.{did_you_mean(text, KINDS)}")
    return text


AnomalyKind = Annotated[str, AfterValidator(_anomaly_kind)]
Address = Annotated[str, AfterValidator(_address)]
Secret = Annotated[str, AfterValidator(_secret)]
Split = Literal["train", "validation", "test"]

TASK_METRICS: dict[str, tuple[str, ...]] = {
    "binary": ("auc", "accuracy", "loss", "precision", "recall", "f1"),
    "multiclass": ("accuracy", "loss", "macro_f1"),
    "regression": ("rmse", "mae", "r2", "loss"),
}

REFUSED_CALLBACKS: dict[str, str] = {
    "BackupAndRestore": "training resumes by itself",
    "LambdaCallback": "it needs functions; name one of your own, package.module:make",
    "LearningRateScheduler": "it needs a function; choose train.optimizer.schedule instead",
    "TerminateOnNaN": "steps with NaN are skipped and counted; set train.max_bad_steps instead",
}


class SparkConfig(Section):
    """Where `data.engine: spark` runs."""

    master: str | None = Field(
        None,
        description="local[*], local[4], spark://host:7077, yarn, k8s://...; default: what spark-submit was told, or else "
        "this machine.",
    )
    conf: dict[str, str | int | float] = Field({}, description="Settings of Spark, such as spark.executor.memory: 4g.")


class DataConfig(Section):
    """Where the examples come from and what is to be predicted (step `ingest`)."""

    source: str = Field(
        "csv",
        description="csv, parquet, jsonl, sql, tfrecord, image_folder, image_manifest, text, numpy, a sample set, or "
        "package.module:source.",
    )
    path: str | None = Field(
        None,
        description="File, folder or glob, relative to the working directory, or below s3://bucket, gs://bucket or "
        "https://host. {SPAN}, {VERSION} and {YYYY}{MM}{DD} stand for the newest that there is.",
    )
    span: int | str | None = Field(
        None, description="Number or date of the span to read; with a window the last one. Default: the newest."
    )
    window: Count | None = Field(None, description="Spans to read, up to the newest. Default: one.")
    allow_gaps: bool = Field(False, description="Whether spans of the window may lie apart, as weekly dates do.")
    args: dict[str, Any] = Field({}, description="Further arguments of the source.")
    label: str = Field("label", description="Column to predict.")
    task: Literal["binary", "multiclass", "regression"] = "multiclass"
    classes: list[str] | None = Field(
        None,
        description="Class names. String labels must be among them; integer label i stands for the i-th. "
        "Without it: the values seen in the train split, sorted.",
    )
    drop: list[str] = Field([], description="Columns to leave out.")
    limit: Count | None = Field(None, description="Read at most this many rows of each split.")
    examples_per_shard: Count = 20_000
    split: SplitConfig = SplitConfig()
    leakage: LeakageConfig = LeakageConfig()
    engine: Literal["local", "spark"] = without_effect(
        "local", "spark: ingest and statistics run on Apache Spark, with the same result to the byte."
    )
    spark: SparkConfig = without_effect(SparkConfig(), "engine: spark only: where it runs.")
    seed: int = inherited(0)

    @model_validator(mode="after")
    def _spark_is_read_by_engine_spark(self) -> DataConfig:
        _refuse_unread(self, ["spark"] if self.engine == "local" else [], f"engine: {self.engine}")
        return self

    @model_validator(mode="after")
    def _spans_have_a_pattern(self) -> DataConfig:
        refuse_odd_pattern(self.path_patterns, span=self.span, window=self.window, allow_gaps=self.allow_gaps)
        newest = self.split.validation_spans + self.split.test_spans
        if self.split.method == "span" and (self.window or 1) <= newest:
            raise ValueError(
                f"split.method: span takes {newest} spans for validation and test and needs at least one more to train "
                f"on: set window to {newest + 1} or more, received {self.window}"
            )
        if self.split.method == "path" and self.path is None:
            raise ValueError("split.method: path needs path, the folder that split.paths start from")
        return self

    @property
    def path_patterns(self) -> dict[str | None, str | None]:
        """Split -> glob of its files, if files decide; else the one path of all, by None."""
        if self.split.method != "path" or self.path is None:
            return {None: self.path}
        globs = self.split.paths.model_dump(exclude_none=True)
        return {split: f"{self.path.rstrip('/')}/{glob}" for split, glob in globs.items()}

    @model_validator(mode="after")
    def _classes_are_distinct_and_have_a_reader(self) -> DataConfig:
        if self.classes is not None and len(set(self.classes)) < max(len(self.classes), 2):
            raise ValueError(f"classes must be two or more different names, received {self.classes}")
        if self.classes is not None and self.task == "regression":
            raise ValueError("regression has no classes: leave out 'classes', or set task to binary or multiclass")
        return self


class ValidateConfig(Section):
    """What the data must look like (step `validate`)."""

    schema_path: str | None = Field(
        None, description="Your schema (YAML). Without it one is inferred from the train split."
    )
    drift_from: str | None = Field(
        None,
        description="Statistics of the last span, which this data is compared with: a run's folder, its folder "
        "statistics or a statistics.json; latest: of the newest other run beside this one.",
    )
    severities: dict[AnomalyKind, Literal["error", "warning", "ignore"]] = Field(
        {}, description="Kind of anomaly -> error (stops the run), warning (is told) or ignore."
    )
    text_features: list[str] = inherited([])
    needs: TransformNeeds = inherited(NOTHING_MORE)
    slice_features: list[str] = inherited([])
    engine: Literal["local", "spark"] = without_effect("local", inherited=True)
    spark: SparkConfig = without_effect(SparkConfig(), inherited=True)
    weight_feature: str | None = Field(
        None, description="Numeric feature that holds each row's weight; statistics then also count rows by it."
    )
    min_class_examples: Count = Field(1, description="Fewest examples of each class in the train split.")
    num_quantiles: Annotated[int, Field(ge=4)] = Field(
        1000, description="Resolution of the quantiles kept for each numeric feature."
    )
    max_top_values: Count = Field(100_000, description="Distinct values (or words) kept for each string feature.")

    @model_validator(mode="after")
    def _what_cannot_be_trained_on_stays_an_error(self) -> ValidateConfig:
        for kind, severity in self.severities.items():
            if kind in FATAL and severity != "error":
                raise ValueError(f"severities.{kind}: nothing can be trained on such data, received {severity!r}")
        return self


class ModelConfig(Section):
    """The network: a built-in name or package.module:build."""

    name: str = Field(
        "tabular", description="resnet, vit, transformer, tabular, dcn, ft_transformer or package.module:build."
    )
    args: dict[str, Any] = Field({}, description="Further arguments of the builder.")


class LayerRate(Section):
    """A learning rate of its own for some layers."""

    match: Pattern = Field(description="Name or path of layers, as in encoder/* (* and ? stand for any characters).")
    learning_rate_factor: Annotated[float, Field(gt=0)] = Field(
        description="Times the learning rate of the others, weight decay included."
    )


class OptimizerConfig(Section):
    """The optimizer, its learning-rate schedule and what happens to the gradients before."""

    name: Literal["adam", "adamw", "sgd", "nadam", "rmsprop", "lion", "lamb", "adafactor"] = "adam"
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    schedule: Literal["constant", "cosine", "linear", "step"] = Field(
        "constant",
        description="cosine, linear: down to final_learning_rate; step: times decay_factor at each decay_at.",
    )
    warmup_steps: Annotated[int, Field(ge=0)] = Field(
        0, description="Steps over which the learning rate rises linearly from 0."
    )
    final_learning_rate: Annotated[float, Field(ge=0)] = Field(
        0.0, description="cosine and linear: the learning rate at the end of the run."
    )
    decay_at: list[Annotated[float, Field(gt=0, lt=1)]] = Field(
        [], description="step: shares of the run after which the learning rate falls, ascending."
    )
    decay_factor: Annotated[float, Field(gt=0, lt=1)] = Field(0.1, description="step: what it is multiplied by.")
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        0.0, description="All but adam: decoupled decay, not on biases and norms."
    )
    momentum: Fraction = Field(0.9, description="sgd only.")
    nesterov: bool = Field(False, description="sgd only: momentum that looks ahead.")
    clip_norm: Annotated[float, Field(gt=0)] | None = Field(None, description="Largest global norm of the gradients.")
    clip_each_norm: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Largest norm of the gradient of each weight by itself."
    )
    clip_value: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Largest absolute value in any gradient."
    )
    layers: list[LayerRate] = Field(
        [], description="Layers with a learning rate of their own; where several match, the last one holds."
    )

    @model_validator(mode="after")
    def _options_have_a_reader(self) -> OptimizerConfig:
        if self.weight_decay and self.name == "adam":
            raise ValueError("adam has no weight_decay; use name: adamw")
        if self.layers and self.name == "adafactor":
            raise ValueError("adafactor bounds its step by itself, so 'layers' cannot scale it: use another optimizer")
        _refuse_unread(self, [] if self.name == "sgd" else ["momentum", "nesterov"], f"name: {self.name}")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs momentum above 0")
        return self

    @model_validator(mode="after")
    def _schedule_is_whole(self) -> OptimizerConfig:
        falls = ["final_learning_rate"] if self.schedule in ("cosine", "linear") else []
        steps = ["decay_at", "decay_factor"] if self.schedule == "step" else []
        options = ("final_learning_rate", "decay_at", "decay_factor")
        _refuse_unread(self, [name for name in options if name not in falls + steps], f"schedule: {self.schedule}")
        if self.final_learning_rate > self.learning_rate:
            raise ValueError(
                f"final_learning_rate {self.final_learning_rate} is above learning_rate {self.learning_rate}"
            )
        if steps and not self.decay_at:
            raise ValueError("schedule: step needs decay_at, such as [0.5, 0.75]")
        if self.decay_at != sorted(set(self.decay_at)):
            raise ValueError(f"decay_at must ascend, received {self.decay_at}")
        return self

    @model_validator(mode="after")
    def _clips_in_one_way(self) -> OptimizerConfig:
        given = [name for name in ("clip_norm", "clip_each_norm", "clip_value") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"gradients are clipped in one way: leave out all but one of {', '.join(given)}")
        return self


class EarlyStoppingConfig(Section):
    """Stop when the validation metric has not improved, and keep the best epoch's weights."""

    metric: str = Field("loss", description="A metric of the validation split: loss, accuracy, auc ...")
    patience: Count = Field(5, description="Epochs without improvement.")


class CallbackConfig(Section):
    """A Keras callback: a built-in name or package.module:make."""

    name: str = Field(
        description="CSVLogger, EarlyStopping, ModelCheckpoint, ReduceLROnPlateau, RemoteMonitor, SwapEMAWeights, "
        "TensorBoard or package.module:make."
    )
    args: dict[str, Any] = Field({}, description="Its arguments.")

    @field_validator("name")
    @classmethod
    def _is_of_use_here(cls, name: str) -> str:
        if name in REFUSED_CALLBACKS:
            raise ValueError(f"{name} is not for here: {REFUSED_CALLBACKS[name]}")
        return name


class TrainConfig(Section):
    """How the model is trained (step `train`)."""

    epochs: Count = 10
    global_batch_size: Count = Field(128, description="Examples per step, over all devices.")
    gradient_accumulation_steps: Count = Field(
        1, description="Parts into which each batch is split, one in memory after the other."
    )
    last_batch: Literal["drop", "keep"] = Field(
        "drop",
        description="The examples left over at the end of an epoch. drop: they wait for another epoch's shuffle; "
        "keep: a smaller last batch.",
    )
    objective: Literal["config", "model"] = Field(
        "config",
        description="model: with the losses, metrics and optimizer that the model's builder compiled it with.",
    )
    optimizer: OptimizerConfig = OptimizerConfig()
    augment: dict[str, Augment] = Field(
        {}, description="Output of an op image -> random changes of its images, in training alone."
    )
    class_weights: Literal["none", "balanced"] = "none"
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="Keep an exponential moving average of the weights: it is validated, saved and served."
    )
    frozen: list[Pattern] = Field(
        [],
        description="Names or paths of layers that are not trained, as in encoder/* (* and ? stand for any characters).",
    )
    early_stopping: EarlyStoppingConfig | None = None
    callbacks: list[CallbackConfig] = Field([])
    max_bad_steps: Count = Field(
        10, description="Steps in a row with NaN or infinite gradients, each left out and counted, that stop the run."
    )
    checkpoint_steps: Count | None = Field(
        None,
        description="Save within an epoch, too, every so many steps; after each epoch and on SIGTERM it always is.",
    )
    precision: Literal["float32", "mixed_bfloat16", "mixed_float16"] = "float32"
    storage_dtype: Literal["float32", "float16", "bfloat16"] = Field(
        "float32", description="Of the weights in the model file; in memory they are float32 again."
    )
    xla: Literal["auto", "on", "off"] = Field(
        "auto", description="auto: compile, and fall back with the reason where XLA cannot."
    )
    debug: Literal["off", "eager"] = Field(
        "off", description="eager: every step runs op by op in Python, for breakpoints and prints."
    )
    strategy: Literal["one_device", "mirrored", "multi_worker"] = Field(
        "one_device",
        description="mirrored: devices of one process; multi_worker: one process a device, on any machines.",
    )
    num_devices: Count | None = Field(
        None, description="mirrored: devices to use; default: all GPUs, or else all logical CPUs."
    )
    num_workers: Count | None = Field(
        None, description="multi_worker: processes to start on this machine; default: those that TF_CONFIG names."
    )
    steps_per_execution: Count = Field(16, description="Steps run in one call of the compiled loop.")
    tensorboard: bool = Field(False, description="Write event files beside the model.")
    layer_statistics: list[Pattern] = Field(
        [], description="Names or paths of layers whose outputs' statistics and histograms are kept each epoch."
    )
    seed: int = inherited(0)
    model: ModelConfig = inherited(ModelConfig())

    @model_validator(mode="after")
    def _options_have_a_reader(self) -> TrainConfig:
        readers = {"mirrored": "num_devices", "multi_worker": "num_workers"}
        unread = [field for strategy, field in readers.items() if strategy != self.strategy]
        _refuse_unread(self, unread, f"strategy: {self.strategy}")
        own = ["optimizer", "class_weights", "label_smoothing", "ema_decay"] if self.objective == "model" else []
        _refuse_unread(self, own, f"objective: {self.objective}")
        return self

    @model_validator(mode="after")
    def _steps_can_run(self) -> TrainConfig:
        if self.global_batch_size % self.gradient_accumulation_steps:
            raise ValueError(
                f"gradient_accumulation_steps {self.gradient_accumulation_steps} does not divide global_batch_size "
                f"{self.global_batch_size}"
            )
        if self.debug == "eager" and self.xla == "on":
            raise ValueError("debug: eager runs op by op, which XLA cannot: leave out 'xla' or set it to off")
        return self

    @model_validator(mode="after")
    def _callbacks_have_what_they_work_on(self) -> TrainConfig:
        names = {callback.name for callback in self.callbacks} if self.objective == "config" else set()
        if "ReduceLROnPlateau" in names and (self.optimizer.schedule != "constant" or self.optimizer.warmup_steps):
            raise ValueError(
                "ReduceLROnPlateau sets the learning rate, and so does optimizer.schedule: use schedule: constant "
                "without warmup_steps, or leave out the callback"
            )
        if "SwapEMAWeights" in names and self.ema_decay is None:
            raise ValueError("SwapEMAWeights needs a moving average of the weights: set ema_decay")
        return self


class Range(Section):
    """Numbers from `low` to `high`, both included: whole ones if both are."""

    low: int | float
    high: int | float
    step: Annotated[int | float, Field(gt=0)] | None = Field(
        None, description="Distance of the numbers that are tried; default: 1 for whole numbers, any for others."
    )
    log: bool = Field(False, description="Draw the logarithm evenly, as for a learning rate.")

    @property
    def is_whole(self) -> bool:
        """Whether only whole numbers are tried."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    @model_validator(mode="after")
    def _holds_numbers(self) -> Range:
        if self.low >= self.high:
            raise ValueError(f"low must be below high, received {self.low} and {self.high}")
        if self.log and (self.low <= 0 or self.step is not None):
            raise ValueError("log needs low above 0 and no step")
        if self.is_whole and isinstance(self.step, float):
            raise ValueError(f"step of whole numbers must be whole, received {self.step}")
        return self


Candidates = Annotated[
    Annotated[Range, Tag("range")] | Annotated[list[Any], Field(min_length=2), Tag("choices")],
    Discriminator(lambda value: "choices" if isinstance(value, list) else "range"),
]


class TuneConfig(Section):
    """The search for settings of `train` and `model` that do better on the validation split (step `tune`)."""

    trials: Annotated[int, Field(ge=0)] = Field(0, description="Models to train with settings of their own; 0: none.")
    space: dict[str, Candidates] = Field(
        {},
        description="Setting, such as train.optimizer.learning_rate or model.args.dropout -> {low, high, step, log} or a "
        "list of values. The settings as written are the first trial, if they are in it.",
    )
    metric: str | None = Field(None, description="Of the validation split. Default: that of the first threshold.")
    sampler: Literal["tpe", "random", "grid"] = Field(
        "tpe", description="tpe: learns from the trials before (Bergstra et al. 2011); grid: every combination in turn."
    )
    pruner: Literal["none", "median", "hyperband"] = Field(
        "median",
        description="Which trials end early. median: those that are worse than the median of the others after as many "
        "epochs; hyperband: all but the best third, again and again (Li et al. 2018).",
    )
    parallel: Count = Field(1, description="Trials at a time, each in a process with its share of the CPUs.")
    timeout_s: Annotated[float, Field(gt=0)] | None = Field(None, description="Start no trial after so many seconds.")
    on_kubeflow: Literal["one_pod", "parallel_for"] = Field(
        "one_pod", description="parallel_for: a pod for each trial, `parallel` at a time; none learns from another."
    )
    primary_metric: str = inherited("")
    seed: int = inherited(0)
    train: TrainConfig = inherited(TrainConfig())

    @model_validator(mode="after")
    def _has_something_to_search(self) -> TuneConfig:
        if self.trials and not self.space:
            raise ValueError("trials need a space, such as space: {train.optimizer.learning_rate: [0.001, 0.01]}")
        return self

    @model_validator(mode="after")
    def _grid_is_finite(self) -> TuneConfig:
        for path, candidates in self.space.items():
            endless = isinstance(candidates, Range) and not candidates.is_whole and candidates.step is None
            if self.sampler == "grid" and endless:
                raise ValueError(f"sampler: grid needs a list of values, or a step, for '{path}'")
        return self

    @model_validator(mode="after")
    def _pods_do_not_know_each_other(self) -> TuneConfig:
        if self.on_kubeflow == "parallel_for":
            if self.sampler == "tpe":
                raise ValueError("on_kubeflow: parallel_for has no trials to learn from: use sampler: random or grid")
            for name, needed in (("pruner", "none"), ("timeout_s", None)):
                if getattr(self, name) != needed:
                    raise ValueError(
                        f"on_kubeflow: parallel_for runs every trial to its end: set {name}: {needed or 'null'}"
                    )
        return self


class TrainingJobConfig(Section):
    """A job of its own in which the train step's workers run; `training_job: tfjob` stands for `{kind: tfjob}`."""

    kind: Literal["tfjob", "trainjob"] = Field(
        description="tfjob: Training Operator v1; trainjob: Kubeflow Trainer v2, with the runtime of "
        "`headrace manifests --target training`."
    )
    runtime: str = Field("tensorflow-distributed", description="trainjob: name of its ClusterTrainingRuntime.")
    queue: str | None = Field(None, description="Kueue's LocalQueue that admits the job; default: none.")
    pending_timeout_seconds: Annotated[int, Field(ge=0)] = Field(
        1800,
        description="For all workers to be placed on a node and to have their image; waiting in a queue is no part.",
    )
    max_restarts: Annotated[int, Field(ge=0)] = Field(
        3, description="Of any one worker; all go on from the last checkpoint each time."
    )
    deadline_seconds: Count | None = Field(None, description="After which the job is ended, done or not.")

    @model_validator(mode="before")
    @classmethod
    def _may_be_its_kind_alone(cls, given: Any) -> Any:
        return {"kind": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _runtime_has_a_reader(self) -> TrainingJobConfig:
        _refuse_unread(self, ["runtime"] if self.kind == "tfjob" else [], "kind: tfjob")
        return self


class Threshold(Section):
    """A bound that the challenger must keep on the test split, as a whole and, if asked, in every slice."""

    metric: str
    min: float | None = None
    max: float | None = None
    above_baseline: float | None = Field(
        None, description="Margin over what always answering with the train split's majority gives."
    )
    slices: bool = Field(False, description="Hold in every slice that has min_slice_examples, too.")

    @model_validator(mode="after")
    def _has_a_bound(self) -> Threshold:
        if self.min is None and self.max is None and self.above_baseline is None:
            raise ValueError("give min, max or above_baseline: without one the threshold cannot fail")
        return self


class ChampionConfig(Section):
    """How much better the new model must be than the newest pushed one, on the same test split."""

    metric: str
    min_improvement: float = Field(0.0, description="Smallest gain; below zero tolerates a loss.")


class EvaluateConfig(Section):
    """The gate (step `evaluate`)."""

    slices: list[str] = Field([], description="Raw features by whose values metrics are sliced.")
    min_slice_examples: Count = Field(50, description="Smaller slices are shown, never gated.")
    thresholds: list[Threshold] = Field(min_length=1)
    champion: ChampionConfig | None = None
    champion_path: str = inherited("")
    manifests: str | None = inherited(None)
    batch_size: Count = 1024


class _Stage(Section):
    """What every stage of `optimize` has: it trains the model further, as `train` does."""

    epochs: Count = 3
    optimizer: OptimizerConfig | None = Field(
        None, description="Default: that of train, without warm-up and with its learning rate times the factor."
    )
    learning_rate_factor: Annotated[float, Field(gt=0)] = 0.1

    @model_validator(mode="after")
    def _factor_has_a_reader(self) -> _Stage:
        if self.optimizer is not None:
            _refuse_unread(self, ["learning_rate_factor"], "an optimizer of its own")
        return self


class DistillStage(_Stage):
    """A smaller model learns from the answers of the one before (Hinton et al., arXiv:1503.02531)."""

    method: Literal["distill"]
    student: ModelConfig = Field(description="The smaller model.")
    temperature: Annotated[float, Field(gt=0)] = 4.0
    alpha: Fraction = Field(0.5, description="Share of the loss against the teacher; the rest is against the labels.")
    features: dict[Pattern, Pattern] = Field(
        {}, description="Layer of the student -> layer of the teacher whose outputs are to be alike."
    )


class PruneStage(_Stage):
    """Weights of least magnitude become zero, by a schedule (Zhu and Gupta, arXiv:1710.01878)."""

    method: Literal["prune"]
    pattern: Literal["unstructured", "2:4", "channels"] = Field(
        "unstructured", description="2:4: two of each four are zero; channels: whole filters are cut out of the model."
    )
    sparsity: Annotated[float, Field(gt=0, lt=1)] = Field(0.5, description="Share of weights, or of channels.")
    scope: Literal["layer", "global"] = Field("layer", description="Within what the smallest are sought.")
    skip: list[Pattern] = Field([], description="Names or paths of layers that stay whole.")


class ClusterStage(_Stage):
    """The weights of a kernel share few values, so that the file zips well (Han et al., arXiv:1510.00149)."""

    method: Literal["cluster"]
    num_clusters: Annotated[int, Field(ge=2)] = 16
    skip: list[Pattern] = Field([], description="Names or paths of layers that stay as they are.")


class QuantizeAwareStage(_Stage):
    """The model trains with its weights and activations rounded to int8; `compress` then needs no calibration."""

    method: Literal["quantize_aware"]
    ranges: Literal["moving_average", "learned"] = "moving_average"
    start_after: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="Share of the steps that observe ranges and round nothing yet."
    )
    freeze_after: Fraction = Field(0.7, description="Share of the steps after which ranges and batch norm are frozen.")
    skip: list[Pattern] = Field([], description="Names or paths of layers that stay float.")


Stage = Annotated[DistillStage | PruneStage | ClusterStage | QuantizeAwareStage, Field(discriminator="method")]


class OptimizeConfig(Section):
    """Further training that makes the model smaller, for the forms of `compress` (step `optimize`)."""

    stages: list[Stage] = Field([])
    train: TrainConfig = inherited(TrainConfig())

    @model_validator(mode="after")
    def _quantization_comes_last(self) -> OptimizeConfig:
        if "quantize_aware" in [stage.method for stage in self.stages[:-1]]:
            raise ValueError("quantize_aware has to be the last of the stages: no other takes its model")
        return self


class CalibrationConfig(Section):
    """By which examples the ranges of int8 activations are set, and how."""

    method: Literal["min_max", "percentile", "entropy", "mse"] = Field(
        "mse",
        description="min_max: all values; percentile: all but a share at both ends; entropy: least Kullback-Leibler "
        "divergence; mse: least squared error of rounding and clipping.",
    )
    percentile: Annotated[float, Field(gt=50, le=100)] = Field(99.99, description="percentile: the share kept.")
    num_examples: Count = Field(500, description="Of the training split, the classes in equal shares.")

    @model_validator(mode="after")
    def _percentile_has_a_reader(self) -> CalibrationConfig:
        if self.method != "percentile":
            _refuse_unread(self, ["percentile"], f"method: {self.method}")
        return self


class MixedConfig(Section):
    """How many of the layers that int8 costs most stay float."""

    max_drop: Annotated[float, Field(ge=0)] | None = Field(
        None, description="As many as it takes for the first threshold's metric to lose no more on validation examples."
    )
    keep_float: Count | None = Field(None, description="So many.")

    @model_validator(mode="after")
    def _one_of_both(self) -> MixedConfig:
        if (self.max_drop is None) == (self.keep_float is None):
            raise ValueError("give either max_drop or keep_float, which both say how many layers stay float")
        return self


CompressedForm = Literal[
    "float16",
    "dynamic_range",
    "int8",
    "int16x8",
    "onnx_dynamic_int8",
    "onnx_static_int8",
    "openvino_float16",
    "openvino_int8",
    "coreml_float16",
    "tensorrt_float16",
    "tensorrt_int8",
]


class CompressConfig(Section):
    """Smaller forms of the optimized model (step `compress`); `verify` judges them."""

    formats: list[CompressedForm] = Field(
        ["float16", "dynamic_range", "int8"],
        description="TFLite, or what the name says. openvino and coreml need headrace[openvino] and headrace[coreml].",
    )
    io_dtype: Literal["float32", "int8", "uint8"] = Field(
        "float32", description="int8: what float inputs and outputs of the TFLite file become."
    )
    calibration: CalibrationConfig = CalibrationConfig()
    equalize: bool = Field(True, description="int8: try cross-layer equalization, and keep it if it helps.")
    correct_bias: bool = Field(True, description="int8: try bias correction, and keep it if it helps.")
    finetune_steps: Annotated[int, Field(ge=0)] = Field(
        0, description="int8: training steps towards the float model's answers; kept if they help."
    )
    finetune_learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    sensitivity: bool = Field(True, description="int8: measure what each layer costs.")
    mixed: MixedConfig | None = Field(None, description="int8: the worst layers stay float.")
    primary_metric: str = inherited("")
    seed: int = inherited(0)


class ExportConfig(Section):
    """The forms in which the model leaves (step `export`). The SavedModel is always written."""

    model: Literal["trained", "optimized"] = Field(
        "trained", description="optimized: that of `optimize`, in float, an inexact form for verify."
    )
    formats: list[Literal["tflite", "onnx", "openvino", "coreml", "tensorrt"]] = Field(
        ["tflite", "onnx"],
        description="openvino and coreml need headrace[openvino] and headrace[coreml]. What cannot be run here, such as "
        "coreml without macOS or tensorrt without a GPU, verify leaves out.",
    )
    onnx_opset: Annotated[int, Field(ge=13, le=18)] = Field(17, description="tf2onnx 1.17 refuses 19 and above.")
    features: list[Pattern] = Field(
        [], description="Layers, such as block2*, whose outputs the SavedModel's signature `features` gives."
    )
    weights_dtype: Literal["float32", "float16", "bfloat16"] = Field(
        "float32",
        description="In which the SavedModel stores its large weights; rounded ones make it an inexact form for verify.",
    )
    num_warmup_examples: Annotated[int, Field(ge=0, le=999)] = Field(
        8, description="Test examples with which TF Serving warms up, one by one and then as a batch; 0: none."
    )
    seed: int = inherited(0)


class Limits(Section):
    """What a form has to keep on the test split, beside the Keras model; None: no limit."""

    max_abs_difference: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Largest difference of any output; for regression in standard deviations of the answers."
    )
    min_top1_agreement: Fraction | None = Field(None, description="Smallest share of examples with the same answer.")
    max_drop: Annotated[float, Field(ge=0)] | None = Field(None, description="Largest loss of `metric`.")
    max_calibration_error_increase: Annotated[float, Field(ge=0)] | None = Field(
        None, description="Largest gain of the expected calibration error; not for regression."
    )
    max_size_bytes: Count | None = None
    max_zipped_bytes: Count | None = None
    max_load_ms: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Limits of times depend on the machine."
    )
    max_latency_ms_p50_batch_1: Annotated[float, Field(gt=0)] | None = None
    max_latency_ms_p99_batch_1: Annotated[float, Field(gt=0)] | None = None
    max_latency_ms_p50_batch_32: Annotated[float, Field(gt=0)] | None = None
    max_latency_ms_p99_batch_32: Annotated[float, Field(gt=0)] | None = None


class ExactLimits(Limits):
    """Limits of forms that compute in float32; the SavedModel's hold for the server, too."""

    max_abs_difference: Annotated[float, Field(gt=0)] | None = 1e-4
    min_top1_agreement: Fraction | None = 0.999


class InexactLimits(Limits):
    """Limits of all other forms."""

    min_top1_agreement: Fraction | None = 0.95
    max_drop: Annotated[float, Field(ge=0)] | None = 0.01


class FormLimits(Limits):
    """Limits of some forms, in place of those of their kind; what is left out stays."""

    on_failure: Literal["omit", "fail"] | None = None


class VerifyConfig(Section):
    """The gate of the forms (step `verify`): each against the Keras model on the test split, then the running server."""

    metric: str | None = Field(
        None, description="The metric of the test split that is compared; default: that of the first threshold."
    )
    on_failure: Literal["omit", "fail"] = Field(
        "omit",
        description="omit: leave a form out that breaks a limit, and say so; fail: stop the run, as the SavedModel "
        "always does.",
    )
    exact: ExactLimits = ExactLimits()
    inexact: InexactLimits = InexactLimits()
    limits: dict[Pattern, FormLimits] = Field(
        {},
        description="By the name of a form, as in tflite_* (* and ? stand for any characters); where several match, "
        "later ones win.",
    )
    latency_rounds: Count = Field(
        100, description="Calls timed for each form and batch size; below 100 the 99th percentile is near the slowest."
    )
    num_server_examples: Count = Field(256, description="Examples sent through gRPC and REST.")
    primary_metric: str = inherited("")
    seed: int = inherited(0)

    @model_validator(mode="after")
    def _saved_model_stays(self) -> VerifyConfig:
        if "saved_model" in self.limits and self.limits["saved_model"].on_failure == "omit":
            raise ValueError("the SavedModel cannot be left out: leave out limits.saved_model.on_failure")
        return self


class CardConfig(Section):
    """What the model card says that only the makers of a model know."""

    intended_use: str = Field("", description="What it is for, and for whom.")
    out_of_scope_use: str = Field("", description="What it must not be used for.")
    ethical_considerations: str = ""
    caveats: str = Field("", description="Where it fails, and what to do then.")


class RegistryConfig(Section):
    """A Kubeflow Model Registry (Hub), in which `push` records each version."""

    url: str = Field(description="Its address, as in http://model-registry-service.kubeflow:8080.")
    token_env: str | None = Field(None, description="Environment variable that holds the bearer token.")
    destination_uri: str | None = Field(
        None,
        description="What push.destination is called elsewhere, as in pvc://models; default: as it is, or file://.",
    )

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"must begin with http:// or https://, received {url!r}")
        return url.rstrip("/")


class TrackingConfig(Section):
    """Where runs are recorded; `tracking: mlflow` stands for `tracking: {kind: mlflow}`."""

    kind: Literal["mlflow"] = "mlflow"
    uri: str | None = Field(None, description="Tracking server; default: the environment variable MLFLOW_TRACKING_URI.")
    experiment: str | None = Field(None, description="Default: the name of the config.")

    @model_validator(mode="before")
    @classmethod
    def _may_be_its_kind_alone(cls, given: Any) -> Any:
        return {"kind": given} if isinstance(given, str) else given


class PushConfig(Section):
    """Where a blessed and proven model goes (step `push`)."""

    destination: str = Field(
        "serving_models",
        description="Folder, s3://bucket/path or gs://bucket/path; the model lands in <destination>/<name>/<version>.",
    )
    keep_versions: Annotated[int, Field(ge=2)] = Field(
        3, description="Newest versions kept, and those that get traffic; at least two, so that one can roll back."
    )
    name: str = inherited("")
    resolved_config: str = inherited("")
    card: CardConfig = inherited(CardConfig())
    registry: RegistryConfig | None = inherited(None)
    manifests: str | None = inherited(None)

    @field_validator("destination")
    @classmethod
    def _is_a_place_that_can_be_written(cls, destination: str) -> str:
        if "://" in destination and not destination.startswith(("s3://", "gs://")):
            raise ValueError(f"must be a folder, s3://bucket/path or gs://bucket/path, received {destination!r}")
        return destination.rstrip("/") or "/"


class DeployConfig(Section):
    """How many of the requests the pushed version gets (step `deploy`)."""

    canary_share: Fraction = Field(
        1.0,
        description="1: all, at once; less: that share while it is on trial beside the version before, until "
        "`headrace promote` or `headrace rollback`.",
    )
    servers: list[str] = Field(
        [], description="URLs of the servers; what they have counted so far is left out when the version is judged."
    )
    manifests: str | None = Field(
        None,
        description="Folder that `headrace manifests` wrote, which changes instead of traffic.json with the versions.",
    )
    apply: bool = Field(False, description="Bring the manifests to the cluster, too: kubectl apply, docker compose up.")
    overlay: Literal["production", "dev"] = Field("production", description="Which one of them, for plain Kubernetes.")

    @model_validator(mode="after")
    def _options_have_a_reader(self) -> DeployConfig:
        _refuse_unread(self, [] if self.manifests else ["apply"], "manifests: null")
        _refuse_unread(self, [] if self.apply else ["overlay"], "apply: false")
        return self


class AlarmConfig(Section):
    """What `headrace monitor` does at an alarm; the step in a pipeline only reports it."""

    command: list[str] = Field([], description="A program and its arguments; it reads monitor.json on standard input.")
    webhook: Address | None = Field(
        None, description="URL to which the alarms are posted as JSON; $NAME: the environment variable that holds it."
    )
    retrain: Literal["local", "kfp"] | None = Field(
        None, description="Start a run of this config: `headrace run`, or `headrace submit`."
    )
    retrain_args: list[str] = Field([], description="Further arguments of it, such as [--host, URL].")
    cool_down_seconds: Annotated[float, Field(ge=0)] = Field(
        86_400.0, description="Least time between two starts of each."
    )

    @model_validator(mode="after")
    def _options_have_a_reader(self) -> AlarmConfig:
        _refuse_unread(self, [] if self.retrain else ["retrain_args"], "retrain: null")
        if self.retrain == "kfp" and not any(argument.startswith("--host") for argument in self.retrain_args):
            raise ValueError("retrain: kfp needs the address of Kubeflow: retrain_args: [--host, URL]")
        return self


class MonitorConfig(Section):
    """Served requests against the training statistics, against earlier ones and against their labels (step `monitor`)."""

    request_log: str | None = Field(
        None,
        description="The server's --request_log_file, with all that was rotated out of it, a folder of logs or a glob. "
        "Without it: the requests that `verify` sent.",
    )
    model_name: str | None = Field(None, description="Only calls of the model served under this name; default: all.")
    max_linf: Fraction = Field(0.2, description="Categories: largest L-infinity distance.")
    max_jensen_shannon: Fraction = Field(0.2, description="Numbers: largest Jensen-Shannon divergence (base 2).")
    thresholds: dict[str, Fraction] = Field(
        {},
        description="Feature -> its largest distance, in place of these two; so are predicted_label, predicted_score and "
        "predicted_value.",
    )
    max_missing_increase: Fraction = Field(0.1, description="Largest rise of the share of rows without a value.")
    max_unseen_increase: Fraction = Field(
        0.1,
        description="Categories: largest rise of the share of values that the train split lacks, over the test split's.",
    )
    min_examples: Count = Field(
        100, description="Fewest examples to judge by, of a window, a feature or a slice; with fewer it is too_few."
    )
    significance: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.01, description="Chance, over all comparisons together, of an alarm at what is sampling noise alone."
    )
    window_seconds: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Length of a window of time; the newest is judged. Without it: the whole log is one window."
    )
    num_windows: Annotated[int, Field(ge=2)] = Field(24, description="With window_seconds: windows that are read.")
    labels: str | None = Field(
        None,
        description="Labels that came later: CSV, Parquet or JSON Lines (or a glob) with request_id, label and, where "
        "requests hold several examples, row.",
    )
    max_drop: Annotated[float, Field(ge=0)] = Field(
        0.05, description="Largest loss of the first threshold's metric, against the test split, by slice too."
    )
    on_alarm: AlarmConfig = AlarmConfig()
    name: str = inherited("model")
    task: Literal["binary", "multiclass", "regression"] = inherited("multiclass")
    primary_metric: str = inherited("accuracy")
    slice_features: list[str] = inherited([])

    @model_validator(mode="after")
    def _num_windows_has_a_reader(self) -> MonitorConfig:
        _refuse_unread(self, [] if self.window_seconds else ["num_windows"], "window_seconds: null")
        _refuse_unread(self, [] if self.labels else ["max_drop"], "labels: null")
        return self


class EmailConfig(Section):
    """A message by SMTP."""

    host: str = Field(description="Mail server.")
    port: Annotated[int, Field(ge=1, le=65535)] = 587
    security: Literal["starttls", "tls", "none"] = Field("starttls", description="tls: from the start, as on port 465.")
    user: str | None = None
    password: Secret | None = Field(None, description="$NAME: the environment variable that holds it.")
    sender: str
    recipients: list[str] = Field(min_length=1)

    @model_validator(mode="after")
    def _password_is_safe_and_has_a_user(self) -> EmailConfig:
        if (self.user is None) != (self.password is None):
            raise ValueError("give both user and password, or neither")
        if self.password is not None and self.security == "none":
            raise ValueError("a password is not sent in the clear: use security: starttls or tls")
        return self


class NotifyConfig(Section):
    """Who is told how a run ended: after `headrace run`, and by the task `summary` on Kubeflow."""

    when: list[Literal["succeeded", "not_blessed", "failed", "cancelled"]] = Field(
        ["succeeded", "not_blessed", "failed", "cancelled"], min_length=1, description="Which ends are told."
    )
    webhook: Address | None = Field(
        None, description="URL to which the end is posted as JSON; $NAME: the environment variable that holds it."
    )
    slack: Secret | None = Field(
        None,
        description="$NAME: the environment variable that holds an incoming webhook of Slack, or of what takes such.",
    )
    email: EmailConfig | None = None
    link: str | None = Field(
        None, description="Where to look, told with it; {run_id} stands for the run's id, as in Kubeflow's UI."
    )
    name: str = inherited("")
    min_slice_examples: int = inherited(1)

    @property
    def is_on(self) -> bool:
        """Whether anyone is told."""
        return any(target is not None for target in (self.webhook, self.slack, self.email))

    @property
    def variables(self) -> list[str]:
        """The environment variables that it reads."""
        mail = (self.email.user, self.email.password) if self.email else ()
        return [value[1:] for value in (self.webhook, self.slack, *mail) if value and value.startswith("$")]


SECTIONS: dict[str, type[Section]] = {
    "data": DataConfig,
    "validate": ValidateConfig,
    "transform": TransformConfig,
    "tune": TuneConfig,
    "train": TrainConfig,
    "evaluate": EvaluateConfig,
    "optimize": OptimizeConfig,
    "compress": CompressConfig,
    "export": ExportConfig,
    "verify": VerifyConfig,
    "push": PushConfig,
    "deploy": DeployConfig,
    "monitor": MonitorConfig,
    "notify": NotifyConfig,
}
