"""The whole pipeline: small and here, and as Kubeflow gets it."""

from pathlib import Path

import yaml
from pipelines.compile import compile_pipeline
from pipelines.config import load_config
from pipelines.local import run

# Few rows and epochs, and a gate that lets any model through.
SMALL = [
    "data.limit=300",
    "train.epochs=2",
    "evaluate.thresholds=[{metric: loss, min: 0}]",
    "compress.formats=[float16]",
    "verify.latency_rounds=5",
]


def test_runs_from_the_data_to_a_pushed_model(config_file: Path, tmp_path: Path) -> None:
    config = load_config(config_file, [*SMALL, f"push.destination={tmp_path / 'serving_models'}"])
    result = run(config, runs_dir=tmp_path / "runs")
    assert result.exit_code == 0
    assert {step.name: step.state for step in result.steps if step.state != "done"} == {}
    assert (tmp_path / "serving_models" / config.name / "1" / "saved_model.pb").is_file()


def test_compiles_for_kubeflow(config_file: Path) -> None:
    pipeline = next(yaml.safe_load_all(compile_pipeline(load_config(config_file), image="registry.example/image:1")))
    executors = pipeline["deploymentSpec"]["executors"].values()
    assert {executor["container"]["image"] for executor in executors} == {"registry.example/image:1"}
