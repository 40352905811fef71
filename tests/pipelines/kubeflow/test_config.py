"""What may stand in `kubeflow`, and what a pod gets of defaults and its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from components.errors import ConfigError
from pipelines.config import load_config, resolved
from pipelines.kubeflow.config import TASKS, KubeflowConfig
from pipelines.steps import STEPS
from tests.pipelines import fakes


@pytest.mark.parametrize(
    ("kubeflow", "text"),
    [
        (
            {"steps": {"train": {"memory_limit": "16GB"}}},
            "kubeflow.steps.train.memory_limit: '16GB' is no amount of memory: write a whole number and Ki, Mi, Gi, Ti or "
            "K, M, G, T, as in 16Gi. Did you mean 16Gi (powers of 1024) or 16G (of 1000)?",
        ),
        ({"defaults": {"memory_limit": "lots"}}, "kubeflow.defaults.memory_limit: 'lots' is no amount of memory"),
        ({"defaults": {"cpu_limit": "2 cores"}}, "kubeflow.defaults.cpu_limit: '2 cores' is no amount of CPU"),
        ({"steps": {"evalute": {}}}, "kubeflow.steps: there is no step 'evalute'. Did you mean 'evaluate'?"),
        ({"steps": {"train": {"memory": "1Gi"}}}, "kubeflow.steps.train.memory: there is no such key. Did you mean"),
        (
            {"steps": {"train": {"memory_request": "16Gi", "memory_limit": "8G"}}},
            "kubeflow: steps.train: memory_request 16Gi is above memory_limit 8G",
        ),
        ({"defaults": {"cpu_request": "1500m", "cpu_limit": 1}}, "defaults: cpu_request 1500m is above cpu_limit 1"),
        ({"steps": {"train": {"accelerator_limit": 2}}}, "accelerator_limit needs accelerator_type"),
        ({"steps": {"summary": {"retries": 1}}}, "kubeflow.steps: summary is not retried, for it would notify twice"),
        ({"defaults": {"env": {"1A": "x"}}}, "'1A' is no name of an environment variable"),
        ({"defaults": {"env": {"A": "x"}, "secret_env": {"A": {"secret": "s", "key": "k"}}}}, "A is in both env and"),
        ({"defaults": {"volumes": {"data": "claim"}}}, "'data' is no place to mount at: it begins with /"),
        ({"defaults": {"secret_volumes": {"/etc/s": "My_Secret"}}}, "'My_Secret' is no name of a Kubernetes object"),
        ({"defaults": {"labels": {"team": "a b"}}}, "'a b' is no value of a label"),
        (
            {"defaults": {"tolerations": [{"key": "gpu", "operator": "Exists", "value": "x"}]}},
            "Exists compares no value",
        ),
        ({"defaults": {"image_pull_policy": "always"}}, "'always' is none of: Always, IfNotPresent, Never"),
        ({"pipeline_root": "bucket/path"}, "must be the address of an object store, such as s3://bucket/path"),
        ({"workspace": {"size": "10GB"}}, "kubeflow.workspace.size: '10GB' is no amount of memory"),
        ({"active_deadline_seconds": 0}, "kubeflow.active_deadline_seconds: expected"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else "",
)
def test_what_is_wrong_is_said_with_its_place(kubeflow: dict[str, Any], text: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(fakes.settings(kubeflow=kubeflow)))
    with pytest.raises(ConfigError) as raised:
        load_config(tmp_path / "c.yaml")
    assert text in str(raised.value)


@pytest.mark.parametrize(
    ("notify", "text"),
    [
        ({"slack": "https://hooks.slack.com/x"}, "notify.slack: is a secret: write $NAME, and put it into"),
        ({"webhook": "hooks.example.com"}, "notify.webhook: must begin with http:// or https://, or be $NAME"),
        ({"email": {"host": "h", "sender": "s", "recipients": ["r"], "user": "u", "password": "p"}}, "is a secret"),
        ({"email": {"host": "h", "sender": "s", "recipients": ["r"], "user": "u"}}, "give both user and password"),
        (
            {
                "email": {
                    "host": "h",
                    "sender": "s",
                    "recipients": ["r"],
                    "user": "u",
                    "password": "$P",
                    "security": "none",
                }
            },
            "a password is not sent in the clear",
        ),
        ({"when": ["fail"]}, "notify.when.0: 'fail' is none of: succeeded, not_blessed, failed, cancelled"),
        ({"name": "x"}, "notify.name"),
    ],
    ids=["slack", "webhook", "password", "user", "clear", "when", "inherited"],
)
def test_what_is_wrong_with_a_notification_is_said(notify: dict[str, Any], text: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(fakes.settings(notify=notify)))
    with pytest.raises(ConfigError) as raised:
        load_config(tmp_path / "c.yaml")
    assert text in str(raised.value)
    assert "hooks.slack.com" not in str(raised.value)


def test_a_pod_takes_from_the_defaults_what_it_does_not_say() -> None:
    config = KubeflowConfig.model_validate(
        {
            "defaults": {"cpu_limit": 4, "labels": {"team": "a", "tier": "x"}, "tolerations": [{"operator": "Exists"}]},
            "steps": {
                "train": {
                    "cpu_limit": "8",
                    "labels": {"tier": "gpu"},
                    "retries": 0,
                    "accelerator_type": "nvidia.com/gpu",
                }
            },
        }
    )
    train, push = config.pod("train"), config.pod("push")
    assert (train.cpu_limit, push.cpu_limit) == ("8", "4")
    assert (train.retries, push.retries, config.pod("summary").retries) == (0, 2, 0)
    assert (train.labels, push.labels) == ({"team": "a", "tier": "gpu"}, {"team": "a", "tier": "x"})
    assert train.memory_request == push.memory_request == "2Gi"
    assert train.tolerations == push.tolerations != []
    assert (train.accelerator_type, push.accelerator_type) == ("nvidia.com/gpu", None)


def test_the_resolved_configuration_means_the_same(tmp_path: Path) -> None:
    kubeflow = {"defaults": {"memory_request": "4Gi"}, "steps": {"train": {"cpu_limit": 2}}, "image": "a/b@sha256:1"}
    config = fakes.config_of(kubeflow=kubeflow)
    (tmp_path / "c.yaml").write_text(resolved(config))
    again = load_config(tmp_path / "c.yaml")
    assert again == config
    assert again.kubeflow.pod("train").memory_request == "4Gi"


def test_no_step_sees_how_it_runs_or_who_is_told() -> None:
    plain = fakes.config_of()
    other = fakes.config_of(
        kubeflow={"image": "x", "steps": {"train": {"cpu_limit": 2}}}, notify={"webhook": "https://example.com"}
    )
    for step in STEPS:
        assert plain.step_config(step.section) == other.step_config(step.section)


def test_every_step_may_have_a_pod_of_its_own() -> None:
    assert {step.name for step in STEPS} < set(TASKS)
    KubeflowConfig.model_validate({"steps": {name: {"memory_limit": "8Gi"} for name in TASKS}})
