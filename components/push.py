"""Step `push`: put a blessed and proven model where TF Serving picks it up."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from components import artifacts
from components.artifacts import Manifest
from components.config import PushConfig
from components.errors import ArtifactError, NotBlessedError
from components.external import PUSH_RECORD, versions

_OTHER_FORMS = ("tflite", "onnx")


@dataclass(frozen=True)
class PushResult:
    """Where the model is.

    Attributes:
        model_name: Name under which it is served.
        version: Its version.
        version_path: Its folder.
        rollback_version: The version to go back to; None at the first push.
    """

    model_name: str
    version: int
    version_path: str
    rollback_version: int | None


def push(*, model: Path, evaluation: Path, exported: Path, proof: Path, pushed: Path, config: PushConfig) -> PushResult:
    """Copy the export to `<destination>/<name>/<version>`, whole or not at all, and forget the oldest versions.

    The same export is pushed once: a second time, the version that holds it is given.

    Args:
        model: Artifact of `train`.
        evaluation: Artifact of `evaluate`; it must bless this model.
        exported: Artifact of `export`; it must be made from this model.
        proof: Artifact of `verify`; it must be of this export.
        pushed: Where the artifact is written: a record of what was pushed.
        config: Destination and how many versions stay.

    Raises:
        NotBlessedError: the model did not pass the gate.
        ArtifactError: blessing, export and proof are not of one and the same model.
    """
    inputs = {"model": model, "evaluation": evaluation, "exported": exported, "proof": proof}
    made_by = {"model": "train", "evaluation": "evaluate", "exported": "export", "proof": "verify"}
    manifests = {name: artifacts.open_artifact(path, step=made_by[name]) for name, path in inputs.items()}
    _refuse_unproven(manifests)
    with artifacts.writing(pushed, step="push", inputs=inputs, config=config) as out:
        base = Path(config.destination).absolute() / config.name
        record = {
            "name": config.name,
            "classes": manifests["exported"].result["classes"],
            "model_digest": manifests["model"].digest,
            "export_digest": manifests["exported"].digest,
            "metrics": manifests["evaluation"].result["metrics"],
            "reasons": manifests["evaluation"].result["reasons"],
            "proof": json.loads((proof / "proof.json").read_text()),
        }
        with _only_push_to(base):
            version = _version_holding(base, record["export_digest"]) or _copy(
                exported, base, record, config.resolved_config
            )
            _forget_old(base, config.keep_versions)
        out.result = PushResult(
            model_name=config.name,
            version=version,
            version_path=str(base / str(version)),
            rollback_version=max((number for number in versions(base) if number < version), default=None),
        )
        (out.path / "pushed.json").write_text(json.dumps(record, indent=1))
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


def _version_holding(base: Path, export_digest: str) -> int | None:
    """The newest version, if it holds this export already (a push that was killed at its very end, say)."""
    numbers = versions(base)
    if not numbers:
        return None
    record = base / str(numbers[-1]) / PUSH_RECORD
    same = record.is_file() and json.loads(record.read_text()).get("export_digest") == export_digest
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


def _copy(exported: Path, base: Path, record: dict[str, object], resolved_config: str) -> int:
    """Copy under a name that no server looks at, `saved_model.pb` last, then rename."""
    temporary = base / f".push-{os.getpid()}"
    try:
        shutil.copytree(exported / "saved_model", temporary, ignore=shutil.ignore_patterns("saved_model.pb"))
        for form in _OTHER_FORMS:
            if (exported / form).is_dir():
                shutil.copytree(exported / form, temporary / form)
        shutil.copy2(exported / "formats.json", temporary / "assets.extra" / "formats.json")
        (temporary / "assets.extra" / "config.yaml").write_text(resolved_config)
        (temporary / PUSH_RECORD).write_text(json.dumps(record, indent=1))
        shutil.copy2(exported / "saved_model" / "saved_model.pb", temporary / "saved_model.pb")
        version = max((int(d.name) for d in base.iterdir() if d.name.isdigit()), default=0) + 1
        temporary.rename(base / str(version))
        return version
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _forget_old(base: Path, keep: int) -> None:
    for number in versions(base)[:-keep]:
        # Under another name first: half a version must not look like one.
        condemned = (base / str(number)).rename(base / f".push-old-{number}")
        shutil.rmtree(condemned)
