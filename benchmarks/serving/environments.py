"""The peers' environments: one each, since they do not agree on the versions of what they need."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

PROJECT = "project"
# Peer -> what its environment holds beside the model's libraries.
PEERS: dict[str, tuple[str, ...]] = {
    "fastapi": ("fastapi==0.165.0", "uvicorn[standard]==0.54.0"),
    "kserve": ("kserve==0.21.0",),
    "mlserver": ("mlserver==1.7.1",),
    "bentoml": ("bentoml==1.4.40",),
    "litserve": ("litserve==0.2.19",),
}
_LIBRARIES = ("tensorflow", "keras")
_SHOWN = ("tensorflow", "keras", "numpy", "grpcio", "uvicorn", "fastapi")


def prepare(folder: Path, peers: Iterable[str], show: Callable[[str], None]) -> None:
    """Make environments, or bring them up to date, with TensorFlow and Keras as they are here.

    Args:
        folder: Where they go, each under its name.
        peers: Names in PEERS.
        show: Takes a line on what goes on.

    Raises:
        CalledProcessError: a package cannot be installed.
    """
    libraries = [f"{name}=={metadata.version(name)}" for name in _LIBRARIES]
    for name in peers:
        show(f"{name}: {' '.join(PEERS[name])}")
        subprocess.run([sys.executable, "-m", "venv", str(folder / name)], check=True)
        subprocess.run([python(folder, name), "-m", "pip", "install", "-q", *PEERS[name], *libraries], check=True)


def python(folder: Path, environment: str) -> str:
    """The interpreter of an environment."""
    return sys.executable if environment == PROJECT else str(folder.absolute() / environment / "bin" / "python")


def versions(interpreter: str, package: str) -> dict[str, str]:
    """Versions of a package and of the libraries that matter beside it, as far as they are installed.

    Raises:
        OSError: there is no such interpreter.
    """
    code = (
        "import json, sys; from importlib.metadata import distributions;"
        "print(json.dumps({d.name.lower(): d.version for d in distributions() if d.name.lower() in sys.argv[1:]}))"
    )
    done = subprocess.run([interpreter, "-c", code, package, *_SHOWN], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return dict(sorted(found.items()))
