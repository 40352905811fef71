"""The steps of a compiled pipeline in containers on this machine, through kfp.local's DockerRunner."""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kfp import local

from components.errors import HeadraceError
from pipelines.config import PipelineConfig
from serving.request_log.files import log_files

# What steps read of this machine beside their artifacts, and where `push` and `deploy` write.
_READ = (("data", "path"), ("validate_", "schema_path"), ("validate_", "drift_from"), ("monitor", "labels"))
_PATHS = (*_READ, ("monitor", "request_log"), ("push", "destination"), ("deploy", "manifests"))
# Where an object store is and who asks, as the AWS SDKs call it, and which run MLflow records.
_PASSED_ON = (
    *("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION"),
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_EC2_METADATA_DISABLED"),
    *("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID"),
)


def with_absolute_paths(config: PipelineConfig, data_path: str | None = None) -> PipelineConfig:
    """The configuration with every path absolute, since a container starts in another folder.

    Args:
        config: The configuration.
        data_path: Takes the place of `data.path`.
    """
    changed: dict[str, Any] = {}
    if data_path is not None:
        changed["data"] = config.data.model_copy(update={"path": data_path})
    for section, field in _PATHS:
        settings = changed.get(section, getattr(config, section))
        if (path := getattr(settings, field)) and "://" not in path and path != "latest":
            changed[section] = settings.model_copy(update={field: os.path.abspath(path)})
    features = dict(config.transform.features)
    for name, path in config.transform.vocabulary_paths.items():
        features[name] = features[name].model_copy(update={"vocabulary_path": os.path.abspath(path)})
    changed["transform"] = config.transform.model_copy(update={"features": features})
    return config.model_copy(update=changed)


@contextlib.contextmanager
def docker_runner(config: PipelineConfig, image: str) -> Iterator[local.DockerRunner]:
    """A runner for `kfp.local` whose containers see the data, may write to `push.destination`, and belong to this user.

    They share this machine's network, so that a server or an object store on it is where the configuration says.

    Args:
        config: As `with_absolute_paths` gives it.
        image: The image of the steps.

    Raises:
        HeadraceError: there is no Docker engine, or no such image.
    """
    try:
        import docker
    except ImportError as error:
        raise HeadraceError("Steps in containers need the package docker: pip install docker.") from error
    from kfp.local import docker_task_handler

    try:
        with contextlib.closing(docker.from_env()) as client:
            _require_image(client, image)
    except docker.errors.DockerException as error:
        where = os.environ.get("DOCKER_HOST", "the usual socket")
        raise HeadraceError(f"No Docker engine answers at {where}: {error}. Start it, or set DOCKER_HOST.") from error
    before = docker_task_handler.run_docker_container
    docker_task_handler.run_docker_container = run_container
    try:
        yield local.DockerRunner(
            mounts=[docker.types.Mount(path, path, "bind", read_only=read_only) for path, read_only in _mounts(config)],
            user=f"{os.getuid()}:{os.getgid()}",
            network_mode="host",
            environment=_environment(config),
        )
    finally:
        docker_task_handler.run_docker_container = before


def run_container(client: Any, image: str, command: list[str], volumes: Mapping[str, Any], **arguments: Any) -> int:
    """Run a container to its end, print what it writes, and return its exit code.

    kfp's own has the container removed as it ends and takes one that is gone for a success: a step that failed fast
    was SUCCESS (https://github.com/kubeflow/pipelines/issues/13332). Here it is asked first.
    """
    container = client.containers.run(image, command, detach=True, volumes=volumes, **arguments)
    try:
        for line in _lines(container.logs(stream=True)):
            print(line)
        return int(container.wait()["StatusCode"])
    finally:
        container.remove(force=True)


def _lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """The lines of a log that comes in pieces of any length."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)
    if rest:
        yield rest.decode(errors="replace")


def _require_image(client: Any, image: str) -> None:
    import docker

    try:
        client.images.get(image)
    except docker.errors.ImageNotFound:
        try:
            client.images.pull(image)
        except docker.errors.APIError as error:
            raise HeadraceError(
                f"--image: the Docker engine has no {image} and cannot pull it: {error.explanation or error}. "
                "Build it with `headrace image build`."
            ) from error


def _environment(config: PipelineConfig) -> dict[str, str]:
    """The variables that a step reads: those that the configuration names, and `_PASSED_ON`."""
    named = re.findall(r'"\$(\w+)"', config.model_dump_json())
    if config.registry is not None and config.registry.token_env is not None:
        named.append(config.registry.token_env)
    # The user of the containers need not be one that the image knows, with a home.
    return {name: os.environ[name] for name in (*_PASSED_ON, *named) if name in os.environ} | {"HOME": "/tmp"}


def _mounts(config: PipelineConfig) -> Iterator[tuple[str, bool]]:
    """Each path that containers need, and whether it is for reading only."""
    destination = config.push.destination
    if "://" not in destination:
        Path(destination).mkdir(parents=True, exist_ok=True)
        yield destination, False
    if config.deploy.manifests:
        yield os.path.dirname(config.deploy.manifests), False  # the folder itself is replaced
    paths = [path for section, field in _READ if (path := getattr(getattr(config, section), field))]
    paths += config.transform.vocabulary_paths.values()
    if config.monitor.request_log:
        paths += map(str, log_files(config.monitor.request_log))
    for path in dict.fromkeys(paths):
        while glob.has_magic(path):
            path = os.path.dirname(path)
        # What does not exist is told by the step that needs it, as in the other runners.
        if os.path.exists(path) and not Path(path).is_relative_to(destination):
            yield path, True
