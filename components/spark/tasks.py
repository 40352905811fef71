"""Work that Spark divides: a number goes to each task, a result comes back, errors of ours among them."""

from __future__ import annotations

import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from components import plugins, progress
from components.errors import ConfigError, DataError, HeadraceError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Result = TypeVar("Result")

_MARK = ".of-the-driver"
_SCHEMA = pa.schema([("number", pa.int64()), ("result", pa.binary())])
# As the end of a traceback has it: `components.errors.DataError: ...`, but not the frames of Java.
_EXCEPTION = re.compile(r"(?!org\.|java\.)[\w.]*(Error|Exception|Interrupt|Exit)\b: ")


def run_tasks(
    session: SparkSession, work: Callable[[int], Result], num_tasks: int, *, may_fail_by_chance: bool = False
) -> list[Result]:
    """What `work` gives for each number below `num_tasks`, in their order; each runs in a task of its own.

    A task that dies is tried again as often as `spark.task.maxFailures` says, perhaps elsewhere and perhaps beside an
    attempt that is still alive: `work` must write under names that no other attempt has. Only what the attempt that Spark
    counts returned comes back.

    Args:
        session: Spark.
        work: Goes to the executors with all that it holds; what it returns must be picklable.
        num_tasks: How many.
        may_fail_by_chance: Whether errors of ours deserve another attempt, too, as where a source of the user's asks a
            database.

    Raises:
        HeadraceError: what `work` raised for the smallest number.
        DataError: a task died each time.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    attempts = _most_attempts(session) if may_fail_by_chance else 1
    numbers = session.range(0, num_tasks, 1, num_tasks)
    try:
        found = numbers.mapInArrow(_task(work, os.getcwd(), attempts), "number long, result binary").toArrow()
    except (Py4JError, PySparkException) as error:
        raise DataError(
            f"data.engine: a task of Spark died in each of its attempts: {_last_words(error)}. Correct it and run again; "
            "an executor that is killed may need more of spark.executor.memory in data.spark.conf."
        ) from error
    outcomes = dict(zip(found["number"].to_pylist(), found["result"].to_pylist(), strict=True))
    results = [pickle.loads(outcomes[number]) for number in range(num_tasks)]
    for result in results:
        if isinstance(result, HeadraceError):
            raise result
    return results


def shared_folder(path: Path) -> Path:
    """An empty folder for what tasks write, which `check_seen` knows again; what a killed run left there goes."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    (path / _MARK).touch()
    return path.absolute()


def check_seen(folder: Path) -> None:
    """Refuse, in a task, a folder that is not the one of the driver.

    Raises:
        ConfigError: the executor does not see it.
    """
    if not (folder / _MARK).is_file():
        raise ConfigError(
            f"data.engine: an executor of Spark does not see the folder {folder}. Put the runs on a volume that driver and "
            "executors have under the same path."
        )


def _task(
    work: Callable[[int], Any], folder: str, attempts: int
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def each(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                result = pickle.dumps(_outcome(work, number, folder, attempts), protocol=5)
                yield pa.RecordBatch.from_pydict({"number": [number], "result": [result]}, _SCHEMA)

    return each


def _outcome(work: Callable[[int], Any], number: int, folder: str, attempts: int) -> Any:
    """What the work returned, or the error of ours that it raised, once another attempt would be of no use."""
    from pyspark import TaskContext

    if Path(folder).is_dir():
        os.chdir(folder)  # so that relative paths, and modules of the user's, are those of the driver
    plugins.make_importable()
    try:
        with progress.shown_by(lambda line: None):
            return work(number)
    except HeadraceError as error:
        context = TaskContext.get()
        if context is not None and context.attemptNumber() + 1 < attempts:
            raise
        return error


def _most_attempts(session: SparkSession) -> int:
    """How often Spark tries a task; on `local[n]` once, on `local[n,m]` m times."""
    context = session.sparkContext
    if context.master.startswith("local") and not context.master.startswith("local-cluster"):
        told = re.search(r",\s*(\d+)\s*\]", context.master)
        return int(told[1]) if told else 1
    return int(context.getConf().get("spark.task.maxFailures", "4") or 4)


def _last_words(error: Exception) -> str:
    """What a Python worker said last, or else Spark's first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if _EXCEPTION.match(line)]
    return (said or lines or [type(error).__name__])[0].rstrip(".")
