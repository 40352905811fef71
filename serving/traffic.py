"""Which versions of a model get the traffic: `traffic.json` beside its version directories.

While the file is there, the embedded server serves the versions it names instead of those of its version policy. Clients
that name neither a version nor a label get the canary for its share of the requests, and the stable version else; the
labels `stable` and `canary` name the two. TF Serving reads over the file, for its name is no number.

Example:
    {"stable": 3, "canary": 4, "canary_share": 0.1}
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from serving import atomic
from serving.errors import ServingError, invalid_argument

TRAFFIC_FILE = "traffic.json"
ROLLOUT_FILE = "rollout.json"  # what serving.rollout remembers, beside it


@dataclass(frozen=True)
class Traffic:
    """How the requests for one model are divided.

    Attributes:
        stable: the version that has proven itself.
        canary: the version on trial, or None.
        canary_share: its share of the requests, 0 to 1.

    Raises:
        ServingError: INVALID_ARGUMENT for values that make no sense.
    """

    stable: int
    canary: int | None = None
    canary_share: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("stable", self.stable), ("canary", self.canary)):
            if not (_is_version(value) or (value is None and name == "canary")):
                raise invalid_argument(f"{name} is the number of a version, but got {value!r}")
        if self.canary == self.stable:
            raise invalid_argument(f"stable and canary are both version {self.stable}")
        if isinstance(self.canary_share, bool) or not isinstance(self.canary_share, int | float):
            raise invalid_argument(f"canary_share is a number from 0 to 1, but got {self.canary_share!r}")
        if not 0 <= self.canary_share <= 1:
            raise invalid_argument(f"canary_share is a number from 0 to 1, but got {self.canary_share}")
        if self.canary is None and self.canary_share:
            raise invalid_argument(f"canary_share is {self.canary_share}, but there is no canary")

    @property
    def labels(self) -> dict[str, int]:
        """Label -> version."""
        return {"stable": self.stable} | ({} if self.canary is None else {"canary": self.canary})

    def choose(self) -> int:
        """A version for one request, by chance."""
        return self.canary if self.canary is not None and random.random() < self.canary_share else self.stable


def _is_version(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def read_traffic(base_path: Path) -> Traffic | None:
    """The traffic of a model, or None without a file.

    Raises:
        ServingError: INVALID_ARGUMENT, naming the file and what is wrong with it.
        OSError: the file cannot be read.
    """
    path = base_path / TRAFFIC_FILE
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    try:
        document = json.loads(text)
        names = [field.name for field in fields(Traffic)]
        if not isinstance(document, dict) or "stable" not in document or set(document) - set(names):
            raise invalid_argument(f"it holds an object with the keys {', '.join(names)}")
        return Traffic(**document)
    except (ValueError, ServingError) as error:
        message = error.message if isinstance(error, ServingError) else f"no JSON: {error}"
        raise invalid_argument(f"{path}: {message}") from error


def write_traffic(base_path: Path, traffic: Traffic | None) -> None:
    """Divide the traffic anew, all at once; None takes the file away, and the version policy decides again.

    Raises:
        OSError: the file cannot be written.
    """
    path = base_path / TRAFFIC_FILE
    if traffic is None:
        path.unlink(missing_ok=True)
    else:
        atomic.write_text(path, json.dumps(asdict(traffic)))
