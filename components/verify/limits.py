"""The limits that each form has to keep, and what it breaks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from components.config import FormLimits, VerifyConfig
from components.errors import ConfigError, did_you_mean
from components.formats import Format

# Limit -> what is measured for it, where that is not the limit's own name or its name without max_ or min_.
_MEASURED = {name: name.removeprefix("max_").removeprefix("min_") for name in FormLimits.model_fields} | {
    "max_abs_difference": "max_abs_difference"
}


def check_patterns(config: VerifyConfig, forms: Iterable[Format]) -> None:
    """Refuse limits of forms that are not there.

    Raises:
        ConfigError: naming the nearest form.
    """
    names = [form.name for form in forms]
    for pattern in config.limits:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"verify.limits: this export has no form '{pattern}'.{did_you_mean(pattern, names)}")


def limits_of(form: Format, config: VerifyConfig) -> FormLimits:
    """The limits of a form: those of its kind, and over them those of every pattern that its name matches, in order."""
    limits = {"on_failure": config.on_failure, **(config.exact if form.exact else config.inexact).model_dump()}
    for pattern, given in config.limits.items():
        if fnmatchcase(form.name, pattern):
            limits |= given.model_dump(exclude_none=True)
    return FormLimits.model_validate(limits)


def broken_limits(row: Mapping[str, Any], limits: FormLimits, metric: str) -> list[str]:
    """What a form breaks, in words; limits of what was not measured in `row` do not count."""
    broken = []
    for name, limit in limits.model_dump(exclude={"on_failure"}, exclude_none=True).items():
        measured = _MEASURED[name]
        if measured not in row:
            continue
        title = f"{metric} drop" if measured == "drop" else measured
        value = row[measured]
        if value is None:
            broken.append(f"{title} is not defined on this test split, but {name} is {limit:g}")
        elif value < limit if name.startswith("min_") else value > limit:
            wanted = "at least" if name.startswith("min_") else "at most"
            broken.append(f"{title} is {value:.4g}, {wanted} {limit:g} allowed")
    return broken
