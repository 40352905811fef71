"""The train step on a cluster: what the workers need goes to a volume that they share, and their model comes back."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components import artifacts
from components.config import TrainConfig, TrainingJobConfig
from components.errors import ConfigError, HeadraceError
from components.launch.api import Api, Object, connect
from components.launch.job import run_job
from components.launch.manifests import RUN, TaskSettings, Work, training_job
from components.train.result import TrainResult

_CONFIG = "train.json"
_STEP_CONTAINER = "main"  # Argo calls it so


def train_on_cluster(
    *,
    examples: Path,
    transform: Path,
    model: Path,
    config: TrainConfig,
    job: TrainingJobConfig,
    workspace: Path,
    task: TaskSettings,
    api: Api | None = None,
    environ: Mapping[str, str] = os.environ,
) -> TrainResult:
    """Train with the workers of a job of its own; the artifact is the one that `train` with as many workers writes.

    The job runs the image of this step's pod, goes when the pipeline's run goes, and has a name that follows from the run
    and the work: a step that is tried again adopts it. Its checkpoints are in the workspace, too.

    Args:
        examples: As for `train`.
        transform: As for `train`.
        model: As for `train`.
        config: As for `train`; `num_workers` says how many.
        job: Kind and limits.
        workspace: A folder on a volume that `task` mounts at the same place in the workers.
        task: What Kubeflow Pipelines passes on to the job.
        api: The cluster; default: that of this pod.
        environ: Where KFP_POD_NAME is.

    Raises:
        ConfigError: the trainer says that its configuration is wrong.
        HeadraceError: see `run_job`; or the workers do not mount the workspace.
    """
    _check_mounted(workspace, task)
    if config.num_workers is None:
        raise ConfigError("kubeflow.training_job needs to know how many workers to start: set train.num_workers.")
    settings = config.model_copy(update={"strategy": "multi_worker"})
    with api or connect() as cluster:
        pod = _StepPod.of(cluster, environ)
        inputs = {"examples": examples, "transform": transform}
        made_from = artifacts.make_fingerprint_parts(step="train", inputs=inputs, config=settings)
        digest = artifacts.digest_of({"run": pod.run, "made_from": made_from})
        name = f"train-{digest[:12]}"
        folder = workspace / name
        _stage(folder, inputs, settings)
        work = Work(
            name=name,
            namespace=cluster.namespace,
            digest=digest,
            run=pod.run,
            image=pod.image,
            command=("python", "-m", "components.train.launch", str(folder / _CONFIG)),
            num_workers=config.num_workers,
            task=task,
            image_pull_secrets=pod.image_pull_secrets,
            owner=pod.owner,
        )
        run_job(cluster, job, training_job(job, work))
    manifest = artifacts.open_artifact(folder / "model", step="train")
    _copy_whole(folder / "model", model)
    return TrainResult(**manifest.result)


@dataclass(frozen=True)
class _StepPod:
    """What the launcher knows from its own pod."""

    run: str
    image: str
    image_pull_secrets: tuple[dict[str, str], ...]
    owner: Mapping[str, Any] | None

    @classmethod
    def of(cls, api: Api, environ: Mapping[str, str]) -> _StepPod:
        name = environ.get("KFP_POD_NAME", "")
        pod = api.get(api.path("pods", name)) if name else None
        run = pod and pod["metadata"].get("labels", {}).get(RUN)
        if pod is None or not run:
            raise HeadraceError(
                f"KFP_POD_NAME is {name!r}, which is no pod of a pipeline's run in namespace {api.namespace}: a training "
                "job is started by a step of a Kubeflow pipeline only."
            )
        spec = pod["spec"]
        (image,) = [each["image"] for each in spec["containers"] if each["name"] == _STEP_CONTAINER]
        return cls(run, image, tuple(spec.get("imagePullSecrets") or ()), _owner_of(pod))


def _owner_of(pod: Object) -> Mapping[str, Any] | None:
    """The workflow that a pod belongs to, as an owner that need not wait for what it owns."""
    owners = [each for each in pod["metadata"].get("ownerReferences", []) if each.get("controller")]
    return {**owners[0], "controller": False, "blockOwnerDeletion": False} if owners else None


def _check_mounted(workspace: Path, task: TaskSettings) -> None:
    mounts = [Path(mount["mountPath"]) for mount in task.volume_mounts]
    if not any(workspace.is_relative_to(mount) for mount in mounts):
        raise HeadraceError(
            f"The workers would not see {workspace}: no volume that Kubeflow passes on is mounted there, but at "
            f"{', '.join(map(str, mounts)) or 'no place at all'}. Set kubeflow.workspace: {{access_modes: [ReadWriteMany]}}."
        )


def _stage(folder: Path, inputs: Mapping[str, Path], config: TrainConfig) -> None:
    """Put what the workers read into their folder; what an earlier try has put there stays."""
    with artifacts.disk_errors_explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, path in inputs.items():
            if not (folder / name / artifacts.MANIFEST).is_file():
                _copy_whole(path, folder / name)
        (folder / _CONFIG).write_text(config.model_dump_json())


def _copy_whole(source: Path, target: Path) -> None:
    with artifacts.replacing_directory(target) as temporary:
        shutil.copytree(source, temporary, dirs_exist_ok=True)
