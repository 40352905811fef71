"""`headrace manifests`: settings from file and command line, a folder that is whole or not there."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from kubeflow_spark_api import models as spark_models

from components.config import DataConfig
from components.errors import ArtifactError, ConfigError
from components.section import effective_settings
from pipelines import manifests
from pipelines.config import load_config
from serving.manifests.config import ServingManifestConfig
from serving.manifests.documents import CONFIG_FILE, HEADER
from serving.manifests.render import TARGETS

MODEL = ("model_name=chicago_taxi", "model_uri=pvc://models/chicago_taxi")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(manifests.main, arguments)


def tree(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}


def test_settings_come_from_file_and_overrides(tmp_path: Path) -> None:
    (tmp_path / "serving.yaml").write_text(
        "model_name: taxi\nmodel_uri: pvc://models/taxi\nreplicas: {min: 3, max: 6}\n"
    )
    config = manifests.load_manifest_config(
        tmp_path / "serving.yaml", ["replicas.max=5", "batching={}"], ServingManifestConfig
    )
    assert (config.replicas.min, config.replicas.max, config.batching is not None) == (3, 5, True)


def test_problems_have_a_place(tmp_path: Path) -> None:
    file = tmp_path / "serving.yaml"
    file.write_text("model_name: taxi\nmodel_uri: http://x/y\nreplica: {min: 3}\n")
    with pytest.raises(ConfigError) as caught:
        manifests.load_manifest_config(file, ["resources.memory=lots"], ServingManifestConfig)
    message = str(caught.value)
    assert f"{file}:2: model_uri: expected pvc://claim/path" in message
    assert f"{file}:3: replica: there is no such key. Did you mean 'replicas'?" in message
    assert "override 'resources.memory=lots': resources.memory:" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "command line: model_name: this is required and not set"),
        ((*MODEL, "canary.version=2"), "a canary needs a stable_version beside it"),
        ((*MODEL, "--target", "compose"), "Error: --target compose: compose serves a folder of this machine"),
        (("no.yaml",), "There is no config no.yaml"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_written(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    result = invoke(*arguments, "--output", str(tmp_path / "deploy"))
    assert result.exit_code == 2
    assert message in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("target", TARGETS)
def test_written_files_give_themselves_again(target: str, tmp_path: Path) -> None:
    uri = "file:///srv/models" if target == "compose" else "s3://bucket/models"
    first, second = tmp_path / "first", tmp_path / "second"
    result = invoke("model_name=m", f"model_uri={uri}", "stable_version=3", "--target", target, "--output", str(first))
    assert result.exit_code == 0, result.output
    assert f"Wrote {len(tree(first))} files. To use them: " in result.output
    again = invoke(str(first / CONFIG_FILE), "--target", target, "--output", str(second))
    assert again.exit_code == 0, again.output
    assert tree(first) == tree(second)
    assert list(manifests._NEXT_STEP) == [*TARGETS, "training", "spark"]


def test_a_second_call_replaces_the_folder(tmp_path: Path) -> None:
    output = tmp_path / "deploy"
    invoke(*MODEL, "--target", "kubernetes", "--output", str(output))
    assert (output / "base" / "horizontalpodautoscaler.yaml").exists()
    invoke(*MODEL, "replicas={min: 2, max: 2}", "--output", str(output))
    assert not (output / "base" / "horizontalpodautoscaler.yaml").exists()
    deployment = yaml.safe_load((output / "base" / "deployment.yaml").read_text())
    assert deployment["spec"]["replicas"] == 2


def test_files_of_others_are_not_replaced(tmp_path: Path) -> None:
    output = tmp_path / "deploy"
    invoke(*MODEL, "--output", str(output))
    mine = output / "overlays" / "staging" / "kustomization.yaml"
    mine.parent.mkdir()
    mine.write_text("resources: [../../base]\n")
    before = tree(output)
    result = invoke(*MODEL, "stable_version=3", "--output", str(output))
    assert result.exit_code == 2
    assert "holds files that are not made by this command, such as overlays/staging/kustomization.yaml" in result.output
    assert tree(output) == before


def test_every_file_of_ours_is_known_again(tmp_path: Path) -> None:
    """Those that are no YAML, too; a file of somebody else's stays, even where ours would have its name."""
    arguments = ("model_name=m", "model_uri=file:///srv/models", "--target", "compose", "--output", str(tmp_path))
    assert invoke(*arguments, "batching.max_batch_size=8").exit_code == 0
    assert (tmp_path / "server" / "batching.config").exists()
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    assert not (tmp_path / "server" / "batching.config").exists()
    (tmp_path / "compose.yaml").write_text("mine")
    assert "such as compose.yaml" in invoke(*arguments).output
    assert (tmp_path / "compose.yaml").read_text() == "mine"


