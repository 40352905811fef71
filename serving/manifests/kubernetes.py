"""Plain Kubernetes objects for one served model, as `documents` writes them."""

from __future__ import annotations

import hashlib
from typing import Any

from serving.manifests import server
from serving.manifests.config import GatewayConfig, ServingManifestConfig
from serving.manifests.documents import why
from serving.manifests.pod import CONTAINER, copies_models, pod_spec
from serving.manifests.server import Track


def objects(config: ServingManifestConfig) -> list[dict[str, Any]]:
    """The objects that serve a model, with comments; `documents.without_comments` takes those away.

    Args:
        config: The model and where it serves.

    Returns:
        Objects without a namespace: the same for the same config.
    """
    tracks = server.tracks(config)
    found = [service_account(config), server_config_map(config)]
    found += [_models_config_map(config, track) for track in tracks]
    found += [_deployment(config, track) for track in tracks]
    found += _services(config, tracks)
    found += [_autoscaler(config, track) for track in tracks if track.max_replicas > track.min_replicas]
    found += [_disruption_budget(config), _network_policy(config)]
    return found + ([] if config.gateway is None else _routes(config, config.gateway, tracks))


def scraped(port: int) -> dict[str, str]:
    """The annotations by which Prometheus finds the metrics of a pod."""
    values = {"scrape": "true", "port": str(port), "path": server.METRICS_PATH}
    return {f"prometheus.io/{name}": value for name, value in values.items()}


def _named(config: ServingManifestConfig, track: Track) -> str:
    return config.resource_name + ("" if track.name == "stable" else f"-{track.name}")


def _selector(config: ServingManifestConfig, track: Track | None = None) -> dict[str, str]:
    """The labels that select the pods of a track, or of all; they never change, since a Deployment's selector cannot."""
    of_all = {"app.kubernetes.io/name": "model-server", "app.kubernetes.io/instance": config.resource_name}
    return of_all if track is None else of_all | {"track": track.name}


def make_object(
    config: ServingManifestConfig, api_version: str, kind: str, name: str, body: dict[str, Any], **metadata: Any
) -> dict[str, Any]:
    """An object with the labels that all objects of a model bear."""
    labels = _selector(config) | {"app.kubernetes.io/managed-by": "headrace"}
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": name, "labels": labels, **metadata}, **body}


def canary_objects(config: ServingManifestConfig) -> list[str]:
    """What only a canary with pods of its own has, as kubectl names objects; its ConfigMap is left, as all old ones are."""
    name = f"{config.resource_name}-canary"
    return [f"{kind}/{name}" for kind in ("deployment", "horizontalpodautoscaler", "service")]


def service_account(config: ServingManifestConfig) -> dict[str, Any]:
    """The account that the pods run as."""
    annotations = config.storage.service_account_annotations
    metadata = {"annotations": dict(annotations)} if annotations else {}
    body = {**why("The server never calls the Kubernetes API."), "automountServiceAccountToken": False}
    return make_object(config, "v1", "ServiceAccount", config.resource_name, body, **metadata)


def server_config_name(config: ServingManifestConfig) -> str:
    """Name of the ConfigMap with what the server reads once."""
    digest = hashlib.sha256(repr(server.server_config_files(config)).encode()).hexdigest()
    return f"{config.resource_name}-server-{digest[:8]}"


def server_config_map(config: ServingManifestConfig) -> dict[str, Any]:
    """The ConfigMap with what the server reads once."""
    body = {
        **why("Read once, at the start: another content has another name, and so restarts the pods."),
        "immutable": True,
        "data": server.server_config_files(config),
    }
    return make_object(config, "v1", "ConfigMap", server_config_name(config), body)


def _models_config_name(config: ServingManifestConfig, track: Track) -> str:
    return f"{_named(config, track)}-models-{track.versions[0] if track.versions else 'latest'}"


def _models_config_map(config: ServingManifestConfig, track: Track) -> dict[str, Any]:
    body = {
        **why("The server looks at this file again and again, so a canary comes and goes without a restart."),
        **why("The name has the stable version: that one changes by a rolling update, one ready pod after the other."),
        "data": server.model_config_files(config, track),
    }
    return make_object(config, "v1", "ConfigMap", _models_config_name(config, track), body)


