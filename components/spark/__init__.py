"""Apache Spark runs our own code where one machine ends: a session, and work that is divided into tasks."""

from components.spark.session import connected
from components.spark.tasks import run_tasks

__all__ = ["connected", "run_tasks"]
