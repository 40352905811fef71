"""What is wrong with the pods of a training job, in words that say how to mend it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from components.errors import ConfigError, HeadraceError
from components.launch.manifests import Kind
from components.train.cluster import RESTART_ME
from components.train.preemption import TERMINATED

Object = Mapping[str, Any]

_KILLED = 128 + 9
# What other workers are seen to end with once one has failed: they tell nothing of their own.
_CONSEQUENCES = (RESTART_ME, TERMINATED)
# The kubelet would try for ever. Errors of registries that are busy or out of reach look otherwise.
_NEVER_MENDS_ITSELF = ("InvalidImageName", "ErrImageNeverPull")
_WRONG_IMAGE = ("not found", "code = NotFound", "manifest unknown", "unauthorized", "denied", "no match for platform")
_HOW_TO_MEND = {
    "image": "Check kubeflow.image and kubeflow.image_pull_secrets.",
    "Unschedulable": "Lower what kubeflow.steps.train asks for, or mend its node_selector and tolerations.",
    "CreateContainerConfigError": "A secret that kubeflow.steps.train names is missing, or the image runs as root.",
    "ContainerCreating": "Often a volume cannot be mounted: workers on several nodes need a claim that is ReadWriteMany.",
}


@dataclass(frozen=True)
class Ending:
    """How a worker's container ended badly.

    Attributes:
        key: Which start of which pod it was.
        worker: Index of the worker.
        pod: Name of the pod.
        at: When, as Kubernetes writes it.
        reason: What happened to it, in words.
        exit_code: Of the container; `None` if it never came to one.
        weight: The smaller, the likelier it is the cause of what happened to others.
        said: The last that the worker wrote.
    """

    key: tuple[str, int]
    worker: int
    pod: str
    at: str
    reason: str
    exit_code: int | None
    weight: int
    said: str


def worker_of(kind: Kind, pod: Object) -> int:
    """Index of the worker that a pod is."""
    metadata = pod["metadata"]
    marks = {**metadata.get("annotations", {}), **metadata.get("labels", {})}
    return int(marks.get(kind.index_label, 0))


def has_started(kind: Kind, pod: Object) -> bool:
    """Whether a pod's container runs, or has run."""
    status = container_status(kind, pod)
    return bool({"running", "terminated"} & {*status.get("state", {})})


def has_ended(kind: Kind, pod: Object) -> bool:
    """Whether a pod's container has run, and runs no more."""
    return "terminated" in container_status(kind, pod).get("state", {})


def container_status(kind: Kind, pod: Object) -> Object:
    """The status of the container that trains; empty before the kubelet knows it."""
    statuses = pod.get("status", {}).get("containerStatuses") or []
    found: Object = next((each for each in statuses if each["name"] == kind.container), {})
    return found


def bad_endings(kind: Kind, pod: Object) -> list[Ending]:
    """How the container of a pod ended badly, now and before it was started again in its place."""
    status, found = container_status(kind, pod), []
    restarts = status.get("restartCount", 0)
    for state, start in ((status.get("lastState", {}), restarts - 1), (status.get("state", {}), restarts)):
        ended = state.get("terminated")
        if ended and ended["exitCode"] != 0:
            found.append(_ending(kind, pod, start, ended))
    if not found and (reason := _pod_reason(pod)):
        found.append(_ending(kind, pod, restarts, {}, reason))
    return found


