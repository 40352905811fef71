"""A KServe InferenceService for a model, on KServe's own runtime for TF Serving (KServe 0.20)."""

from __future__ import annotations

from typing import Any

from serving.manifests import kubernetes, pod, server
from serving.manifests.config import ServingManifestConfig, canary_replicas
from serving.manifests.documents import to_yaml, why

_RUNTIME = "kserve-tensorflow-serving"
_MODELS = "/mnt/models"  # where the runtime's --model_base_path points
_REST_PORT = 8080
_OFFICIAL_IMAGE = "tensorflow/serving:"
# What the runtime says itself, and the model config, which would take the place of its --model_base_path.
_RUNTIME_FLAGS = ("--port", "--rest_api_port", "--model_config", "--allow_version_labels")


def files(config: ServingManifestConfig) -> dict[str, str]:
    """The files: path -> text.

    Raises:
        ValueError: KServe cannot serve this.
    """
    return {"inferenceservice.yaml": to_yaml(objects(config))}


def objects(config: ServingManifestConfig) -> list[dict[str, Any]]:
    """The InferenceService and what it refers to, with comments.

    Raises:
        ValueError: KServe cannot serve this.
    """
    if config.server != "tensorflow_serving":
        raise ValueError("KServe's runtime is TF Serving: set server to tensorflow_serving")
    if config.scheme == "file":
        raise ValueError(
            f"KServe copies no folder of a node, {config.model_uri}: give model_uri as pvc://, s3:// or gs://"
        )
    account = kubernetes.service_account(config)
    if config.storage.credentials_secret:
        account["secrets"] = [{"name": config.storage.credentials_secret}]
    found = [account, kubernetes.server_config_map(config), _inference_service(config)]
    for each in found:
        each["metadata"]["namespace"] = config.namespace
    return found


def _inference_service(config: ServingManifestConfig) -> dict[str, Any]:
    mode = config.kserve_mode.capitalize()
    return kubernetes.make_object(
        config,
        "serving.kserve.io/v1beta1",
        "InferenceService",
        config.resource_name,
        {
            **why(f"Requests name the model by this object: /v1/models/{config.resource_name}:predict"),
            "spec": _spec(config),
        },
        annotations={"serving.kserve.io/deploymentMode": mode},
    )


def _spec(config: ServingManifestConfig) -> dict[str, Any]:
    if config.canary_on_trial is None:
        return {"predictor": _predictor(config, config.stable_version)}
    version, canary = config.canary_on_trial
    if config.kserve_mode == "knative":
        # Knative keeps the revision that served last; it gets what the canary does not.
        predictor = {
            **why(f"The rest goes to the revision that served last: roll version {config.stable_version} out before."),
            "canaryTrafficPercent": canary.percent,
            **_predictor(config, version),
        }
        return {"predictor": predictor}
    on_trial = _predictor(config, version)
    on_trial["minReplicas"] = canary_replicas(config.replicas.min, canary.percent)
    on_trial["model"] = {"name": "kserve-container", **on_trial["model"]}
    entry = {"trafficPercent": canary.percent, "predictor": {"name": "canary", **on_trial}}
    return {"predictor": _predictor(config, config.stable_version), "canary": [entry]}


def _predictor(config: ServingManifestConfig, version: int | None) -> dict[str, Any]:
    replicas = config.replicas
    predictor: dict[str, Any] = {
        "serviceAccountName": config.resource_name,
        "automountServiceAccountToken": False,
        "annotations": kubernetes.scraped(_REST_PORT),
        "minReplicas": replicas.min,
        "maxReplicas": replicas.max,
    }
    if config.kserve_mode == "standard":
        predictor |= {
            "scaleMetric": "cpu",
            "scaleTarget": replicas.target_cpu_percent,
            "terminationGracePeriodSeconds": pod.termination_seconds(config),
        }
    if version is not None:
        predictor |= {
            **why(
                "One version, and its number in the mount path: TF Serving reads the version from the folder's name."
            ),
            "storageUris": [{"uri": f"{config.model_uri}/{version}", "mountPath": f"{_MODELS}/{version}"}],
        }
    return predictor | {
        "model": _model(config, None if version is not None else config.model_uri),
        "volumes": [{"name": "server-config", "configMap": {"name": kubernetes.server_config_name(config)}}],
    }


def _model(config: ServingManifestConfig, storage_uri: str | None) -> dict[str, Any]:
    image = config.server_image
    model: dict[str, Any] = {"modelFormat": {"name": "tensorflow", "version": "2"}, "runtime": _RUNTIME}
    if image.startswith(_OFFICIAL_IMAGE):
        model |= {**why("The runtime's own is 2.6.2."), "runtimeVersion": image.removeprefix(_OFFICIAL_IMAGE)}
    else:
        model["image"] = image
    if storage_uri is not None:
        model["storageUri"] = storage_uri
    ready = {"path": f"/v1/models/{config.resource_name}/metadata", "port": _REST_PORT}
    model |= {
        "protocolVersion": "v1",
        "args": [flag for flag in server.flags(config) if not flag.startswith(_RUNTIME_FLAGS)],
        "resources": pod.resources(config),
        "readinessProbe": {"httpGet": ready, "periodSeconds": 5, "timeoutSeconds": 3},
    }
    if config.kserve_mode == "standard":
        model["lifecycle"] = {"preStop": {"sleep": {"seconds": pod.pre_stop_seconds(config)}}}
    mount = {"name": "server-config", "mountPath": server.SERVER_FOLDER, "readOnly": True}
    return model | {"volumeMounts": [mount]}
