"""A Docker engine for tests: the one that is there, or one of their own; and a base image made without a registry."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

REQUIRED = "HEADRACE_CONTAINER_TESTS"
_START_SECONDS = 60.0
_STOP_SECONDS = 30.0


@contextlib.contextmanager
def docker_engine() -> Iterator[None]:
    """Let `docker` and DOCKER_HOST lead to an engine, and leave nothing of one that was started here.

    Skips the test where there is none, or fails it where $HEADRACE_CONTAINER_TESTS is `required`.
    """
    if shutil.which("docker") is None:
        _give_up("there is no docker command: install docker.io, or Docker")
    if _answers():
        yield
        return
    if shutil.which("dockerd") is None or os.getuid():
        _give_up("no Docker engine answers, and only root can start one, with dockerd (docker.io)")
    if shutil.which("mmdebstrap") is None:
        _give_up("mmdebstrap is not installed, which makes the base image")
    # A socket's path is at most 107 characters long, which a test's own folder may exceed.
    folder = Path(tempfile.mkdtemp(prefix="headrace-docker-"))
    # Within a container, where CI runs, an engine has no bridge and no rights to the firewall.
    options = ["--bridge", "none", "--iptables=false", "--default-ulimit", "nofile=20000:20000"]
    places = ["--data-root", folder / "data", "--exec-root", folder / "exec", "--pidfile", folder / "pid"]
    with pytest.MonkeyPatch.context() as patch, (folder / "log").open("w+") as log:
        patch.setenv("DOCKER_HOST", f"unix://{folder}/socket")
        command = ["dockerd", *map(str, places), "--host", os.environ["DOCKER_HOST"], *options]
        engine = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            _wait_for(engine, folder / "log")
            yield
        finally:
            engine.terminate()
            try:
                engine.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                engine.kill()
                engine.wait()
            subprocess.run(["umount", folder / "exec/netns/default"], capture_output=True)  # which it leaves behind
            shutil.rmtree(folder, ignore_errors=True)


def debian_base() -> str:
    """The ID of an image with Debian's Python and its venv module, made from Debian's packages."""
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    bootstrap = ["mmdebstrap", "--variant=minbase", "--include=python3,python3-venv", release["VERSION_CODENAME"]]
    with subprocess.Popen([*bootstrap, "-"], stdout=subprocess.PIPE) as tar:
        done = subprocess.run(["docker", "import", "-"], stdin=tar.stdout, capture_output=True, text=True, check=True)
    assert tar.returncode == 0
    return done.stdout.strip()


def _answers() -> bool:
    return subprocess.run(["docker", "version"], capture_output=True).returncode == 0


def _wait_for(engine: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + _START_SECONDS
    while not _answers():
        if engine.poll() is not None or time.monotonic() > end:
            _give_up("dockerd does not start here: " + log.read_text()[-500:])
        time.sleep(0.2)


def _give_up(reason: str) -> None:
    (pytest.fail if os.environ.get(REQUIRED) == "required" else pytest.skip)(reason)
