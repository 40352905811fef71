"""ServingManifestConfig: everything that the manifests of a served model follow from."""

from __future__ import annotations

import importlib.metadata
import math
import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

TF_SERVING_VERSION = "2.20.0"

_DNS_LABEL = r"[a-z]([a-z0-9-]*[a-z0-9])?"
# KServe makes `<name>-predictor-canary` of it, and a DNS label has 63 characters.
_MAX_NAME_LENGTH = 40
_PINNED_IMAGE = re.compile(r"[\w.\-/:]+(:(?!latest$)[\w.\-]+|@sha256:[0-9a-f]{64})")
_URI_FORMS = "pvc://claim/path, s3://bucket/path, gs://bucket/path or file:///path"

Version = Annotated[int, Field(ge=1)]
DnsLabel = Annotated[str, Field(pattern=rf"^{_DNS_LABEL}$", max_length=63)]


class Section(BaseModel):
    """Base of every part: unknown keys are errors, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class CanaryConfig(Section):
    """A second version that serves beside the stable one."""

    version: Version | None = Field(None, description="Default: none for now; the method is for the next one.")
    method: Literal["labels", "replicas", "gateway"] = Field(
        "labels",
        description="labels: both versions in every replica, and a request names the label it wants; replicas: a second "
        "Deployment behind the same Service; gateway: a second Deployment that a Gateway API route weighs.",
    )
    percent: int = Field(10, ge=1, le=99, description="Share of the requests; with labels the clients decide.")


class ReplicasConfig(Section):
    """How many pods serve."""

    min: int = Field(2, ge=1)
    max: int = Field(4, ge=1, description="Equal to min: no autoscaler.")
    target_cpu_percent: int = Field(70, ge=1, le=100, description="Of the CPU request, over all replicas.")

    @model_validator(mode="after")
    def _is_a_range(self) -> ReplicasConfig:
        if self.max < self.min:
            raise ValueError(f"replicas.max is {self.max}, below replicas.min, which is {self.min}")
        return self


class ResourcesConfig(Section):
    """What one pod gets."""

    cpu: float = Field(1, gt=0, description="Cores that are requested; the server's thread pools follow it.")
    memory: str = Field("2Gi", pattern=r"^[1-9]\d*(Mi|Gi)$", description="Request and limit.")
    gpus: int = Field(0, ge=0, description="NVIDIA GPUs.")


class BatchingConfig(Section):
    """Dynamic batching; the fields are those of TF Serving's BatchingParameters."""

    max_batch_size: int = Field(32, ge=1)
    batch_timeout_micros: int = Field(1000, ge=0)
    max_enqueued_batches: int = Field(100, ge=1)
    num_batch_threads: int | None = Field(None, ge=1, description="Default: the cores of a pod, rounded up.")
    allowed_batch_sizes: list[int] = Field([], description="Ascending; the last is max_batch_size.")
    pad_variable_length_inputs: bool = False

    @model_validator(mode="after")
    def _sizes_are_ascending(self) -> BatchingConfig:
        sizes = self.allowed_batch_sizes
        if sizes and (sizes != sorted(set(sizes)) or sizes[0] < 1 or sizes[-1] != self.max_batch_size):
            raise ValueError(
                f"allowed_batch_sizes must ascend and end with max_batch_size, {self.max_batch_size}; received {sizes}"
            )
        return self


class StorageConfig(Section):
    """How a model in an object store is copied into the pods; TF Serving's image cannot read s3:// itself."""

    copy_image: str = Field("rclone/rclone:1.69.1", description="Image with rclone and a shell.")
    poll_seconds: int = Field(60, ge=1, description="Seconds between looks for new versions.")
    environment: dict[str, str] = Field(
        {}, description="rclone's variables, over our own: RCLONE_S3_PROVIDER, RCLONE_S3_ENDPOINT, ..."
    )
    credentials_secret: DnsLabel | None = Field(
        None, description="Secret whose keys become variables, such as AWS_ACCESS_KEY_ID."
    )
    service_account_annotations: dict[str, str] = Field(
        {}, description="Instead of a Secret: what binds the ServiceAccount to a cloud identity."
    )

    @field_validator("copy_image")
    @classmethod
    def _is_pinned(cls, image: str) -> str:
        return _pinned(image)


