"""The pods that serve a model: server, probes, draining, where the model comes from."""

from __future__ import annotations

from typing import Any

from serving.manifests import server
from serving.manifests.config import ServingManifestConfig
from serving.manifests.documents import why
from serving.manifests.server import Track

CONTAINER = "server"
HOSTNAME = "kubernetes.io/hostname"
SPREAD_OVER = ("topology.kubernetes.io/zone", HOSTNAME)

# Both images can run as it, and headrace's own writes pushed models as it.
USER_ID = 1000
# How long a stopping pod still gets requests from proxies that have not heard of it.
_ROUTES_SETTLE_SECONDS = 10
_COPIED = "/models/.copied"

# Versions appear under their number only when they are whole: a server must not find half of one. The push writes
# saved_model.pb last, so a version without it is still being written.
_COPY_SCRIPT = f"""\
set -u
mkdir -p "$TARGET"
while true; do
  if found=$(rclone lsf --recursive --files-only --include '/*/saved_model.pb' "$SOURCE") && [ -n "$found" ]; then
    for version in $(echo "$found" | sed -n 's#^\\([0-9]*\\)/saved_model.pb$#\\1#p'); do
      if [ ! -e "$TARGET/$version" ]; then
        rm -rf "$TARGET/.incoming"
        rclone copy "$SOURCE/$version" "$TARGET/.incoming" && mv "$TARGET/.incoming" "$TARGET/$version"
      fi
    done
    for copy in "$TARGET"/[0-9]*; do
      if [ -e "$copy" ]; then touch {_COPIED}; fi
      echo "$found" | grep -qx "${{copy##*/}}/saved_model.pb" || rm -rf "$copy"
    done
  fi
  sleep "$POLL_SECONDS"
done
"""
_COPY_ENVIRONMENT = {
    "s3": {"RCLONE_S3_PROVIDER": "AWS", "RCLONE_S3_ENV_AUTH": "true"},
    "gs": {"RCLONE_GCS_ENV_AUTH": "true", "RCLONE_GCS_BUCKET_POLICY_ONLY": "true"},
}
_REMOTES = {"s3": ":s3:", "gs": ":gcs:"}


