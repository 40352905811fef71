"""PipelineConfig: the whole tree of settings; `load_config` reads it from YAML and dotted overrides.

`python -m pipelines.config --write-golden` writes what tests compare with: configs/schema.json and the resolved form of
each file in configs/.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from pydantic import BaseModel, Field, ValidationError, model_validator

from components.config import (
    CardConfig,
    CompressConfig,
    DataConfig,
    DeployConfig,
    EvaluateConfig,
    ExportConfig,
    ModelConfig,
    MonitorConfig,
    NotifyConfig,
    OptimizeConfig,
    PushConfig,
    RegistryConfig,
    Section,
    TrackingConfig,
    TrainConfig,
    TransformConfig,
    TuneConfig,
    ValidateConfig,
    VerifyConfig,
    inherited_fields,
)
from components.errors import ConfigError
from components.plugins import CALLBACKS, MODELS, SOURCES
from pipelines import config_problems, yaml_text
from pipelines.config_sources import Settings, read_settings
from pipelines.kubeflow.config import KubeflowConfig

DEFAULT = Path("configs/chicago_taxi.yaml")
# Sections that say how a run goes, not what it makes: no step follows from them.
_ABOUT_RUNS = ("notify", "kubeflow")
_PROJECT = Path(__file__).resolve().parent.parent

Config = TypeVar("Config", bound=BaseModel)


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
    tune: TuneConfig = TuneConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig
    optimize: OptimizeConfig = OptimizeConfig()
    compress: CompressConfig = CompressConfig()
    export: ExportConfig = ExportConfig()
    verify: VerifyConfig = VerifyConfig()
    push: PushConfig = PushConfig()
    deploy: DeployConfig = DeployConfig()
    monitor: MonitorConfig = MonitorConfig()
    notify: NotifyConfig = NotifyConfig()
    kubeflow: KubeflowConfig = KubeflowConfig()
    card: CardConfig = CardConfig()
    registry: RegistryConfig | None = None
    tracking: TrackingConfig | None = None

    @model_validator(mode="after")
    def _inherited_fields_are_set_at_the_top(self) -> PipelineConfig:
        for section in _sections():
            config = self.section(section)
            for field in set(inherited_fields(type(config))) & config.model_fields_set:
                raise ValueError(f"{section}.{field} is set from the top of the file: write '{field}:' there instead")
        return self

    @model_validator(mode="after")
    def _trials_have_a_folder(self) -> PipelineConfig:
        if self.deploy.canary_share < 1 and self.deploy.manifests is None and "://" in self.push.destination:
            raise ValueError("deploy.canary_share below 1 needs deploy.manifests, or a folder as push.destination")
        return self

    @model_validator(mode="after")
    def _ingest_is_divided_once(self) -> PipelineConfig:
        if self.data.engine == "spark" and self.kubeflow.ingest_pods > 1:
            raise ValueError("data.engine: spark divides the data by itself: leave out kubeflow.ingest_pods")
        return self

    @model_validator(mode="after")
    def _a_training_job_has_workers(self) -> PipelineConfig:
        if self.kubeflow.training_job and (self.train.strategy != "multi_worker" or (self.train.num_workers or 0) < 2):
            raise ValueError(
                "kubeflow.training_job needs train.strategy: multi_worker and train.num_workers, at least 2"
            )
        return self

    def section(self, name: str) -> Section:
        """A section as written, by its name in the YAML."""
        return getattr(self, "validate_" if name == "validate" else name)

    def step_config(self, section: str) -> Any:
        """A section as its step receives it: inherited fields filled in."""
        config = self.section(section)
        fields = inherited_fields(type(config))
        values: dict[str, Any] = {
            "name": self.name,
            "seed": self.seed,
            "task": self.data.task,
            "engine": self.data.engine,
            "spark": self.data.spark,
            "model": self.model,
            "card": self.card,
            "registry": self.registry,
            "train": self.train.model_copy(update={"seed": self.seed, "model": self.model}),
            "champion_path": f"{self.push.destination}/{self.name}",
            "manifests": self.deploy.manifests,
            "primary_metric": self.evaluate.thresholds[0].metric,
            "slice_features": self.evaluate.slices,
            "min_slice_examples": self.evaluate.min_slice_examples,
            "text_features": self.transform.text_features,
            "needs": self.transform.needs,
        }
        if "resolved_config" in fields:
            values["resolved_config"] = resolved(self, without=_ABOUT_RUNS)
        return config.model_copy(update={field: values[field] for field in fields})


def _sections() -> list[str]:
    return [
        field.alias or name
        for name, field in PipelineConfig.model_fields.items()
        if name not in ("name", "seed", "model", "registry", "tracking")
    ]


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> PipelineConfig:
    """Read a configuration: defaults, then the YAML file, then the overrides.

    Args:
        path: The YAML file.
        overrides: `section.key=value`, the value in YAML; an item of a list by its number.

    Raises:
        ConfigError: anything is wrong; every problem is listed with its place.

    Example:
        >>> load_config("configs/chicago_taxi.yaml", ["train.epochs=3"]).train.epochs
        3
    """
    settings = read_settings(Path(path), overrides)
    config = validated(settings, PipelineConfig)
    if problems := list(config_problems.of_search_space(config.step_config("tune"))):
        raise ConfigError(_all_of(problems, settings))
    return config


def validated(settings: Settings, root: type[Config]) -> Config:
    """The settings as a config of class `root`.

    Raises:
        ConfigError: anything is wrong; every problem is listed with its place.
    """
    problems = [*settings.problems, *config_problems.before_validation(settings.tree, root)]
    config = None
    try:
        config = root.model_validate(settings.tree)
    except ValidationError as error:
        problems += config_problems.of_validation(error, settings.tree, root)
    if config is None or problems:
        raise ConfigError(_all_of(problems, settings))
    return config


def split_arguments(arguments: Sequence[str]) -> tuple[Path, list[str]]:
    """The config file, or else the default one, and the overrides of a command line `[CONFIG] [section.key=value ...]`.

    Raises:
        ConfigError: an argument after the first is no override, or there is no default config.
    """
    path, overrides = split_given(arguments)
    return path or default_config_path(), overrides


def split_given(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The config file, if one is given, and the overrides of a command line `[CONFIG] [section.key=value ...]`.

    Raises:
        ConfigError: an argument after the first is no override.
    """
    path, overrides = None, list(arguments)
    if overrides and ("=" not in overrides[0] or Path(overrides[0]).is_file()):
        path = Path(overrides.pop(0))
    if wrong := [argument for argument in overrides if "=" not in argument]:
        raise ConfigError(f"Expected section.key=value after the config, received {', '.join(map(repr, wrong))}.")
    return path, overrides


