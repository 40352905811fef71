"""Whether the artifact of an earlier run still holds, and if not, what exactly changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from components import artifacts, external
from components.artifacts import Manifest
from components.config import SECTIONS, inherited_fields
from components.errors import ArtifactError
from pipelines.config import PipelineConfig
from pipelines.steps import Step

_ABSENT = object()
_LONGEST_SHOWN = 100


@dataclasses.dataclass(frozen=True)
class Decision:
    """What is to be done with a step.

    Attributes:
        manifest: That of the artifact to reuse; `None`: run the step.
        reasons: Why, one line each.
    """

    manifest: Manifest | None
    reasons: tuple[str, ...]


def decide(step: Step, run_dir: Path, config: PipelineConfig, *, forced_by: str | None = None) -> Decision:
    """Reuse the artifact of a step, or run it again.

    Args:
        step: The step; its inputs are whole.
        run_dir: Where the artifacts stand.
        config: The experiment.
        forced_by: The option that forbids reuse, such as `--force train`.
    """
    if forced_by:
        return Decision(None, (f"{forced_by} was given",))
    try:
        manifest = artifacts.read_manifest(run_dir / step.output)
        artifacts.check_files(run_dir / step.output, manifest, sizes_only=True)
    except ArtifactError as error:
        there = (run_dir / step.output).exists()
        return Decision(None, (str(error) if there else "it has not run yet",))
    now = made_from_now(step, run_dir, config)
    if manifest.step == step.name and manifest.fingerprint == artifacts.digest_of(now):
        gone = external.why_gone(step.name, manifest.result) or external.why_unknown(
            step.name, config.step_config(step.section)
        )
        return Decision(None, (gone,)) if gone else Decision(manifest, ("nothing that it follows from has changed",))
    return Decision(None, tuple(differences(manifest.made_from, now, step.section)) or ("its fingerprint changed",))


def made_from_now(step: Step, run_dir: Path, config: PipelineConfig) -> dict[str, Any]:
    """What the artifact of a step would be made from if it ran now."""
    return artifacts.make_fingerprint_parts(
        step=step.name,
        inputs={name: run_dir / name for name in step.inputs},
        config=config.step_config(step.section),
    )


def differences(before: Mapping[str, Any], now: Mapping[str, Any], section: str) -> Iterator[str]:
    """What differs between two fingerprints' parts, one line each; `section` is that of the step's config.

    Example:
        >>> list(differences({"config": {"epochs": 3}}, {"config": {"epochs": 5}}, "train"))
        ['setting train.epochs: 3 -> 5']
    """
    for name, _, _ in _changes(before.get("inputs"), now.get("inputs")):
        yield f"input {name} changed"
    for name, old, new in _changes(before.get("config"), now.get("config")):
        yield f"setting {_where_set(name, section)}{_from_to(old, new)}"
    for name, old, new in _changes(before.get("source"), now.get("source"), deep=False):
        yield f"source of {name} {_verb(old, new)}"
    for name, old, new in _changes(before.get("versions"), now.get("versions")):
        yield f"version of {name}{_from_to(old, new)}"
    for name, old, new in _changes(before.get("outside"), now.get("outside")):
        yield f"outside state: the {name.replace('_', ' ')} {_verb(old, new)}"


def _where_set(name: str, section: str) -> str:
    from_the_top = inherited_fields(SECTIONS[section])
    return name if name.partition(".")[0] in from_the_top else f"{section}.{name}"


def _changes(before: Any, now: Any, *, deep: bool = True) -> Iterator[tuple[str, Any, Any]]:
    old, new = leaves(before or {}, deep=deep), leaves(now or {}, deep=deep)
    for name in sorted({*old, *new}):
        pair = old.get(name, _ABSENT), new.get(name, _ABSENT)
        if pair[0] != pair[1]:
            yield name, *pair


def leaves(tree: Mapping[str, Any], *, deep: bool = True, prefix: str = "") -> dict[str, Any]:
    """The values of a tree by their dotted names, or only those at its top."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if deep and isinstance(value, Mapping) and value:
            found |= leaves(value, prefix=f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _from_to(old: Any, new: Any) -> str:
    """`: old -> new`, or no more than that it changed where the values would fill the screen."""
    texts = ["absent" if value is _ABSENT else repr(value) for value in (old, new)]
    return f": {' -> '.join(texts)}" if max(map(len, texts)) <= _LONGEST_SHOWN else " changed"


def _verb(old: Any, new: Any) -> str:
    if old in (None, _ABSENT):
        return "is new"
    return "is gone" if new in (None, _ABSENT) else "changed"
