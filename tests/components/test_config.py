"""Options that nothing would read are refused, and the defaults that a resolved config writes out are not."""

from __future__ import annotations

from typing import Any

import pytest

from components.config import (
    REFUSED_CALLBACKS,
    CallbackConfig,
    OptimizeConfig,
    OptimizerConfig,
    Section,
    SplitConfig,
    TrainConfig,
)
from components.transform_config import Text

UNREAD: list[tuple[type[Section], dict[str, Any], str, Any]] = [
    (OptimizerConfig, {"name": "adam"}, "momentum", 0.5),
    (OptimizerConfig, {"name": "adamw"}, "momentum", 0.5),
    (OptimizerConfig, {"name": "rmsprop"}, "nesterov", True),
    (OptimizerConfig, {"schedule": "constant"}, "final_learning_rate", 1e-4),
    (OptimizerConfig, {"schedule": "constant"}, "decay_at", [0.5]),
    (OptimizerConfig, {"schedule": "cosine"}, "decay_at", [0.5]),
    (OptimizerConfig, {"schedule": "linear"}, "decay_factor", 0.5),
    (OptimizerConfig, {"decay_at": [0.5], "schedule": "step"}, "final_learning_rate", 1e-4),
    (TrainConfig, {"strategy": "one_device"}, "num_devices", 2),
    (TrainConfig, {"objective": "model"}, "class_weights", "balanced"),
    (TrainConfig, {"objective": "model"}, "label_smoothing", 0.1),
    (TrainConfig, {"objective": "model"}, "ema_decay", 0.9),
    (SplitConfig, {"method": "time"}, "key", ["user"]),
    (SplitConfig, {"method": "column"}, "test", 0.2),
    (SplitConfig, {"method": "hash"}, "column", "part"),
    (SplitConfig, {"method": "hash"}, "test_from", "2013-11-01"),
    (SplitConfig, {"method": "fold"}, "test", 0.2),
    (SplitConfig, {"method": "column"}, "num_folds", 3),
    (SplitConfig, {"paths": {"train": "a", "test": "b"}, "method": "path"}, "fold", 1),
    (SplitConfig, {"method": "span"}, "test", 0.2),
    (SplitConfig, {"method": "hash"}, "paths", {"train": "a", "test": "b"}),
    (SplitConfig, {"method": "hash"}, "test_spans", 2),
    (Text, {"op": "text", "output": "tf_idf"}, "length", 64),
]
READ: list[tuple[type[Section], dict[str, Any]]] = [
    (OptimizerConfig, {"name": "sgd", "momentum": 0.5}),
    (OptimizerConfig, {"name": "sgd", "nesterov": True}),
    (OptimizerConfig, {"schedule": "linear", "final_learning_rate": 1e-4}),
    (OptimizerConfig, {"schedule": "step", "decay_at": [0.5, 0.75], "decay_factor": 0.5}),
    (OptimizerConfig, {"clip_value": 1, "layers": [{"match": "encoder/*", "learning_rate_factor": 0.1}]}),
    (TrainConfig, {"strategy": "mirrored", "num_devices": 2}),
    (TrainConfig, {"ema_decay": 0.99, "callbacks": [{"name": "SwapEMAWeights"}, {"name": "my.own:make"}]}),
    (TrainConfig, {"objective": "model", "callbacks": [{"name": "ReduceLROnPlateau", "args": {"patience": 2}}]}),
    (TrainConfig, {"objective": "model", "callbacks": [{"name": "SwapEMAWeights"}]}),
    (TrainConfig, {"global_batch_size": 96, "gradient_accumulation_steps": 3, "frozen": ["a", "b*"], "xla": "on"}),
    (SplitConfig, {"method": "hash", "key": ["user"], "test": 0.2}),
    (SplitConfig, {"method": "column", "column": "part", "key": ["user"]}),
    (SplitConfig, {"method": "time", "column": "at", "test": 0.3, "validation_from": "2013-10-01T00:00:00Z"}),
    (SplitConfig, {"method": "path", "paths": {"train": "a/*", "test": "b/*"}, "validation": 0.2}),
    (SplitConfig, {"method": "span", "validation_spans": 1, "test_spans": 2}),
    (SplitConfig, {"method": "fold", "num_folds": 3, "fold": 2, "key": ["user"]}),
    (Text, {"op": "text", "length": 64}),
]


@pytest.mark.parametrize(("section", "settings", "option", "value"), UNREAD)
def test_an_option_that_nothing_reads_is_refused(
    section: type[Section], settings: dict[str, Any], option: str, value: Any
) -> None:
    by = list(settings)[-1]
    with pytest.raises(ValueError, match=f"nothing reads {option} with {by}: {settings[by]}: leave out '{option}'"):
        section.model_validate({**settings, option: value})


