"""How the pipeline runs on Kubeflow: pods, retries, caching, deadlines. It is read when the pipeline is compiled.

No step sees any of it, so that it changes no artifact, no fingerprint and no cache key.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, field_validator, model_validator

from components.config import Count, Section, TrainingJobConfig
from components.errors import did_you_mean
from pipelines.steps import STEPS

# Tasks of the Kubeflow pipeline that are no steps: what the data is, a trial of `tune`, a form of `export`, the end.
FINGERPRINT, ENCODE, TRIAL, CONVERT, SUMMARY = "fingerprint", "encode", "trial", "convert", "summary"
TASKS = (*(step.name for step in STEPS), FINGERPRINT, ENCODE, TRIAL, CONVERT, SUMMARY)

# What kfp takes (kfp.dsl.PipelineTask), which is less than Kubernetes does.
_MEMORY = re.compile(r"(\d+)(?:([EPTGMK])(i?))?")
_CPU = re.compile(r"(\d+\.?\d*|\.\d+)(m?)")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_OBJECT_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}


def _number_as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _memory(text: str) -> str:
    if _MEMORY.fullmatch(text) is None:
        near = re.fullmatch(r"(\d+)\s*([EPTGMKk])(i?)B?", text)
        unit = near and near[2].upper()
        meant = f" Did you mean {near[1]}{unit}i (powers of 1024) or {near[1]}{unit} (of 1000)?" if near else ""
        raise ValueError(
            f"{text!r} is no amount of memory: write a whole number and Ki, Mi, Gi, Ti or K, M, G, T, as in 16Gi.{meant}"
        )
    return text


def _cpu(text: str) -> str:
    if _CPU.fullmatch(text) is None:
        raise ValueError(
            f"{text!r} is no amount of CPU: write cores, as in 2 or 0.5, or thousandths of one, as in 500m"
        )
    return text


def _named(kind: str, pattern: re.Pattern[str], rule: str) -> AfterValidator:
    def check(text: str) -> str:
        if pattern.fullmatch(text) is None:
            raise ValueError(f"{text!r} is no {kind}: {rule}")
        return text

    return AfterValidator(check)


_Number = WithJsonSchema({"type": ["string", "number"]})
Memory = Annotated[str, BeforeValidator(_number_as_text), AfterValidator(_memory), _Number]
Cpu = Annotated[str, BeforeValidator(_number_as_text), AfterValidator(_cpu), _Number]
ObjectName = Annotated[
    str, _named("name of a Kubernetes object", _OBJECT_NAME, "lower-case letters, digits, '-' and '.'")
]
EnvName = Annotated[str, _named("name of an environment variable", _ENV_NAME, "letters, digits and '_'")]
MountPath = Annotated[str, _named("place to mount at", re.compile(r"/[^:]+"), "it begins with / and has no colon")]
LabelKey = Annotated[
    str, _named("key of a label", _LABEL_KEY, "letters, digits, '-', '_' and '.', after a domain and / if need be")
]
LabelValue = Annotated[
    str,
    _named("value of a label", _LABEL_VALUE, "at most 63 letters, digits, '-', '_' and '.', none of these at the ends"),
]


class SecretKey(Section):
    """One value of a Kubernetes secret."""

    secret: ObjectName
    key: str


class Toleration(Section):
    """A taint that the pod may run on in spite of it."""

    key: str | None = Field(None, description="Without one: all taints.")
    operator: Literal["Equal", "Exists"] = "Equal"
    value: str | None = None
    effect: Literal["NoExecute", "NoSchedule", "PreferNoSchedule"] | None = Field(
        None, description="Without one: all effects."
    )
    toleration_seconds: Count | None = Field(None, description="NoExecute: how long; default: for ever.")

    @model_validator(mode="after")
    def _is_one_that_kubernetes_takes(self) -> Toleration:
        if self.operator == "Exists" and self.value is not None:
            raise ValueError("operator: Exists compares no value: leave out 'value', or use operator: Equal")
        if self.key is None and self.operator == "Equal":
            raise ValueError("a toleration without a key needs operator: Exists")
        if self.toleration_seconds is not None and self.effect != "NoExecute":
            raise ValueError("toleration_seconds is read with effect: NoExecute only")
        return self


class PodConfig(Section):
    """The pod of a task. What is left out is as in `kubeflow.defaults`; mappings of both are taken together."""

    cpu_request: Cpu | None = None
    cpu_limit: Cpu | None = None
    memory_request: Memory | None = None
    memory_limit: Memory | None = None
    accelerator_type: str | None = Field(None, description="Resource name of an accelerator, as nvidia.com/gpu.")
    accelerator_limit: Count | None = Field(None, description="How many; default: 1.")
    shared_memory: Memory | None = Field(
        None, description="Size of /dev/shm, which counts as memory; of itself it is 64 MB."
    )
    retries: Annotated[int, Field(ge=0)] | None = Field(
        None, description="How often a pod that failed is started anew; default: 2, for summary 0."
    )
    retry_wait_seconds: Count | None = Field(None, description="Before the first retry; twice as long each time.")
    timeout_seconds: Count | None = Field(None, description="After which the pod is ended.")
    env: dict[EnvName, str] = Field({}, description="Environment variables; secrets belong into secret_env.")
    secret_env: dict[EnvName, SecretKey] = Field({}, description="Environment variables out of secrets.")
    secret_volumes: dict[MountPath, ObjectName] = Field({}, description="Path -> secret that is mounted there.")
    volumes: dict[MountPath, ObjectName] = Field(
        {}, description="Path -> PersistentVolumeClaim that is mounted there, such as that of the data or the models."
    )
    node_selector: dict[LabelKey, LabelValue] = Field({}, description="Labels that the node must have.")
    tolerations: list[Toleration] = Field([], description="Taints of nodes that it may run on all the same.")
    labels: dict[LabelKey, LabelValue] = Field({}, description="Of the pod.")
    annotations: dict[LabelKey, str] = Field({}, description="Of the pod.")
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None

    def over(self, defaults: PodConfig) -> PodConfig:
        """This pod, with what is left out taken from `defaults`."""
        merged: dict[str, Any] = {}
        for name in PodConfig.model_fields:
            own, default = getattr(self, name), getattr(defaults, name)
            if isinstance(own, dict):
                merged[name] = {**default, **own}
            else:
                merged[name] = default if own is None or own == [] else own
        return PodConfig.model_construct(**merged)

    def problems(self) -> str | None:
        """What does not go together, once nothing is left out any more."""
        for name, amount in (("cpu", _cores), ("memory", _bytes)):
            request, limit = getattr(self, f"{name}_request"), getattr(self, f"{name}_limit")
            if request is not None and limit is not None and amount(request) > amount(limit):
                return f"{name}_request {request} is above {name}_limit {limit}"
        if self.accelerator_limit is not None and self.accelerator_type is None:
            return "accelerator_limit needs accelerator_type, such as nvidia.com/gpu"
        if twice := sorted({*self.env} & {*self.secret_env}):
            return f"{twice[0]} is in both env and secret_env: leave out one"
        if twice := sorted({*self.volumes} & {*self.secret_volumes}):
            return f"{twice[0]} is in both volumes and secret_volumes: leave out one"
        return None


class DefaultPodConfig(PodConfig):
    """The pod of every task, but for what `kubeflow.steps` says of it."""

    cpu_request: Cpu | None = "1"
    memory_request: Memory | None = "2Gi"
    retries: Annotated[int, Field(ge=0)] = Field(
        2, description="How often a pod that failed is started anew; never that of summary, which would notify twice."
    )
    retry_wait_seconds: Count = Field(30, description="Before the first retry; twice as long each time.")


class WorkspaceConfig(Section):
    """A volume that all tasks of a run share; the steps note there what became of them, for summary and notification."""

    size: Memory = "1Gi"
    storage_class: str | None = Field(None, description="Default: the cluster's.")
    access_modes: list[Literal["ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod"]] = Field(
        [], description="Default: the cluster's. Tasks on several nodes need ReadWriteMany."
    )


class KubeflowConfig(Section):
    """How the pipeline runs on Kubeflow; no step sees any of it."""

    image: str | None = Field(
        None,
        description="Image of every step; default: headrace:<version>. With a digest (name@sha256:...) the cache knows "
        "when it changed.",
    )
    image_pull_secrets: list[ObjectName] = Field([], description="Secrets with which the image is pulled.")
    cache: bool = Field(True, description="Take what an earlier run made of the same data, code and configuration.")
    ingest_pods: Annotated[int, Field(ge=1, le=100)] = Field(
        1,
        description="Encode the examples in as many pods; each reads all of the data and writes its share. Worth it from "
        "millions of rows on.",
    )
    parallel_export: bool = Field(
        False, description="Convert each of export.formats in a pod of its own; worth it where that takes minutes."
    )
    pipeline_root: str | None = Field(
        None, description="Where artifacts are kept, as s3://bucket/path; default: the place set up in the cluster."
    )
    workspace: WorkspaceConfig | None = None
    training_job: TrainingJobConfig | None = Field(
        None,
        description="Train in a job of its own, each worker a pod as steps.train says; default: in the step's pod.",
    )
    ttl_seconds_after_finished: Count | None = Field(
        None, description="How long the workflow of a run is kept in the cluster."
    )
    ttl_seconds_after_success: Count | None = None
    ttl_seconds_after_failure: Count | None = None
    active_deadline_seconds: Count | None = Field(None, description="After which a run is ended.")
    defaults: DefaultPodConfig = DefaultPodConfig()
    steps: dict[str, PodConfig] = Field(
        {}, description=f"Step -> its pod. Beside the steps: {FINGERPRINT}, {ENCODE}, {TRIAL}, {CONVERT} and {SUMMARY}."
    )

    @field_validator("pipeline_root")
    @classmethod
    def _is_an_address(cls, root: str | None) -> str | None:
        if root is not None and "://" not in root:
            raise ValueError(f"must be the address of an object store, such as s3://bucket/path, received {root!r}")
        return root

    @field_validator("steps")
    @classmethod
    def _exist(cls, steps: dict[str, PodConfig]) -> dict[str, PodConfig]:
        for name in steps:
            if name not in TASKS:
                raise ValueError(f"there is no step '{name}'.{did_you_mean(name, TASKS)}".rstrip("."))
        if SUMMARY in steps and steps[SUMMARY].retries:
            raise ValueError(f"{SUMMARY} is not retried, for it would notify twice: leave out {SUMMARY}.retries")
        return steps

    @model_validator(mode="after")
    def _pods_can_run(self) -> KubeflowConfig:
        for name in TASKS:
            if problem := self.pod(name).problems():
                where = f"steps.{name}" if name in self.steps else "defaults"
                raise ValueError(f"{where}: {problem}")
        return self

    @model_validator(mode="after")
    def _workers_get_what_they_need(self) -> KubeflowConfig:
        if self.training_job is None:
            return self
        if self.workspace is None:
            raise ValueError(
                "training_job needs a volume for its workers: set workspace: {access_modes: [ReadWriteMany]}"
            )
        if self.pod("train").shared_memory is not None:
            raise ValueError("shared_memory does not reach the workers of training_job: leave it out of steps.train")
        return self

    def pod(self, task: str) -> PodConfig:
        """The pod of a task, nothing left out."""
        pod = self.steps.get(task, PodConfig()).over(self.defaults)
        return pod.model_copy(update={"retries": 0}) if task == SUMMARY else pod

    def on_this_machine(self) -> KubeflowConfig:
        """The same pipeline for `kfp.local`, which has no pods and would wait before each retry."""
        kept = {"ingest_pods": self.ingest_pods, "parallel_export": self.parallel_export}
        return KubeflowConfig(**kept, defaults=DefaultPodConfig(retries=0))


def _cores(text: str) -> Decimal:
    return Decimal(text[:-1]) / 1000 if text.endswith("m") else Decimal(text)


def _bytes(text: str) -> int:
    number, unit, binary = _MEMORY.fullmatch(text).groups()  # type: ignore[union-attr]
    return int(number) * (1024 if binary else 1000) ** _POWERS[unit or ""]
