"""What every section of the configuration is made of."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """Base of every part of the tree: unknown keys are errors, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


def inherited(default: Any) -> Any:
    """A field that the top of the tree sets."""
    return Field(default, json_schema_extra={"inherited": True})


def without_effect(default: Any, description: str | None = None, **marks: bool) -> Any:
    """A field that says how a step gets to its result, and is no part of what the result follows from."""
    return Field(default, description=description, json_schema_extra={"without_effect": True, **marks})


def effective_settings(section: BaseModel) -> dict[str, Any]:
    """The settings that a result follows from, as JSON-able values."""
    return section.model_dump(mode="json", exclude=set(_marked(type(section), "without_effect")))


def refuse_unread(section: Section, fields: list[str], setting: str) -> None:
    """Refuse options that another setting makes nobody read.

    Their default passes even where it is written out, because the resolved config of a run writes out everything.

    Raises:
        ValueError: naming the option and the setting.
    """
    for name in fields:
        value = getattr(section, name)
        if value != type(section).model_fields[name].default:
            value = value.model_dump(mode="json", exclude_defaults=True) if isinstance(value, Section) else value
            raise ValueError(f"nothing reads {name} with {setting}: leave out '{name}', received {value!r}")


def inherited_fields(section: type[BaseModel]) -> list[str]:
    """Names of the fields of a section that the top of the tree sets."""
    return _marked(section, "inherited")


def _marked(section: type[BaseModel], mark: str) -> list[str]:
    extras = {name: field.json_schema_extra for name, field in section.model_fields.items()}
    return [name for name, extra in extras.items() if isinstance(extra, dict) and extra.get(mark)]
