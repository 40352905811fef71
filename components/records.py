"""What is written down of a pushed version: its model card, its lineage, and what the model registry is told."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components import lineage, model_card, model_registry
from components.config import PushConfig, RegistryConfig

Origins = Mapping[str, Mapping[str, Any]]


def documents(
    config: PushConfig, origins: Origins, pushed: Mapping[str, Any], files: Mapping[str, str]
) -> dict[str, str]:
    """Model card and lineage, by file name.

    Args:
        config: The model's name, and what its makers say of it.
        origins: Artifact -> what `artifacts.origin` says of it, from the data to the proof.
        pushed: The same of the push.
        files: Path in the version -> SHA-256 of each file of the export.
    """
    time = datetime.datetime.now(datetime.timezone.utc).isoformat()
    place = pushed["result"]["version_path"]
    chain = lineage.events(config.name, origins, time=time)
    chain.append(lineage.pushed_event(config.name, pushed, time=time, location=place, files=files))
    card = model_card.markdown(config.name, config.card, origins)
    return {
        lineage.FILE: json.dumps(chain, indent=1),
        model_card.FILE: card,
        model_card.PAGE: model_card.page(config.name, card),
    }


def register(registry: RegistryConfig, config: PushConfig, version: int, origins: Origins, *, kept: list[int]) -> str:
    """Record a version in a model registry, and return its id there.

    Args:
        registry: The registry.
        config: The destination and the model's name.
        version: The version.
        origins: As for `documents`.
        kept: The versions that are there.

    Raises:
        HeadraceError: the registry does not take it.
    """
    place = config.destination if "://" in config.destination else Path(config.destination).absolute().as_uri()
    base = f"{registry.destination_uri or place}/{config.name}"
    metrics = origins["evaluation"]["result"]["metrics"]["test"]
    known = {
        **{f"test_{name}": value for name, value in metrics.items()},
        **{f"{name}_digest": origins[name]["digest"] for name in ("examples", "model")},
        "data_fingerprint": origins["examples"]["outside"]["data"],
        "mlflow_run_id": os.environ.get("MLFLOW_RUN_ID"),
    }
    pushed = model_registry.PushedVersion(
        model_name=config.name,
        version=version,
        uri=f"{base}/{version}",
        destination=base,
        digest=origins["exported"]["digest"],
        properties={name: value for name, value in known.items() if value is not None},
    )
    return model_registry.register(registry, pushed, kept=kept)