class GatewayConfig(Section):
    """The Gateway (Gateway API) through which requests come."""

    name: DnsLabel
    namespace: DnsLabel | None = Field(None, description="Default: that of the model.")
    hostnames: list[str] = Field([], description="Of REST; give each model its own.")
    grpc_hostnames: list[str] = Field([], description="Of gRPC. Default: no gRPC through the gateway.")

    @model_validator(mode="after")
    def _hostnames_are_apart(self) -> GatewayConfig:
        if self.grpc_hostnames and (not self.hostnames or set(self.hostnames) & set(self.grpc_hostnames)):
            raise ValueError(
                "a Gateway keeps REST and gRPC apart by host name: give gateway.hostnames and gateway.grpc_hostnames, "
                f"none in both; received {self.hostnames} and {self.grpc_hostnames}"
            )
        return self


class ServingManifestConfig(Section):
    """One model and where it serves.

    Example:
        >>> ServingManifestConfig(model_name="chicago_taxi", model_uri="pvc://models/chicago_taxi").resource_name
        'chicago-taxi'
    """

    model_name: str = Field(description="Name of the model in requests.")
    model_uri: str = Field(description=f"Folder that holds the numbered versions: {_URI_FORMS}.")
    stable_version: Version | None = Field(None, description="Default: the newest one there, followed as it changes.")
    canary: CanaryConfig | None = None
    name: Annotated[str, Field(pattern=rf"^{_DNS_LABEL}$", max_length=_MAX_NAME_LENGTH)] | None = Field(
        None, description="Name of the Kubernetes objects. Default: model_name in lower case, with - for _ and dots."
    )
    namespace: DnsLabel = Field("serving", description="Of the overlay production; that of dev ends in -dev.")
    server: Literal["tensorflow_serving", "embedded"] = "tensorflow_serving"
    image: str | None = Field(None, description="With a tag or digest. Default: the server's release known to work.")
    replicas: ReplicasConfig = ReplicasConfig()
    resources: ResourcesConfig = ResourcesConfig()
    batching: BatchingConfig | None = Field(None, description="Default: no batching.")
    request_timeout_seconds: int = Field(30, ge=1, description="Of a REST request; a stopping pod serves as long.")
    load_timeout_seconds: int = Field(600, ge=10, description="A pod that has not loaded its model by then restarts.")
    ingress_namespaces: list[DnsLabel] = Field(
        [], description="Namespaces whose pods may send requests, or scrape metrics, besides the model's own."
    )
    storage: StorageConfig = StorageConfig()
    gateway: GatewayConfig | None = None
    kserve_mode: Literal["standard", "knative"] = Field(
        "standard", description="How the KServe of the cluster deploys; the two canaries are written differently."
    )

    @field_validator("model_name")
    @classmethod
    def _is_a_model_name(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError(
                f"{name!r} is no name that works in a URL and a path: letters, digits, '_', '-' and dots, a letter or "
                "digit first"
            )
        return name

    @field_validator("model_uri")
    @classmethod
    def _is_a_known_place(cls, uri: str) -> str:
        parts = urlsplit(uri)
        has_host = parts.scheme in ("pvc", "s3", "gs") and re.fullmatch(r"[a-z0-9][a-z0-9.-]*", parts.netloc)
        if not has_host and not (parts.scheme == "file" and not parts.netloc and parts.path.startswith("/")):
            raise ValueError(f"expected {_URI_FORMS}; received {uri!r}")
        if ".." in parts.path.split("/") or parts.query or parts.fragment:
            raise ValueError(f"expected a plain path without '..', '?' and '#'; received {uri!r}")
        return uri.rstrip("/")

    @field_validator("image")
    @classmethod
    def _is_pinned(cls, image: str | None) -> str | None:
        return None if image is None else _pinned(image)

    @model_validator(mode="after")
    def _has_a_resource_name(self) -> ServingManifestConfig:
        if self.name is None and not (
            re.fullmatch(_DNS_LABEL, self.resource_name) and len(self.resource_name) <= _MAX_NAME_LENGTH
        ):
            raise ValueError(
                f"model_name {self.model_name!r} gives no name for Kubernetes objects, which have up to "
                f"{_MAX_NAME_LENGTH} lower-case letters, digits and '-', a letter first: set 'name'"
            )
        return self

    @model_validator(mode="after")
    def _canary_fits(self) -> ServingManifestConfig:
        if self.canary is not None and self.canary.method == "gateway" and self.gateway is None:
            raise ValueError("canary.method gateway needs gateway.name, the Gateway that weighs the two")
        if self.canary is None or self.canary.version is None:
            return self
        if self.stable_version is None:
            raise ValueError("a canary needs a stable_version beside it: without one the newest version serves alone")
        if self.canary.version == self.stable_version:
            raise ValueError(f"canary.version and stable_version are both {self.stable_version}")
        if self.canary.method == "replicas":
            self._check_share(self.canary.percent)
        return self

    def _check_share(self, percent: int) -> None:
        stable = self.replicas.min
        canary = canary_replicas(stable, percent)
        share = 100 * canary / (stable + canary)
        if abs(share - percent) > 5:
            needed = max(1, round((100 - percent) / percent))
            raise ValueError(
                f"canary.percent {percent} cannot be had by replicas: {canary} beside {stable} is {share:.0f} percent. "
                f"Set replicas.min to {needed}, or canary.method to gateway"
            )

    @model_validator(mode="after")
    def _storage_has_a_reader(self) -> ServingManifestConfig:
        if self.storage != StorageConfig() and self.scheme not in ("s3", "gs"):
            raise ValueError(f"nothing is copied from {self.model_uri}, so nothing reads 'storage': leave it out")
        return self

    @property
    def resource_name(self) -> str:
        """Name of the Kubernetes objects."""
        return self.name or re.sub(r"[._]", "-", self.model_name.lower())

    @property
    def canary_on_trial(self) -> tuple[int, CanaryConfig] | None:
        """The version on trial and how it is, or None."""
        return None if self.canary is None or self.canary.version is None else (self.canary.version, self.canary)

    @property
    def scheme(self) -> str:
        """pvc, s3, gs or file."""
        return urlsplit(self.model_uri).scheme

    @property
    def location(self) -> tuple[str, str]:
        """Claim or bucket (empty for file://), and the path in it without a leading slash."""
        parts = urlsplit(self.model_uri)
        return parts.netloc, parts.path.lstrip("/")

    @property
    def server_image(self) -> str:
        """The image to run, pinned."""
        if self.image is not None:
            return self.image
        if self.server == "embedded":
            return f"headrace:{importlib.metadata.version('headrace')}"
        return f"tensorflow/serving:{TF_SERVING_VERSION}{'-gpu' if self.resources.gpus else ''}"

    @property
    def num_threads(self) -> int:
        """The cores of a pod, rounded up."""
        return math.ceil(self.resources.cpu)


def with_versions(
    config: ServingManifestConfig,
    *,
    stable_version: int,
    canary_version: int | None = None,
    canary_percent: int = 0,
) -> ServingManifestConfig:
    """The config at one step of a rollout, checked as if it had been written so.

    Args:
        config: Where the model serves; the method of its canary is kept.
        stable_version: The version that serves.
        canary_version: The one on trial, if any.
        canary_percent: Its share of the requests; 0 is no canary.

    Raises:
        pydantic.ValidationError: the share or the versions do not fit.

    Example:
        >>> render(with_versions(config, stable_version=3, canary_version=4, canary_percent=10), "kubernetes")
    """
    canary = CanaryConfig(method=config.canary.method) if config.canary is not None else CanaryConfig()
    if canary_version is not None and canary_percent > 0:
        canary = canary.model_copy(update={"version": canary_version, "percent": canary_percent})
    changes = {"stable_version": stable_version, "canary": None if canary == CanaryConfig() else canary.model_dump()}
    return ServingManifestConfig.model_validate(config.model_dump() | changes)


def canary_replicas(stable: int, percent: int) -> int:
    """The canary's replicas beside so many stable ones, so that it gets `percent` of requests spread evenly."""
    return max(1, round(stable * percent / (100 - percent)))


def _pinned(image: str) -> str:
    if not _PINNED_IMAGE.fullmatch(image):
        raise ValueError(
            f"{image!r} is not pinned, so two pods may run different servers: add a tag other than latest, or a digest"
        )
    return image
