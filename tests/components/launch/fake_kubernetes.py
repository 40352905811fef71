"""A Kubernetes API server in the test's process: real HTTP, and of the real one's behaviour what a launcher meets.

Objects have versions and uids; lists are watched from a version on, by chunked streams with bookmarks; versions that are
too old are 410; a name that is taken is 409; a deletion takes the pods with it. Source: the documentation of Kubernetes,
"API concepts" and "API conventions".
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from components.launch.manifests import KINDS, Kind

Object = dict[str, Any]
NAMESPACE = "team-a"
USER = "system:serviceaccount:team-a:pipeline-runner"
TOKEN = "secret-token"
_PATIENCE_S = 60.0


@dataclass
class Fault:
    """What befalls the next requests of a kind.

    Attributes:
        method: HTTP method; empty: any.
        part: Part of the path and query.
        status: Answered; 0 for a connection that is cut without an answer.
        times: How many requests.
        headers: Of the answer.
        is_done: Whether the request has its effect before it is answered so.
    """

    method: str
    part: str
    status: int = 0
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)
    is_done: bool = False


class FakeCluster:
    """The state of a namespace, and the server in front of it.

    Args:
        tls: To answer by TLS.

    Attributes:
        requests: `METHOD path?query` of each request, in order.
        faults: What befalls requests to come.
        forbidden: `(verb, resource)` that the service account may not.
        unknown: Plurals of kinds that are not installed.
        bodies: Bodies of the DELETE requests.
        shown: What the launcher has shown; give it `show`.
        on_create: Called in a thread of its own with each job that was created: what the operator does.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.requests: list[str] = []
        self.faults: list[Fault] = []
        self.forbidden: set[tuple[str, str]] = set()
        self.unknown: set[str] = set()
        self.bodies: list[Object] = []
        self.shown: list[str] = []
        self.on_create: Callable[[Kind, Object], None] = lambda kind, job: None
        self.changed = threading.Condition(threading.RLock())
        self._versions, self._uids = itertools.count(100), itertools.count(1)
        self._objects: dict[str, Object] = {}
        self._history: list[tuple[int, str, str, Object]] = []
        self._oldest = 0
        self._logs: dict[str, list[str]] = {}
        self._streams: set[socket.socket] = set()
        self._server = _Server(self, tls)

    def __enter__(self) -> FakeCluster:
        self._server.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.stop()

    @property
    def url(self) -> str:
        """Where the server answers."""
        return self._server.url

    def show(self, line: str) -> None:
        """Note what the launcher shows, for those who wait for it."""
        with self.changed:
            self.shown.append(line)
            self.changed.notify_all()

    # What a test, or an operator, does to the cluster.

    def put(self, path: str, found: Object) -> Object:
        """Create or change an object at `<collection>/<name>`."""
        with self.changed:
            before = self._objects.get(path)
            metadata = found.setdefault("metadata", {})
            metadata.setdefault("uid", before["metadata"]["uid"] if before else f"uid-{next(self._uids)}")
            metadata.setdefault("namespace", NAMESPACE)
            self._record("MODIFIED" if before else "ADDED", path, found)
            self._objects[path] = found
            return found

    def get(self, path: str) -> Object | None:
        """An object."""
        with self.changed:
            return self._objects.get(path)

    def remove(self, path: str) -> None:
        """Delete an object at once; with a job go its pods, with a pod its log."""
        with self.changed:
            found = self._objects.pop(path)
            self._logs.pop(found["metadata"]["name"], None)
            self._record("DELETED", path, found)
            label = next((kind.job_label for kind in KINDS.values() if f"/{kind.plural}/" in path), None)
            for pod_path, pod in list(self._objects.items()):
                if label and pod["metadata"].get("labels", {}).get(label) == found["metadata"]["name"]:
                    self.remove(pod_path)

    def log(self, pod: str, *lines: str) -> None:
        """Let a pod write."""
        with self.changed:
            self._logs.setdefault(pod, []).extend(lines)
            self.changed.notify_all()

    def expire(self) -> None:
        """Forget the changes so far: whoever watches from before now is told 410."""
        with self.changed:
            self._oldest = next(self._versions)
            self._history.clear()
            self.changed.notify_all()

    def cut(self) -> None:
        """Cut every stream that is open."""
        with self.changed:
            for stream in self._streams:
                with contextlib.suppress(OSError):
                    stream.shutdown(socket.SHUT_RDWR)
            self._streams.clear()
            self.changed.notify_all()

    def wait(self, until: Callable[[], Any]) -> Any:
        """Wait for something to become true of this cluster, and return it."""
        with self.changed:
            found: list[Any] = []
            if not self.changed.wait_for(lambda: found.append(until()) or found[-1], _PATIENCE_S):
                raise TimeoutError(f"it never came to it; requests: {self.requests}")
            return found[-1]

    def wait_for_requests(self, part: str, count: int = 1) -> None:
        """Wait until as many requests with that text in them have come."""
        self.wait(lambda: sum(part in request for request in self.requests) >= count)

    def count(self, part: str) -> int:
        """How many requests with that text in them have come."""
        with self.changed:
            return sum(part in request for request in self.requests)

    # Jobs and pods, as operators and kubelets write them.

    def job_path(self, kind: Kind, name: str = "") -> str:
        """Where jobs of a kind are, or one of them."""
        collection = f"/apis/{kind.group}/{kind.version}/namespaces/{NAMESPACE}/{kind.plural}"
        return f"{collection}/{name}" if name else collection

    def put_pod(
        self, kind: Kind, job: str, index: int, *, name: str | None = None, uid: str = "", **status: Any
    ) -> str:
        """Create or change a worker's pod; returns its name."""
        name = name or (f"{job}-worker-{index}" if kind.name == "TFJob" else f"{job}-node-0-{index}-x7k2p")
        metadata = {"name": name, "labels": {kind.job_label: job, kind.index_label: str(index)}}
        if uid:
            metadata["uid"] = uid
        containers = [{"name": kind.container, "resources": {"limits": {"memory": "2Gi"}}}]
        self.put(
            f"/api/v1/namespaces/{NAMESPACE}/pods/{name}",
            {"metadata": metadata, "spec": {"containers": containers}, "status": status},
        )
        return name

    def set_condition(self, kind: Kind, job: str, name: str, reason: str = "", message: str = "") -> None:
        """Let an operator say something of a job, and that nothing else holds any more."""
        with self.changed:
            found = json.loads(json.dumps(self._objects[self.job_path(kind, job)]))
            condition = {"type": name, "status": "True", "reason": reason, "message": message}
            found["status"] = {"conditions": [condition]}
            self.put(self.job_path(kind, job), found)

    # What the server asks.

    def _record(self, event: str, path: str, found: Object) -> None:
        version = next(self._versions)
        found["metadata"]["resourceVersion"] = str(version)
        self._history.append((version, event, path, json.loads(json.dumps(found))))
        self.changed.notify_all()

    def fault(self, method: str, target: str) -> Fault | None:
        """What befalls a request."""
        with self.changed:
            for each in self.faults:
                if each.times and each.method in ("", method) and each.part in target:
                    each.times -= 1
                    return each
        return None

    def list(self, collection: str, query: dict[str, str]) -> Object:
        """The objects of a collection that selectors select."""
        with self.changed:
            items = [
                each for path, each in self._objects.items() if _is_in(path, collection) and _selected(each, query)
            ]
            version = str(next(self._versions))
            return {"kind": "List", "metadata": {"resourceVersion": version}, "items": items}

    def events(self, collection: str, query: dict[str, str], is_cut: Callable[[], bool]) -> Iterator[Object]:
        """What changes in a collection after a version, for ever or until it is cut."""
        seen = int(query["resourceVersion"])
        while not is_cut():
            with self.changed:
                if seen < self._oldest:
                    status = _status(410, "Expired", f"too old resource version: {seen} ({self._oldest})")
                    yield {"type": "ERROR", "object": status}
                    return
                fresh = [each for each in self._history if each[0] > seen]
                if not fresh:
                    self.changed.wait(0.5)
                    continue
            for version, event, path, found in fresh:
                seen = version
                if _is_in(path, collection) and _selected(found, query):
                    yield {"type": event, "object": found}
                else:
                    yield {"type": "BOOKMARK", "object": {"kind": "Pod", "metadata": {"resourceVersion": str(version)}}}

    def log_lines(self, pod: str, is_cut: Callable[[], bool]) -> Iterator[tuple[int, str]]:
        """What a pod writes, to the end of its container."""
        given = 0
        while not is_cut():
            with self.changed:
                fresh = self._logs.get(pod, [])[given:]
                found = self._objects.get(f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}")
                statuses = found["status"].get("containerStatuses", []) if found else []
                if not fresh:
                    if not found or any("terminated" in each["state"] for each in statuses):
                        return
                    self.changed.wait(0.5)
                    continue
            for line in fresh:
                given += 1
                yield given, line


