"""A compose file for a model in a folder of this machine, with Prometheus beside it if wanted."""

from __future__ import annotations

from typing import Any

from serving.manifests import pod, server
from serving.manifests.config import ServingManifestConfig
from serving.manifests.documents import HEADER, to_yaml, why

_PROMETHEUS_IMAGE = "prom/prometheus:v3.5.0"


def files(config: ServingManifestConfig) -> dict[str, str]:
    """The compose file and what it mounts: path -> text.

    Raises:
        ValueError: one machine cannot serve this.
    """
    if config.scheme != "file":
        raise ValueError(
            f"compose serves a folder of this machine: give model_uri as file:///path, not {config.model_uri}"
        )
    if config.canary is not None and config.canary.method != "labels":
        raise ValueError(f"compose runs one server, so it has no canary.method {config.canary.method}: use labels")
    (track,) = server.tracks(config)
    texts = {"compose.yaml": to_yaml([_compose(config)]), "prometheus.yaml": to_yaml([_scraping(config)])}
    texts |= {f"models/{name}": HEADER + text for name, text in server.model_config_files(config, track).items()}
    return texts | {f"server/{name}": HEADER + text for name, text in server.server_config_files(config).items()}


def _compose(config: ServingManifestConfig) -> dict[str, Any]:
    return {
        "name": config.resource_name,
        "services": {config.resource_name: _service(config), "prometheus": _prometheus()},
    }


def _service(config: ServingManifestConfig) -> dict[str, Any]:
    (track,) = server.tracks(config)
    gpus = {"driver": "nvidia", "count": config.resources.gpus, "capabilities": ["gpu"]}
    return {
        "image": config.server_image,
        "entrypoint": server.command(config),
        "command": server.flags(config),
        **why("For this machine alone; take 127.0.0.1 away to serve others."),
        "ports": [f"127.0.0.1:{port}:{port}" for port in (server.GRPC_PORT, server.REST_PORT)],
        "volumes": [
            _mount(f"/{config.location[1]}", server.base_path(config)),
            _mount("./models", server.MODELS_FOLDER),
            _mount("./server", server.SERVER_FOLDER),
        ],
        "healthcheck": {
            **why("TF Serving's image has neither curl nor wget."),
            "test": ["CMD", "bash", "-c", _ask(server.ready_path(config, track))],
            "interval": "10s",
            "timeout": "5s",
            "start_period": f"{config.load_timeout_seconds}s",
        },
        "restart": "unless-stopped",
        **why("TF Serving as process 1 would not hear SIGTERM."),
        "init": True,
        "stop_grace_period": f"{config.request_timeout_seconds + 5}s",
        "mem_limit": config.resources.memory.removesuffix("i").lower(),
        **({"deploy": {"resources": {"reservations": {"devices": [gpus]}}}} if config.resources.gpus else {}),
        "user": f"{pod.USER_ID}:{pod.USER_ID}",
        "read_only": True,
        "tmpfs": ["/tmp"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
    }


def _mount(source: str, target: str) -> dict[str, Any]:
    return {
        "type": "bind",
        "source": source,
        "target": target,
        "read_only": True,
        "bind": {"create_host_path": False},
    }


def _ask(path: str) -> str:
    """A line of bash that fails unless a GET of `path` is answered with 200."""
    return (
        f"exec 3<>/dev/tcp/127.0.0.1/{server.REST_PORT} && printf 'GET {path} HTTP/1.0\\r\\n\\r\\n' >&3 "
        '&& read -r _ status _ <&3 && [ "$$status" = 200 ]'
    )


def _prometheus() -> dict[str, Any]:
    return {
        "image": _PROMETHEUS_IMAGE,
        **why("docker compose --profile monitoring up"),
        "profiles": ["monitoring"],
        "ports": ["127.0.0.1:9090:9090"],
        "volumes": [_mount("./prometheus.yaml", "/etc/prometheus/prometheus.yml")],
    }


def _scraping(config: ServingManifestConfig) -> dict[str, Any]:
    target = {"targets": [f"{config.resource_name}:{server.REST_PORT}"]}
    return {
        "scrape_configs": [
            {"job_name": config.resource_name, "metrics_path": server.METRICS_PATH, "static_configs": [target]}
        ]
    }
