"""The launcher against an API server that behaves, and misbehaves, as Kubernetes does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from components.config import TrainingJobConfig
from components.errors import ConfigError, HeadraceError
from components.launch.api import KubernetesError
from components.launch.job import Cancelled, run_job
from components.launch.manifests import KINDS, Kind
from tests.components.launch.clusters import NAME, client, manifest_of, operated, threads_of_the_launcher
from tests.components.launch.fake_kubernetes import FakeCluster, Fault, ended, running, unschedulable, waiting

Script = Callable[[Kind, str], None]


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster() as cluster:
        yield cluster
    assert threads_of_the_launcher() == []


def launch(cluster: FakeCluster, script: Script, kind: str = "tfjob", **settings: Any) -> list[str]:
    """Run a job whose operator follows a script; returns what was shown."""
    config = TrainingJobConfig.model_validate({"kind": kind, **settings})
    with client(cluster.url) as api, operated(cluster, script):
        run_job(api, config, manifest_of(config), show=cluster.show)
    return cluster.shown


def failure(cluster: FakeCluster, script: Script, kind: str = "tfjob", **settings: Any) -> HeadraceError:
    """The error that such a job ends with."""
    with pytest.raises(HeadraceError) as caught:
        launch(cluster, script, kind, **settings)
    return caught.value


def job_in(cluster: FakeCluster, kind: str = "tfjob") -> dict[str, Any] | None:
    return cluster.get(cluster.job_path(KINDS[kind], NAME))


class Training:
    """Two workers that train until they are told how it ends."""

    def __init__(self, cluster: FakeCluster, kind: Kind, job: str) -> None:
        self.cluster, self.kind, self.job = cluster, kind, job
        self.pods = [cluster.put_pod(kind, job, index, **running(kind)) for index in range(2)]

    def write(self, *lines: str) -> None:
        """Let the chief write, and wait until it is shown."""
        self.cluster.log(self.pods[0], *lines)
        self.cluster.wait(lambda: {*lines} <= {*self.cluster.shown})

    def succeed(self) -> None:
        for index in range(2):
            self.end(index, 0)
        self.cluster.set_condition(self.kind, self.job, self.kind.succeeded)

    def end(self, index: int, code: int, *arguments: Any, **options: Any) -> None:
        self.cluster.put_pod(self.kind, self.job, index, **ended(self.kind, code, *arguments, **options))

    def fail(self, reason: str = "Failed", message: str = "a replica has failed") -> None:
        self.cluster.set_condition(self.kind, self.job, "Failed", reason, message)


@pytest.mark.parametrize("kind", ["tfjob", "trainjob"])
def test_a_job_that_succeeds_shows_the_log_of_the_chief(cluster: FakeCluster, kind: str) -> None:
    def operate(kind: Kind, job: str) -> None:
        training = Training(cluster, kind, job)
        cluster.log(training.pods[1], "said by worker 1")
        training.write("epoch 1/2")
        cluster.set_condition(kind, job, kind.succeeded)
        training.write("epoch 2/2")  # what comes after the operator's word is heard, too
        training.end(0, 0)

    lines = launch(cluster, operate, kind)
    assert lines == [f"created {KINDS[kind].name} {NAME}", "epoch 1/2", "epoch 2/2"]
    assert job_in(cluster, kind) is not None
    assert cluster.count("DELETE") == 0


def test_a_job_that_is_done_already_shows_its_log(cluster: FakeCluster) -> None:
    kind = KINDS["tfjob"]
    cluster.put(cluster.job_path(kind, NAME), manifest_of(TrainingJobConfig(kind="tfjob")))
    cluster.set_condition(kind, NAME, kind.succeeded)
    cluster.log(cluster.put_pod(kind, NAME, 0, **ended(kind, 0)), "epoch 1/1")
    lines = launch(cluster, lambda kind, job: None)
    assert lines == [f"going on with TFJob {NAME}, which an earlier try of this step has created", "epoch 1/1"]


def test_a_job_whose_trainer_finds_the_config_wrong_is_a_wrong_config(cluster: FakeCluster) -> None:
    def operate(kind: Kind, job: str) -> None:
        training = Training(cluster, kind, job)
        training.end(0, 2, message="Error: train.global_batch_size 2 cannot be divided over 3 workers.")
        training.end(1, 138, at="2026-12-01T00:00:30Z")
        training.fail()

    error = failure(cluster, operate)
    assert isinstance(error, ConfigError)
    assert f"worker 0 (pod {NAME}-worker-0) ended with exit code 2" in str(error)
    assert "cannot be divided over 3 workers" in str(error)


@pytest.mark.parametrize("kind", ["tfjob", "trainjob"])
def test_what_the_others_die_of_is_not_taken_for_the_cause(cluster: FakeCluster, kind: str) -> None:
    def operate(kind: Kind, job: str) -> None:
        training = Training(cluster, kind, job)
        training.end(0, 138, at="2026-12-01T00:00:01Z")
        training.end(1, 137, "OOMKilled", at="2026-12-01T00:00:02Z")
        training.fail()

    error = failure(cluster, operate, kind)
    assert "worker 1" in str(error) and "ran out of memory (OOMKilled, limit 2Gi)" in str(error)
    assert "Give kubeflow.steps.train a higher memory_limit" in str(error)
    assert type(error) is HeadraceError
    assert job_in(cluster, kind) is not None, "a job that has ended stays, to be looked at"


def test_a_pod_that_was_evicted_says_so(cluster: FakeCluster) -> None:
    def operate(kind: Kind, job: str) -> None:
        training = Training(cluster, kind, job)
        status = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
        cluster.put_pod(kind, job, 1, **status)
        training.end(0, 138)
        cluster.set_condition(kind, job, "Failed", "TFJobFailed", "failed")

    error = failure(cluster, operate)
    assert "worker 1" in str(error) and "taken off its node (Evicted: The node was low on resource" in str(error)


@pytest.mark.parametrize(
    ("kind", "reason", "message"),
    [
        ("tfjob", "TFJobFailed", "TFJob x has failed because it was active longer than specified deadline"),
        ("trainjob", "DeadlineExceeded", "TrainJob exceeded its active deadline"),
    ],
)
def test_a_deadline_is_named(cluster: FakeCluster, kind: str, reason: str, message: str) -> None:
    def operate(kind: Kind, job: str) -> None:
        training = Training(cluster, kind, job)
        training.end(0, 143)
        training.fail(reason, message)

    assert "kubeflow.training_job.deadline_seconds" in str(failure(cluster, operate, kind))


@pytest.mark.parametrize(
    ("reason", "message", "hint"),
    [
        ("ErrImagePull", "rpc error: code = NotFound desc = failed to pull: not found", "kubeflow.image"),
        ("ImagePullBackOff", 'Back-off pulling image "x": unauthorized', "image_pull_secrets"),
        ("InvalidImageName", "", "kubeflow.image"),
    ],
)
def test_an_image_that_is_not_there_is_not_waited_for(
    cluster: FakeCluster, reason: str, message: str, hint: str
) -> None:
    def operate(kind: Kind, job: str) -> None:
        cluster.put_pod(kind, job, 0, **running(kind))
        cluster.put_pod(kind, job, 1, **waiting(kind, reason, message))

    error = failure(cluster, operate)
    assert f"worker 1 (pod {NAME}-worker-1) does not start: {reason}" in str(error)
    assert message in str(error) and hint in str(error) and "It was deleted" in str(error)
    assert job_in(cluster) is None


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (
            unschedulable("0/3 nodes are available: 3 Insufficient nvidia.com/gpu."),
            "Insufficient nvidia.com/gpu.). Lower",
        ),
        (waiting(KINDS["tfjob"], "ImagePullBackOff", "i/o timeout"), "ImagePullBackOff (i/o timeout)"),
        (waiting(KINDS["tfjob"], "ContainerCreating"), "ReadWriteMany"),
        (waiting(KINDS["tfjob"], "CreateContainerConfigError", 'secret "s3" not found'), 'secret "s3" not found'),
    ],
)
def test_what_may_pass_is_waited_for_so_long(cluster: FakeCluster, status: dict[str, Any], said: str) -> None:
    kind = KINDS["tfjob"]
    cluster.put_pod(kind, NAME, 0, **running(kind))
    cluster.put_pod(kind, NAME, 1, **status)
    error = failure(cluster, lambda kind, job: None, pending_timeout_seconds=0)
    assert said in str(error)
    assert job_in(cluster) is None


def test_a_job_without_pods_is_not_waited_for_for_ever(cluster: FakeCluster) -> None:
    error = failure(cluster, lambda kind, job: None, pending_timeout_seconds=0)
    assert "0 of 2 pods are there" in str(error) and "kubectl get events" in str(error)


@pytest.mark.parametrize("kind", ["tfjob", "trainjob"])
def test_a_job_that_waits_in_a_queue_is_waited_for(cluster: FakeCluster, kind: str) -> None:
    def operate(kind: Kind, job: str) -> None:
        cluster.wait_for_requests("watch=true", 2)
        Training(cluster, kind, job).succeed()

    config = TrainingJobConfig.model_validate({"kind": kind, "queue": "gpus", "pending_timeout_seconds": 0})
    manifest = manifest_of(config)
    # As Kueue's webhook does.
    manifest["spec"].get("runPolicy", manifest["spec"])["suspend"] = True
    with client(cluster.url) as api, operated(cluster, operate):
        run_job(api, config, manifest, show=cluster.show)


def test_workers_that_start_again_are_counted(cluster: FakeCluster) -> None:
    """A TFJob starts a pod again for codes from 128 on, however often it runs out of memory."""

    def operate(kind: Kind, job: str) -> None:
        training = Training(cluster, kind, job)
        cluster.wait_for_requests("watch=true", 2)
        for start in range(3):
            name = training.pods[1]
            cluster.put_pod(kind, job, 1, uid=f"start-{start}", **ended(kind, 137, "OOMKilled"))
            cluster.remove(f"/api/v1/namespaces/team-a/pods/{name}")
        cluster.put_pod(kind, job, 1, uid="start-3", **running(kind))

    error = failure(cluster, operate, max_restarts=2)
    assert "ran out of memory (OOMKilled, limit 2Gi)" in str(error)
    assert "It was started again 2 times (kubeflow.training_job.max_restarts)" in str(error)
    assert job_in(cluster) is None


def test_a_chief_that_starts_again_is_heard_again(cluster: FakeCluster) -> None:
    def operate(kind: Kind, job: str) -> None:
        training = Training(cluster, kind, job)
        training.write("epoch 1/2")
        training.end(0, 143)
        cluster.remove(f"/api/v1/namespaces/team-a/pods/{training.pods[0]}")
        cluster.put_pod(kind, job, 0, uid="again", **running(kind))
        training.write("going on after epoch 1")
        training.succeed()

    lines = launch(cluster, operate)
    assert lines[1] == "epoch 1/2" and lines[-1] == "going on after epoch 1"
    assert "worker 0 (pod train-0123456789ab-worker-0) was told to stop" in lines


def test_an_api_that_is_busy_is_asked_again(cluster: FakeCluster) -> None:
    def operate(kind: Kind, job: str) -> None:
        training = Training(cluster, kind, job)
        cluster.wait_for_requests("watch=true", 4)
        training.succeed()

    cluster.faults = [
        Fault("POST", "tfjobs", 429, headers={"Retry-After": "0"}),
        Fault("POST", "tfjobs", 503),
        Fault("GET", "pods?labelSelector", 500, times=2),
        Fault("GET", "watch=true", 429, times=2),
    ]
    launch(cluster, operate)
    assert cluster.count("POST") == 3
    assert not any(fault.times for fault in cluster.faults)


def test_a_creation_whose_answer_is_lost_is_no_conflict(cluster: FakeCluster) -> None:
    def operate(kind: Kind, job: str) -> None:
        Training(cluster, kind, job).succeed()

    cluster.faults = [Fault("POST", "tfjobs", is_done=True)]
    lines = launch(cluster, operate)
    assert cluster.count("POST") == 2
    assert lines[0].startswith(f"going on with TFJob {NAME}")


def test_a_network_that_is_cut_for_a_while_loses_nothing_of_the_log(cluster: FakeCluster) -> None:
    def operate(kind: Kind, job: str) -> None:
        training = Training(cluster, kind, job)
        training.write(*(f"step {number}" for number in range(15)))
        with cluster.changed:
            cluster.faults.append(Fault("", "", times=8))
            cluster.cut()
        training.write(*(f"step {number}" for number in range(15, 30)))
        training.succeed()

    lines = launch(cluster, operate)
    assert lines[1:] == [f"step {number}" for number in range(30)]
    assert cluster.count("sinceTime") and not any(fault.times for fault in cluster.faults)


def test_a_watch_that_expires_is_begun_anew(cluster: FakeCluster) -> None:
    def operate(kind: Kind, job: str) -> None:
        training = Training(cluster, kind, job)
        cluster.wait_for_requests("watch=true", 2)
        cluster.expire()
        cluster.faults.append(Fault("GET", "watch=true", 410))  # one that is refused as it is opened
        cluster.wait_for_requests("tfjobs?fieldSelector", 4)
        training.succeed()

    launch(cluster, operate)
    lists = [line for line in cluster.requests if "Selector" in line and "watch" not in line]
    assert len(lists) >= 4


@pytest.mark.parametrize(
    ("verb", "resource"),
    [
        ("create", "tfjobs"),
        ("get", "tfjobs"),
        ("list", "tfjobs"),
        ("watch", "tfjobs"),
        ("list", "pods"),
        ("get", "pods/log"),
    ],
)
def test_what_the_service_account_may_not_is_named(cluster: FakeCluster, verb: str, resource: str) -> None:
    cluster.forbidden.add((verb, resource))
    config = TrainingJobConfig(kind="tfjob")
    if verb == "get" and resource == "tfjobs":
        cluster.put(cluster.job_path(KINDS["tfjob"], NAME), manifest_of(config))

    error = failure(cluster, lambda kind, job: Training(cluster, kind, job) and None)
    assert f"Give system:serviceaccount:team-a:pipeline-runner the verb '{verb}' on {resource}" in str(error)
    assert "rbac.yaml" in str(error)


def test_an_account_that_is_not_known_is_said_to_be(cluster: FakeCluster) -> None:
    config = TrainingJobConfig(kind="tfjob")
    with (
        client(cluster.url, token="stale") as api,
        pytest.raises(KubernetesError, match="does not know this step's service account"),
    ):
        run_job(api, config, manifest_of(config))


def test_a_cluster_without_the_operator_is_told_from_others(cluster: FakeCluster) -> None:
    cluster.unknown.add("trainjobs")
    error = failure(cluster, lambda kind, job: None, "trainjob")
    assert "has no such kind of job" in str(error)


def test_an_api_that_is_gone_leaves_the_job_alone(cluster: FakeCluster) -> None:
    def operate(kind: Kind, job: str) -> None:
        Training(cluster, kind, job)
        cluster.wait_for_requests("watch=true", 2)
        with cluster.changed:
            cluster.faults.append(Fault("", "", times=1000))
            cluster.cut()

    error = failure(cluster, operate)
    assert "has not answered, however often it was asked" in str(error) and "adopts it" in str(error)
    assert job_in(cluster) is not None


def test_a_foreign_job_of_the_same_name_is_left_alone(cluster: FakeCluster) -> None:
    config = TrainingJobConfig(kind="tfjob")
    cluster.put(cluster.job_path(KINDS["tfjob"], NAME), manifest_of(config, digest="work of another step"))
    error = failure(cluster, lambda kind, job: None)
    assert "that this step has not made" in str(error) and f"kubectl get tfjobs {NAME}" in str(error)
    assert job_in(cluster) is not None and cluster.count("DELETE") == 0


def test_a_job_of_an_earlier_try_that_failed_makes_room(cluster: FakeCluster) -> None:
    config = TrainingJobConfig(kind="tfjob")
    old = cluster.put(cluster.job_path(KINDS["tfjob"], NAME), manifest_of(config))
    cluster.set_condition(KINDS["tfjob"], NAME, "Failed", "TFJobFailed", "failed")
    lines = launch(cluster, lambda kind, job: Training(cluster, kind, job).succeed())
    assert "of an earlier try has failed" in lines[0] and lines[1] == f"created TFJob {NAME}"
    assert job_in(cluster)["metadata"]["uid"] != old["metadata"]["uid"]
    (options,) = cluster.bodies
    assert options["propagationPolicy"] == "Foreground"
    assert options["preconditions"] == {"uid": old["metadata"]["uid"]}


def test_a_job_that_somebody_deletes_is_missed(cluster: FakeCluster) -> None:
    def operate(kind: Kind, job: str) -> None:
        Training(cluster, kind, job)
        cluster.wait_for_requests("watch=true", 2)
        cluster.remove(cluster.job_path(kind, job))

    assert "was deleted while it ran, by somebody else" in str(failure(cluster, operate))


@pytest.mark.parametrize("is_running", [False, True])
def test_sigterm_deletes_the_job(cluster: FakeCluster, is_running: bool) -> None:
    def operate(kind: Kind, job: str) -> None:
        if is_running:
            Training(cluster, kind, job)
            cluster.wait_for_requests("follow=true")
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Cancelled) as cancelled:
        launch(cluster, operate)
    assert cancelled.value.code == 143
    assert job_in(cluster) is None
    assert cluster.list("/api/v1/namespaces/team-a/pods", {})["items"] == []
    assert signal.getsignal(signal.SIGTERM) is before


LAUNCHER = """
from components.config import TrainingJobConfig
from components.launch.job import run_job
from tests.components.launch.clusters import client, manifest_of

