"""What tests of several modules share: a Kubeflow Pipelines API, a folder with a small config, and a webhook."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


class _Hook(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.received.append((self.path, body))
        status = self.server.answers.pop(0) if self.server.answers else 200
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/login")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.server.received.append((self.path, None))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hook() -> Iterator[Any]:
    """A server that notes what is posted, and answers with the statuses in `answers`, then 200."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Hook) as server:
        server.received, server.answers = [], []
        server.url = f"http://127.0.0.1:{server.server_port}/services/T0/secret"
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        yield server
        server.shutdown()
