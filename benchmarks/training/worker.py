"""One process of the benchmark: trains as one contender, a turn at a time. The driver starts it."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path

from benchmarks import machine
from benchmarks.training.contenders import CONTENDERS
from benchmarks.training.turns import Task, Turns
from benchmarks.training.workloads import WORKLOADS


def main(arguments: str) -> None:
    """Train until standard input ends.

    Args:
        arguments: JSON with `contender`, `model`, `settings`, `threads`, `steps`, `reference` and `started_at`.
    """
    given = json.loads(arguments)
    # Libraries print, too; what they print must not reach the driver.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    machine.keep_to(given["threads"])
    turns = Turns(sys.stdin, answers, given["started_at"])
    task = Task(
        WORKLOADS[given["model"]], given["settings"], given["threads"], given["steps"], Path(given["reference"])
    )
    try:
        module = importlib.import_module(f"benchmarks.training.contenders.{CONTENDERS[given['contender']].module}")
        module.train(task, turns)
    except ImportError as error:
        turns.say({"failed": f"not installed: {error}"})
    except Exception as error:
        traceback.print_exc()
        turns.say({"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"})


if __name__ == "__main__":
    main(sys.argv[1])
