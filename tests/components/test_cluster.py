"""TF_CONFIG and its stand-in on Kubeflow Trainer, who takes which rows, and the meeting of the workers."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from components.errors import ConfigError
from components.train import cluster as clusters
from components.train.batches import TrainBatches
from components.train.cluster import Cluster, PeerError
from components.train.meeting import meet

TFJOB = {
    "cluster": {"worker": ["mwms-worker-0.team-a.svc:2222", "mwms-worker-1.team-a.svc:2222"]},
    "task": {"type": "worker", "index": 1},
    "environment": "cloud",
}
TRAINJOB = {"JOBSET_NAME": "taxi", "TF_TASK_INDEX": "2", "TF_NUM_WORKERS": "3"}


def read(**changes: Any) -> Cluster | None:
    return clusters.from_environ({"TF_CONFIG": json.dumps({**TFJOB, **changes})})


def test_tf_config_of_a_tfjob() -> None:
    assert read() == Cluster(("mwms-worker-0.team-a.svc:2222", "mwms-worker-1.team-a.svc:2222"), 1)
    assert not read().is_chief
    assert read(task={"type": "worker", "index": "0"}).is_chief
    assert clusters.from_environ({}) is None


@pytest.mark.parametrize("chief", ["chief", "master"])
def test_a_chief_comes_before_the_workers(chief: str) -> None:
    cluster = {"worker": ["b:1", "c:1"], chief: ["a:1"]}
    assert read(cluster=cluster, task={"type": chief, "index": 0}) == Cluster(("a:1", "b:1", "c:1"), 0)
    worker = read(cluster=cluster, task={"type": "worker", "index": 1})
    assert worker == Cluster(("a:1", "b:1", "c:1"), 2)
    assert clusters.parse_tf_config(worker.tf_config()) == worker


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{cluster", "TF_CONFIG is not JSON"),
        ("[]", r"TF_CONFIG is \[\], expected a JSON object"),
        (json.dumps({"task": TFJOB["task"]}), "TF_CONFIG: cluster is missing"),
        (json.dumps({"cluster": TFJOB["cluster"]}), "TF_CONFIG: task is missing"),
        (json.dumps({**TFJOB, "task": {"type": "worker"}}), "task.index is missing, expected a whole number"),
        (json.dumps({**TFJOB, "task": {"type": "worker", "index": 2}}), "task.index is 2, but the cluster has 2"),
        (json.dumps({**TFJOB, "task": {"type": "worker", "index": -1}}), "task.index is -1, expected a whole number"),
        (json.dumps({**TFJOB, "task": {"type": "chief", "index": 0}}), "task.type is 'chief', expected one of worker"),
        (json.dumps({**TFJOB, "task": {"index": 0}}), "task.type is None, expected one of worker"),
        (json.dumps({**TFJOB, "cluster": {"worker": []}}), "cluster.worker is .*expected a list of 'host:port'"),
        (json.dumps({**TFJOB, "cluster": {"worker": ["a"]}}), "cluster.worker is .*expected a list of 'host:port'"),
        (json.dumps({**TFJOB, "cluster": {"ps": ["a:1"], "worker": ["b:1"]}}), "the task types ps; training takes"),
        (json.dumps({**TFJOB, "cluster": {"chief": ["a:1", "b:1"], "worker": ["c:1"]}}), "more than one chief"),
    ],
)
def test_a_wrong_tf_config_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        clusters.from_environ({"TF_CONFIG": text})


def test_a_pod_of_a_trainjob() -> None:
    hosts = tuple(f"taxi-node-0-{index}.taxi:2222" for index in range(3))
    assert clusters.from_environ(TRAINJOB) == Cluster(hosts, 2)
    assert clusters.from_environ({**TRAINJOB, "TF_PORT": "3000"}).addresses[0] == "taxi-node-0-0.taxi:3000"
    both = {**TRAINJOB, "TF_CONFIG": json.dumps(TFJOB)}
    assert clusters.from_environ(both).addresses[0].startswith("mwms-worker-0")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"TF_TASK_INDEX": ""}, "TF_TASK_INDEX is not. Set TF_TASK_INDEX from the annotation"),
        ({"TF_NUM_WORKERS": ""}, "TF_NUM_WORKERS is not"),
        ({"TF_NUM_WORKERS": "two"}, "TF_NUM_WORKERS is 'two', expected a whole number"),
        ({"TF_TASK_INDEX": "3"}, "TF_TASK_INDEX is 3, but TF_NUM_WORKERS is 3"),
    ],
)
def test_an_incomplete_pod_is_refused(changes: Mapping[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        clusters.from_environ({**TRAINJOB, **changes})


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
def test_the_workers_rows_make_up_each_global_batch(num_workers: int) -> None:
    rows = np.arange(50)

    def batches_of(part_of: Callable[[int], tuple[int, int]]) -> list[list[int]]:
        batches = TrainBatches({"x": rows}, rows, rows.astype(np.float32), batch_size=8, seed=3, part_of=part_of)
        steps = batches.steps_per_epoch
        return [features["x"].numpy().tolist() for features, _, _ in batches.from_step(steps).take(2 * steps)]

    whole = batches_of(lambda num_rows: (0, num_rows))
    parts = [
        batches_of(lambda num_rows, index=index: clusters.rows_of(num_rows, num_workers, index))
        for index in range(num_workers)
    ]
    assert [[row for part in batch for row in part] for batch in zip(*parts, strict=True)] == whole
    sizes = [len(part[0]) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_workers_that_come_one_by_one_meet() -> None:
    workers = clusters.local_clusters(3)

    def come(cluster: Cluster) -> None:
        time.sleep(0.2 * (2 - cluster.index))
        meet(cluster, 10)

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(come, workers)) == [None] * 3


def test_strangers_at_the_chiefs_port_are_let_go() -> None:
    workers = clusters.local_clusters(2)
    with ThreadPoolExecutor() as pool:
        chief = pool.submit(meet, workers[0], 10)
        time.sleep(0.2)
        host, port = workers[0].addresses[0].split(":")
        with socket.create_connection((host, int(port))) as probe:
            probe.sendall(b"GET / HTTP/1.1\n")
        meet(workers[1], 10)
        assert chief.result() is None


def test_who_does_not_come_is_named_to_all() -> None:
    workers = clusters.local_clusters(3)
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(meet, cluster, 1.0) for cluster in workers[:2]]
        for index, future in enumerate(waiting):
            with pytest.raises(PeerError, match=rf"Worker {index} of 3 waited 1 s in vain for worker 2 \(127.0.0.1:"):
                future.result()


def test_a_worker_without_a_chief_names_it() -> None:
    with pytest.raises(PeerError, match=r"in vain for worker 0 \(127.0.0.1:\d+\): Connection refused") as raised:
        meet(clusters.local_clusters(2)[1], 0.5)
    assert raised.value.exit_code == 138
