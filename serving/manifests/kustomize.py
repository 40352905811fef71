"""A kustomize base of the objects, and overlays of it for development and production."""

from __future__ import annotations

from typing import Any

from serving.manifests import kubernetes, pod
from serving.manifests.config import ServingManifestConfig
from serving.manifests.documents import to_yaml, why


def files(config: ServingManifestConfig) -> dict[str, str]:
    """The files of base and overlays: path -> text. `kubectl apply -k overlays/production` takes them."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for each in kubernetes.objects(config):
        by_kind.setdefault(f"{each['kind'].lower()}.yaml", []).append(each)
    texts = {f"base/{name}": to_yaml(objects) for name, objects in by_kind.items()}
    texts["base/kustomization.yaml"] = _kustomization({"resources": sorted(by_kind)})
    dev = _dev_patches(by_kind)
    texts |= _overlay(config, "dev", {name: patch["kind"] for name, patch in dev.items()})
    texts |= {f"overlays/dev/{name}": to_yaml([patch]) for name, patch in dev.items()}
    texts |= _overlay(config, "production", {"spread.yaml": "Deployment"})
    texts["overlays/production/spread.yaml"] = to_yaml([_production_patch()])
    return texts


def namespace_of(config: ServingManifestConfig, overlay: str) -> str:
    """Where an overlay puts the objects."""
    return config.namespace if overlay == "production" else f"{config.namespace}-{overlay}"


def _overlay(config: ServingManifestConfig, name: str, patches: dict[str, str]) -> dict[str, str]:
    """An overlay whose patches, file -> kind, change every object of the kind."""
    standard = "privileged alone: they mount a folder of the node" if config.scheme == "file" else "restricted"
    body = {
        **why(f"The pods pass the Pod Security Standard {standard}."),
        "namespace": namespace_of(config, name),
        "resources": ["../../base"],
        "patches": [{"path": file, "target": {"kind": kind}} for file, kind in patches.items()],
    }
    return {f"overlays/{name}/kustomization.yaml": _kustomization(body)}


def _kustomization(body: dict[str, Any]) -> str:
    return to_yaml([{"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", **body}])


def _dev_patches(by_kind: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """One small pod of each Deployment, which may be away while its node is drained."""
    container = {"name": pod.CONTAINER, "resources": {"requests": {"cpu": "100m"}}}
    spec = {"replicas": 1, "template": {"spec": {"containers": [container]}}}
    patches = {"small.yaml": _patch("apps/v1", "Deployment", {"spec": spec})}
    if "horizontalpodautoscaler.yaml" in by_kind:
        patches["no-autoscaler.yaml"] = _patch("autoscaling/v2", "HorizontalPodAutoscaler", {"$patch": "delete"})
    patches["no-budget.yaml"] = _patch("policy/v1", "PodDisruptionBudget", {"$patch": "delete"})
    return patches


def _production_patch() -> list[dict[str, Any]]:
    """A JSON patch: kustomize merges these constraints by two keys, of which this changes one."""
    constraint = f"/spec/template/spec/topologySpreadConstraints/{pod.SPREAD_OVER.index(pod.HOSTNAME)}"
    return [
        {"op": "test", "path": f"{constraint}/topologyKey", "value": pod.HOSTNAME},
        {
            "op": "replace",
            "path": f"{constraint}/whenUnsatisfiable",
            **why("Rather wait for a node than have all replicas on one."),
            "value": "DoNotSchedule",
        },
    ]


def _patch(api_version: str, kind: str, body: dict[str, Any]) -> dict[str, Any]:
    """A strategic merge patch; its name is not read, because the kustomization targets the kind."""
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": "any"}, **body}
