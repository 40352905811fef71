"""Step `deploy`: the pushed version gets requests: all of them, or a share while it is on trial."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from components import artifacts
from components.config import DeployConfig
from components.errors import DataError
from serving.errors import ServingError
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
    `traffic.json` when all requests are to go to its newest version, for that is what servers do by themselves.
    `headrace promote` and `headrace rollback` end a trial.

    Args:
        pushed: Artifact of `push`.
        deployed: Where the artifact is written: `traffic.json` as it is from now on.
        config: The share, and the servers whose metrics are read.

    Raises:
        DataError: Another version is on trial, or a server's metrics cannot be read.
    """
    record = artifacts.open_artifact(pushed, step="push").result
    version = record["version"]
    with artifacts.writing(deployed, step="deploy", inputs={"pushed": pushed}, config=config) as out:
        try:
            rollout = Rollout(Path(record["version_path"]).parent, record["model_name"])
            traffic = rollout.traffic()
            if traffic is None and config.canary_share == 1 and version == rollout.versions()[-1]:
                traffic = Traffic(version)
            elif traffic is None or not _is_done(traffic, version, config.canary_share):
                traffic = rollout.deploy(version, config.canary_share, config.servers)
        except ServingError as error:
            raise DataError(f"deploy: {error.message}.") from error
        (out.path / "traffic.json").write_text(json.dumps(asdict(traffic)) + "\n")
        out.result = DeployResult(version, **asdict(traffic))
    return out.result


def _is_done(traffic: Traffic, version: int, canary_share: float) -> bool:
    return version == traffic.stable or (version, canary_share) == (traffic.canary, traffic.canary_share)