def test_nothing_half_written_stays(tmp_path: Path) -> None:
    output = tmp_path / "deploy"
    manifests.write_whole({"a": HEADER}, output)
    with pytest.raises(FileExistsError):
        manifests.write_whole({"a": HEADER, "b": HEADER, "b/c": HEADER}, output)
    with pytest.raises(ArtifactError, match="is a file, but a folder is needed there"):
        manifests.write_whole({"b": HEADER}, output / "a" / "deploy")
    assert tree(tmp_path) == {"deploy/a": HEADER}
    assert [path.name for path in tmp_path.iterdir()] == ["deploy"]


def test_what_distributed_training_needs(tmp_path: Path) -> None:
    output = tmp_path / "training"
    wrong = invoke("--target", "training", "namespace=team-a", "imag=i", "--output", str(output))
    assert wrong.exit_code == 2 and "Did you mean 'image'?" in wrong.output and not output.exists()
    result = invoke("--target", "training", "namespace=team-a", "image=headrace:1", "--output", str(output))
    assert result.exit_code == 0 and f"kubectl apply -f {output}" in result.output
    objects = [each for text in tree(output).values() for each in yaml.safe_load_all(text)]
    assert sorted(each["kind"] for each in objects) == ["ClusterTrainingRuntime", "Role", "RoleBinding"]


EVALUATE = "evaluate: {thresholds: [{metric: accuracy, above_baseline: 0.1}]}\n"
SPARK = ("namespace=team-a", "image=ghcr.io/acme/headrace-spark:1", "claim=runs")


def test_an_ingest_on_the_spark_operator_is_one_that_its_types_take(tmp_path: Path) -> None:
    experiment = tmp_path / "taxi.yaml"
    experiment.write_text(
        "name: Taxi_1\nseed: 3\n"
        "data:\n  path: /runs/raw/*.csv\n  label: tip\n  engine: spark\n"
        "  spark: {master: 'local[2]', conf: {spark.task.maxFailures: 8}}\n" + EVALUATE
    )
    result = invoke(
        f"config={experiment}", *SPARK, "executors=4", "--target", "spark", "--output", str(tmp_path / "out")
    )
    assert result.exit_code == 0, result.output
    text = (tmp_path / "out/ingest.yaml").read_text()
    assert text.startswith(HEADER)
    made = yaml.safe_load(text)
    kept = spark_models.SparkV1beta2SparkApplication.from_dict(copy.deepcopy(made)).to_dict()
    assert kept == made  # a field that the operator's types do not know would be gone
    spec = made["spec"]
    assert (made["metadata"]["name"], spec["executor"]["instances"]) == ("taxi-1-ingest", 4)
    assert spec["sparkConf"] == {"spark.task.maxFailures": "8"}
    assert {pod["volumeMounts"][0]["mountPath"] for pod in (spec["driver"], spec["executor"])} == {"/runs"}
    _, config, _, examples = spec["arguments"]
    assert examples == "/runs/Taxi_1/examples"
    expected = load_config(experiment).step_config("data")
    given = DataConfig.model_validate_json(config)
    assert (given.engine, given.spark.master) == ("spark", None)
    assert effective_settings(given) == effective_settings(expected)


def test_a_relative_path_is_none_for_the_spark_operator(tmp_path: Path) -> None:
    experiment = tmp_path / "taxi.yaml"
    experiment.write_text("name: taxi\ndata: {path: raw/*.csv, label: tip}\n" + EVALUATE)
    result = invoke(f"config={experiment}", *SPARK, "--target", "spark", "--output", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert "data.path: raw/*.csv is relative to this folder, which pods do not have" in result.output
