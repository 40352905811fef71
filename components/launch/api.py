"""The Kubernetes API as the launcher needs it: patient with what passes, clear about what does not.

Addresses, certificates and tokens are the `kubernetes` client's business. Its models are not used, since pods and custom
resources are read alike, as JSON; nor is its `Watch`, which gives up at the first cut and loses the version of bookmarks.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import urllib3

from components.errors import HeadraceError

if TYPE_CHECKING:
    from kubernetes.client import Configuration

Object = dict[str, Any]
ContainerState = Literal["running", "ended", "replaced"]

_CONNECT_SECONDS = 10
_ANSWER_SECONDS = 60
# The server ends a watch after the first, and what is silent for longer is a dead connection. Logs may be silent.
_WATCH_SECONDS = 240
_WATCH_SILENCE_SECONDS = 270
_LOG_SILENCE_SECONDS = 900
_GONE = 410
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class KubernetesError(HeadraceError):
    """The Kubernetes API refused, or does not answer.

    Attributes:
        status: HTTP status; 0 without an answer.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


def patience() -> urllib3.Retry:
    """Five minutes for a network cut, a control plane that is being upgraded, or one that is busy and says when to come."""
    return urllib3.Retry(
        total=15,
        backoff_factor=0.5,
        backoff_jitter=1.0,
        backoff_max=30,
        status_forcelist=(429, 500, 502, 503, 504),
        allowed_methods=None,  # All are safe to repeat: the name of a job is fixed.
        raise_on_status=False,
    )


def connect(account: Path = _ACCOUNT) -> Api:
    """The API of the cluster that this process is a pod of.

    Args:
        account: Folder with the pod's token, namespace, and the certificate of the cluster.

    Raises:
        KubernetesError: it is none.
    """
    import kubernetes
    from kubernetes.config.incluster_config import InClusterConfigLoader

    configuration = kubernetes.client.Configuration()
    loader = InClusterConfigLoader(token_filename=str(account / "token"), cert_filename=str(account / "ca.crt"))
    try:
        loader.load_and_set(configuration)
        namespace = (account / "namespace").read_text().strip()
    except (kubernetes.config.ConfigException, OSError) as error:
        raise KubernetesError(
            f"This process is no pod with a service account ({str(error).rstrip('.')}), and a training job is started by a "
            "step on Kubeflow. Here, leave out kubeflow.training_job: train.num_workers processes start on this machine."
        ) from error
    return Api(configuration, namespace)


