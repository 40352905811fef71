"""What the launcher's tests share: a cluster, a client of it, and operators that follow a script."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import kubernetes
import urllib3

from components.config import TrainingJobConfig
from components.launch.api import Api
from components.launch.job import Cancelled
from components.launch.manifests import Kind, Work, training_job
from tests.components.launch.fake_kubernetes import NAMESPACE, TOKEN, FakeCluster

NAME = "train-0123456789ab"
QUICK = {"total": 15, "backoff_factor": 0.001, "backoff_max": 0.01, "status_forcelist": (429, 500, 503)}


def client(url: str, token: str = TOKEN) -> Api:
    """A client that waits no longer than it must."""
    configuration = kubernetes.client.Configuration(
        host=url, api_key={"authorization": token}, api_key_prefix={"authorization": "Bearer"}
    )
    retry = urllib3.Retry(**QUICK, allowed_methods=None, raise_on_status=False)
    return Api(configuration, NAMESPACE, retry=retry, pause_s=0.001)


def manifest_of(config: TrainingJobConfig, digest: str = "work-of-this-step", **changes: Any) -> dict[str, Any]:
    """A job of two workers."""
    settings: dict[str, Any] = {
        "name": NAME,
        "namespace": NAMESPACE,
        "digest": digest,
        "run": "run-1",
        "image": "ghcr.io/acme/headrace:1",
        "command": ("python", "-m", "components.train.launch", "/kfp-workspace/train.json"),
        "num_workers": 2,
    }
    return training_job(config, Work(**settings | changes))


@contextlib.contextmanager
def operated(cluster: FakeCluster, script: Callable[[Kind, str], None]) -> Iterator[None]:
    """Let `script` play operator and kubelet for each job that is created; what it fails with ends the test."""
    errors: list[BaseException] = []

    def operate(kind: Kind, job: dict[str, Any]) -> None:
        try:
            script(kind, job["metadata"]["name"])
        except BaseException as error:
            errors.append(error)
            os.kill(os.getpid(), signal.SIGTERM)  # or the launcher would wait for ever for what the script does not do

    cluster.on_create = operate
    try:
        yield
    except Cancelled:
        if errors:
            raise errors[0] from None
        raise


def threads_of_the_launcher() -> list[threading.Thread]:
    """Those that have not ended."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("launch-")]