def running(kind: Kind, restarts: int = 0) -> Object:
    """The status of a pod whose container runs."""
    return _container(kind, {"running": {"startedAt": "2026-12-01T00:00:00Z"}}, "Running", restarts)


def ended(kind: Kind, code: int, reason: str = "Error", message: str = "", at: str = "2026-12-01T00:01:00Z") -> Object:
    """The status of a pod whose container has ended."""
    state = {"exitCode": code, "reason": reason if code else "Completed", "message": message, "finishedAt": at}
    return _container(kind, {"terminated": state}, "Failed" if code else "Succeeded")


def waiting(kind: Kind, reason: str, message: str = "") -> Object:
    """The status of a pod whose container does not start."""
    return _container(kind, {"waiting": {"reason": reason, "message": message}}, "Pending")


def unschedulable(message: str) -> Object:
    """The status of a pod that fits on no node."""
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"phase": "Pending", "conditions": [condition]}


def _container(kind: Kind, state: Object, phase: str, restarts: int = 0) -> Object:
    container = {"name": kind.container, "state": state, "lastState": {}, "restartCount": restarts}
    return {"phase": phase, "containerStatuses": [container]}


def _is_in(path: str, collection: str) -> bool:
    return path.rpartition("/")[0] == collection


def _selected(found: Object, query: dict[str, str]) -> bool:
    labels = found["metadata"].get("labels", {})
    for term in filter(None, query.get("labelSelector", "").split(",")):
        name, _, value = term.partition("=")
        if labels.get(name) != value:
            return False
    name = query.get("fieldSelector", "").removeprefix("metadata.name=")
    return not name or found["metadata"]["name"] == name


