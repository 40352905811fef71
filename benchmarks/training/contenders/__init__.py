"""The contenders: one module a kind, each with `train(task, turns)`. CONTENDERS is the table that the driver goes by.

No module here is imported by the driver: each runs in a process, and may run in an environment, of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Variant = Mapping[str, Any]


def _one(model: str, steps: int) -> list[Variant]:
    return [{}]


@dataclass(frozen=True)
class Contender:
    """One way to train.

    Attributes:
        module: Its module in this package.
        variants: `(model name, steps a turn) -> settings`; where there are several the fastest in a trial takes part.
        settings: Settings that are no matter of trial.
        environment: Which interpreter runs it: `project`, `torch` or `jax`.
        keras_backend: The KERAS_BACKEND that it is started with.
    """

    module: str
    variants: Callable[[str, int], list[Variant]] = _one
    settings: Variant = ()  # type: ignore[assignment]
    environment: str = "project"
    keras_backend: str = "tensorflow"


def _xla_on_and_off(model: str, steps: int) -> list[Variant]:
    return [{"xla": True}, {"xla": False}]


def _fit_settings(model: str, steps: int) -> list[Variant]:
    return [
        {"jit_compile": jit, "steps_per_execution": count}
        for jit in (True, False)
        for count in (1, 8, 32)
        if steps % count == 0
    ]


def _memory_formats(model: str, steps: int) -> list[Variant]:
    return [{"channels_last": True}, {"channels_last": False}] if model == "resnet" else [{}]


CONTENDERS: dict[str, Contender] = {
    "bare_xla": Contender("bare", settings={"xla": True}),
    "bare_graph": Contender("bare", settings={"xla": False}),
    "headrace": Contender("headrace", _xla_on_and_off),
    "keras_fit": Contender("keras_fit"),
    "keras_fit_best": Contender("keras_fit", _fit_settings),
    "keras_jax": Contender("keras_fit", environment="jax", keras_backend="jax"),
    "torch_eager": Contender("torch_step", _memory_formats, {"compile": False}, environment="torch"),
    "torch_compile": Contender("torch_step", _memory_formats, {"compile": True}, environment="torch"),
}
REFERENCE = "bare_xla"
# The faster of them is the limit.
BARE = ("bare_xla", "bare_graph")