class Api:
    """A namespace of a cluster.

    Every call repeats what may pass by itself (429, 5xx, no connection), as `retry` says. As a context it ends its
    streams, which other threads may be reading, and closes its connections.

    Args:
        configuration: Address and credentials.
        namespace: Of all objects.
        retry: How patiently.
        pause_s: Up to how long to wait before a stream is opened again.
    """

    def __init__(
        self, configuration: Configuration, namespace: str, *, retry: urllib3.Retry | None = None, pause_s: float = 1.0
    ) -> None:
        import kubernetes

        configuration.retries = retry or patience()
        self.namespace = namespace
        self._client = kubernetes.client.ApiClient(configuration)
        self._pause_s = pause_s
        self._closed = threading.Event()
        self._streams: set[_Stream] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> Api:
        return self

    def __exit__(self, *_: Any) -> None:
        self.end_streams()
        self._client.rest_client.pool_manager.clear()

    def end_streams(self) -> None:
        """End what other threads are reading."""
        with self._lock:
            self._closed.set()
            for stream in self._streams:
                stream.end()

    def path(self, plural: str, name: str = "", *, group: str = "", version: str = "v1") -> str:
        """The URL path of a kind of object, or of one of them."""
        root = f"/apis/{group}/{version}" if group else f"/api/{version}"
        return "/".join([root, "namespaces", self.namespace, plural, *([name] if name else [])])

    def get(self, path: str) -> Object | None:
        """An object; `None` if there is none."""
        try:
            found: Object = self._call("GET", path)
        except KubernetesError as error:
            if error.status != 404:
                raise
            return None
        return found

    def list(self, path: str, **selectors: str) -> tuple[dict[str, Object], str]:
        """The objects by name, and the version of the list."""
        found = self._call("GET", path, query=selectors)
        return {_name(each): each for each in found["items"]}, found["metadata"]["resourceVersion"]

    def create(self, path: str, manifest: Object) -> Object | None:
        """Create an object; `None` if there is one of that name."""
        try:
            created: Object = self._call("POST", path, body=manifest)
        except KubernetesError as error:
            if error.status != 409:
                raise
            return None
        return created

    def delete(self, path: str, uid: str) -> None:
        """Delete this very object and what belongs to it; it stays until that is gone."""
        options = {"propagationPolicy": "Foreground", "preconditions": {"uid": uid}}
        try:
            self._call("DELETE", path, body={"kind": "DeleteOptions", "apiVersion": "v1", **options})
        except KubernetesError as error:
            if error.status not in (404, 409):  # Gone, or another one has its name.
                raise

    def snapshots(self, path: str, **selectors: str) -> Iterator[dict[str, Object]]:
        """The objects by name: as they are, and each time that one has changed; until `end_streams`.

        They are listed once, then watched from the version of the list; if that is too old (410), listed again.
        Kubernetes API concepts, "Efficient detection of changes".
        """
        objects: dict[str, Object] = {}
        version = ""
        while not self._closed.is_set():
            if not version:
                objects, version = self.list(path, **selectors)
                yield dict(objects)
            for kind, changed in self._events(path, selectors, version):
                if kind == "ERROR":
                    version = ""
                    break
                version = changed["metadata"]["resourceVersion"]
                if kind == "DELETED":
                    objects.pop(_name(changed), None)
                elif kind != "BOOKMARK":
                    objects[_name(changed)] = changed
                if kind != "BOOKMARK":
                    yield dict(objects)
            self._pause()

    def log(self, pod: str, container: str, state: Callable[[], ContainerState]) -> Iterator[str]:
        """The lines of a container's log, each once, to the end of it; after a cut they go on where they were.

        Args:
            pod: Name of the pod.
            container: Name of the container, which has started.
            state: What is known of it; `replaced` once another one bears its name, and so has its log.
        """
        path, last = self.path("pods", f"{pod}/log"), ""
        while not self._closed.is_set() and (known := state()) != "replaced":
            since = {"sinceTime": last} if last else {}
            query = {"container": container, "follow": "true", "timestamps": "true", **since}
            # Seconds are the finest that sinceTime knows, so lines come again.
            before, is_whole = _as_key(last), False
            try:
                stream = self._stream(path, query, _LOG_SILENCE_SECONDS)
                for line in stream:
                    stamp, _, text = line.partition(" ")
                    if _as_key(stamp) > before:
                        last = stamp
                        yield text
                is_whole = stream.is_whole
            except KubernetesError as error:
                if error.status == 404:  # the pod is gone, and its log with it
                    return
                if error.status != 400:  # of a container that is about to start again
                    raise
            if known == "ended" and is_whole:
                return
            self._pause()

    def _events(self, path: str, selectors: dict[str, str], version: str) -> Iterator[tuple[str, Object]]:
        query = {
            **selectors,
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH_SECONDS),
        }
        try:
            for line in self._stream(path, query, _WATCH_SILENCE_SECONDS):
                event = json.loads(line)
                yield event["type"], event["object"]
        except KubernetesError as error:
            if error.status != _GONE:
                raise
            yield "ERROR", {}

    def _stream(self, path: str, query: dict[str, str], silence_s: float) -> _Stream:
        stream = _Stream(self._call("GET", path, query=query, silence_s=silence_s), self._ended)
        with self._lock:
            self._streams.add(stream)
            if self._closed.is_set():
                stream.end()
        return stream

    def _ended(self, stream: _Stream) -> None:
        with self._lock:
            self._streams.discard(stream)

    def _pause(self) -> None:
        self._closed.wait(random.uniform(0, self._pause_s))

    def _call(
        self, method: str, path: str, *, query: dict[str, str] | None = None, body: Any = None, silence_s: float = 0
    ) -> Any:
        """Ask, and answer with an object; or with the response itself, if it may be silent for `silence_s`."""
        import kubernetes

        host = self._client.configuration.host
        try:
            return self._client.call_api(
                path,
                method,
                query_params=list((query or {}).items()),
                header_params={"Accept": "application/json, */*"},
                body=body,
                response_type="object",
                auth_settings=["BearerToken"],
                _return_http_data_only=True,
                _preload_content=not silence_s,
                _request_timeout=(_CONNECT_SECONDS, silence_s or _ANSWER_SECONDS),
            )
        except kubernetes.client.ApiException as error:
            raise _refusal(error, method, path) from error
        except urllib3.exceptions.HTTPError as error:
            cause = getattr(error, "reason", None) or error
            raise KubernetesError(
                f"The Kubernetes API at {host} has not answered, however often it was asked: {cause}. The training job, "
                "if it was created, goes on: once the network is back, the step's next try adopts it."
            ) from error


