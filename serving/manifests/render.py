"""From a config to the files of a target."""

from __future__ import annotations

from collections.abc import Callable

from serving.manifests import compose, kserve, kustomize
from serving.manifests.config import ServingManifestConfig
from serving.manifests.documents import CONFIG_FILE, to_yaml

TARGETS: dict[str, Callable[[ServingManifestConfig], dict[str, str]]] = {
    "kubernetes": kustomize.files,
    "kserve": kserve.files,
    "compose": compose.files,
}


def render(config: ServingManifestConfig, target: str) -> dict[str, str]:
    """The files that put a model on a target: path -> text, the same for the same config.

    Args:
        config: The model and where it serves.
        target: One of `TARGETS`.

    Raises:
        ValueError: the target cannot serve this; the message says what to change.

    Example:
        >>> sorted(render(config, "kserve"))
        ['inferenceservice.yaml', 'serving.resolved.yaml']
    """
    return {CONFIG_FILE: to_yaml([config.model_dump(mode="json")]), **TARGETS[target](config)}
