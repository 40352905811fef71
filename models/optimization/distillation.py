"""Distillation: a small model learns from the answers of a large one, and from its features.

G. Hinton et al., "Distilling the knowledge in a neural network" (arXiv:1503.02531); features as A. Romero et al.,
"FitNets" (arXiv:1412.6550).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import keras
from keras import layers, ops

from models.hooks import find
from models.optimization.stage import Stage, check_choices, copy_of


@dataclass(frozen=True)
class DistillationConfig:
    """Settings of distillation. The loss is `alpha * soft + (1 - alpha) * hard + feature_weight * features`.

    Attributes:
        outputs: `logits`: the soft loss is `temperature**2 * KL(teacher || student)` of the classes that the logits give
            at that temperature; of a single logit those are two. `numbers`: it is the mean squared difference.
        alpha: Share of the soft loss; the hard one is the loss that the model is compiled with.
        temperature: By which logits are divided.
        features: Pairs of layers, the student's and the teacher's, whose outputs are to be alike; where these have other
            channels than those a Dense layer (a 1x1 convolution), which only training needs, lies between.
        feature_weight: Of the mean squared differences of features, added up over the pairs.
    """

    outputs: Literal["logits", "numbers"] = "logits"
    alpha: float = 0.5
    temperature: float = 4.0
    features: tuple[tuple[str, str], ...] = ()
    feature_weight: float = 1.0

    def __post_init__(self) -> None:
        check_choices(outputs=(self.outputs, ("logits", "numbers")))
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha must be a number in [0, 1], received {self.alpha!r}")
        if self.temperature <= 0:
            raise ValueError(f"temperature must be above 0, received {self.temperature!r}")
        default = type(self)
        if self.outputs == "numbers" and self.temperature != default.temperature:
            raise ValueError(
                f"nothing reads temperature with outputs 'numbers': leave it out, received {self.temperature}"
            )
        if not self.features and self.feature_weight != default.feature_weight:
            raise ValueError(
                f"nothing reads feature_weight without features: leave it out, received {self.feature_weight}"
            )


def distill(student: keras.Model, config: DistillationConfig, *, teacher: keras.Model) -> Stage:
    """Train a copy of a model to answer as another one does.

    Args:
        student: Built, trained or not, of any kind; functional where features are to be alike.
        config: Settings.
        teacher: A trained model of the same inputs and outputs. It is asked as at inference and stays as it is; it is not
            among what the stage saves.

    Returns:
        The stage; validation has the hard loss alone, and `finish()` gives the student alone.

    Raises:
        ValueError: the outputs of the two differ in shape, or a layer of `features` is not one of the model's.

    Example:
        >>> stage = distill(small, DistillationConfig(temperature=2.0), teacher=large)
        >>> stage.model.compile("adam", loss); stage.model.fit(images, labels)
        >>> small = stage.finish()
    """
    network, expert = copy_of(student), copy_of(teacher)
    expert.trainable = False
    trained = _Distilled(network, expert, config)
    return Stage(trained, lambda: network)


class _SoftLoss(keras.losses.Loss):
    """What an output loses against the teacher's: a loss of Keras for its weights of examples and its replicas."""

    def __init__(self, config: DistillationConfig) -> None:
        super().__init__(name="soft_loss")
        self._config = config

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """`(teacher's (batch, ..., n), student's (batch, ..., n)) -> (batch, ...)`."""
        if self._config.outputs == "numbers":
            return ops.mean(ops.square(y_true - y_pred), axis=-1)
        teacher, student = (ops.log_softmax(_logits(y) / self._config.temperature) for y in (y_true, y_pred))
        return self._config.temperature**2 * ops.sum(ops.exp(teacher) * (teacher - student), axis=-1)


def _logits(outputs: Any) -> Any:
    """Those of two classes where there is one for both."""
    return ops.concatenate([ops.zeros_like(outputs), outputs], axis=-1) if outputs.shape[-1] == 1 else outputs


