"""The client by itself: who it is in a cluster, how it waits, and streams that come in pieces."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme
import urllib3

from components.config import TrainingJobConfig
from components.launch import api as api_module
from components.launch.api import KubernetesError, connect, patience
from components.launch.job import run_job
from tests.components.launch.clusters import NAME, manifest_of, operated, threads_of_the_launcher
from tests.components.launch.fake_kubernetes import NAMESPACE, TOKEN, FakeCluster
from tests.components.launch.test_job import Training


def test_a_pod_talks_to_its_cluster_as_its_service_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = trustme.CA()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "namespace").write_text(f"{NAMESPACE}\n")
    with FakeCluster(tls) as cluster:
        host, port = cluster.url.removeprefix("https://").split(":")
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
        config = TrainingJobConfig(kind="tfjob")
        with connect(tmp_path) as api, operated(cluster, lambda kind, job: Training(cluster, kind, job).succeed()):
            assert api.namespace == NAMESPACE
            run_job(api, config, manifest_of(config), show=cluster.show)
        # Streams that were being read have ended, which over TLS takes another way.
        assert threads_of_the_launcher() == []
    assert cluster.shown == [f"created TFJob {NAME}"]


@pytest.mark.parametrize("missing", ["KUBERNETES_SERVICE_HOST", "token", "namespace"])
def test_this_machine_is_no_pod(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")
    for name in ("token", "ca.crt", "namespace"):
        (tmp_path / name).write_text("x")
    if missing.isupper():
        monkeypatch.delenv(missing)
    else:
        (tmp_path / missing).unlink()
    with pytest.raises(KubernetesError, match=r"no pod with a service account .* leave out kubeflow\.training_job"):
        connect(tmp_path)


def test_the_patience_lasts_for_minutes() -> None:
    retry, waited = patience(), []
    while not retry.is_exhausted():
        retry = retry.increment("GET", "/", error=urllib3.exceptions.ProtocolError())
        waited.append(retry.get_backoff_time())
        if retry.total == 0:
            break
    assert 240 < sum(waited) < 400
    assert max(waited) == 30


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        ("", "2026-12-01T00:00:00Z"),
        ("2026-12-01T00:00:00Z", "2026-12-01T00:00:00.1Z"),
        ("2026-12-01T00:00:00.1Z", "2026-12-01T00:00:00.12Z"),
        ("2026-12-01T00:00:00.123456789+08:00", "2026-12-01T00:00:00.2+08:00"),
        ("2026-12-01T00:00:00.9Z", "2026-12-01T00:00:01Z"),
    ],
)
def test_times_of_log_lines_sort(earlier: str, later: str) -> None:
    assert api_module._as_key(earlier) < api_module._as_key(later)


class Pieces:
    """A response that comes in pieces, and may be cut."""

    def __init__(self, pieces: list[bytes], error: Exception | None = None) -> None:
        self._pieces, self._error = pieces, error
        self.is_closed = False

    def stream(self) -> Any:
        yield from self._pieces
        if self._error:
            raise self._error

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize(
    ("pieces", "error", "lines", "is_whole"),
    [
        ([b"a\nb", b"c\n", b"\xc3", b"\xa4\n"], None, ["a", "bc", "ä"], True),
        ([b"a\nb"], None, ["a"], False),
        ([b"a\n"], urllib3.exceptions.ProtocolError(), ["a"], False),
        ([], None, [], True),
    ],
)
def test_a_stream_gives_whole_lines(
    pieces: list[bytes], error: Exception | None, lines: list[str], is_whole: bool
) -> None:
    response = Pieces(pieces, error)
    stream = api_module._Stream(response, lambda _: None)
    assert list(stream) == lines
    assert stream.is_whole == is_whole and response.is_closed
