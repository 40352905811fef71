"""Data on the web: what is fetched, how a run knows it again, and what is said when it cannot be had."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from components import external, object_store
from components.config import DataConfig
from components.errors import DataError

CONTENT = {"a/x.csv": "n\n1\n", "a/y.csv": "n\n2\n", "b/z.csv": "n\n3\n", "a/notes.txt": "none"}


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, with pages that link to its files; one file breaks off, one is forbidden."""

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/secret.csv":
            self.send_error(403)
        elif self.path == "/broken.csv":
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"n\n1\n")
        else:
            super().do_GET()

    def do_HEAD(self) -> None:
        if self.path == "/secret.csv":
            self.send_error(403)
        elif self.path == "/broken.csv":
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
        else:
            super().do_HEAD()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A server's address and the folder that it serves."""
    folder = tmp_path_factory.mktemp("web")
    for name, text in CONTENT.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(_Handler, directory=str(folder))
    ) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", folder
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("a/x.csv", ["a/x.csv"]),
        ("a/x.csv?token=1", ["a/x.csv"]),
        ("a/*.csv", ["a/x.csv", "a/y.csv"]),
        ("*/?.csv", ["a/x.csv", "a/y.csv", "b/z.csv"]),
        ("b/", ["b/z.csv"]),
    ],
)
def test_a_file_a_glob_and_a_folder_are_fetched(
    served: tuple[str, Path], tmp_path: Path, path: str, found: list[str]
) -> None:
    with object_store.local_data(DataConfig(path=f"{served[0]}/{path}"), tmp_path) as config:
        assert config.path is not None
        texts = [file.read_text() for file in external.data_files(config.path)]
    assert texts == [CONTENT[name] for name in found]


def test_a_run_knows_the_data_again_until_they_change(served: tuple[str, Path]) -> None:
    address, folder = served

    def state() -> object:
        return external.state("ingest", DataConfig(path=f"{address}/b/z.csv"), {})["data"]

    before = state()
    assert before is not None and state() == before
    (folder / "b" / "z.csv").write_text("n\n33\n")
    assert state() != before
    (folder / "b" / "z.csv").write_text(CONTENT["b/z.csv"])


def test_a_source_of_the_users_gets_the_address(served: tuple[str, Path], tmp_path: Path) -> None:
    own = DataConfig(source="mine:source", path=f"{served[0]}/a/x.csv")
    with object_store.local_data(own, tmp_path) as config:
        assert config is own


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("a/nothing.csv", "data.path: there is no .*/a/nothing.csv. Correct the"),
        ("broken.csv", "data.path: .*/broken.csv cannot be fetched: .*Run again, or copy it here"),
        ("secret.csv", "data.path: .*/secret.csv cannot be fetched: 403"),
        ("nowhere/*.csv", "data.path: there is no .*/nowhere/. Correct the address|there is no object"),
    ],
)
def test_what_cannot_be_had_is_named(served: tuple[str, Path], tmp_path: Path, path: str, message: str) -> None:
    with (
        pytest.raises(DataError, match=message),
        object_store.local_data(DataConfig(path=f"{served[0]}/{path}"), tmp_path),
    ):
        pass


def test_a_server_that_does_not_answer_is_named(tmp_path: Path) -> None:
    config = DataConfig(path="http://127.0.0.1:9/x.csv")
    with pytest.raises(DataError, match=r"http://127.0.0.1:9/x.csv cannot be fetched: "):
        object_store.data_digest(config)
