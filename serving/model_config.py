"""TF Serving's model config: ModelServerConfig as text in a file, or in a reload request.

The rules and messages are those of tensorflow_serving/model_servers/server_core.cc. A `logging_config` is read over, as
in TF Serving's open build, which has no collector for it.

Example:
    model_config_list {
      config {
        name: "taxi"
        base_path: "/models/taxi"
        model_platform: "tensorflow"
        model_version_policy { specific { versions: 1 versions: 2 } }
        version_labels { key: "stable" value: 1 }
      }
    }
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from serving.errors import ServingError, invalid_argument
from serving.manager import ModelManager
from serving.protos import ModelServerConfig, ModelType, ReloadConfigRequest, ReloadConfigResponse
from serving.served_model import ModelConfig
from serving.versions import VersionPolicy, all_versions, latest, specific

__all__ = ["ConfigFile", "ReloadConfigRequest", "ReloadConfigResponse", "read_config", "requested_configs"]

logger = logging.getLogger(__name__)

PLATFORM = "tensorflow"


def read_config(path: Path) -> list[ModelConfig]:
    """The models that a config file lists.

    Args:
        path: a ModelServerConfig in protobuf's text format.

    Raises:
        ServingError: INVALID_ARGUMENT, naming the file, and the line where its syntax is wrong.
        OSError: it cannot be read.
    """
    try:
        config = text_format.Parse(path.read_bytes(), ModelServerConfig())
        if config.WhichOneof("config") != "model_config_list":
            raise invalid_argument("it has no model_config_list { ... }; leave that empty to serve no model")
        return _model_configs(config.model_config_list)
    except text_format.ParseError as error:
        raise invalid_argument(
            f"{path}: Error parsing text-format tensorflow.serving.ModelServerConfig: {error}"
        ) from error
    except ServingError as error:
        raise ServingError(error.code, f"{path}: {error.message}") from error


def requested_configs(request: Any) -> list[ModelConfig]:
    """The models that a ReloadConfigRequest lists.

    Raises:
        ServingError: INVALID_ARGUMENT, as for a file.
    """
    if request.config.WhichOneof("config") != "model_config_list":
        raise invalid_argument(
            "ServerModelConfig type not supported by HandleReloadConfigRequest. "
            "Only ModelConfigList is currently supported"
        )
    return _model_configs(request.config.model_config_list)


def _model_configs(config_list: Any) -> list[ModelConfig]:
    """The models of a ModelConfigList.

    Raises:
        ServingError: INVALID_ARGUMENT, naming the model and what is wrong with it.
    """
    for name, count in Counter(model.name for model in config_list.config).items():
        if not name:
            raise invalid_argument("a model in model_config_list has no name; requests need one")
        if count > 1:
            raise invalid_argument(f"Illegal to list model {name} multiple times in config list")
    return [_model_config(model) for model in config_list.config]


def _model_config(model: Any) -> ModelConfig:
    platform = model.model_platform or (PLATFORM if model.model_type == ModelType.TENSORFLOW else "")
    if platform != PLATFORM:
        raise invalid_argument(
            f'Model {model.name} requests unsupported platform "{platform}"; write model_platform: "{PLATFORM}"'
        )
    if "://" in model.base_path:
        raise invalid_argument(f"model {model.name}: base_path {model.base_path} is a URI; give a local folder")
    base_path = Path(model.base_path)
    if not base_path.is_absolute():
        raise invalid_argument(
            f"Expected model {model.name} to have an absolute path or URI; got base_path()={model.base_path}"
        )
    return ModelConfig(model.name, base_path, _policy(model.model_version_policy), dict(model.version_labels))


def _policy(policy: Any) -> VersionPolicy:
    choice = policy.WhichOneof("policy_choice")
    if choice == "all":
        return all_versions
    if choice == "specific":
        return specific(*policy.specific.versions)
    return latest(max(policy.latest.num_versions, 1))


class ConfigFile:
    """A config file that the models of a manager follow.

    A gRPC reload holds until the file is read again, as in TF Serving.

    Args:
        path: a ModelServerConfig in protobuf's text format.
        manager: serves what the file lists.
        poll_wait_seconds: time between two looks at the file; 0 reads it once.
    """

    def __init__(self, path: Path, manager: ModelManager, poll_wait_seconds: float) -> None:
        self._path = path
        self._manager = manager
        self._poll_wait_seconds = poll_wait_seconds
        self._stopping = threading.Event()
        self._complaint = ""

    def start(self) -> None:
        """Serve what the file lists, then keep looking at it.

        Raises:
            ServingError: the file is wrong, or a model does not load.
            OSError: the file cannot be read.
        """
        self._manager.reload(read_config(self._path))
        if self._poll_wait_seconds > 0:
            threading.Thread(target=self._poll, name="config-poller", daemon=True).start()

    def _poll(self) -> None:
        while not self._stopping.wait(self._poll_wait_seconds):
            complaint = ""
            try:
                self._manager.reload(read_config(self._path))
            except Exception as error:
                complaint = str(error)
            if complaint and complaint != self._complaint:
                logger.error("the model config %s is not followed: %s", self._path, complaint)
            self._complaint = complaint

    def stop(self) -> None:
        """Look at the file no more."""
        self._stopping.set()
