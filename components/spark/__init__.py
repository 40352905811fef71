"""Apache Spark runs our own code where one machine ends: a session, and work that is divided into tasks."""

from components.spark.session import connected
from components.spark.tasks import check_seen, run_tasks, shared_folder

__all__ = ["check_seen", "connected", "run_tasks", "shared_folder"]
