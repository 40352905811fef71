"""An HTTP server that behaves as a Kubeflow Model Registry (Hub) does, for the few paths that are used.

Its types are those of api/openapi/model-registry.yaml in kubeflow/model-registry; what it says of wrong questions is what
the Go server says (https://github.com/kubeflow/hub/issues/2009).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs, urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

PREFIX = "/api/model_registry/v1alpha3"
PAGE_SIZE = 2  # whatever is asked for
Id = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,8}$")]
Name = Annotated[str, Field(min_length=1)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class MetadataBoolValue(Strict):
    metadataType: Literal["MetadataBoolValue"]  # noqa: N815 - as on the wire
    bool_value: bool


class MetadataIntValue(Strict):
    metadataType: Literal["MetadataIntValue"]  # noqa: N815
    int_value: Annotated[str, Field(pattern=r"^-?([1-9][0-9]{0,8}|0)$")]


class MetadataDoubleValue(Strict):
    metadataType: Literal["MetadataDoubleValue"]  # noqa: N815
    double_value: float


class MetadataStringValue(Strict):
    metadataType: Literal["MetadataStringValue"]  # noqa: N815
    string_value: str


MetadataValue = Annotated[
    MetadataBoolValue | MetadataIntValue | MetadataDoubleValue | MetadataStringValue,
    Field(discriminator="metadataType"),
]


class Resource(Strict):
    customProperties: dict[str, MetadataValue] = {}  # noqa: N815
    description: str | None = None
    externalId: str | None = None  # noqa: N815


class RegisteredModelCreate(Resource):
    name: Name
    owner: str | None = None
    state: Literal["LIVE", "ARCHIVED"] = "LIVE"


class ModelVersionUpdate(Resource):
    state: Literal["LIVE", "ARCHIVED"] = "LIVE"
    author: str | None = None


class ModelVersionCreate(ModelVersionUpdate):
    registeredModelId: Id  # noqa: N815
    name: Name


class ModelArtifactCreate(Resource):
    artifactType: Literal["model-artifact"]  # noqa: N815
    name: Name
    uri: str
    state: Literal["UNKNOWN", "PENDING", "LIVE", "MARKED_FOR_DELETION", "DELETED", "ABANDONED", "REFERENCE"]
    modelFormatName: str | None = None  # noqa: N815
    modelFormatVersion: str | None = None  # noqa: N815
    storageKey: str | None = None  # noqa: N815
    storagePath: str | None = None  # noqa: N815
    serviceAccountName: str | None = None  # noqa: N815
    modelSourceKind: str | None = None  # noqa: N815
    modelSourceClass: str | None = None  # noqa: N815
    modelSourceGroup: str | None = None  # noqa: N815
    modelSourceId: str | None = None  # noqa: N815
    modelSourceName: str | None = None  # noqa: N815


class RefusedError(Exception):
    """Ends a request with a status and a message."""

    def __init__(self, status: int, code: str, message: str) -> None:
        self.status, self.content = status, {"code": code, "message": message}


class Hub:
    """What the registry holds.

    Attributes:
        resources: Kind -> id -> resource, with the id of its parent under `parent`.
        requests: Method and path of all that it was asked.
        faults: What befalls the next requests, in turn: a status, "lost": it is done and the answer never comes, or "none".
        token: The bearer token that it wants, if any.
        hidden: Kinds that it does not find the first time, as if somebody made them just now.
    """

    def __init__(self, token: str | None = None) -> None:
        self.token = token
        self.resources: dict[str, dict[str, dict[str, Any]]] = {
            "registered_model": {},
            "model_version": {},
            "model_artifact": {},
        }
        self.requests: list[str] = []
        self.faults: list[int | str] = []
        self.hidden: list[str] = []
        self._ids = itertools.count(1)

    def answer(self, method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        """Answer a question whose path is given without its prefix."""
        if method == "GET" and path in ("/registered_model", "/model_version", "/model_artifact"):
            return 200, self._find(path[1:], query)
        if method == "GET" and (match := re.fullmatch(r"/registered_models/(\d+)/versions", path)):
            return 200, self._page(match[1], query)
        if method == "POST" and path == "/registered_models":
            return 201, self._add("registered_model", RegisteredModelCreate.model_validate(body), "")
        if method == "POST" and path == "/model_versions":
            version = ModelVersionCreate.model_validate(body)
            self._existing("registered_model", version.registeredModelId)
            return 201, self._add("model_version", version, version.registeredModelId)
        if method == "POST" and (match := re.fullmatch(r"/model_versions/(\d+)/artifacts", path)):
            self._existing("model_version", match[1])
            return 201, self._add("model_artifact", ModelArtifactCreate.model_validate(body), match[1])
        if method == "PATCH" and (match := re.fullmatch(r"/model_versions/(\d+)", path)):
            changes = ModelVersionUpdate.model_validate(body).model_dump(exclude_unset=True)
            version_now = self._existing("model_version", match[1])
            version_now |= changes
            return 200, _shown(version_now)
        raise RefusedError(404, "Not Found", f"no such path: {method} {path}")

    def _find(self, kind: str, query: dict[str, str]) -> Any:
        parent = query.get("parentResourceId", "")
        if not query.get("name") or (kind != "registered_model" and not parent):
            raise RefusedError(
                400, "Bad Request", "invalid parameters call, supply either (name and parent), or externalId"
            )
        found = [
            each for each in self.resources[kind].values() if (each["name"], each["parent"]) == (query["name"], parent)
        ]
        if kind in self.hidden:
            self.hidden.remove(kind)
            found = []
        if not found:
            raise RefusedError(404, "Not Found", f"no {kind} found for name={query['name']}: not found")
        return _shown(found[0])

    def _page(self, parent: str, query: dict[str, str]) -> Any:
        self._existing("registered_model", parent)
        versions = [each for each in self.resources["model_version"].values() if each["parent"] == parent]
        start = int(query.get("nextPageToken", "opaque-0").removeprefix("opaque-"))
        items = versions[start : start + PAGE_SIZE]
        token = f"opaque-{start + PAGE_SIZE}" if start + PAGE_SIZE < len(versions) else ""
        return {
            "items": [_shown(each) for each in items],
            "nextPageToken": token,
            "pageSize": int(query["pageSize"]),
            "size": len(items),
        }

    def _add(self, kind: str, given: BaseModel, parent: str) -> Any:
        resource = given.model_dump(exclude_none=True) | {"parent": parent}
        for each in self.resources[kind].values():
            if (each["name"], each["parent"]) == (resource["name"], parent):
                raise RefusedError(409, "Conflict", f"{kind} {resource['name']} already exists")
        resource["id"] = str(next(self._ids))
        self.resources[kind][resource["id"]] = resource
        return _shown(resource)

    def _existing(self, kind: str, identifier: str) -> dict[str, Any]:
        if identifier not in self.resources[kind]:
            raise RefusedError(404, "Not Found", f"no {kind} found for id {identifier}: not found")
        return self.resources[kind][identifier]


def _shown(resource: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in resource.items() if name != "parent"}


@contextlib.contextmanager
def serving(hub: Hub) -> Iterator[str]:
    """The address at which a registry answers."""

    class Handler(BaseHTTPRequestHandler):
        def _respond(self) -> None:
            url = urlsplit(self.path)
            size = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(size) or b"null")
            hub.requests.append(f"{self.command} {url.path.removeprefix(PREFIX)}")
            fault = hub.faults.pop(0) if hub.faults else None
            if isinstance(fault, int):
                self._send(fault, {"code": "Service Unavailable", "message": "try again"})
                return
            try:
                if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
                    raise RefusedError(401, "Unauthorized", "invalid token")
                query = {name: values[0] for name, values in parse_qs(url.query).items()}
                status, content = hub.answer(self.command, url.path.removeprefix(PREFIX), query, body)
            except RefusedError as refused:
                status, content = refused.status, refused.content
            except ValidationError as error:
                status, content = 422, {"code": "Unprocessable Entity", "message": str(error)}
            if fault == "lost":
                self.close_connection = True
                return
            self._send(status, content)

        do_GET = do_POST = do_PATCH = _respond  # noqa: N815

        def _send(self, status: int, content: Any) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json; charset=UTF-8")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
