"""A training job from its creation to its end: created or adopted, watched, its log shown, deleted if it is given up."""

from __future__ import annotations

import collections
import contextlib
import functools
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

from components import progress
from components.config import TrainingJobConfig
from components.errors import HeadraceError
from components.launch import failures
from components.launch.api import Api, ContainerState, KubernetesError
from components.launch.failures import Ending
from components.launch.manifests import KINDS, WORK, Kind
from components.train.preemption import TERMINATED

Object = dict[str, Any]
Show = Callable[[str], None]

_POLL_SECONDS = 1.0
# After the job has ended, for the rest of the log.
_LAST_WORDS_SECONDS = 10.0
# A thread that waits for the API is not waited for.
_THREAD_SECONDS = 1.0


class Cancelled(SystemExit):
    """The step was told to stop."""

    def __init__(self) -> None:
        super().__init__(TERMINATED)

    def __str__(self) -> str:
        return "told to stop"


def run_job(api: Api, config: TrainingJobConfig, manifest: Object, *, show: Show = progress.report) -> None:
    """Create the job, or adopt it if it is there already, and follow it to its end.

    SIGTERM, by which Kubeflow cancels a step, deletes the job. If this process is killed, the job goes on, and the next
    call with the same manifest adopts it.

    Args:
        api: The cluster.
        config: Kind and limits.
        manifest: The job, as made by `training_job`.
        show: Called with each line of the chief's log, and with what becomes of the job.

    Raises:
        ConfigError: the trainer says that its configuration is wrong.
        HeadraceError: the job failed, does not start, or another one bears its name.
        KubernetesError: the API refused or does not answer.
        Cancelled: after SIGTERM.
    """
    kind = KINDS[config.kind]
    job = _Job(api, kind, manifest, show)
    with _sigterm_raises():
        try:
            job.create_or_adopt(config.pending_timeout_seconds)
            _Follower(job, config).until_done()
        except (Cancelled, KeyboardInterrupt):
            show(f"told to stop: {job.what} is deleted")
            job.delete()
            raise


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """In the main thread, SIGTERM raises `Cancelled`, once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def cancel(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Cancelled

    before = signal.signal(signal.SIGTERM, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Job:
    """The job on the cluster."""

    def __init__(self, api: Api, kind: Kind, manifest: Object, show: Show) -> None:
        self.api, self.kind, self.manifest, self.show = api, kind, manifest, show
        self.name = manifest["metadata"]["name"]
        self.what = f"{kind.name} {self.name}"
        self.collection = api.path(kind.plural, group=kind.group, version=kind.version)
        self._path = api.path(kind.plural, self.name, group=kind.group, version=kind.version)

    def create_or_adopt(self, patience_s: float) -> None:
        """See to it that the job is there.

        Raises:
            HeadraceError: one of its name is, and is not ours.
        """
        while True:
            if self.api.create(self.collection, self.manifest) is not None:
                self.show(f"created {self.what}")
                return
            found = self.api.get(self._path)
            if found is None:  # it has just gone, or a quota was being counted
                time.sleep(_POLL_SECONDS)
                continue
            if not self._is_ours(found):
                raise HeadraceError(
                    f"There is a {self.what} in namespace {self.api.namespace} that this step has not made. See what it is: "
                    f"kubectl get {self.kind.plural} {self.name} -o yaml. If nobody needs it, delete it and run again."
                )
            if "deletionTimestamp" not in found["metadata"] and outcome(self.kind, found) != "failed":
                self.show(f"going on with {self.what}, which an earlier try of this step has created")
                return
            self.show(
                f"{self.what} of an earlier try has failed: deleting it; training goes on from its last checkpoint"
            )
            self._delete_and_wait(found["metadata"]["uid"], patience_s)

    def delete(self) -> None:
        """Delete the job, if it is there and ours."""
        found = self.api.get(self._path)
        if found is not None and self._is_ours(found):
            self.api.delete(self._path, found["metadata"]["uid"])

    def _is_ours(self, found: Object) -> bool:
        return found["metadata"].get("annotations", {}).get(WORK) == self.manifest["metadata"]["annotations"][WORK]

    def _delete_and_wait(self, uid: str, patience_s: float) -> None:
        self.api.delete(self._path, uid)
        deadline = time.monotonic() + patience_s
        while (found := self.api.get(self._path)) is not None and found["metadata"]["uid"] == uid:
            if time.monotonic() > deadline:
                raise HeadraceError(
                    f"{self.what} of an earlier try is still there, {patience_s:g} s after it was deleted. What keeps it: "
                    f"kubectl get {self.kind.plural} {self.name} -o jsonpath='{{.metadata.finalizers}}'."
                )
            time.sleep(_POLL_SECONDS)


def outcome(kind: Kind, job: Mapping[str, Any]) -> str | None:
    """`succeeded`, `failed`, or `None` for a job that goes on."""
    conditions = _conditions(job)
    if kind.succeeded in conditions:
        return "succeeded"
    return "failed" if "Failed" in conditions else None


def _conditions(job: Mapping[str, Any]) -> dict[str, str]:
    """Those that hold, each with what is said of it."""
    found = job.get("status", {}).get("conditions") or []
    return {
        each["type"]: f"{each.get('reason', '')}: {each.get('message', '')}".strip(": ")
        for each in found
        if each["status"] == "True"
    }


class _Follower:
    """Follows a job: threads read what the API streams, the caller's makes sense of it."""

    def __init__(self, job: _Job, config: TrainingJobConfig) -> None:
        self._job, self._config, self._kind = job, config, job.kind
        self._num_workers = _num_workers(job.manifest)
        self._news: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._jobs: dict[str, Object] | None = None
        self._pods: dict[str, Object] | None = None
        self._endings: dict[tuple[str, int], Ending] = {}
        self._logs: dict[tuple[str, int], threading.Thread] = {}
        self._threads: list[threading.Thread] = []
        self._pending_since: float | None = None

    def until_done(self) -> None:
        """Return when the job has succeeded.

        Raises:
            HeadraceError: it has not.
        """
        api, pods = self._job.api, self._job.api.path("pods")
        of_job = {"labelSelector": f"{self._kind.job_label}={self._job.name}"}
        try:
            self._start(
                self._watch, self._job.collection, self._set_jobs, fieldSelector=f"metadata.name={self._job.name}"
            )
            self._start(self._watch, pods, self._set_pods, **of_job)
            while (result := self._outcome()) is None:
                if reason := self._why_hopeless():
                    raise self._given_up(reason)
                self._hear(self._seconds_left())
            why_failed = _conditions((self._jobs or {})[self._job.name]).get("Failed", "")
            # The watch of the pods may be behind.
            self._set_pods(api.list(pods, **of_job)[0])
            self._hear_last_words()
            if result == "failed":
                raise failures.error_of(self._job.what, self._endings.values(), why_failed)
        finally:
            api.end_streams()
            for thread in self._threads:
                thread.join(_THREAD_SECONDS)

    def _hear(self, seconds: float | None) -> None:
        """Take in the next news, if there are any within these seconds."""
        with contextlib.suppress(queue.Empty):
            self._news.get(timeout=seconds)()

    def _outcome(self) -> str | None:
        """What has become of the job, `None` while it goes on.

        Raises:
            HeadraceError: it was deleted.
        """
        if self._jobs is None:
            return None
        if self._job.name not in self._jobs:
            raise HeadraceError(
                f"{self._job.what} was deleted while it ran, by somebody else. Run again: training goes on from the last "
                "checkpoint."
            )
        return outcome(self._kind, self._jobs[self._job.name])

    def _why_hopeless(self) -> str | None:
        """Why the job, left alone, would not come to an end."""
        restarts = collections.Counter(ending.worker for ending in self._endings.values())
        if restarts and max(restarts.values()) > self._config.max_restarts:
            error = failures.error_of(self._job.what, self._endings.values(), "")
            return (
                f"{error}\nIt was started again {self._config.max_restarts} times (kubeflow.training_job.max_restarts)."
            )
        if self._jobs is None or self._pods is None or _is_suspended(self._jobs[self._job.name]):
            self._pending_since = None
            return None
        if sum(failures.has_started(self._kind, pod) for pod in self._pods.values()) >= self._num_workers:
            self._pending_since = None
            return None
        if self._pending_since is None:
            self._pending_since = time.monotonic()
        blocked = [why for pod in self._pods.values() if (why := failures.why_blocked(self._kind, pod))]
        final = [why for why in blocked if why.is_final]
        if not final and self._seconds_left():
            return None
        reasons = "; ".join(why.message for why in final or blocked)
        return f"{self._job.what} does not start: {reasons or self._no_pods()}"

    def _given_up(self, reason: str) -> HeadraceError:
        """The error, after the job was deleted."""
        try:
            self._job.delete()
        except KubernetesError as error:
            return HeadraceError(f"{reason}\nIt is still there, since it could not be deleted: {error}")
        return HeadraceError(f"{reason}\nIt was deleted. Run again to go on from the last checkpoint, if there is one.")

    def _no_pods(self) -> str:
        return (
            f"{len(self._pods or {})} of {self._num_workers} pods are there. See why: kubectl describe {self._kind.plural} "
            f"{self._job.name}, and kubectl get events; often a quota of the namespace is used up, or the operator is down."
        )

    def _seconds_left(self) -> float | None:
        """For the workers to start; `None` if they have."""
        if self._pending_since is None:
            return None
        return max(0.0, self._pending_since + self._config.pending_timeout_seconds - time.monotonic())

    def _hear_last_words(self) -> None:
        """Take in the rest of the chief's log."""
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        while (left := deadline - time.monotonic()) > 0 and any(log.is_alive() for log in self._logs.values()):
            self._hear(left)
        while not self._news.empty():
            self._hear(0)

    def _set_jobs(self, jobs: dict[str, Object]) -> None:
        self._jobs = jobs

    def _set_pods(self, pods: dict[str, Object]) -> None:
        self._pods = pods
        for pod in pods.values():
            for ending in failures.bad_endings(self._kind, pod):
                if ending.key not in self._endings:
                    self._endings[ending.key] = ending
                    self._job.show(f"worker {ending.worker} (pod {ending.pod}) {ending.reason}")
            if failures.worker_of(self._kind, pod) == 0 and failures.has_started(self._kind, pod):
                self._follow_log(pod)

    def _follow_log(self, pod: Object) -> None:
        key = self._start_of(pod)
        if key in self._logs:
            return

        def state() -> ContainerState:
            now = (self._pods or {}).get(pod["metadata"]["name"])
            if now is None or self._start_of(now) != key:
                return "replaced"
            return "ended" if failures.has_ended(self._kind, now) else "running"

        def read() -> None:
            for line in self._job.api.log(pod["metadata"]["name"], self._kind.container, state):
                self._news.put(functools.partial(self._job.show, line))

        self._logs[key] = self._start(read)

    def _start_of(self, pod: Object) -> tuple[str, int]:
        """Which start of which pod this is."""
        restarts = failures.container_status(self._kind, pod).get("restartCount", 0)
        return pod["metadata"]["uid"], restarts

    def _watch(self, path: str, tell: Callable[[dict[str, Object]], None], **selectors: str) -> None:
        for found in self._job.api.snapshots(path, **selectors):
            self._news.put(functools.partial(tell, found))

    def _start(self, work: Callable[..., None], *arguments: Any, **options: Any) -> threading.Thread:
        def run() -> None:
            try:
                work(*arguments, **options)
            except BaseException as error:
                self._news.put(functools.partial(_throw, error))
            else:
                self._news.put(lambda: None)  # the caller may wait for this thread's end

        thread = threading.Thread(target=run, daemon=True, name=f"launch-{work.__name__}")
        thread.start()
        self._threads.append(thread)
        return thread


def _throw(error: BaseException) -> None:
    raise error


def _is_suspended(job: Object) -> bool:
    """Whether it waits in a queue, such as Kueue's."""
    spec = job["spec"]
    return bool(spec.get("suspend") or spec.get("runPolicy", {}).get("suspend"))


def _num_workers(manifest: Object) -> int:
    spec = manifest["spec"]
    if manifest["kind"] == "TFJob":
        return int(spec["tfReplicaSpecs"]["Worker"]["replicas"])
    return int(spec["trainer"]["numNodes"])
