"""The data source keeps headrace's contract."""

from pathlib import Path

from components.ingest.contract import check_source
from pipelines.config import load_config

from package_name.data import source


def test_the_source_keeps_the_contract(config_file: Path) -> None:
    data = load_config(config_file).data
    check_source(source, path=data.path, **data.args)
