"""A version loaded in a process of its own first: what kills a process then kills that one, and the server goes on.

Damaged files rarely do. Of 1,900 damaged LiteRT files 3 did, LiteRT aborting where it finds what it does not expect; of
1,819 SavedModels and 1,300 ONNX files none (tests/serving/fuzz_models.py). Want of memory is the other case.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

from serving.errors import Code, ServingError
from serving.settings import LoadSettings


def try_to_load(path: Path, settings: LoadSettings) -> None:
    """Load a version, replay its warm-up requests, and let go of it, all in another process.

    A load that fails in an orderly way is not an error here: it fails in the server for the same reason.

    Args:
        path: the version directory.
        settings: how versions are loaded.

    Raises:
        ServingError: INTERNAL when a signal ended the process, DEADLINE_EXCEEDED when it was not done in time.
    """
    project = str(Path(__file__).resolve().parents[1])
    paths = [project, *filter(None, [os.environ.get("PYTHONPATH")])]
    seconds = settings.trial_load_timeout_seconds
    try:
        done = subprocess.run(
            [sys.executable, "-m", "serving.backends.trial"],
            input=pickle.dumps((path, dataclasses.replace(settings, trial_load="never"))),
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ServingError(
            Code.DEADLINE_EXCEEDED,
            f"{path} cannot be loaded: the process that tried it first was not done after {seconds:g} s; a larger "
            "--trial_load_timeout_seconds gives it more",
        ) from error
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        message = f"{path} cannot be loaded: the process that tried it first was ended by {name}; a file is damaged"
        message += " or the memory does not suffice" if name == "SIGKILL" else ""
        raise ServingError(Code.INTERNAL, message)


def _main() -> None:
    from serving.server import load_version

    load_version(*pickle.load(sys.stdin.buffer))


if __name__ == "__main__":
    _main()