class _Stream:
    """The whole lines of an answer that goes on, read by one thread and ended by any.

    Attributes:
        is_whole: Whether it has ended, and was not cut.
    """

    def __init__(self, response: urllib3.BaseHTTPResponse, ended: Callable[[_Stream], None]) -> None:
        self.is_whole = False
        self._response, self._ended = response, ended

    def __iter__(self) -> Iterator[str]:
        try:
            begun = b""
            for part in self._response.stream():
                *lines, begun = (begun + part).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines)
            self.is_whole = not begun
        except urllib3.exceptions.HTTPError:
            pass
        finally:
            self._ended(self)
            self._response.close()

    def end(self) -> None:
        """Let the reader find the end."""
        with contextlib.suppress(RuntimeError, ValueError):  # there already
            self._response.shutdown()


def _refusal(error: Any, method: str, path: str) -> KubernetesError:
    body = error.body.decode(errors="replace") if isinstance(error.body, bytes) else error.body
    try:
        said = str(json.loads(body)["message"]).rstrip(".")
    except (ValueError, KeyError, TypeError):
        said = str(body or error.reason).strip().rstrip(".")
    answer = f"The Kubernetes API answers {method} {path} with {error.status}: {said}."
    return KubernetesError(f"{answer} {_how_to_mend(error.status, method, said)}".rstrip(), error.status)


def _how_to_mend(status: int, method: str, said: str) -> str:
    if status == 401:
        return "It does not know this step's service account: see whether the account and its token are still valid."
    if forbidden := re.search(r'User "([^"]*)" cannot (\w+) resource "([^"]*)"', said):
        user, verb, resource = forbidden.groups()
        return (
            f"Give {user} the verb '{verb}' on {resource}: kubectl apply the rbac.yaml that "
            "`headrace manifests --target training` writes."
        )
    if status == 404 and method == "POST":
        return (
            "This cluster has no such kind of job. Install Training Operator for kubeflow.training_job: tfjob, or Kubeflow "
            "Trainer for trainjob, or choose the other."
        )
    if "must be created before the TrainJob" in said:
        return "kubectl apply the runtime.yaml that `headrace manifests --target training` writes."
    if status in (429, 500, 502, 503, 504):
        return "It was asked for minutes; see how the control plane does, then run the step again."
    return ""


def _as_key(stamp: str) -> str:
    """A time of RFC 3339 in a form that sorts: its fraction comes without trailing zeros."""
    fraction = re.match(r"\.(\d+)", stamp[19:])
    return f"{stamp[:19]}.{fraction[1] if fraction else '':0<9}"


def _name(found: Object) -> str:
    return str(found["metadata"]["name"])