@pytest.mark.parametrize(("section", "settings"), [*((each[0], each[1]) for each in UNREAD), *READ])
def test_a_section_written_out_in_full_reads_back(section: type[Section], settings: dict[str, Any]) -> None:
    config = section.model_validate(settings)
    assert section.model_validate(config.model_dump(mode="json", exclude={"seed", "model"})) == config


IMPOSSIBLE: list[tuple[type[Section], dict[str, Any], str]] = [
    (OptimizerConfig, {"name": "adam", "weight_decay": 0.1}, "adam has no weight_decay; use name: adamw"),
    (OptimizerConfig, {"name": "sgd", "momentum": 0, "nesterov": True}, "nesterov needs momentum above 0"),
    (OptimizerConfig, {"clip_norm": 1, "clip_value": 1}, "leave out all but one of clip_norm, clip_value"),
    (OptimizerConfig, {"clip_each_norm": 1, "clip_norm": 1}, "leave out all but one of clip_norm, clip_each_norm"),
    (OptimizerConfig, {"clip_value": 0}, "clip_value\n.*greater than 0"),
    (OptimizerConfig, {"schedule": "step"}, r"schedule: step needs decay_at, such as \[0.5, 0.75\]"),
    (OptimizerConfig, {"schedule": "step", "decay_at": [0.5, 0.25]}, r"decay_at must ascend, received \[0.5, 0.25\]"),
    (OptimizerConfig, {"schedule": "step", "decay_at": [0.5, 0.5]}, "decay_at must ascend"),
    (OptimizerConfig, {"schedule": "step", "decay_at": [30]}, "decay_at.0\n.*less than 1"),
    (
        OptimizerConfig,
        {"schedule": "cosine", "learning_rate": 0.01, "final_learning_rate": 0.1},
        "final_learning_rate 0.1 is above learning_rate 0.01",
    ),
    (
        OptimizerConfig,
        {"name": "adafactor", "layers": [{"match": "a", "learning_rate_factor": 2}]},
        "adafactor bounds its step by itself, so 'layers' cannot scale it",
    ),
    (
        OptimizerConfig,
        {"layers": [{"match": "a", "learning_rate_factor": 0}]},
        "learning_rate_factor\n.*greater than 0",
    ),
    (
        TrainConfig,
        {"objective": "model", "optimizer": {"name": "sgd", "clip_norm": 1}},
        "nothing reads optimizer with objective: model: leave out 'optimizer', received "
        "{'name': 'sgd', 'clip_norm': 1.0}",
    ),
    (
        TrainConfig,
        {"global_batch_size": 128, "gradient_accumulation_steps": 3},
        "gradient_accumulation_steps 3 does not divide global_batch_size 128",
    ),
    (TrainConfig, {"debug": "eager", "xla": "on"}, "debug: eager runs op by op, which XLA cannot"),
    (TrainConfig, {"ema_decay": 1.0}, "ema_decay\n.*less than 1"),
    (TrainConfig, {"max_bad_steps": 0}, "max_bad_steps\n.*greater than or equal to 1"),
    (TrainConfig, {"frozen": [""]}, "frozen.0\n.*at least 1 character"),
    (
        TrainConfig,
        {"callbacks": [{"name": "SwapEMAWeights"}]},
        "SwapEMAWeights needs a moving average .*: set ema_decay",
    ),
    *(
        (
            TrainConfig,
            {"callbacks": [{"name": "ReduceLROnPlateau"}], "optimizer": optimizer},
            "ReduceLROnPlateau sets the learning rate, and so does optimizer.schedule: use schedule: constant without "
            "warmup_steps",
        )
        for optimizer in ({"schedule": "cosine"}, {"warmup_steps": 5})
    ),
    (
        OptimizeConfig,
        {"stages": [{"method": "quantize_aware"}, {"method": "prune"}]},
        "quantize_aware has to be the last of the stages",
    ),
    (
        OptimizeConfig,
        {"stages": [{"method": "prune", "learning_rate_factor": 0.5, "optimizer": {"name": "sgd"}}]},
        "nothing reads learning_rate_factor with an optimizer of its own",
    ),
]


@pytest.mark.parametrize(("section", "settings", "message"), IMPOSSIBLE)
def test_settings_that_cannot_go_together_are_refused(
    section: type[Section], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        section.model_validate(settings)


@pytest.mark.parametrize("name", REFUSED_CALLBACKS)
def test_callbacks_that_are_not_for_here_are_refused_with_the_way_to_go(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is not for here: ") as caught:
        CallbackConfig(name=name)
    assert REFUSED_CALLBACKS[name] in str(caught.value)
