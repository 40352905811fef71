"""Records pushed versions in a Kubeflow Model Registry (Hub), by its REST API v1alpha3.

Paths and bodies are those of api/openapi/model-registry.yaml in kubeflow/model-registry.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import urllib3

from components.artifacts import digest_of
from components.config import RegistryConfig
from components.errors import ConfigError, HeadraceError

_API = "/api/model_registry/v1alpha3"
_PAGE_SIZE = 100
_SECONDS = 30.0
# The registry's integers are of nine digits at most.
_LARGEST_INT = 999_999_999

Properties = Mapping[str, str | int | float | bool]


@dataclass(frozen=True)
class PushedVersion:
    """What the registry is told of a pushed version.

    Attributes:
        model_name: Name under which it is served.
        version: Its number.
        uri: Where its files are.
        destination: Where all versions of the model are.
        digest: Of the export that it holds.
        properties: Whatever else is worth finding it by.
    """

    model_name: str
    version: int
    uri: str
    destination: str
    digest: str
    properties: Properties


def register(config: RegistryConfig, pushed: PushedVersion, *, kept: list[int]) -> str:
    """Record a version, once, and archive those of the same destination whose files are gone.

    A registry outlives destinations: where another version has this one's number already, this one is called
    `<number>-<eight digits>`, which follow from its destination and its digest.

    Args:
        config: The registry.
        pushed: The version.
        kept: The numbers of the versions that are still there.

    Returns:
        The id of the model version in the registry.

    Raises:
        ConfigError: the token is not set.
        HeadraceError: the registry does not answer, or refuses.
    """
    registry = _Registry(config)
    model = registry.find_or_create("registered_model", {"name": pushed.model_name, "state": "LIVE"})
    version = _version(registry, model["id"], pushed)
    registry.find_or_create(
        "model_artifact",
        {
            "artifactType": "model-artifact",
            "name": f"{pushed.model_name}-{version['name']}",
            "uri": pushed.uri,
            "state": "LIVE",
            "modelFormatName": "tensorflow",
            "modelFormatVersion": "2",
            "modelSourceKind": "headrace",
            "modelSourceName": pushed.model_name,
            "modelSourceId": pushed.digest,
        },
        parent=version["id"],
    )
    # One of the same number is of a model that lay there before.
    others = {str(number) for number in kept if number != pushed.version}
    for other in registry.items(f"/registered_models/{model['id']}/versions"):
        is_ours = _text(other, "destination") == pushed.destination and other["id"] != version["id"]
        if is_ours and _text(other, "version") not in others:
            registry.set_state(other, "ARCHIVED")
    registry.set_state(version, "LIVE")
    return str(version["id"])


def _version(registry: _Registry, model_id: str, pushed: PushedVersion) -> dict[str, Any]:
    facts = {"destination": pushed.destination, "version": str(pushed.version), "digest": pushed.digest}
    body = {
        "registeredModelId": model_id,
        "state": "LIVE",
        "customProperties": {name: _metadata(value) for name, value in {**pushed.properties, **facts}.items()},
    }
    version: dict[str, Any] = {}
    for name in (str(pushed.version), f"{pushed.version}-{digest_of(facts)[:8]}"):
        version = registry.find_or_create("model_version", {"name": name} | body, parent=model_id)
        if _text(version, "digest") == pushed.digest and _text(version, "destination") == pushed.destination:
            break
    return version


def _metadata(value: str | int | float | bool) -> dict[str, Any]:
    """A MetadataValue: bool, int (as text), double or string."""
    if isinstance(value, bool):
        return {"metadataType": "MetadataBoolValue", "bool_value": value}
    if isinstance(value, int) and abs(value) <= _LARGEST_INT:
        return {"metadataType": "MetadataIntValue", "int_value": str(value)}
    if isinstance(value, int | float):
        return {"metadataType": "MetadataDoubleValue", "double_value": float(value)}
    return {"metadataType": "MetadataStringValue", "string_value": value}


def _text(resource: Mapping[str, Any], name: str) -> str:
    return str(resource.get("customProperties", {}).get(name, {}).get("string_value", ""))


class _Registry:
    """The few requests that are needed; what is lost on the way is sent again."""

    def __init__(self, config: RegistryConfig) -> None:
        self._url = config.url
        headers = {"Accept": "application/json"}
        if config.token_env:
            headers["Authorization"] = f"Bearer {_token(config.token_env)}"
        retries = urllib3.Retry(
            total=3,
            backoff_factor=0.5,
            status_forcelist=(429, 502, 503, 504),
            allowed_methods=None,
            raise_on_status=False,
        )
        self._http = urllib3.PoolManager(headers=headers, retries=retries, timeout=_SECONDS)

    def find_or_create(self, kind: str, body: Mapping[str, Any], *, parent: str | None = None) -> dict[str, Any]:
        """The resource of that kind, name and parent; made if there is none, by us or by whoever is faster."""
        if found := self._find(kind, body["name"], parent):
            return found
        collection = f"/model_versions/{parent}/artifacts" if kind == "model_artifact" else f"/{kind}s"
        status, made = self._ask("POST", collection, body=body, fine=(200, 201, 409))
        if status != 409:
            return made
        if found := self._find(kind, body["name"], parent):
            return found
        raise HeadraceError(f"{self._url} has a {kind} '{body['name']}' that it does not show{_message(made)}.")

    def _find(self, kind: str, name: str, parent: str | None) -> dict[str, Any] | None:
        fields = {"name": name} | ({"parentResourceId": parent} if parent else {})
        status, found = self._ask("GET", f"/{kind}", fields=fields, fine=(200, 404))
        return found if status == 200 else None

    def items(self, path: str) -> Iterator[dict[str, Any]]:
        """Every item of a list, page after page."""
        token = ""
        while True:
            fields = {"pageSize": str(_PAGE_SIZE)} | ({"nextPageToken": token} if token else {})
            _, page = self._ask("GET", path, fields=fields)
            yield from page.get("items", ())
            if not (token := page.get("nextPageToken", "")):
                return

    def set_state(self, version: Mapping[str, Any], state: str) -> None:
        """Archive a model version, or bring it back."""
        if version.get("state", "LIVE") != state:
            self._ask("PATCH", f"/model_versions/{version['id']}", body={"state": state})

    def _ask(
        self,
        method: str,
        path: str,
        *,
        fields: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        fine: tuple[int, ...] = (200,),
    ) -> tuple[int, Any]:
        try:
            answer = self._http.request(
                method, f"{self._url}{_API}{path}", **({"json": body} if body is not None else {"fields": fields})
            )
        except urllib3.exceptions.HTTPError as error:
            reason = getattr(error, "reason", None) or error
            raise HeadraceError(f"No model registry answers at {self._url}: {reason}. Check registry.url.") from error
        if (kind := answer.headers.get("Content-Type", "")) and "json" not in kind:
            raise HeadraceError(
                f"{self._url} answered {answer.status} with {kind}: that is no model registry. Check registry.url."
            )
        content = json.loads(answer.data or b"{}")
        if answer.status in (401, 403):
            raise HeadraceError(
                f"The model registry {self._url} refuses ({answer.status}){_message(content)}. Put a valid token into the "
                "environment variable that registry.token_env names."
            )
        if answer.status not in fine:
            raise HeadraceError(
                f"The model registry {self._url} answered {answer.status} to {method} {path}{_message(content)}."
            )
        return answer.status, content


def _message(content: Any) -> str:
    message = content.get("message") if isinstance(content, dict) else None
    return f": {str(message).rstrip('.')}" if message else ""


def _token(variable: str) -> str:
    if not (token := os.environ.get(variable)):
        raise ConfigError(f"registry.token_env: the environment variable {variable} is not set. Put the token into it.")
    return token
