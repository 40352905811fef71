"""The search of a configuration as a Katib Experiment: `headrace katib`.

Fields are those of Katib 0.19, pkg/apis/controller/experiments/v1beta1/experiment_types.go and common_types.go.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipelines.exits import reported

if TYPE_CHECKING:
    from components.config import Candidates
    from pipelines.config import PipelineConfig
    from pipelines.kubeflow.config import PodConfig

# Where the event files of a trial are; Katib mounts an empty volume there, which its collector reads.
_METRICS = "/var/log/katib/tfevent"
_PRINTER = "components.train.callbacks:PrintMetrics"


def experiment(config: PipelineConfig, *, image: str, run_dir: str, namespace: str | None = None) -> dict[str, Any]:
    """The Experiment: the space and the sampler of `tune`, and a TFJob for each trial.

    Args:
        config: The experiment; `kubeflow` says what the pods of its step `tune` are like.
        image: What the workers run in.
        run_dir: A run's folder, with `config.yaml`, `examples` and `transform`, as the pods see it.
        namespace: Of the Experiment; default: the one that it is applied to.

    Raises:
        ConfigError: there is no search, or Katib cannot do it.
    """
    from components.errors import ConfigError
    from components.metrics import HIGHER_IS_BETTER
    from components.search_space import num_trials

    tune = config.step_config("tune")
    if not tune.trials:
        raise ConfigError("tune.trials is 0, so there is no search: set tune.trials and tune.space.")
    if tune.pruner == "hyperband":
        raise ConfigError("Katib stops trials by the median only: set tune.pruner to median or none.")
    metric = tune.metric or tune.primary_metric
    name = f"validation_{metric}"
    higher, stopping = HIGHER_IS_BETTER[metric], config.train.early_stopping
    kept = ("max" if higher else "min") if stopping and stopping.metric == metric else "latest"
    trials = num_trials(tune)
    spec: dict[str, Any] = {
        "objective": {
            "type": "maximize" if higher else "minimize",
            "objectiveMetricName": name,
            # Which epoch's weights are kept.
            "metricStrategies": [{"name": name, "value": kept}],
        },
        "algorithm": {"algorithmName": tune.sampler, **_seeded(tune.sampler, tune.seed)},
        "maxTrialCount": trials,
        "parallelTrialCount": min(tune.parallel, trials),
        "maxFailedTrialCount": trials,
        "resumePolicy": "FromVolume",
        "parameters": [_parameter(path, candidates) for path, candidates in tune.space.items()],
        "trialTemplate": {
            "primaryContainerName": "tensorflow",
            "primaryPodLabels": {"training.kubeflow.org/job-role": "master"},
            "trialParameters": [{"name": path, "reference": path} for path in tune.space],
            "trialSpec": _trial(config, image, run_dir),
        },
    }
    if tune.pruner == "median":
        # Katib's collector of event files takes no stopping rules: it has no flag for them, and ends with an error.
        spec["earlyStopping"] = {
            "algorithmName": "medianstop",
            # As Optuna's MedianPruner begins.
            "algorithmSettings": [{"name": "min_trials_required", "value": "5"}, {"name": "start_step", "value": "1"}],
        }
        spec["metricsCollectorSpec"] = {"collector": {"kind": "StdOut"}}
    else:
        spec["metricsCollectorSpec"] = {
            "collector": {"kind": "TensorFlowEvent"},
            "source": {"fileSystemPath": {"path": _METRICS, "kind": "Directory"}},
        }
    metadata = {"name": config.name.lower().replace("_", "-"), **({"namespace": namespace} if namespace else {})}
    return {"apiVersion": "kubeflow.org/v1beta1", "kind": "Experiment", "metadata": metadata, "spec": spec}


def _seeded(sampler: str, seed: int) -> dict[str, Any]:
    settings = [{"name": "random_state", "value": str(seed)}]
    return {} if sampler == "grid" else {"algorithmSettings": settings}


def _parameter(path: str, candidates: Candidates) -> dict[str, Any]:
    from components.config import Range
    from components.search_space import ends_of

    if not isinstance(candidates, Range):
        values = [_in_a_command(value, path) for value in candidates]
        return {"name": path, "parameterType": "categorical", "feasibleSpace": {"list": values}}
    low, high = ends_of(candidates)
    space = {"min": str(low), "max": str(high)}
    if candidates.step is not None:
        space["step"] = str(candidates.step)
    if candidates.log:
        space["distribution"] = "logUniform"
    return {"name": path, "parameterType": "int" if candidates.is_whole else "double", "feasibleSpace": space}


def _in_a_command(value: Any, path: str) -> str:
    """A value as YAML in one line. Katib puts it into the JSON of the trial as it is, so it may not have double quotes."""
    import yaml

    from components.errors import ConfigError

    text = yaml.safe_dump(value, default_flow_style=True, width=2**31).removesuffix("\n...\n").strip()
    if '"' in text or "\\" in text or "\n" in text:
        raise ConfigError(
            f"tune.space.{path}: Katib cannot pass on {value!r}: leave out double quotes and backslashes."
        )
    return text


def _trial(config: PipelineConfig, image: str, run_dir: str) -> dict[str, Any]:
    from components.config import TrainingJobConfig
    from components.launch.manifests import TaskSettings, Work, training_job
    from components.train.cluster import PORT, Cluster

    tune = config.step_config("tune")
    num_workers = config.train.num_workers or 1
    if tune.pruner == "median":
        callbacks = [each.model_dump(mode="json") for each in config.train.callbacks]
        shown = f"train.callbacks={_in_a_command([*callbacks, {'name': _PRINTER}], 'train.callbacks')}"
    else:
        shown = "train.tensorboard=true"
    command = ["python", "-m", "components.train.launch", f"{run_dir}/config.yaml"]
    command += ["--model", f"{_METRICS}/model", shown, *(f"{path}=${{trialParameters.{path}}}" for path in tune.space)]
    work = Work(
        name="",
        namespace="",
        digest="",
        run="",
        image=image,
        command=tuple(command),
        num_workers=num_workers,
        task=TaskSettings.of(_task_config(config.kubeflow.pod("tune"))),
        image_pull_secrets=tuple({"name": name} for name in config.kubeflow.image_pull_secrets),
    )
    job = training_job(TrainingJobConfig(kind="tfjob"), work)
    pod = job["spec"]["tfReplicaSpecs"]["Worker"]["template"]["spec"]
    (container,) = pod["containers"]
    # Katib's collector, which is put into the pod, runs as root to see the trainer's processes.
    container["securityContext"]["runAsNonRoot"] = pod["securityContext"].pop("runAsNonRoot")
    if num_workers == 1:
        # The Training Operator tells a worker that is alone nothing of a cluster.
        alone = Cluster((f"localhost:{PORT}",), 0).tf_config()
        container["env"] = [*container.get("env", []), {"name": "TF_CONFIG", "value": alone}]
    del job["metadata"]  # Katib gives it
    return job


def _task_config(pod: PodConfig) -> dict[str, Any]:
    """What Kubeflow Pipelines would pass on of a pod."""
    limits = {"cpu": pod.cpu_limit, "memory": pod.memory_limit}
    if pod.accelerator_type:
        limits[pod.accelerator_type] = str(pod.accelerator_limit or 1)
    requests = {"cpu": pod.cpu_request, "memory": pod.memory_request}
    resources = {
        kind: given
        for kind, amounts in (("limits", limits), ("requests", requests))
        if (given := {name: amount for name, amount in amounts.items() if amount})
    }
    secrets = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": each.secret, "key": each.key}}}
        for name, each in pod.secret_env.items()
    ]
    claims = {path: {"persistentVolumeClaim": {"claimName": claim}} for path, claim in pod.volumes.items()}
    claims |= {path: {"secret": {"secretName": secret}} for path, secret in pod.secret_volumes.items()}
    if pod.shared_memory:
        claims["/dev/shm"] = {"emptyDir": {"medium": "Memory", "sizeLimit": pod.shared_memory}}
    return {
        "resources": resources,
        "env": [*({"name": name, "value": value} for name, value in pod.env.items()), *secrets],
        "volumes": [{"name": f"volume{number}", **source} for number, source in enumerate(claims.values())],
        "volume_mounts": [{"name": f"volume{number}", "mountPath": path} for number, path in enumerate(claims)],
        "node_selector": pod.node_selector,
        "tolerations": [_toleration(each) for each in pod.tolerations],
    }


def _toleration(given: Any) -> dict[str, Any]:
    names = {"toleration_seconds": "tolerationSeconds"}
    return {names.get(name, name): value for name, value in given.model_dump(exclude_none=True).items()}


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("arguments", nargs=-1, metavar="[CONFIG] [section.key=value ...]")
@click.option("--run-dir", required=True, help="The run's folder, as the pods of the trials see it.")
@click.option("--image", help="Image of the trials.  [default: kubeflow.image, or headrace:<version>]")
@click.option("--namespace", help="Namespace of the Experiment.  [default: the one it is applied to]")
@click.option("--output", type=click.Path(path_type=Path), default=Path("experiment.yaml"), help="File to write.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(
    arguments: tuple[str, ...], run_dir: str, image: str | None, namespace: str | None, output: Path, debug: bool
) -> None:
    """Write the search of a configuration as a Katib Experiment, each trial of which is a TFJob.

    RUN_DIR is what `headrace run CONFIG --until transform` leaves, on a volume that kubeflow.steps.tune.volumes names.
    """
    with reported(debug=debug):
        from pipelines import yaml_text
        from pipelines.config import load_config, split_arguments
        from pipelines.local import write_whole
        from pipelines.training import default_image

        path, overrides = split_arguments(arguments)
        config = load_config(path, overrides)
        chosen = image or config.kubeflow.image or default_image()
        made = experiment(config, image=chosen, run_dir=run_dir.rstrip("/"), namespace=namespace)
        header = f"# Made by headrace katib from the configuration '{config.name}': change that, not this.\n"
        write_whole(output, header + yaml_text.dump(made))
        click.echo(f"Wrote {output}. To run it: kubectl apply -f {output}")


if __name__ == "__main__":
    main(prog_name="python -m pipelines.kubeflow.katib")
