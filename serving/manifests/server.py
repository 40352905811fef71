"""What a model server is told, on every platform: flags, config files, paths of its own.

The flags are those of tensorflow_serving/model_servers/main.cc; the embedded server takes the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from google.protobuf import text_format

from serving.manifests.config import ServingManifestConfig, canary_replicas
from serving.protos import ModelServerConfig

GRPC_PORT = 8500
REST_PORT = 8501
METRICS_PATH = "/monitoring/prometheus/metrics"

MODELS_FOLDER = "/etc/serving/models"  # of the model config, which the server reads again and again
SERVER_FOLDER = "/etc/serving/server"  # of what it reads once
MODEL_CONFIG_POLL_SECONDS = 30
GRPC_CONNECTION_AGE_SECONDS = 60


@dataclass(frozen=True)
class Track:
    """The replicas that serve the same versions.

    Attributes:
        name: stable or canary.
        versions: The versions they serve; empty: the newest one there.
        labels: Label -> version.
        min_replicas: How many pods there are at least.
        max_replicas: How many at most.
        weight: Share of the requests in percent, where a gateway weighs them.
    """

    name: str
    versions: tuple[int, ...]
    labels: Mapping[str, int]
    min_replicas: int
    max_replicas: int
    weight: int = 100


def tracks(config: ServingManifestConfig) -> list[Track]:
    """The stable replicas, and those of the canary if it has its own."""
    stable, replicas = config.stable_version, config.replicas
    versions = () if stable is None else (stable,)
    labels = {} if stable is None else {"stable": stable}
    if config.canary_on_trial is None:
        return [Track("stable", versions, labels, replicas.min, replicas.max)]
    version, canary = config.canary_on_trial
    canary_label = {"canary": version}
    if canary.method == "labels":
        both = (*versions, version)
        return [Track("stable", both, labels | canary_label, replicas.min, replicas.max)]
    least, most = (canary_replicas(number, canary.percent) for number in (replicas.min, replicas.max))
    return [
        Track("stable", versions, labels, replicas.min, replicas.max, 100 - canary.percent),
        Track("canary", (version,), canary_label, least, most, canary.percent),
    ]


def base_path(config: ServingManifestConfig) -> str:
    """Where the versions of the model lie in the container."""
    return f"/models/{config.model_name}"


def model_config_files(config: ServingManifestConfig, track: Track) -> dict[str, str]:
    """The file that says which versions of the model are served: name -> text."""
    server_config = ModelServerConfig()
    model = server_config.model_config_list.config.add(
        name=config.model_name, base_path=base_path(config), model_platform="tensorflow"
    )
    if track.versions:
        model.model_version_policy.specific.versions.extend(track.versions)
    else:
        model.model_version_policy.latest.num_versions = 1
    for label, version in track.labels.items():
        model.version_labels[label] = version
    return {"models.config": text_format.MessageToString(server_config)}


def server_config_files(config: ServingManifestConfig) -> dict[str, str]:
    """The files that a server reads once, at its start: name -> text.

    Their messages are in no Python package: tensorflow_serving/config/monitoring_config.proto,
    tensorflow_serving/servables/tensorflow/session_bundle_config.proto.
    """
    files = {"monitoring.config": f'prometheus_config {{\n  enable: true\n  path: "{METRICS_PATH}"\n}}\n'}
    if config.batching is not None:
        batching = config.batching
        wrapped = {
            "max_batch_size": batching.max_batch_size,
            "batch_timeout_micros": batching.batch_timeout_micros,
            "max_enqueued_batches": batching.max_enqueued_batches,
            "num_batch_threads": batching.num_batch_threads or config.num_threads,
        }
        lines = [f"{name} {{ value: {value} }}" for name, value in wrapped.items()]
        lines += [f"allowed_batch_sizes: {size}" for size in batching.allowed_batch_sizes]
        lines += ["pad_variable_length_inputs: true"] if batching.pad_variable_length_inputs else []
        files["batching.config"] = "\n".join(lines) + "\n"
    return files


def command(config: ServingManifestConfig) -> list[str]:
    """What the container runs.

    Not the entry point of TF Serving's image, a shell script that adds `--model_name` and does not hand on signals.
    """
    return ["python", "-m", "serving"] if config.server == "embedded" else ["/usr/bin/tensorflow_model_server"]


def flags(config: ServingManifestConfig) -> list[str]:
    """The server's arguments."""
    values: dict[str, object] = {
        "port": GRPC_PORT,
        "rest_api_port": REST_PORT,
        # Clients keep a gRPC connection for ever: without an end to it, new replicas would get no requests.
        "grpc_channel_arguments": f"grpc.max_connection_age_ms={GRPC_CONNECTION_AGE_SECONDS * 1000}",
        "rest_api_timeout_in_ms": config.request_timeout_seconds * 1000,
        "model_config_file": f"{MODELS_FOLDER}/models.config",
        "model_config_file_poll_wait_seconds": MODEL_CONFIG_POLL_SECONDS,
        # A label is read before its version is loaded, at the start and when a canary comes.
        "allow_version_labels_for_unavailable_models": "true",
        "monitoring_config_file": f"{SERVER_FOLDER}/monitoring.config",
    }
    if config.batching is not None:
        values |= {"enable_batching": "true", "batching_parameters_file": f"{SERVER_FOLDER}/batching.config"}
    # Else TensorFlow makes a thread for each core of the node, however few of them the pod may use.
    values["tensorflow_intra_op_parallelism"] = config.num_threads
    if config.server == "embedded":
        values["drain_grace_seconds"] = config.request_timeout_seconds
    else:
        values["tensorflow_inter_op_parallelism"] = config.num_threads
    return [f"--{name}={value}" for name, value in values.items()]


def ready_path(config: ServingManifestConfig, track: Track) -> str:
    """A path that answers 200 as soon as, and as long as, the version that must serve is loaded.

    The status page answers 200 for a model that is loading or has failed, too (get_model_status_impl.cc), and
    /healthz/ready does not know which version is the stable one; metadata needs it loaded.
    """
    label = f"/labels/{track.name}" if track.labels else ""
    return f"/v1/models/{config.model_name}{label}/metadata"


def live_path(config: ServingManifestConfig) -> str:
    """A path that answers 200 as long as the server answers at all; a model that fails is no reason to restart it."""
    return "/healthz/live" if config.server == "embedded" else f"/v1/models/{config.model_name}"
