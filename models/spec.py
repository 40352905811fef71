"""What a model builder is told about its inputs and its output.

Every builder has the signature `build(input_spec, output_spec, **args) -> keras.Model`: it takes a dictionary of tensors
named and shaped as `input_spec` says and returns float32 logits of shape `(batch, output_spec.num_logits)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Task = Literal["binary", "multiclass", "regression"]


@dataclass(frozen=True)
class FeatureSpec:
    """One transformed feature.

    Attributes:
        shape: Its shape without the batch dimension; `None` where a length varies.
        dtype: `float32`, or `int64` for ids.
        num_categories: For ids, how many there are: every value lies in `[0, num_categories)`. `None` for measures.
        is_sequence: For text, whether the ids are a sequence of tokens in which 0 is padding.
    """

    shape: tuple[int | None, ...]
    dtype: str
    num_categories: int | None = None
    is_sequence: bool = False


@dataclass(frozen=True)
class OutputSpec:
    """What is predicted.

    Attributes:
        task: `binary`, `multiclass` or `regression`.
        num_classes: Number of classes; 2 for binary, 1 for regression.
    """

    task: Task
    num_classes: int

    @property
    def num_logits(self) -> int:
        """Width of the model's output: one per class, or one in all for binary and regression."""
        return self.num_classes if self.task == "multiclass" else 1


InputSpec = Mapping[str, FeatureSpec]
