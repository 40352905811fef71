"""What can be found wrong with Kubernetes objects without a cluster: schemas, and names that nothing bears."""

from __future__ import annotations

import functools
import gzip
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

# The oldest that has all we use (the sleep of preStop, ContainerResource, sidecars), and the newest known here.
KUBERNETES_VERSIONS = ("1.30", "1.37")
_ROUTES = "gateway.networking.k8s.io/v1"


def crds_folder() -> Path | None:
    """Where the custom resource definitions are, if this machine has them."""
    default = Path(__file__).parents[4] / "shared" / "crds"
    folder = Path(os.environ.get("HEADRACE_CRDS", default))
    return folder if folder.is_dir() else None


def problems(objects: Sequence[dict[str, Any]]) -> list[str]:
    """All that is wrong with objects that are applied together."""
    found = [problem for each in objects for problem in schema_problems(each)]
    return found + list(_dangling(objects))


def schema_problems(manifest: dict[str, Any]) -> list[str]:
    """Where an object breaks its schema; an unknown field is an error."""
    if manifest["apiVersion"] == _ROUTES:  # a custom resource; what it refers to is checked
        return []
    if manifest["apiVersion"].startswith("serving.kserve.io/"):
        return crd_problems(manifest) if crds_folder() else []
    found = []
    for version in KUBERNETES_VERSIONS:
        try:
            kubernetes_validate.validate(manifest, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            found.append(f"{manifest['kind']} {version}: {'.'.join(map(str, error.path))}: {error.message}")
    return found


def crd_problems(manifest: dict[str, Any]) -> list[str]:
    """Where a custom resource breaks the schema of its definition; an unknown field is an error."""
    validator = _crd_validator(manifest["apiVersion"], manifest["kind"])
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in validator.iter_errors(manifest)]


@functools.cache
def _crd_validator(api_version: str, kind: str) -> jsonschema.Draft202012Validator:
    group, version = api_version.split("/")
    folder = crds_folder()
    assert folder is not None
    with gzip.open(folder / f"{group}_{kind.lower()}s.yaml.gz") as file:
        definition = yaml.load(file, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # the other takes seconds
    (schema,) = [each["schema"] for each in definition["spec"]["versions"] if each["name"] == version]
    return jsonschema.Draft202012Validator(_strict(schema["openAPIV3Schema"]))


def _strict(schema: Any) -> Any:
    """An openAPI schema of Kubernetes as a JSON schema that refuses fields it does not know."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    strict = {key: _strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        # Only `metadata` of a resource is an object that says nothing about its fields.
        strict.setdefault("additionalProperties", False)
    return strict


def _dangling(objects: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Names and labels that refer to nothing."""
    names = {(each["kind"], each["metadata"]["name"]) for each in objects}
    pods = [each["spec"]["template"] for each in objects if each["kind"] == "Deployment"]
    ports = {port["name"] for pod in pods for port in pod["spec"]["containers"][0]["ports"]}
    for each in objects:
        where, spec = f"{each['kind']} {each['metadata']['name']}", each.get("spec", {})
        for wanted in _references(each):
            if wanted not in names:
                yield f"{where}: there is no {' '.join(wanted)}"
        if (selector := _selector(each)) is not None:
            selected = [pod for pod in pods if selector.items() <= pod["metadata"]["labels"].items()]
            if not selected:
                yield f"{where}: {selector} selects no pod"
            if each["kind"] == "Deployment" and selected != [spec["template"]]:
                yield f"{where}: {selector} selects the pods of another Deployment"
        if each["kind"] == "Service":
            yield from (
                f"{where}: no pod has a port {port['targetPort']}"
                for port in spec["ports"]
                if port["targetPort"] not in ports
            )
    for pod in pods:
        yield from _unmounted(pod["spec"])


def _references(manifest: dict[str, Any]) -> Iterator[tuple[str, str]]:
    spec = manifest.get("spec", {})
    if manifest["kind"] == "Deployment":
        pod = spec["template"]["spec"]
        yield "ServiceAccount", pod["serviceAccountName"]
        yield from (("ConfigMap", volume["configMap"]["name"]) for volume in pod["volumes"] if "configMap" in volume)
    if manifest["kind"] == "HorizontalPodAutoscaler":
        yield spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"]
    if manifest["apiVersion"] == _ROUTES:
        yield from (("Service", backend["name"]) for rule in spec["rules"] for backend in rule["backendRefs"])


def _selector(manifest: dict[str, Any]) -> dict[str, str] | None:
    spec = manifest.get("spec", {})
    if manifest["kind"] == "Service":
        return spec["selector"]
    if manifest["kind"] in ("Deployment", "PodDisruptionBudget"):
        return spec["selector"]["matchLabels"]
    return spec["podSelector"]["matchLabels"] if manifest["kind"] == "NetworkPolicy" else None


def _unmounted(pod: dict[str, Any]) -> Iterator[str]:
    volumes = {volume["name"] for volume in pod["volumes"]}
    mounts = {
        mount["name"]
        for container in (*pod.get("initContainers", []), *pod["containers"])
        for mount in container["volumeMounts"]
    }
    yield from (f"there is no volume {name}" for name in sorted(mounts - volumes))
    yield from (f"nothing mounts the volume {name}" for name in sorted(volumes - mounts))
