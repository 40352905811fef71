"""Which worker of how many this process is: read from TF_CONFIG, or made from what Kubeflow Trainer v2 tells a pod.

Nothing here imports TensorFlow. The first address is the chief's: it alone reads and writes files.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.errors import ConfigError, HeadraceError

PORT = 2222
# A TFJob with restartPolicy ExitCode starts a pod again for codes from 128 on; 138 is the one left to programs.
RESTART_ME = 138
_CHIEFS = ("chief", "master")
_JOBSET = ("JOBSET_NAME", "TF_TASK_INDEX", "TF_NUM_WORKERS")


class PeerError(HeadraceError):
    """Another worker is missing or gone: all must start again, from the last checkpoint."""

    exit_code = RESTART_ME


@dataclass(frozen=True)
class Cluster:
    """The workers of a run and the place of this process among them.

    Attributes:
        addresses: `host:port` of each worker; the first is the chief.
        index: Of this process.
    """

    addresses: tuple[str, ...]
    index: int

    @property
    def is_chief(self) -> bool:
        """Whether this process reads and writes the files."""
        return self.index == 0

    def tf_config(self) -> str:
        """As TF_CONFIG, with the chief as worker 0."""
        task = {"type": "worker", "index": self.index}
        return json.dumps({"cluster": {"worker": list(self.addresses)}, "task": task})


def from_environ(environ: Mapping[str, str] = os.environ) -> Cluster | None:
    """The cluster that the environment names, `None` if it names none.

    TF_CONFIG is what TFJob v1 gives its pods. Kubeflow Trainer v2 gives none for TensorFlow; there the pod template
    sets JOBSET_NAME and TF_TASK_INDEX from its own labels, and the TrainJob sets TF_NUM_WORKERS.

    Raises:
        ConfigError: it names one, and wrongly.

    Example:
        >>> from_environ({"JOBSET_NAME": "taxi", "TF_TASK_INDEX": "1", "TF_NUM_WORKERS": "2"}).addresses
        ('taxi-node-0-0.taxi:2222', 'taxi-node-0-1.taxi:2222')
    """
    if environ.get("TF_CONFIG"):
        return parse_tf_config(environ["TF_CONFIG"])
    if environ.get("JOBSET_NAME"):
        return _of_jobset(environ)
    return None


def parse_tf_config(text: str) -> Cluster:
    """Read TF_CONFIG; a chief (or master) comes before the workers.

    Raises:
        ConfigError: it is no JSON, lacks a part, or speaks of tasks that this training has no use for.
    """
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"TF_CONFIG is not JSON ({error}): {text!r}.") from error
    jobs, task = _object(fields, "TF_CONFIG").get("cluster"), fields.get("task")
    jobs, task = _object(jobs, "TF_CONFIG: cluster"), _object(task, "TF_CONFIG: task")
    chief = [name for name in jobs if name in _CHIEFS]
    if other := [name for name in jobs if name not in (*_CHIEFS, "worker")]:
        raise ConfigError(
            f"TF_CONFIG: cluster has the task types {', '.join(other)}; training takes chief and worker only. "
            "Leave the others out of the TFJob: the chief evaluates after each epoch."
        )
    order = [*chief, *(["worker"] if "worker" in jobs else [])]
    addresses = [(name, address) for name in order for address in _addresses(jobs[name], name)]
    kind, index = task.get("type"), _index(task.get("index"), "TF_CONFIG: task.index")
    mine = [place for place, (name, _) in enumerate(addresses) if name == kind]
    if len(chief) > 1 or len(jobs.get(chief[0], ()) if chief else ()) > 1:
        raise ConfigError("TF_CONFIG: cluster has more than one chief.")
    if kind not in order:
        raise ConfigError(f"TF_CONFIG: task.type is {kind!r}, expected one of {', '.join(order) or 'the cluster'}.")
    if index >= len(mine):
        raise ConfigError(f"TF_CONFIG: task.index is {index}, but the cluster has {len(mine)} of type '{kind}'.")
    return Cluster(tuple(address for _, address in addresses), mine[index])


def local_clusters(num_workers: int) -> list[Cluster]:
    """One cluster on this machine on free ports, seen from each of its workers."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(num_workers)]
    addresses = tuple(f"127.0.0.1:{sock.getsockname()[1]}" for sock in sockets)
    for sock in sockets:
        sock.close()
    return [Cluster(addresses, index) for index in range(num_workers)]


def rows_of(batch_size: int, num_workers: int, index: int) -> tuple[int, int]:
    """First row and end of a worker's part of each global batch; the parts differ by one row at most.

    Example:
        >>> [rows_of(32, 3, index) for index in range(3)]
        [(0, 11), (11, 22), (22, 32)]
    """
    size, more = divmod(batch_size, num_workers)
    start = index * size + min(index, more)
    return start, start + size + (index < more)


def _of_jobset(environ: Mapping[str, str]) -> Cluster:
    if missing := [name for name in _JOBSET if not environ.get(name)]:
        raise ConfigError(
            f"JOBSET_NAME is set, so this is a pod of a TrainJob, but {' and '.join(missing)} is not. "
            "Set TF_TASK_INDEX from the annotation batch.kubernetes.io/job-completion-index and TF_NUM_WORKERS to numNodes."
        )
    name, index, count = (environ[key] for key in _JOBSET)
    port = _index(environ.get("TF_PORT", PORT), "TF_PORT")
    addresses = tuple(f"{name}-node-0-{i}.{name}:{port}" for i in range(_index(count, "TF_NUM_WORKERS")))
    if not 0 <= _index(index, "TF_TASK_INDEX") < len(addresses):
        raise ConfigError(f"TF_TASK_INDEX is {index}, but TF_NUM_WORKERS is {count}.")
    return Cluster(addresses, int(index))


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        raise ConfigError(f"{name} is {'missing' if value is None else repr(value)}, expected a JSON object.")
    return value


def _addresses(value: Any, name: str) -> Sequence[str]:
    wrong = not isinstance(value, list) or not value or not all(isinstance(a, str) and ":" in a for a in value)
    if wrong:
        raise ConfigError(f"TF_CONFIG: cluster.{name} is {value!r}, expected a list of 'host:port'.")
    addresses: list[str] = value
    return addresses


def _index(value: Any, name: str) -> int:
    # Kubernetes knows only strings; TFJob writes numbers.
    if isinstance(value, bool) or not isinstance(value, int | str) or not str(value).isdecimal():
        raise ConfigError(
            f"{name} is {'missing' if value is None else repr(value)}, expected a whole number from 0 on."
        )
    return int(value)
