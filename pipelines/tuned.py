"""Configurations with the settings that a search has found in place of those that were written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from components.config import OptimizeConfig, PushConfig, Section, TrainConfig, inherited_fields
from components.search_space import with_settings
from pipelines import yaml_text
from pipelines.config import PipelineConfig, resolved


def tuned_config(config: PipelineConfig, settings: Mapping[str, Any]) -> PipelineConfig:
    """The experiment with the best settings, and without a search.

    Args:
        config: The experiment.
        settings: Of the best trial, as `tune` returns them.
    """
    return PipelineConfig.model_validate(yaml_text.parse(_tuned_text(resolved(config), settings)))


def tuned_section(config: Section, settings: Mapping[str, Any]) -> Section:
    """The configuration of one step as it is cut from `tuned_config`."""
    if isinstance(config, TrainConfig):
        return with_settings(config, settings)
    if isinstance(config, OptimizeConfig):
        return config.model_copy(update={"train": with_settings(config.train, settings)})
    if isinstance(config, PushConfig):
        return config.model_copy(update={"resolved_config": _tuned_text(config.resolved_config, settings)})
    return config


def _tuned_text(resolved_config: str, settings: Mapping[str, Any]) -> str:
    tree = yaml_text.parse(resolved_config)
    train = with_settings(TrainConfig.model_validate({**tree["train"], "model": tree["model"]}), settings)
    tree["model"] = train.model.model_dump(mode="json")
    tree["train"] = train.model_dump(mode="json", exclude=set(inherited_fields(TrainConfig)))
    tree["tune"]["trials"] = 0
    return yaml_text.dump(tree)