class _Distilled(keras.Model):
    """The student with a loss that asks the teacher."""

    def __init__(self, student: keras.Model, teacher: keras.Model, config: DistillationConfig) -> None:
        super().__init__(name=student.name, autocast=False)
        self.student, self.config = student, config
        self._soft_loss, self._feature_loss = _SoftLoss(config), keras.losses.MeanSquaredError()
        learning = _with_features(student, [pattern for pattern, _ in config.features])
        knowing = _with_features(teacher, [pattern for _, pattern in config.features])
        # Keras tracks models that are attributes, and the teacher is not to be saved.
        self._ask_student: Callable[..., Any] = lambda inputs, training: learning(inputs, training=training)
        self._ask_teacher: Callable[[Any], Any] = lambda inputs: knowing(inputs, training=False)
        self.projections: list[Any] = []
        if config.features:
            pairs = zip(config.features, learning.output[1], knowing.output[1], strict=True)
            self.projections = [_projection(names, *tensors) for names, *tensors in pairs]
        # Replicas take turns in threads.
        self._local = threading.local()
        self.built = True

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        if not self.config.features:
            return self._ask_student(inputs, training)
        outputs, self._local.features = self._ask_student(inputs, training)
        return outputs

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        if not training:
            return loss
        outputs, features = self._ask_teacher(x) if self.config.features else (self._ask_teacher(x), [])
        # Those that layers add, such as penalties of weights, count in full.
        own = sum((self._aggregate_additional_loss(each) for each in self.losses), 0.0)
        soft = self._compare(outputs, y_pred, sample_weight)
        loss = self.config.alpha * soft + (1 - self.config.alpha) * (loss - own) + own
        for project, of_student, of_teacher in zip(self.projections, self._features(), features, strict=True):
            loss += self.config.feature_weight * self._feature_loss(of_teacher, project(of_student))
        return loss

    def _features(self) -> list[Any]:
        return self._local.features if self.config.features else []

    def _compare(self, teacher: Any, student: Any, sample_weight: Any) -> Any:
        """The soft loss, added up over the outputs."""
        answers, given = keras.tree.flatten(student), keras.tree.flatten(teacher)
        shapes = [[tuple(each.shape[1:]) for each in outputs] for outputs in (answers, given)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"the student '{self.name}' answers in the shapes {shapes[0]}, the teacher in {shapes[1]}: give a teacher "
                "of the same outputs"
            )
        weights = [None] if sample_weight is None else keras.tree.flatten(sample_weight)
        weights = weights if len(weights) == len(given) else weights * len(given)
        return sum(self._soft_loss(*each) for each in zip(given, answers, weights, strict=True))


def _with_features(model: keras.Model, patterns: Sequence[str]) -> keras.Model:
    """A model that gives the outputs and, as a list, the features, if there are any."""
    if not patterns:
        return model
    found: list[Any] = []
    for pattern in patterns:
        matching = find(model, [pattern])
        if len(matching) > 1:
            raise ValueError(f"{pattern!r} matches {len(matching)} layers of model '{model.name}': name one of a pair")
        found.append(matching[0][1])
    is_sequential = isinstance(model, keras.Sequential)
    try:
        inputs = model.inputs[0] if is_sequential else model.input
        outputs = model.outputs[0] if is_sequential else model.output
        return keras.Model(inputs, (outputs, [layer.output for layer in found]))
    except (AttributeError, ValueError) as error:
        raise ValueError(
            f"model '{model.name}' does not give the outputs of {list(patterns)}: features are outputs of layers of a "
            f"functional or Sequential model itself, each called once ({error})"
        ) from error


def _projection(names: tuple[str, str], student: Any, teacher: Any) -> Any:
    """From a student's feature to one with the teacher's channels."""
    if student.shape[1:-1] != teacher.shape[1:-1]:
        raise ValueError(
            f"features '{names[0]}' {student.shape} and '{names[1]}' {teacher.shape} may differ in their last axis alone: "
            "choose layers of the same height and width"
        )
    if student.shape[-1] == teacher.shape[-1]:
        return layers.Identity()
    dense = layers.Dense(teacher.shape[-1], name=f"{names[0]}_projection", dtype="float32")
    dense.build(student.shape)
    return dense
