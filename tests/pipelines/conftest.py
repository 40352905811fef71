"""What tests of several modules share: a Kubeflow Pipelines API, and a folder with a small config."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.pipelines import fakes

if TYPE_CHECKING:
    from tests.pipelines.fake_kfp import FakeApi


@pytest.fixture
def kfp_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApi]:
    """An API to submit to; the working directory has tiny.yaml. The developer's settings of kfp play no part."""
    import kfp

    from pipelines import compile as compiling
    from pipelines import submit
    from tests.pipelines.fake_kfp import FakeApi, compile_once

    monkeypatch.setattr(compiling, "compile_pipeline", compile_once)
    monkeypatch.setattr(kfp.Client, "_LOCAL_KFP_CONTEXT", str(tmp_path / "context.json"))
    monkeypatch.setattr(submit, "POLL_SECONDS", 0.01)
    monkeypatch.delenv("KF_PIPELINES_ENDPOINT", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(yaml.safe_dump(fakes.settings()))
    server = FakeApi()
    yield server
    server.close()
