"""Step `deploy`: the pushed version gets requests: all of them, or a share while it is on trial."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from components import artifacts, object_store
from components.config import DeployConfig
from components.errors import DataError
from serving.errors import ServingError
from serving.rollout.places import ManifestFolder, Place, VersionFolder
from serving.rollout.readings import ServerPages
from serving.rollout.rollout import Rollout
from serving.traffic import Traffic


@dataclass(frozen=True)
class DeployResult:
    """How the requests are divided.

    Attributes:
        version: The pushed version.
        stable: The version that gets the requests which the canary does not.
        canary: The version on trial, or None.
        canary_share: Its share of the requests, 0 to 1.
    """

    version: int
    stable: int
    canary: int | None
    canary_share: float


def deploy(*, pushed: Path, deployed: Path, config: DeployConfig) -> DeployResult:
    """Put the pushed version on trial with a share of the requests, or give it all of them.

    A version that is the stable one already, or on trial with this share, is left alone; so is a folder without
    `traffic.json` when all requests are to go to its newest version, for that is what servers do by themselves. Manifests
    are applied all the same, in case that failed before. `headrace promote` and `headrace rollback` end a trial.

    Args:
        pushed: Artifact of `push`.
        deployed: Where the artifact is written: `traffic.json` as it is from now on.
        config: The share, the servers whose metrics are read, the manifests if they say what is served.

    Raises:
        DataError: Another version is on trial, a server's metrics cannot be read, the manifests are not what was written or
            cannot be applied.
    """
    record = artifacts.open_artifact(pushed, step="push").result
    version = record["version"]
    base_path, _, _ = record["version_path"].rpartition("/")
    with (
        artifacts.writing(deployed, step="deploy", inputs={"pushed": pushed}, config=config) as out,
        object_store.base_path(base_path) as base,
    ):
        try:
            place = _place(base, record["model_name"], config)
            traffic = place.traffic()
            is_newest = config.manifests is None and version == (place.versions() or [version])[-1]
            if traffic is None and config.canary_share == 1 and is_newest:
                traffic = Traffic(version)
            elif traffic is None or not _is_done(traffic, version, config.canary_share):
                if object_store.is_uri(base_path) and config.manifests is None:
                    raise DataError(
                        f"deploy: {base_path} has traffic.json, or a newer version than {version}, and traffic is divided "
                        "in folders only. Change it there by hand, or set deploy.manifests."
                    )
                source = ServerPages(config.servers) if config.servers else None
                traffic = Rollout(place).deploy(version, config.canary_share, source)
            else:
                place.apply()
        except ServingError as error:
            raise DataError(f"deploy: {error.message}.") from error
        (out.path / "traffic.json").write_text(json.dumps(asdict(traffic)) + "\n")
        out.result = DeployResult(version, **asdict(traffic))
    return out.result


def _place(base_path: Path, model_name: str, config: DeployConfig) -> Place:
    if config.manifests is None:
        return VersionFolder(base_path, model_name)
    overlay = config.overlay if config.apply else None
    return ManifestFolder(Path(config.manifests), base_path=base_path, overlay=overlay)


def _is_done(traffic: Traffic, version: int, canary_share: float) -> bool:
    return version == traffic.stable or (version, canary_share) == (traffic.canary, traffic.canary_share)