def _ending(kind: Kind, pod: Object, start: int, ended: Object, reason: str | None = None) -> Ending:
    code = ended.get("exitCode")
    taken_away = reason or _pod_reason(pod)
    if ended.get("reason") == "OOMKilled":
        weight, words = 0, f"ran out of memory (OOMKilled{_memory_limit(kind, pod)})"
    elif taken_away:
        weight, words = 1, f"was taken off its node ({taken_away})"
    elif code in _CONSEQUENCES:
        weight, words = 4, "has lost the others" if code == RESTART_ME else "was told to stop"
    elif code == _KILLED:
        weight, words = 3, "was killed (exit code 137)"
    else:
        weight, words = 2, f"ended with exit code {code}"
    return Ending(
        key=(pod["metadata"]["uid"], start),
        worker=worker_of(kind, pod),
        pod=pod["metadata"]["name"],
        at=ended.get("finishedAt") or "",
        reason=words,
        exit_code=code,
        weight=weight,
        said=(ended.get("message") or "").strip(),
    )


def _pod_reason(pod: Object) -> str | None:
    """Why a pod was ended from outside, if it was."""
    status = pod.get("status", {})
    for condition in status.get("conditions") or []:
        if condition["type"] == "DisruptionTarget" and condition["status"] == "True":
            return f"{condition.get('reason', '')}: {condition.get('message', '')}".strip(": ")
    if status.get("phase") == "Failed" and status.get("reason"):  # such as Evicted, NodeLost
        return f"{status['reason']}: {status.get('message', '')}".strip(": ")
    return None


def _memory_limit(kind: Kind, pod: Object) -> str:
    containers = {each["name"]: each for each in pod.get("spec", {}).get("containers", [])}
    limit = containers.get(kind.container, {}).get("resources", {}).get("limits", {}).get("memory")
    return f", limit {limit}" if limit else ""


@dataclass(frozen=True)
class Blocked:
    """A pod that does not start.

    Attributes:
        message: Why.
        is_final: Whether waiting cannot help.
    """

    message: str
    is_final: bool


def why_blocked(kind: Kind, pod: Object) -> Blocked | None:
    """Why a pod's container has not started, `None` if it has."""
    if has_started(kind, pod) or _pod_reason(pod):
        return None
    who = f"worker {worker_of(kind, pod)} (pod {pod['metadata']['name']})"
    for condition in pod.get("status", {}).get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return Blocked(
                f"{who} fits on no node ({condition.get('message') or condition.get('reason')}). "
                f"{_HOW_TO_MEND['Unschedulable']}",
                False,
            )
    waiting = container_status(kind, pod).get("state", {}).get("waiting", {})
    reason, said = waiting.get("reason") or "ContainerCreating", waiting.get("message") or ""
    about_image = "Image" in reason
    hint = _HOW_TO_MEND.get("image" if about_image else reason, "")
    is_final = reason in _NEVER_MENDS_ITSELF or (about_image and any(text in said for text in _WRONG_IMAGE))
    return Blocked(f"{who} does not start: {reason}{said and f' ({said})'}. {hint}".rstrip(), is_final)


def error_of(what: str, endings: Iterable[Ending], why: str) -> HeadraceError:
    """The error that a failed job stands for.

    Args:
        what: The job, as in `TFJob taxi-train-1a2b`.
        endings: Of its workers, all that were seen.
        why: What the job's own status says.
    """
    cause = min(endings, key=lambda ending: (ending.weight, ending.at), default=None)
    if "DeadlineExceeded" in why or "deadline" in why:
        return HeadraceError(
            f"{what} was ended after kubeflow.training_job.deadline_seconds: {why}. Give it longer; run again to go on "
            "from the last checkpoint."
        )
    if cause is None:
        return HeadraceError(f"{what} failed, and none of its workers says why: {why}.")
    hints = {
        0: " Give kubeflow.steps.train a higher memory_limit, or lower train.global_batch_size.",
        1: " Run again to go on from the last checkpoint, or raise kubeflow.training_job.max_restarts.",
    }
    said = f"\n{cause.said}" if cause.said else " Its log is above, if it is worker 0."
    message = (
        f"{what} failed: worker {cause.worker} (pod {cause.pod}) {cause.reason}.{hints.get(cause.weight, '')}{said}"
    )
    return ConfigError(message) if cause.exit_code == ConfigError.exit_code else HeadraceError(message)
