"""State outside the artifacts that a step's output follows from: the data, the champion, the endpoint, the request log.

It belongs to a step's fingerprint. Nothing here imports TensorFlow, so that a run in which nothing changed stays quick.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

PUSH_RECORD = "assets.extra/headrace.json"


def state(step: str, config: BaseModel, inputs: Mapping[str, Path]) -> dict[str, Any]:
    """The outside state that `step` depends on, as JSON-able values; empty for most steps."""
    settings: Any = config
    if step == "ingest":
        return {"data": digest_data(settings.path)}
    if step == "validate":
        return {"schema": digest_data(settings.schema_path)}
    if step == "evaluate":
        champion = find_champion(Path(settings.champion_path), other_than=_model_digest(inputs["model"]))
        return {"champion": champion and champion_digest(champion)}
    if step == "monitor":
        return {"request_log": digest_data(settings.request_log)}
    return {}


def digest_data(path: str | None) -> str | None:
    """Digest of the bytes of a file, of every file below a folder, or of the files of a glob; `None` if there is none."""
    if path is None or not (files := data_files(path)):
        return None
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def data_files(path: str) -> list[Path]:
    """The files that a path, folder or glob names, sorted."""
    root = Path(path)
    if root.is_dir():
        return sorted(file for file in root.rglob("*") if file.is_file())
    if root.is_file():
        return [root]
    pattern = root.relative_to(root.anchor) if root.anchor else root
    return sorted(file for file in Path(root.anchor or ".").glob(str(pattern)) if file.is_file())


def versions(base_path: Path) -> list[int]:
    """The numbers of the complete model versions under a TF Serving base path, oldest first."""
    if not base_path.is_dir():
        return []
    return sorted(int(d.name) for d in base_path.iterdir() if d.name.isdigit() and (d / "saved_model.pb").is_file())


def find_champion(base_path: Path, *, other_than: str) -> Path | None:
    """The newest pushed version that is not the model `other_than` itself."""
    for number in reversed(versions(base_path)):
        if champion_digest(base_path / str(number)) != other_than:
            return base_path / str(number)
    return None


def why_gone(step: str, result: Mapping[str, Any]) -> str | None:
    """Why a whole artifact no longer holds: what its step did outside the artifacts has been undone. `None` if it holds."""
    if step == "push" and not (Path(result["version_path"]) / "saved_model.pb").is_file():
        return f"the pushed model {result['version_path']} is gone"
    return None


def champion_digest(version_path: Path) -> str:
    """Digest of the trained model that a pushed version was exported from; of its graph if someone else put it there."""
    record = version_path / PUSH_RECORD
    if record.is_file():
        return str(json.loads(record.read_text())["model_digest"])
    return hashlib.sha256((version_path / "saved_model.pb").read_bytes()).hexdigest()


def _model_digest(model: Path) -> str:
    return str(json.loads((model / "manifest.json").read_text())["digest"])
