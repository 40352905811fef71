"""PipelineConfig: the whole tree of settings; `load_config` reads it from YAML and dotted overrides."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from components.config import (
    CompressConfig,
    DataConfig,
    EvaluateConfig,
    ExportConfig,
    ModelConfig,
    MonitorConfig,
    PushConfig,
    Section,
    TrainConfig,
    TransformConfig,
    ValidateConfig,
    VerifyConfig,
    inherited_fields,
)


class PipelineConfig(Section):
    """One experiment: what every step is told."""

    name: str = Field(
        pattern=r"^[A-Za-z][A-Za-z0-9_-]*$", description="Name of the run's folder and of the served model."
    )
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of everything random.")
    data: DataConfig
    validate_: ValidateConfig = Field(ValidateConfig(), alias="validate")
    transform: TransformConfig = TransformConfig()
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig
    compress: CompressConfig = CompressConfig()
    export: ExportConfig = ExportConfig()
    verify: VerifyConfig = VerifyConfig()
    push: PushConfig = PushConfig()
    monitor: MonitorConfig = MonitorConfig()

    @model_validator(mode="after")
    def _inherited_fields_are_set_at_the_top(self) -> PipelineConfig:
        for section in _sections():
            config = self.section(section)
            for field in set(inherited_fields(type(config))) & config.model_fields_set:
                raise ValueError(f"{section}.{field} is set from the top of the file: write '{field}:' there instead")
        return self

    def section(self, name: str) -> Section:
        """A section as written, by its name in the YAML."""
        return getattr(self, "validate_" if name == "validate" else name)

    def step_config(self, section: str) -> Any:
        """A section as its step receives it: inherited fields filled in."""
        config = self.section(section)
        values = {
            "name": self.name,
            "seed": self.seed,
            "model": self.model,
            "champion_path": f"{self.push.destination}/{self.name}",
            "text_features": [op.input or name for name, op in self.transform.features.items() if op.op == "text"],
        }
        return config.model_copy(update={field: values[field] for field in inherited_fields(type(config))})


def _sections() -> list[str]:
    return [
        field.alias or name
        for name, field in PipelineConfig.model_fields.items()
        if name not in ("name", "seed", "model")
    ]
