"""Step `push`: put a blessed and proven model where TF Serving picks it up."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from components import artifacts, formats, object_store, records
from components.artifacts import Manifest
from components.config import PushConfig
from components.errors import ArtifactError, NotBlessedError
from components.external import PUSH_RECORD, champion_digest, find_champion, traffic_of, versions
from components.formats import Format

_SAVED_MODEL = "saved_model"


@dataclass(frozen=True)
class PushResult:
    """Where the model is.

    Attributes:
        model_name: Name under which it is served.
        version: Its version.
        version_path: Its folder.
        rollback_version: The version to go back to; None at the first push.
        formats: The forms in it.
        left_out: The forms of the export that are not, with the reason.
        registry_version_id: What the model registry calls it; None without one.
    """

    model_name: str
    version: int
    version_path: str
    rollback_version: int | None
    formats: list[str]
    left_out: dict[str, str]
    registry_version_id: str | None = None


def push(*, model: Path, evaluation: Path, exported: Path, proof: Path, pushed: Path, config: PushConfig) -> PushResult:
    """Copy the proven forms to `<destination>/<name>/<version>`, all or nothing, and forget the oldest versions.

    The same forms are pushed once: a second time, the version that holds them is given. The model card and the lineage
    go with them. Then the version is recorded in the model registry, if there is one.

    Args:
        model: Artifact of `train`.
        evaluation: Artifact of `evaluate`; it must bless this model.
        exported: Artifact of `export`; it must be made from this model.
        proof: Artifact of `verify`; it must be of this export.
        pushed: Where the artifact is written: a record of what was pushed.
        config: Destination and how many versions stay.

    Raises:
        NotBlessedError: the model did not pass the gate.
        ArtifactError: blessing, export and proof are not of one and the same model, or the champion is another one than
            the model was compared with.
        HeadraceError: the model registry does not take the version, which is pushed all the same.
    """
    inputs = {"model": model, "evaluation": evaluation, "exported": exported, "proof": proof}
    made_by = {"model": "train", "evaluation": "evaluate", "exported": "export", "proof": "verify"}
    manifests = {name: artifacts.open_artifact(path, step=made_by[name]) for name, path in inputs.items()}
    _refuse_unproven(manifests)
    place = object_store.absolute(f"{config.destination}/{config.name}")
    with (
        artifacts.writing(pushed, step="push", inputs=inputs, config=config) as out,
        object_store.base_path(place) as base,
    ):
        measured = json.loads((proof / "proof.json").read_text())
        forms, left_out = _proven(exported, measured["formats"])
        record = {
            "name": config.name,
            "classes": manifests["exported"].result["classes"],
            "model_digest": manifests["model"].digest,
            "export_digest": manifests["exported"].digest,
            "metrics": manifests["evaluation"].result["metrics"],
            "slices": manifests["evaluation"].result["slices"],
            "reasons": manifests["evaluation"].result["reasons"],
            "formats": [form.name for form in forms],
            "left_out": left_out,
            "proof": measured,
        }
        origins = artifacts.ancestors_of(inputs)
        files = [str(file.relative_to(exported)) for form in forms for file in formats.files_of(exported / form.path)]
        digests = {name.removeprefix(f"{_SAVED_MODEL}/"): manifests["exported"].files[name]["sha256"] for name in files}

        def result(version: int) -> PushResult:
            return PushResult(
                model_name=config.name,
                version=version,
                version_path=f"{place}/{version}",
                rollback_version=max((number for number in versions(base) if number < version), default=None),
                formats=record["formats"],
                left_out=left_out,
            )

        @functools.cache  # the time in them is one
        def documents(version: int) -> dict[str, str]:
            pushed_as = out.origin("push", digest=manifests["exported"].digest, result=asdict(result(version)))
            return records.documents(config, origins, pushed_as, digests)

        with _only_push_to(base):
            version = _version_holding(base, record)
            if version is None:
                _refuse_stale_blessing(manifests["evaluation"], manifests["model"], base, config.manifests)
                version = _copy(exported, forms, base, record, config.resolved_config, documents)
            _forget_old(base, config.keep_versions, config.manifests)
            object_store.publish(place, base, version)
        out.result = result(version)
        for name, text in documents(version).items():
            (out.path / name).write_text(text)
        (out.path / "pushed.json").write_text(json.dumps(record, indent=1))
        if config.registry is not None:
            its_id = records.register(config.registry, config, version, origins, kept=versions(base))
            out.result = replace(out.result, registry_version_id=its_id)
    return out.result


def _refuse_unproven(manifests: dict[str, Manifest]) -> None:
    evaluation, exported, proof = manifests["evaluation"], manifests["exported"], manifests["proof"]
    if not evaluation.result["blessed"]:
        failed = [reason for reason in evaluation.result["reasons"] if not reason.startswith("passed")]
        raise NotBlessedError(f"The model is not blessed, so it is not pushed: {'; '.join(failed)}.")
    chain = (
        ("evaluation", evaluation.made_from["inputs"]["model"], manifests["model"].digest),
        ("export", exported.made_from["inputs"]["model"], manifests["model"].digest),
        ("proof", proof.made_from["inputs"]["exported"], exported.digest),
    )
    for name, made_from, given in chain:
        if made_from != given:
            raise ArtifactError(f"The {name} was made from another model than the one to push. Run its step again.")


def _refuse_stale_blessing(evaluation: Manifest, model: Manifest, base: Path, manifests: str | None) -> None:
    """A blessing says: better than the champion. Of another one, which a run beside this one has pushed, it says nothing."""
    if evaluation.made_from["config"]["champion"] is None:
        return
    champion = find_champion(base, other_than=model.digest, manifests=manifests)
    if (champion and champion_digest(champion)) != evaluation.made_from["outside"]["champion"]:
        raise ArtifactError(
            f"The champion is another one ({champion}) than the model was compared with, so nothing is pushed: another "
            "run has pushed, or the traffic was changed. Run again: only the comparison and what follows is repeated."
        )


def _proven(exported: Path, measured: list[dict[str, Any]]) -> tuple[list[Format], dict[str, str]]:
    """The forms of the export that passed, and name -> reason of the others: one without a proof is not pushed."""
    reasons = {row["format"]: row["reason"] for row in measured if not row["passed"]}
    passed = {row["format"] for row in measured if row["passed"]}
    forms = formats.read_formats(exported)
    left_out = {form.name: reasons.get(form.name, "not verified") for form in forms if form.name not in passed}
    if _SAVED_MODEL in left_out:
        raise ArtifactError(f"The SavedModel is not proven ({left_out[_SAVED_MODEL]}), so nothing is pushed.")
    return [form for form in forms if form.name in passed], left_out


def _version_holding(base: Path, record: dict[str, Any]) -> int | None:
    """The newest version, if it holds these forms of this export already (a push that was killed at its very end, say)."""
    numbers = versions(base)
    if not numbers:
        return None
    file = base / str(numbers[-1]) / PUSH_RECORD
    held = json.loads(file.read_text()) if file.is_file() else {}
    same = all(held.get(name) == record[name] for name in ("export_digest", "formats"))
    return numbers[-1] if same else None


@contextlib.contextmanager
def _only_push_to(base: Path) -> Iterator[None]:
    """Wait for other pushes to `base`, so that no two take one version number; what a killed one left is removed."""
    with artifacts.disk_errors_explained(base):
        base.mkdir(parents=True, exist_ok=True)
        folder = os.open(base, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            for left_over in base.glob(".push-*"):
                shutil.rmtree(left_over)
            yield
        finally:
            os.close(folder)


def _copy(
    exported: Path,
    forms: list[Format],
    base: Path,
    record: dict[str, Any],
    resolved_config: str,
    documents: Callable[[int], dict[str, str]],
) -> int:
    """Copy under a name that no server looks at, `saved_model.pb` last, then rename."""
    temporary = base / f".push-{os.getpid()}"
    try:
        shutil.copytree(exported / _SAVED_MODEL, temporary, ignore=shutil.ignore_patterns("saved_model.pb"))
        for file in (
            file for form in forms if form.name != _SAVED_MODEL for file in formats.files_of(exported / form.path)
        ):
            copy = temporary / file.relative_to(exported)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, copy)
        formats.write_formats(forms, temporary / "assets.extra")
        (temporary / "assets.extra" / "config.yaml").write_text(resolved_config)
        (temporary / PUSH_RECORD).write_text(json.dumps(record, indent=1))
        version = max((int(d.name) for d in base.iterdir() if d.name.isdigit()), default=0) + 1
        for name, text in documents(version).items():
            (temporary / "assets.extra" / name).write_text(text)
        shutil.copy2(exported / _SAVED_MODEL / "saved_model.pb", temporary / "saved_model.pb")
        temporary.rename(base / str(version))
        return version
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _forget_old(base: Path, keep: int, manifests: str | None) -> None:
    traffic = traffic_of(base, manifests)
    served = traffic.labels.values() if traffic is not None else ()
    for number in (number for number in versions(base)[:-keep] if number not in served):
        # Under another name first: half a version must not look like one.
        condemned = (base / str(number)).rename(base / f".push-old-{number}")
        shutil.rmtree(condemned)