def _deployment(config: ServingManifestConfig, track: Track) -> dict[str, Any]:
    autoscaled = track.max_replicas > track.min_replicas
    replicas = why("No replicas: the autoscaler sets them.") if autoscaled else {"replicas": track.min_replicas}
    labels = _selector(config, track)
    spec_of_pod = pod_spec(
        config,
        track,
        labels=labels,
        models_config=_models_config_name(config, track),
        server_config=server_config_name(config),
    )
    spec = {
        **replicas,
        "revisionHistoryLimit": 5,
        **why("Longer than a pod may take to load its model, or a slow start counts as a failed rollout."),
        "progressDeadlineSeconds": config.load_timeout_seconds + 60,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "selector": {"matchLabels": labels},
        "template": {
            "metadata": {"labels": labels, "annotations": scraped(server.REST_PORT)},
            "spec": spec_of_pod,
        },
    }
    return make_object(config, "apps/v1", "Deployment", _named(config, track), {"spec": spec})


def _services(config: ServingManifestConfig, tracks: list[Track]) -> list[dict[str, Any]]:
    found = [_service(config, config.resource_name, _selector(config))]
    if config.gateway is not None:
        found += [_service(config, _track_service(config, track), _selector(config, track)) for track in tracks]
    return found


def _track_service(config: ServingManifestConfig, track: Track) -> str:
    return f"{config.resource_name}-{track.name}"


def _service(config: ServingManifestConfig, name: str, selector: dict[str, str]) -> dict[str, Any]:
    spec = {
        "selector": selector,
        **why("Meshes tell the protocol by the port's name; gRPC needs one to be spread over the pods by request."),
        "ports": [
            {"name": "grpc", "port": server.GRPC_PORT, "targetPort": "grpc"},
            {"name": "http", "port": server.REST_PORT, "targetPort": "http"},
        ],
    }
    return make_object(config, "v1", "Service", name, {"spec": spec})


def _autoscaler(config: ServingManifestConfig, track: Track) -> dict[str, Any]:
    cpu = {"type": "Utilization", "averageUtilization": config.replicas.target_cpu_percent}
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": _named(config, track)},
        "minReplicas": track.min_replicas,
        "maxReplicas": track.max_replicas,
        **why("Of the server alone, so that sidecars do not blur it."),
        "metrics": [
            {"type": "ContainerResource", "containerResource": {"container": CONTAINER, "name": "cpu", "target": cpu}}
        ],
        **why("A new pod has to load its model: do not give one away at the first quiet minute."),
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 300}},
    }
    return make_object(config, "autoscaling/v2", "HorizontalPodAutoscaler", _named(config, track), {"spec": spec})


def _disruption_budget(config: ServingManifestConfig) -> dict[str, Any]:
    spec = {
        **why("Not minAvailable, which would keep a node with the only replica from ever being drained."),
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": _selector(config)},
    }
    return make_object(config, "policy/v1", "PodDisruptionBudget", config.resource_name, {"spec": spec})


def _network_policy(config: ServingManifestConfig) -> dict[str, Any]:
    allowed: list[dict[str, Any]] = [{"podSelector": {}}]
    for name in config.ingress_namespaces:
        allowed.append({"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}})
    ports = [{"port": server.GRPC_PORT}, {"port": server.REST_PORT}]
    egress: dict[str, Any]
    if copies_models(config):
        egress = {**why("To the object store, wherever it is."), "egress": [{}]}
    else:
        egress = {**why("A server answers; it calls nobody."), "egress": []}
    spec = {
        "podSelector": {"matchLabels": _selector(config)},
        "policyTypes": ["Ingress", "Egress"],
        **why("Pods of this namespace, and those of ingress_namespaces: gateways, Prometheus."),
        "ingress": [{"from": allowed, "ports": ports}],
        **egress,
    }
    return make_object(config, "networking.k8s.io/v1", "NetworkPolicy", config.resource_name, {"spec": spec})


def _routes(config: ServingManifestConfig, gateway: GatewayConfig, tracks: list[Track]) -> list[dict[str, Any]]:
    """REST, and gRPC where it has a host name, through a gateway: each request to one of the tracks, by weight."""
    path = {"path": {"type": "PathPrefix", "value": "/v1/models"}}
    routes = [("HTTPRoute", server.REST_PORT, gateway.hostnames, {"matches": [path]})]
    if gateway.grpc_hostnames:
        routes.append(("GRPCRoute", server.GRPC_PORT, gateway.grpc_hostnames, {}))
    parent = {"name": gateway.name, **({"namespace": gateway.namespace} if gateway.namespace else {})}
    found = []
    for kind, port, hostnames, matches in routes:
        backends = [{"name": _track_service(config, track), "port": port, "weight": track.weight} for track in tracks]
        spec = {
            "parentRefs": [parent],
            **({"hostnames": hostnames} if hostnames else {}),
            "rules": [{**matches, "backendRefs": backends}],
        }
        found.append(make_object(config, "gateway.networking.k8s.io/v1", kind, config.resource_name, {"spec": spec}))
    return found