config = TrainingJobConfig(kind="tfjob")
with client({url!r}) as api:
    run_job(api, config, manifest_of(config), show=lambda line: print(line, flush=True))
"""


def test_a_launcher_that_was_killed_adopts_its_job(cluster: FakeCluster) -> None:
    started: list[Training] = []

    def operate(kind: Kind, job: str) -> None:
        started.append(Training(cluster, kind, job))
        cluster.log(started[0].pods[0], "epoch 1/2")

    with operated(cluster, operate):
        code = textwrap.dedent(LAUNCHER).format(url=cluster.url)
        project = Path(__file__).resolve().parents[3]
        with subprocess.Popen([sys.executable, "-c", code], cwd=project, stdout=subprocess.PIPE, text=True) as launcher:
            assert launcher.stdout is not None
            assert [launcher.stdout.readline().strip() for _ in range(2)] == [f"created TFJob {NAME}", "epoch 1/2"]
            launcher.kill()
    uid = job_in(cluster)["metadata"]["uid"]
    config = TrainingJobConfig(kind="tfjob")

    def show(line: str) -> None:
        cluster.show(line)
        if line == "epoch 1/2":
            cluster.log(started[0].pods[0], "epoch 2/2")
            started[0].succeed()

    with client(cluster.url) as api:
        run_job(api, config, manifest_of(config), show=show)
    assert cluster.shown == [
        f"going on with TFJob {NAME}, which an earlier try of this step has created",
        "epoch 1/2",
        "epoch 2/2",
    ]
    assert job_in(cluster)["metadata"]["uid"] == uid and len(started) == 1
