"""The train step on a cluster: what goes to the workers, what comes back, and workers that really train."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components import artifacts
from components.config import DataConfig, EarlyStoppingConfig, TrainConfig, TrainingJobConfig, TransformConfig
from components.errors import ArtifactError, ConfigError, HeadraceError
from components.launch.manifests import KINDS, Kind, TaskSettings
from components.launch.step import train_on_cluster
from components.train import cluster as clusters
from components.train.launch import read_config
from components.train.result import TrainResult
from tests.components.launch.clusters import client, operated
from tests.components.launch.fake_kubernetes import FakeCluster, ended, running
from tests.conftest import StepRun

POD = "taxi-abcde-train-123"
WORKFLOW = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "taxi-abcde", "uid": "8c5f"}
CONFIG = TrainConfig(strategy="multi_worker", num_workers=2, global_batch_size=64, epochs=1)
JOB = TrainingJobConfig(kind="tfjob")


RESULT = TrainResult(
    num_parameters=7,
    epochs=1,
    best_epoch=1,
    validation={"auc": 0.5},
    xla="off",
    num_replicas=2,
    skipped_steps=0,
)


def write_artifact(path: Path, step: str, config: Any, **inputs: Path) -> None:
    """An artifact with one file."""
    with artifacts.writing(path, step=step, inputs=inputs, config=config) as out:
        (out.path / "file.txt").write_text(f"made by {step}")
        out.result = RESULT


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    """A cluster with the pod of the step, as Kubeflow Pipelines makes it."""
    with FakeCluster() as cluster:
        metadata = {
            "name": POD,
            "labels": {"pipeline/runid": "run-1"},
            "ownerReferences": [{**WORKFLOW, "controller": True, "blockOwnerDeletion": True}],
        }
        containers = [
            {"name": "wait", "image": "argoexec"},
            {"name": "main", "image": "ghcr.io/acme/headrace@sha256:ab"},
        ]
        spec = {"containers": containers, "imagePullSecrets": [{"name": "registry"}]}
        cluster.put(f"/api/v1/namespaces/team-a/pods/{POD}", {"metadata": metadata, "spec": spec, "status": {}})
        yield cluster


class Step:
    """The train step with a workspace, and workers that a test makes up."""

    def __init__(self, cluster: FakeCluster, folder: Path) -> None:
        self.cluster, self.folder, self.workspace = cluster, folder, folder / "workspace"
        self.workspace.mkdir()
        self.inputs = {"examples": folder / "examples", "transform": folder / "transform"}
        self.task = TaskSettings.of({"volume_mounts": [{"name": "kfp-workspace", "mountPath": str(self.workspace)}]})

    def run(self, config: TrainConfig = CONFIG, **changes: Any) -> TrainResult:
        """Run it."""
        settings: dict[str, Any] = {
            "model": self.folder / "model",
            "config": config,
            "job": JOB,
            "workspace": self.workspace,
            "task": self.task,
            "environ": {"KFP_POD_NAME": POD},
        }
        with operated(self.cluster, self.train):
            return train_on_cluster(**self.inputs, **settings | changes, api=client(self.cluster.url))

    def train(self, kind: Kind, job: str) -> None:
        """Be two workers and the operator."""
        command = self.job(kind, job)["spec"]["tfReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0][
            "command"
        ]
        config = Path(command[-1])
        for index in range(2):
            self.cluster.put_pod(kind, job, index, **ended(kind, 0))
        inputs = {name: config.parent / name for name in self.inputs}
        write_artifact(config.parent / "model", "train", read_config(config), **inputs)
        self.cluster.set_condition(kind, job, kind.succeeded)

    def job(self, kind: Kind, job: str) -> dict[str, Any]:
        """The job on the cluster."""
        found = self.cluster.get(self.cluster.job_path(kind, job))
        assert found is not None
        return found

    def jobs(self) -> list[str]:
        """Names of those that are there."""
        items = self.cluster.list(self.cluster.job_path(KINDS[JOB.kind]), {})["items"]
        return [job["metadata"]["name"] for job in items]


@pytest.fixture
def step(cluster: FakeCluster, tmp_path: Path) -> Step:
    step = Step(cluster, tmp_path)
    write_artifact(step.inputs["examples"], "ingest", DataConfig(source="csv", path="data.csv", label="tips"))
    write_artifact(step.inputs["transform"], "transform", TransformConfig(), examples=step.inputs["examples"])
    return step


def test_the_model_of_the_chief_comes_back(step: Step) -> None:
    assert step.run() == RESULT
    manifest = artifacts.open_artifact(step.folder / "model", step="train")
    assert manifest.made_from["config"]["num_workers"] == 2
    (folder,) = step.workspace.iterdir()
    assert step.jobs() == [folder.name]
    for name, path in step.inputs.items():
        assert artifacts.read_manifest(folder / name) == artifacts.read_manifest(path)
    assert not [path for path in step.folder.rglob("*") if ".tmp" in path.name]


def test_the_job_is_of_the_run_and_its_image(step: Step) -> None:
    step.run()
    (name,) = step.jobs()
    job = step.job(KINDS[JOB.kind], name)
    template = job["spec"]["tfReplicaSpecs"]["Worker"]["template"]["spec"]
    assert template["containers"][0]["image"] == "ghcr.io/acme/headrace@sha256:ab"
    assert template["imagePullSecrets"] == [{"name": "registry"}]
    assert job["metadata"]["ownerReferences"] == [{**WORKFLOW, "controller": False, "blockOwnerDeletion": False}]


def test_a_step_that_is_tried_again_takes_the_model_of_its_job(step: Step) -> None:
    step.run()
    (step.folder / "model" / artifacts.MANIFEST).unlink()
    assert step.run() == RESULT
    assert step.cluster.count("POST") == 2 and step.cluster.count("DELETE") == 0
    assert artifacts.open_artifact(step.folder / "model", step="train").result == dataclasses.asdict(RESULT)


def test_other_work_and_other_runs_have_jobs_of_their_own(step: Step) -> None:
    step.run()
    step.run(CONFIG.model_copy(update={"epochs": 2}))
    path = f"/api/v1/namespaces/team-a/pods/{POD}"
    pod = step.cluster.get(path)
    step.cluster.put(path, {**pod, "metadata": {**pod["metadata"], "labels": {"pipeline/runid": "run-2"}}})
    step.run()
    assert len(step.jobs()) == 3


def test_a_damaged_model_is_not_handed_back(step: Step) -> None:
    def train(kind: Kind, job: str) -> None:
        folder = step.workspace / job
        write_artifact(folder / "model", "train", CONFIG)
        (folder / "model/file.txt").write_text("damaged")
        step.cluster.set_condition(kind, job, kind.succeeded)

    step.train = train
    with pytest.raises(ArtifactError, match=r"file\.txt"):
        step.run()
    assert not (step.folder / "model").exists()


def test_workers_must_see_the_workspace(step: Step) -> None:
    with pytest.raises(
        HeadraceError, match=r"no volume .* is mounted there, but at no place at all. Set kubeflow.workspace"
    ):
        step.run(task=TaskSettings())
    assert step.cluster.requests == []


def test_the_number_of_workers_must_be_known(step: Step) -> None:
    with pytest.raises(ConfigError, match=r"set train\.num_workers"):
        step.run(TrainConfig(strategy="multi_worker"))


@pytest.mark.parametrize("environ", [{}, {"KFP_POD_NAME": "another"}])
def test_only_a_step_of_a_run_starts_a_job(step: Step, environ: dict[str, str]) -> None:
    with pytest.raises(HeadraceError, match="by a step of a Kubeflow pipeline only"):
        step.run(environ=environ)
    assert step.cluster.count("POST") == 0


class Processes:
    """An operator and a kubelet that run the containers of a TFJob as processes of this machine."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster

    def __call__(self, kind: Kind, job: str) -> None:
        """Run a job to its end."""
        found = self.cluster.get(self.cluster.job_path(kind, job))
        assert found is not None
        replicas = found["spec"]["tfReplicaSpecs"]["Worker"]
        places = clusters.local_clusters(replicas["replicas"])
        workers = [
            threading.Thread(target=self._run, args=(kind, job, replicas["template"], place)) for place in places
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    def _run(self, kind: Kind, job: str, template: dict[str, Any], place: clusters.Cluster) -> None:
        (container,) = template["spec"]["containers"]
        pod = self.cluster.put_pod(kind, job, place.index, **running(kind))
        environment = {**os.environ, "TF_CONFIG": place.tf_config(), "TF_NUM_INTRAOP_THREADS": "1"}
        environment |= {each["name"]: each["value"] for each in container.get("env", [])}
        command = [sys.executable, *container["command"][1:]]
        assert container["command"][0] == "python"
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            said = []
            for line in process.stdout:
                said.append(line.rstrip())
                self.cluster.log(pod, line.rstrip())
        code = process.returncode
        self.cluster.put_pod(kind, job, place.index, **ended(kind, code, message="\n".join(said[-5:])))
        if code or place.index == 0:
            self.cluster.set_condition(kind, job, "Failed" if code else kind.succeeded)


TRAINING = TrainConfig.model_validate(
    {
        "epochs": 1,
        "global_batch_size": 64,
        "optimizer": {"learning_rate": 0.01},
        "seed": 5,
        "model": {"name": "tests.components.test_preemption:build"},
        "xla": "off",
        "strategy": "multi_worker",
        "num_workers": 2,
    }
)


@pytest.mark.slow
def test_workers_of_a_job_train_the_model_of_as_many_local_ones(
    taxi: StepRun, cluster: FakeCluster, tmp_path: Path
) -> None:
    from components.train import train

    step = Step(cluster, tmp_path)
    step.inputs = {"examples": taxi.path("examples"), "transform": taxi.path("transform")}
    step.train = Processes(cluster)
    result = step.run(TRAINING)
    local = train(**step.inputs, model=tmp_path / "local" / "model", config=TRAINING)
    assert result == local
    digests = [artifacts.read_manifest(folder / "model").digest for folder in (tmp_path, tmp_path / "local")]
    assert digests[0] == digests[1]
    # Then a configuration that only the trainer finds wrong.
    with pytest.raises(ConfigError, match="has no 'accuarcy'"):
        step.run(TRAINING.model_copy(update={"early_stopping": EarlyStoppingConfig(metric="accuarcy")}))
