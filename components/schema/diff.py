"""What two schemas differ in: by meaning, so that order, comments and written-out defaults do not count."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from components.schema.files import fields_of
from components.schema.spec import Schema


def differences(a: Schema, b: Schema) -> Iterator[str]:
    """A line for each difference; `-` is in `a` alone, `+` in `b` alone."""
    top_a, top_b = (schema.model_dump(mode="json", exclude={"features"}) for schema in (a, b))
    yield from _of_fields("", top_a, top_b)
    for name in [*a.features, *(name for name in b.features if name not in a.features)]:
        if name not in b.features:
            yield f"- {name}: {fields_of(a.features[name])}"
        elif name not in a.features:
            yield f"+ {name}: {fields_of(b.features[name])}"
        else:
            yield from _of_fields(f"{name}.", *(schema.features[name].model_dump(mode="json") for schema in (a, b)))


def _of_fields(place: str, a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    for key in dict.fromkeys([*a, *b]):
        before, after = a.get(key), b.get(key)
        if before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _of_fields(f"{place}{key}.", before, after)
        elif key in ("domain", "default_environment", "in_environment", "not_in_environment") and before and after:
            lost, new = (
                [value for value in one if value not in other] for one, other in ((before, after), (after, before))
            )
            if lost or new:
                yield " ".join(
                    [f"{place}{key}:", *(f"-{value!r}" for value in lost), *(f"+{value!r}" for value in new)]
                )
        else:
            yield f"{place}{key}: {before} -> {after}"
