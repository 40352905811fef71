"""What a configuration trains towards: the loss, the example weights, the optimizer, and which layers it moves how far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from components.config import LayerRate, OptimizerConfig, TrainConfig
from components.errors import ConfigError
from models import hooks
from models.spec import OutputSpec

NOT_DECAYED = ["bias", "gamma", "beta", "range_log_factors"]

LearningRate: TypeAlias = float | keras.optimizers.schedules.LearningRateSchedule


@keras.saving.register_keras_serializable("headrace")
class ExampleLoss(keras.losses.Loss):
    """Cross-entropy of logits, or squared error for regression.

    Args:
        task: binary, multiclass or regression.
        num_classes: Classes there are.
        label_smoothing: Share of each label that is spread over all classes.
        reduction: As in Keras; by default the mean over the batch.
        name: Its name among the metrics.
    """

    def __init__(
        self,
        task: str,
        num_classes: int = 0,
        label_smoothing: float = 0.0,
        reduction: str | None = "sum_over_batch_size",
        name: str = "loss",
    ) -> None:
        super().__init__(name=name, reduction=reduction)
        self.task, self.num_classes, self.label_smoothing = task, num_classes, label_smoothing

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """`(labels (batch,), logits (batch, num_logits)) -> (batch,)`, the loss of each example."""
        labels = tf.reshape(y_true, [-1])
        if self.task == "regression":
            return tf.square(tf.cast(labels, tf.float32) - tf.squeeze(y_pred, axis=1))
        if self.task == "binary":
            targets = tf.cast(labels, tf.float32) * (1 - self.label_smoothing) + 0.5 * self.label_smoothing
            return tf.nn.sigmoid_cross_entropy_with_logits(labels=targets, logits=tf.squeeze(y_pred, axis=1))
        # Keras hands over labels as float32, which hold every class number below 2^24.
        targets = tf.one_hot(tf.cast(labels, tf.int32), self.num_classes)
        targets = targets * (1 - self.label_smoothing) + self.label_smoothing / self.num_classes
        return tf.nn.softmax_cross_entropy_with_logits(labels=targets, logits=y_pred)

    def get_config(self) -> dict[str, Any]:
        """What makes the same loss again."""
        own = {"task": self.task, "num_classes": self.num_classes, "label_smoothing": self.label_smoothing}
        return {**super().get_config(), **own}


def make_loss(output: OutputSpec, label_smoothing: float) -> ExampleLoss:
    """The loss of a task: the mean over the batch of what each example loses, times its weight.

    Raises:
        ConfigError: label smoothing of numbers.
    """
    if output.task == "regression" and label_smoothing:
        raise ConfigError("train.label_smoothing: a regression task has no classes. Leave it out.")
    return ExampleLoss(output.task, output.num_classes, label_smoothing)


def example_weights(labels: np.ndarray, output: OutputSpec, mode: str) -> np.ndarray:
    """`(num_examples,)` float32: all one, or such that every class weighs the same and the mean is one.

    Raises:
        ConfigError: class weights of numbers.
    """
    if mode == "none":
        return np.ones(len(labels), np.float32)
    if output.task == "regression":
        raise ConfigError("train.class_weights: a regression task has no classes. Leave it out.")
    counts = np.maximum(np.bincount(labels, minlength=output.num_classes), 1)
    return (len(labels) / (np.count_nonzero(counts) * counts))[labels].astype(np.float32)


def make_optimizer(config: TrainConfig, num_steps: int) -> keras.optimizers.Optimizer:
    """The optimizer with its schedule over `num_steps` steps, and with a moving average of the weights if asked for."""
    settings, kinds = config.optimizer, keras.optimizers
    kind = {
        "adam": kinds.Adam,
        "adamw": kinds.AdamW,
        "sgd": kinds.SGD,
        "nadam": kinds.Nadam,
        "rmsprop": kinds.RMSprop,
        "lion": kinds.Lion,
        "lamb": kinds.Lamb,
        "adafactor": kinds.Adafactor,
    }[settings.name]
    own: dict[str, Any] = {}
    if settings.name == "sgd":
        own = {"momentum": settings.momentum, "nesterov": settings.nesterov}
    if settings.weight_decay or settings.name == "adamw":
        own["weight_decay"] = settings.weight_decay
    if config.ema_decay is not None:
        own |= {"use_ema": True, "ema_momentum": config.ema_decay, "ema_overwrite_frequency": None}
    optimizer = kind(make_learning_rate(settings, num_steps), **own)
    if settings.weight_decay:
        optimizer.exclude_from_weight_decay(var_names=NOT_DECAYED)
    return optimizer


@keras.saving.register_keras_serializable("headrace")
class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    """A linear rise from 0 to `peak` over `steps` steps, and then what `after` says, counted from there."""

    def __init__(self, peak: float, steps: int, after: LearningRate) -> None:
        self.peak, self.steps, self.after = peak, steps, after

    def __call__(self, step: Any) -> tf.Tensor:
        """The learning rate of a step, counted from 0."""
        step = tf.convert_to_tensor(step)
        rising = self.peak * (tf.cast(step, tf.float32) / self.steps)
        after = self.after(step - self.steps) if callable(self.after) else self.after
        return tf.where(step < self.steps, rising, after)

    def get_config(self) -> dict[str, Any]:
        """What makes the same schedule again."""
        return {"peak": self.peak, "steps": self.steps, "after": keras.saving.serialize_keras_object(self.after)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> WarmUp:
        """The schedule that `get_config` tells of."""
        return cls(**{**config, "after": keras.saving.deserialize_keras_object(config["after"])})


def make_learning_rate(settings: OptimizerConfig, num_steps: int) -> LearningRate:
    """The learning rate of each of `num_steps` steps; a plain number, which a callback may change, if it is constant."""
    peak, warmup = settings.learning_rate, settings.warmup_steps
    decay = _make_decay(settings, num_steps)
    return WarmUp(peak, warmup, decay) if warmup else decay


def _make_decay(settings: OptimizerConfig, num_steps: int) -> LearningRate:
    """The learning rate after the warm-up, step 0 being the first one after it."""
    schedules, peak, final = keras.optimizers.schedules, settings.learning_rate, settings.final_learning_rate
    steps = max(num_steps - settings.warmup_steps, 1)
    if settings.schedule == "cosine":
        return schedules.CosineDecay(peak, steps, alpha=final / peak)
    if settings.schedule == "linear":
        return schedules.PolynomialDecay(peak, steps, end_learning_rate=final)
    if settings.schedule == "step":
        # Keras lets the rate fall after the step that it is given, and shares are of the whole run.
        ends = [round(share * num_steps) - settings.warmup_steps - 1 for share in settings.decay_at]
        rates = [peak * settings.decay_factor**number for number in range(len(ends) + 1)]
        return schedules.PiecewiseConstantDecay(ends, rates)
    return peak


Clip = Callable[[list[tf.Tensor]], list[tf.Tensor]]


def make_clip(settings: OptimizerConfig) -> Clip | None:
    """What bounds the gradients of a step, as the settings say; norms are taken in float32.

    NaN and infinite gradients stay so, in at least one place, whichever way is chosen.
    """
    if (largest := settings.clip_norm) is not None:
        return lambda gradients: _shrink(gradients, largest, _norm(gradients))
    if (largest_each := settings.clip_each_norm) is not None:
        return lambda gradients: [_shrink([each], largest_each, _norm([each]))[0] for each in gradients]
    if (bound := settings.clip_value) is not None:
        return lambda gradients: [
            tf.where(tf.math.is_finite(each), tf.clip_by_value(each, -bound, bound), each) for each in gradients
        ]
    return None


def _norm(gradients: list[tf.Tensor]) -> tf.Tensor:
    return tf.linalg.global_norm([tf.cast(each, tf.float32) for each in gradients])


def _shrink(gradients: list[tf.Tensor], largest: float, norm: tf.Tensor) -> list[tf.Tensor]:
    factor = largest / tf.maximum(norm, largest)
    return [each * tf.cast(factor, each.dtype) for each in gradients]


def freeze(model: keras.Model, patterns: Sequence[str]) -> None:
    """Keep the weights of all layers whose name or path matches a pattern as they are, batch norm's statistics included.

    Raises:
        ConfigError: a pattern matches no layer that has weights, or nothing is left to train.
    """
    layers = [layer for pattern in patterns for layer in match_layers(model, pattern, "train.frozen")]
    for layer in layers:
        layer.trainable = False
    if layers and not model.trainable_variables:
        raise ConfigError(f"train.frozen: {', '.join(patterns)} match every layer, so nothing is left to train.")


def set_learning_rate_factors(
    optimizer: keras.optimizers.Optimizer, model: keras.Model, layers: Sequence[LayerRate]
) -> None:
    """Let the optimizer move some layers slower or faster: its step, and its decoupled weight decay, times a factor.

    A factor on the gradients would not do: Adam and its like divide it out again.

    Args:
        optimizer: One of `make_optimizer`; its step has to be proportional to the learning rate.
        model: A built model with the layers.
        layers: The factors; where several match a layer, the last one holds.

    Raises:
        ConfigError: one matches no layer that is trained.
    """
    factors: dict[Any, float] = {}
    for rate in layers:
        matched = match_layers(model, rate.match, "train.optimizer.layers")
        variables = [variable for layer in matched for variable in layer.trainable_variables]
        if not variables:
            raise ConfigError(f"train.optimizer.layers: '{rate.match}' matches none but frozen layers. Leave it out.")
        factors |= {optimizer._var_key(variable): rate.learning_rate_factor for variable in variables}
    if not factors:
        return
    update_step = optimizer.update_step

    def scaled_step(gradient: tf.Tensor, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        rate = learning_rate * factors.get(optimizer._var_key(variable), 1.0)
        # Here, since only here the variable is that of one replica, as an update under a strategy needs it.
        if optimizer.weight_decay is not None and optimizer._use_weight_decay(variable):
            decay, decay_rate = (tf.cast(number, variable.dtype) for number in (optimizer.weight_decay, rate))
            variable.assign_sub(variable * decay * decay_rate)
        update_step(gradient, variable, rate)

    optimizer.update_step = scaled_step
    optimizer._apply_weight_decay = lambda variables: None


def match_layers(model: keras.Model, pattern: str, setting: str) -> list[keras.layers.Layer]:
    """The layers with weights that match a pattern, as `models.hooks.find` takes it.

    Raises:
        ConfigError: none matches; it names near ones, and `setting`, where in the config the pattern stands.
    """
    layers = [layer for _, layer in find_layers(model, [pattern], setting) if getattr(layer, "weights", None)]
    if not layers:
        raise ConfigError(f"{setting}: '{pattern}' matches none but layers without weights. Leave it out.")
    return layers


def find_layers(model: keras.Model, patterns: Sequence[str], setting: str) -> list[tuple[str, keras.Operation]]:
    """As `models.hooks.find`, for patterns that stand in the config under `setting`.

    Raises:
        ConfigError: a pattern matches no layer.
    """
    try:
        return hooks.find(model, patterns)
    except ValueError as error:
        raise ConfigError(f"{setting}: {error}") from error
