"""Step `monitor`: whether what is served still looks like what was trained on, and is still answered as well."""

from components.monitor.comparisons import Comparison
from components.monitor.findings import MonitorResult
from components.monitor.step import monitor

__all__ = ["Comparison", "MonitorResult", "monitor"]
