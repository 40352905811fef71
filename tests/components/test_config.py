"""Options that nothing would read are refused, and the defaults that a resolved config writes out are not."""

from __future__ import annotations

from typing import Any

import pytest

from components.config import OptimizerConfig, Section, SplitConfig, Text, TrainConfig

UNREAD: list[tuple[type[Section], dict[str, Any], str, Any]] = [
    (OptimizerConfig, {"name": "adam"}, "momentum", 0.5),
    (OptimizerConfig, {"name": "adamw"}, "momentum", 0.5),
    (TrainConfig, {"strategy": "one_device"}, "num_devices", 2),
    (SplitConfig, {"method": "column"}, "key", ["user"]),
    (SplitConfig, {"method": "column"}, "test", 0.2),
    (SplitConfig, {"method": "hash"}, "column", "part"),
    (Text, {"op": "text", "output": "tf_idf"}, "length", 64),
]
READ: list[tuple[type[Section], dict[str, Any]]] = [
    (OptimizerConfig, {"name": "sgd", "momentum": 0.5}),
    (TrainConfig, {"strategy": "mirrored", "num_devices": 2}),
    (SplitConfig, {"method": "hash", "key": ["user"], "test": 0.2}),
    (SplitConfig, {"method": "column", "column": "part"}),
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
