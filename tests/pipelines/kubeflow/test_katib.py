"""The Katib Experiment of a search: checked by Katib's own models, and its trials by what the trainer makes of them."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from kubeflow_katib_api import models
from pydantic import ValidationError

from components.errors import ConfigError
from components.train.launch import read_config
from pipelines.config import PipelineConfig, resolved
from pipelines.kubeflow import katib
from tests.components.launch.test_manifests import lost_in_typed_models
from tests.pipelines import fakes

RATE = "train.optimizer.learning_rate"
SPACE = {
    RATE: {"low": 1e-4, "high": 1e-2, "log": True},
    "train.epochs": {"low": 2, "high": 9, "step": 3},
    "model.args.dropout": {"low": 0.0, "high": 0.5, "step": 0.25},
    "train.optimizer.name": ["adam", "off"],
    "model.args.hidden_dims": [[8], [8, 8]],
}
TUNE = {"trials": 12, "parallel": 3, "pruner": "none", "space": SPACE}


def config_of(tune: dict[str, Any] | None = None, **sections: Any) -> PipelineConfig:
    return fakes.config_of(tune=TUNE | (tune or {}), seed=5, **sections)


def made(config: PipelineConfig, **options: Any) -> dict[str, Any]:
    return katib.experiment(config, image="headrace:1", run_dir="/runs/tiny", **options)


def is_known(experiment: dict[str, Any]) -> bool:
    """Whether Katib's own models know every field, and each has its type; they leave out what they do not know."""
    try:
        return bool(models.V1beta1Experiment.from_dict(copy.deepcopy(experiment)).to_dict() == experiment)
    except ValidationError:
        return False


def command_of(experiment: dict[str, Any], **values: str) -> list[str]:
    """The command of a trial, as Katib puts it together."""
    spec = experiment["spec"]["trialTemplate"]["trialSpec"]["spec"]
    command = spec["tfReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["command"]
    return [re.sub(r"\$\{trialParameters\.(.+?)\}", lambda name: values[name[1]], part) for part in command]


def test_katibs_own_models_know_every_field() -> None:
    for tune in ({}, {"pruner": "median"}, {"sampler": "random", "metric": "loss"}):
        assert is_known(made(config_of(tune), namespace="team"))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("objective", {"type": "maximize", "metric": "auc"}),
        ("maxTrialCount", "12"),
        ("parameters", [{"name": "a", "feasibleSpace": {"min": 1, "max": "2"}}]),
        ("trialTemplate", {"trialParameters": [{"name": "a", "refers": "b"}]}),
    ],
)
def test_a_mistake_in_each_part_is_seen(place: str, value: Any) -> None:
    experiment = made(config_of())
    experiment["spec"][place] = value
    assert not is_known(experiment)


def test_the_space_is_the_same() -> None:
    spec = made(config_of())["spec"]
    assert [(each["name"], each["parameterType"], each["feasibleSpace"]) for each in spec["parameters"]] == [
        (RATE, "double", {"min": "0.0001", "max": "0.01", "distribution": "logUniform"}),
        ("train.epochs", "int", {"min": "2", "max": "8", "step": "3"}),
        ("model.args.dropout", "double", {"min": "0.0", "max": "0.5", "step": "0.25"}),
        ("train.optimizer.name", "categorical", {"list": ["adam", "'off'"]}),
        ("model.args.hidden_dims", "categorical", {"list": ["[8]", "[8, 8]"]}),
    ]
    assert (spec["maxTrialCount"], spec["parallelTrialCount"]) == (12, 3)
    assert spec["algorithm"] == {
        "algorithmName": "tpe",
        "algorithmSettings": [{"name": "random_state", "value": "5"}],
    }


@pytest.mark.parametrize(
    ("stopping", "metric", "strategy"),
    [(None, "auc", "latest"), ("auc", "auc", "max"), ("loss", "auc", "latest"), ("loss", "loss", "min")],
)
def test_the_value_of_a_trial_is_that_of_the_epoch_whose_weights_are_kept(
    stopping: str | None, metric: str, strategy: str
) -> None:
    train = {"early_stopping": stopping and {"metric": stopping}}
    objective = made(config_of({"metric": metric}, train=train))["spec"]["objective"]
    name = f"validation_{metric}"
    assert objective["metricStrategies"] == [{"name": name, "value": strategy}]
    assert objective["type"] == ("maximize" if metric == "auc" else "minimize")


