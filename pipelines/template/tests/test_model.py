"""The network keeps headrace's contract."""

from pathlib import Path

from models.contract import check_model
from models.spec import FeatureSpec, OutputSpec
from pipelines.config import load_config

from package_name.model import build


def test_the_model_can_be_trained_resumed_exported_and_served(config_file: Path) -> None:
    data = load_config(config_file).data
    inputs = {
        "trip_miles": FeatureSpec((1,), "float32"),
        "company": FeatureSpec((1,), "int64", num_categories=7),
    }
    check_model(build, inputs, OutputSpec(data.task, len(data.classes or ["value"])), hidden_dims=[8])