def pod_spec(
    config: ServingManifestConfig, track: Track, *, labels: dict[str, str], models_config: str, server_config: str
) -> dict[str, Any]:
    """The pod of a track, with comments.

    Args:
        config: The model and where it serves.
        track: The versions it serves.
        labels: Those of all pods of the track.
        models_config: Name of the ConfigMap with the track's model config.
        server_config: Name of the ConfigMap with what the server reads once.
    """
    return {
        "serviceAccountName": config.resource_name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "terminationGracePeriodSeconds": termination_seconds(config),
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": key,
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": labels},
                "matchLabelKeys": ["pod-template-hash"],
            }
            for key in SPREAD_OVER
        ],
        **({"initContainers": [_copier(config)]} if copies_models(config) else {}),
        "containers": [_server(config, track)],
        "volumes": [
            {"name": "models", **_storage(config)},
            {"name": "models-config", "configMap": {"name": models_config}},
            {"name": "server-config", "configMap": {"name": server_config}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }


def copies_models(config: ServingManifestConfig) -> bool:
    """Whether the model is copied from an object store into each pod."""
    return config.scheme in _REMOTES


def pre_stop_seconds(config: ServingManifestConfig) -> int:
    """How long a stopping pod goes on as before: TF Serving has to finish its requests in it, for it drains nothing."""
    finishing = 0 if config.server == "embedded" else config.request_timeout_seconds
    return _ROUTES_SETTLE_SECONDS + finishing


def termination_seconds(config: ServingManifestConfig) -> int:
    """When a stopping pod is killed: as process 1, without a handler, TF Serving does not even hear SIGTERM."""
    draining = config.request_timeout_seconds if config.server == "embedded" else 0
    return pre_stop_seconds(config) + draining + 5


def _server(config: ServingManifestConfig, track: Track) -> dict[str, Any]:
    drains = (
        "Requests still come until every proxy has heard that the pod stops; then the server drains itself."
        if config.server == "embedded"
        else "TF Serving does not drain: this time is for requests that still come, and for those under way."
    )
    ready_get = {"path": server.ready_path(config, track), "port": "http"}
    ready = {"httpGet": ready_get, "periodSeconds": 5, "timeoutSeconds": 3}
    return {
        "name": CONTAINER,
        "image": config.server_image,
        "command": server.command(config),
        "args": server.flags(config),
        "ports": [
            {"name": "grpc", "containerPort": server.GRPC_PORT},
            {"name": "http", "containerPort": server.REST_PORT},
        ],
        "resources": resources(config),
        **why("Until this has answered once, the other probes wait."),
        "startupProbe": {**ready, "failureThreshold": -(-config.load_timeout_seconds // 5)},
        **why("Not the status page, which answers 200 while a model loads or has failed: metadata needs a loaded one."),
        "readinessProbe": {**ready, "failureThreshold": 2},
        **why("Patient, so that a server under load is not killed for being slow."),
        "livenessProbe": {
            "httpGet": {"path": server.live_path(config), "port": "http"},
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
        **why(drains),
        "lifecycle": {"preStop": {"sleep": {"seconds": pre_stop_seconds(config)}}},
        "securityContext": _locked_down(),
        **why("Folders: a single file, mounted by subPath, would never change."),
        "volumeMounts": [
            {**_models_mount(config), "readOnly": True},
            {"name": "models-config", "mountPath": server.MODELS_FOLDER, "readOnly": True},
            {"name": "server-config", "mountPath": server.SERVER_FOLDER, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }


def resources(config: ServingManifestConfig) -> dict[str, Any]:
    """What the server's container asks for and may use."""
    cpu = f"{round(config.resources.cpu * 1000)}m"
    gpus = {"nvidia.com/gpu": str(config.resources.gpus)} if config.resources.gpus else {}
    memory = {"memory": config.resources.memory}
    return {
        "requests": {"cpu": cpu, **memory, **gpus},
        **why("No CPU limit: throttling would show in the slowest answers."),
        "limits": {**memory, **gpus},
    }


def _locked_down() -> dict[str, Any]:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _storage(config: ServingManifestConfig) -> dict[str, Any]:
    place, path = config.location
    if config.scheme == "pvc":
        return {"persistentVolumeClaim": {"claimName": place, "readOnly": True}}
    if config.scheme == "file":
        return {
            **why("A folder of the node: for kind and minikube, not for a cluster whose nodes come and go."),
            "hostPath": {"path": f"/{path}", "type": "Directory"},
        }
    return {"emptyDir": {}}


def _models_mount(config: ServingManifestConfig) -> dict[str, Any]:
    if copies_models(config):
        return {"name": "models", "mountPath": "/models"}
    path = config.location[1]
    sub_path = {"subPath": path} if config.scheme == "pvc" and path else {}
    return {"name": "models", "mountPath": server.base_path(config), **sub_path}


def _copier(config: ServingManifestConfig) -> dict[str, Any]:
    storage = config.storage
    bucket, path = config.location
    environment = {
        "SOURCE": f"{_REMOTES[config.scheme]}{bucket}/{path}".rstrip("/"),
        "TARGET": server.base_path(config),
        "POLL_SECONDS": str(storage.poll_seconds),
        "RCLONE_CONFIG": "/dev/null",
        **_COPY_ENVIRONMENT[config.scheme],
        **storage.environment,
    }
    secret = storage.credentials_secret
    return {
        "name": "copy-models",
        "image": storage.copy_image,
        **why("A sidecar: the server starts when the first version is there, and new ones follow."),
        "restartPolicy": "Always",
        "command": ["/bin/sh", "-c", _COPY_SCRIPT],
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        **({"envFrom": [{"secretRef": {"name": secret}}]} if secret else {}),
        "startupProbe": {
            "exec": {"command": ["test", "-e", _COPIED]},
            "periodSeconds": 2,
            "failureThreshold": -(-config.load_timeout_seconds // 2),
        },
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": _locked_down(),
        "volumeMounts": [_models_mount(config), {"name": "tmp", "mountPath": "/tmp"}],
    }