def test_event_files_are_collected_unless_trials_are_to_be_stopped() -> None:
    spec = made(config_of())["spec"]
    place = spec["metricsCollectorSpec"]["source"]["fileSystemPath"]["path"]
    assert spec["metricsCollectorSpec"]["collector"] == {"kind": "TensorFlowEvent"}
    command = command_of(made(config_of()), **dict.fromkeys(SPACE, "1"))
    assert command[command.index("--model") + 1].startswith(f"{place}/")
    assert "train.tensorboard=true" in command

    stopping = made(config_of({"pruner": "median"}))["spec"]
    assert stopping["metricsCollectorSpec"] == {"collector": {"kind": "StdOut"}}
    assert stopping["earlyStopping"]["algorithmName"] == "medianstop"


def test_a_trial_trains_with_its_values(tmp_path: Path) -> None:
    config = config_of({"pruner": "median"}, train={"callbacks": [{"name": "CSVLogger", "args": {"filename": "a"}}]})
    (tmp_path / "config.yaml").write_text(resolved(config))
    values = {RATE: "0.0034", "train.epochs": "5", "model.args.dropout": "0.25"}
    lists = {"train.optimizer.name": "adam", "model.args.hidden_dims": "[8, 8]"}
    python, _, module, file, *rest = command_of(made(config), **values, **lists)
    assert (python, module, file) == ("python", "components.train.launch", "/runs/tiny/config.yaml")
    train = read_config(tmp_path / "config.yaml", rest[2:])
    assert (train.epochs, train.optimizer.learning_rate, train.optimizer.name) == (5, 0.0034, "adam")
    assert train.model.args == {"dropout": 0.25, "hidden_dims": [8, 8]}
    assert [callback.name for callback in train.callbacks] == ["CSVLogger", "components.train.callbacks:PrintMetrics"]
    assert train.seed == 5


def test_the_job_is_one_that_katib_takes() -> None:
    pods = {"cpu_limit": 4, "volumes": {"/runs": "runs-claim"}, "secret_env": {"KEY": {"secret": "s", "key": "k"}}}
    template = made(config_of(kubeflow={"steps": {"tune": pods}}))["spec"]["trialTemplate"]
    job = template["trialSpec"]
    assert lost_in_typed_models(job) == []
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "TFJob")
    assert "name" not in job.get("metadata", {})
    worker = job["spec"]["tfReplicaSpecs"]["Worker"]
    pod, (container,) = worker["template"]["spec"], worker["template"]["spec"]["containers"]
    assert container["name"] == template["primaryContainerName"]
    assert pod["volumes"] == [{"name": "volume0", "persistentVolumeClaim": {"claimName": "runs-claim"}}]
    assert container["volumeMounts"] == [{"name": "volume0", "mountPath": "/runs"}]
    assert container["resources"]["limits"] == {"cpu": "4"}
    # The collector beside it runs as root.
    assert "runAsNonRoot" not in pod["securityContext"]
    assert container["securityContext"]["runAsNonRoot"] is True
    names = [each["name"] for each in container["env"]]
    assert (worker["replicas"], names) == (1, ["KEY", "TF_CONFIG"])
    several = made(config_of(train={"strategy": "multi_worker", "num_workers": 3}))["spec"]["trialTemplate"]
    worker = several["trialSpec"]["spec"]["tfReplicaSpecs"]["Worker"]
    assert worker["replicas"] == 3
    assert "env" not in worker["template"]["spec"]["containers"][0]


@pytest.mark.parametrize(
    ("tune", "message"),
    [
        ({"trials": 0}, "there is no search: set tune.trials"),
        ({"pruner": "hyperband"}, "Katib stops trials by the median only"),
        ({"space": {"model.args.name": ["a", 'say "b"']}}, "Katib cannot pass on 'say \"b\"'"),
    ],
)
def test_what_katib_cannot_do_is_told(tune: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(config_of(tune))


def test_the_command_writes_a_file_for_kubectl(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(resolved(config_of({"space": {RATE: [0.1, 0.01]}})))
    arguments = [str(tmp_path / "c.yaml"), "--run-dir", "/runs/tiny/", "--output", str(tmp_path / "e.yaml")]
    done = CliRunner().invoke(katib.main, [*arguments, "--image", "mine:2", "tune.trials=4"])
    assert done.exit_code == 0, done.output
    written = yaml.safe_load((tmp_path / "e.yaml").read_text())
    assert written["spec"]["maxTrialCount"] == 4
    assert is_known(written)
    refused = CliRunner().invoke(katib.main, [*arguments, "tune.trials=0"])
    assert refused.exit_code == 2