def _status(code: int, reason: str, message: str) -> Object:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": message,
    }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    cluster: FakeCluster

    def log_message(self, *_: Any) -> None:
        """Silence."""

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # who asked has gone
            super().handle()

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_DELETE(self) -> None:
        self._answer("DELETE")

    def _answer(self, method: str) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null")
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        with self.cluster.changed:
            self.cluster.requests.append(f"{method} {self.path}")
            self.cluster.changed.notify_all()
        fault = self.cluster.fault(method, self.path)
        if fault and fault.is_done:
            self._handle(method, url.path, query, body, is_silent=True)
        if fault and not fault.status:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        elif fault:
            reason = {410: "Expired", 429: "TooManyRequests"}.get(fault.status, "InternalError")
            self._send(fault.status, _status(fault.status, reason, f"a fault: {reason}"), fault.headers)
        else:
            self._handle(method, url.path, query, body)

    def _handle(self, method: str, path: str, query: dict[str, str], body: Any, is_silent: bool = False) -> None:
        cluster = self.cluster
        resource = path.split("/namespaces/")[1].split("/")[1:]
        plural, name = resource[0], resource[1] if len(resource) > 1 else ""
        is_log = len(resource) > 2 and resource[2] == "log"
        verb = {"POST": "create", "DELETE": "delete"}.get(method) or (
            "get" if name else "watch" if "watch" in query else "list"
        )
        shown = f"{plural}/log" if is_log else plural
        send = (lambda *_: None) if is_silent else self._send
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or token != TOKEN:
            send(401, _status(401, "Unauthorized", "Unauthorized"))
        elif (verb, shown) in cluster.forbidden:
            group = path.split("/")[2] if path.startswith("/apis") else ""
            text = (
                f'{shown} is forbidden: User "{USER}" cannot {verb} resource "{shown}" in API group "{group}" in the '
                f'namespace "{NAMESPACE}"'
            )
            send(403, _status(403, "Forbidden", text))
        elif plural in cluster.unknown:
            send(404, None)
        elif is_log:
            self._stream_log(name, query)
        elif verb == "watch":
            stream = cluster.events(path, query, self._is_cut)
            self._stream(json.dumps(event) for event in stream)
        elif verb == "list":
            send(200, cluster.list(path, query))
        elif verb == "create":
            self._create(path, body, send)
        elif (found := cluster.get(path)) is None:
            send(404, _status(404, "NotFound", f'{plural} "{name}" not found'))
        elif verb == "get":
            send(200, found)
        else:
            self._delete(path, found, body, send)

    def _create(self, path: str, body: Object, send: Callable[..., None]) -> None:
        name = body["metadata"]["name"]
        with self.cluster.changed:
            if self.cluster.get(f"{path}/{name}") is not None:
                send(409, _status(409, "AlreadyExists", f'"{name}" already exists'))
                return
            created = self.cluster.put(f"{path}/{name}", body)
        kind = next(kind for kind in KINDS.values() if kind.plural == path.rpartition("/")[2])
        threading.Thread(target=self.cluster.on_create, args=(kind, created), daemon=True).start()
        send(201, created)

    def _delete(self, path: str, found: Object, body: Object, send: Callable[..., None]) -> None:
        self.cluster.bodies.append(body)
        wanted = body.get("preconditions", {}).get("uid")
        if wanted not in (None, found["metadata"]["uid"]):
            send(409, _status(409, "Conflict", "the UID in the precondition does not match"))
            return
        self.cluster.remove(path)
        send(200, {"kind": "Status", "status": "Success"})

    def _stream_log(self, pod: str, query: dict[str, str]) -> None:
        if self.cluster.get(f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}") is None:
            self._send(404, _status(404, "NotFound", f'pods "{pod}" not found'))
            return
        since = query.get("sinceTime", "")[:19]

        def stamped() -> Iterator[str]:
            for number, line in self.cluster.log_lines(pod, self._is_cut):
                # Ten lines a second, and no trailing zeros, as containerd writes them.
                seconds, tenths = divmod(number, 10)
                stamp = f"2026-12-01T00:{seconds // 60:02}:{seconds % 60:02}" + (f".{tenths}Z" if tenths else "Z")
                if stamp[:19] >= since:
                    yield f"{stamp} {line}"

        self._stream(stamped())

    def _is_cut(self) -> bool:
        return self.connection not in self.cluster._streams

    def _stream(self, lines: Iterator[str]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with self.cluster.changed:
            self.cluster._streams.add(self.connection)
        for line in lines:
            data = f"{line}\n".encode()
            # In two pieces, as a network may deliver it.
            for piece in filter(None, (data[:7], data[7:])):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        if not self._is_cut():
            self.wfile.write(b"0\r\n\r\n")
        with self.cluster.changed:
            self.cluster._streams.discard(self.connection)
        self.close_connection = True

    def _send(self, status: int, answer: Object | None, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(answer).encode() if answer else b"404 page not found\n"
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, cluster: FakeCluster, tls: ssl.SSLContext | None) -> None:
        super().__init__(("127.0.0.1", 0), type("Handler", (_Handler,), {"cluster": cluster}))
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        self._cluster = cluster
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05})
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.server_address[1]}"

    def start(self) -> None:
        """Answer, in a thread."""
        self._thread.start()

    def stop(self) -> None:
        """Answer no more."""
        self._cluster.cut()
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is no error."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)