def default_config_path() -> Path:
    """The only file in configs/, as in a project of one's own, or configs/chicago_taxi.yaml: here, or where this code is.

    Raises:
        ConfigError: there is none, or it is not clear which.
    """
    here = sorted(DEFAULT.parent.glob("*.yaml"))
    if len(here) > 1 and DEFAULT not in here:
        raise ConfigError(f"No config was given and there are several here. Give one of {', '.join(map(str, here))}.")
    for path in (DEFAULT, *here, _PROJECT / DEFAULT):
        if path.is_file():
            return path
    raise ConfigError(f"No config was given and there is no {DEFAULT} here. Give the path of a YAML file.")


def resolved(config: PipelineConfig, *, without: Collection[str] = ()) -> str:
    """Every setting, defaults included, as YAML that `load_config` reads back to the same configuration.

    Args:
        config: The whole configuration.
        without: Sections to leave out.
    """
    tree = config.model_dump(mode="json", by_alias=True, exclude=set(without))
    for section in set(_sections()) - set(without):
        for field in inherited_fields(type(config.section(section))):
            del tree[section][field]
    return yaml_text.dump(tree)


def json_schema() -> dict[str, Any]:
    """JSON Schema of a config file, for editors."""
    schema = PipelineConfig.model_json_schema()
    for section in _sections():
        schema["properties"][section].pop("default", None)
    for definition in (schema, *schema["$defs"].values()):
        properties = definition.get("properties", {})
        for name in [name for name, field in properties.items() if field.get("inherited")]:
            del properties[name]
    schema["properties"]["tracking"]["anyOf"].append({"const": "mlflow"})
    schema["$defs"]["KubeflowConfig"]["properties"]["training_job"]["anyOf"].append({"enum": ["tfjob", "trainjob"]})
    named = (("DataConfig", "source", SOURCES), ("ModelConfig", "name", MODELS), ("CallbackConfig", "name", CALLBACKS))
    for definition, field, table in named:
        schema["$defs"][definition]["properties"][field]["anyOf"] = [
            {"enum": sorted(table)},
            {"pattern": r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"},
        ]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def schema_text() -> str:
    """The JSON Schema as its file holds it."""
    return json.dumps(json_schema(), indent=2) + "\n"


def golden_files(project: Path = _PROJECT) -> dict[Path, str]:
    """The files that follow from the classes and configs of a project, with what they should hold."""
    files = {project / "configs/schema.json": schema_text()}
    for path in sorted((project / "configs").glob("*.yaml")):
        files[project / f"tests/golden/{path.stem}.resolved.yaml"] = resolved(load_config(path))
    return files


def _all_of(problems: Sequence[config_problems.Problem], settings: Settings) -> str:
    in_order = sorted(problems, key=lambda problem: settings.rank(problem.path))
    lines = dict.fromkeys(f"{settings.origin(at.path)}: {at.dotted}{at.message}" for at in in_order)
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    return "\n  ".join([f"The configuration has {count}:", *lines])


@click.command()
@click.option("--write-golden", is_flag=True, help="Write what tests compare with: configs/schema.json, tests/golden/.")
@click.option(
    "--write-schema", type=click.Path(path_type=Path), help="Write the JSON Schema, for editors, to this file."
)
def main(write_golden: bool, write_schema: Path | None) -> None:
    """Write files that follow from the classes of the configuration."""
    files = golden_files() if write_golden else {}
    if write_schema is not None:
        files[write_schema] = schema_text()
    if not files:
        raise click.UsageError("Give --write-golden or --write-schema.")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        click.echo(path)


if __name__ == "__main__":
    main()
