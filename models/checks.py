"""Checks of a builder's specs and arguments: each says what is wrong, what was received and how to mend it."""

from __future__ import annotations

from collections.abc import Sequence

from models.spec import FeatureSpec, InputSpec, OutputSpec


def check_output_spec(output_spec: OutputSpec) -> None:
    """Raise ValueError unless the number of classes fits the task."""
    task, num_classes = output_spec.task, output_spec.num_classes
    if task not in ("binary", "multiclass", "regression"):
        raise ValueError(f"unknown task {task!r}: use 'binary', 'multiclass' or 'regression'")
    if task == "multiclass" and num_classes < 2:
        raise ValueError(f"a multiclass task needs num_classes of 2 or more, received {num_classes}")
    expected = {"binary": 2, "regression": 1}.get(task, num_classes)
    if num_classes != expected:
        raise ValueError(f"a {task} task has num_classes={expected}, received {num_classes}: is the task 'multiclass'?")


def check_positive(name: str, value: int) -> int:
    """Return `value` if it is an integer of 1 or more, else raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer of 1 or more, received {value!r}")
    return value


def check_positives(name: str, values: Sequence[int]) -> tuple[int, ...]:
    """Return `values` as a tuple if it is a non-empty list of integers of 1 or more, else raise ValueError."""
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise ValueError(f"{name} must be a non-empty list of integers of 1 or more, received {values!r}")
    return tuple(check_positive(f"{name}[{index}]", value) for index, value in enumerate(values))


def check_fraction(name: str, value: float) -> float:
    """Return `value` if it lies in [0, 1), else raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ValueError(f"{name} must be a number in [0, 1), received {value!r}")
    return float(value)


def is_dense(feature: FeatureSpec) -> bool:
    """Whether a feature is a vector of measures of known length, `(k,)` float32."""
    return (
        feature.dtype == "float32"
        and feature.num_categories is None
        and len(feature.shape) == 1
        and feature.shape[0] is not None
    )


def image_feature(input_spec: InputSpec, model: str) -> tuple[str, tuple[int | None, ...]]:
    """Name and shape `(height, width, channels)` of the one feature, which must be an image, else raise ValueError."""
    features = list(input_spec.items())
    if len(features) == 1:
        name, feature = features[0]
        is_image = len(feature.shape) == 3 and feature.shape[2] is not None
        if is_image and feature.dtype == "float32" and feature.num_categories is None:
            return name, feature.shape
    raise ValueError(
        f"{model} takes exactly one float32 feature of shape (height, width, channels), received "
        f"{describe(input_spec)}: let the transform make one image feature, or choose another model"
    )


def check_divides(num_heads: int, hidden_dim: int) -> None:
    """Raise ValueError unless every head gets an equal part of the width."""
    if hidden_dim % num_heads:
        raise ValueError(
            f"num_heads must divide hidden_dim, received {num_heads} heads for {hidden_dim}: change one of them"
        )


def describe(input_spec: InputSpec) -> str:
    """The features of a spec in one line, for error messages."""
    if not input_spec:
        return "no features"
    return ", ".join(
        f"{name}: {feature.dtype} {feature.shape}"
        + (f", {feature.num_categories} categories" if feature.num_categories is not None else "")
        + (", sequence" if feature.is_sequence else "")
        for name, feature in sorted(input_spec.items())
    )
