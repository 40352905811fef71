"""A Spark session for the length of a block, quiet on the console, and what keeps it from starting."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import socket
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from components.config import SparkConfig
from components.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_CONNECT_TIMEOUT_S = 10.0


@contextlib.contextmanager
def connected(config: SparkConfig) -> Iterator[SparkSession]:
    """A session as `data.spark` says; one that is there already, as in a notebook, is used and left as it is.

    What Spark logs goes to a file, which stays if the block raises.

    Raises:
        ConfigError: pyspark or Java is missing, or there is no such master or it does not answer.
    """
    _check_installed()
    with warnings.catch_warnings():
        # Of pyspark about the version of pandas, which nothing here uses.
        warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
        from pyspark.sql import SparkSession

        if (active := SparkSession.getActiveSession()) is not None:
            yield active
            return
        log = Path(tempfile.mkdtemp(prefix="headrace-spark-")) / "spark.log"
        session = _started(config, log)
        try:
            yield session
        finally:
            session.stop()
        shutil.rmtree(log.parent)


def _started(config: SparkConfig, log: Path) -> SparkSession:
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    _check_answers(config.master)
    builder = SparkSession.builder.appName("headrace")
    if config.master is not None:
        builder = builder.master(config.master)
    for name, value in (_defaults(config.master) | config.conf).items():
        builder = builder.config(name, str(value).lower() if isinstance(value, bool) else str(value))
    try:
        with _standard_error_in(log):
            session = builder.getOrCreate()
    except (Py4JError, PySparkException) as error:
        reason = _told_in(log) or _reason(error)
        raise ConfigError(
            f"data.spark: Spark does not start (master {config.master or 'default'}): {reason}. Correct data.spark.master "
            f"or data.spark.conf; the log is {log}."
        ) from error
    session.sparkContext.setLogLevel("ERROR")
    return session


def _check_installed() -> None:
    if importlib.util.find_spec("pyspark") is None:
        raise ConfigError("data.engine: spark needs pyspark. Install it: pip install 'headrace[spark]'.")
    home = os.environ.get("JAVA_HOME")
    if shutil.which(str(Path(home, "bin/java")) if home else "java") is None:
        where = f"JAVA_HOME, {home}, has none" if home else "there is none on the PATH"
        raise ConfigError(
            f"data.engine: spark needs Java 17 or later; {where}. Install it (Debian: apt-get install "
            "openjdk-17-jre-headless), or set JAVA_HOME to where it is."
        )


def _check_answers(master: str | None) -> None:
    """Refuse a standalone master that is not there at once; Spark itself asks for a minute."""
    if master is None or not master.startswith("spark://"):
        return
    problems = []
    for place in master.removeprefix("spark://").split(","):
        host, _, port = place.rpartition(":")
        try:
            socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S).close()
            return
        except (OSError, ValueError) as error:
            problems.append(f"{place}: {error}")
    raise ConfigError(
        f"data.spark.master: nothing answers at {master} ({'; '.join(problems)}). Start it, or correct the address, as in "
        "spark://host:7077."
    )


def _defaults(master: str | None) -> dict[str, str]:
    """Settings that `data.spark.conf` may change; masters of this machine get its Python and its modules."""
    settings = {"spark.ui.showConsoleProgress": "false", "spark.sql.session.timeZone": "UTC"}
    if master is None or not master.startswith("local"):
        return settings
    return settings | {
        "spark.ui.enabled": "false",
        # A laptop's own name often leads nowhere.
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.pyspark.python": sys.executable,
        "spark.executorEnv.PYTHONPATH": os.pathsep.join(str(Path(place).absolute()) for place in sys.path),
    }


@contextlib.contextmanager
def _standard_error_in(log: Path) -> Iterator[None]:
    """Send to `log` what this process, and those that it starts in the block for all their life, write to standard error."""
    sys.stderr.flush()
    before = os.dup(2)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def _told_in(log: Path) -> str | None:
    """What the launcher of Java complains of, before there is a Java to ask."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    told = [line for line in lines if line.startswith(("Error: ", "Exception in thread "))]
    return re.sub(r"^(Error: |Exception in thread \S+ [\w.$]+: )", "", told[0]).rstrip(".") if told else None


def _reason(error: Exception) -> str:
    """The first telling line of what Java or pyspark raised."""
    java = getattr(error, "java_exception", None)
    text = str(java.toString()) if java is not None else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")
