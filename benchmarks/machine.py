"""What a measurement was made on."""

from __future__ import annotations

import os
import platform
import resource
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any


def describe() -> dict[str, Any]:
    """CPU, cores that this process may use, their vector extensions, system, Python, load average, time (UTC)."""
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "vector_extensions": vector_extensions(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "load_average": list(os.getloadavg()),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model() -> str:
    """Its name, as far as the system tells."""
    return _cpu_info().get("model name") or platform.processor() or platform.machine()


def vector_extensions() -> list[str]:
    """Those of AVX2, AVX-512 and AMX that are there: they decide which kernels libraries choose."""
    flags = set(_cpu_info().get("flags", "").split())
    return [name for name in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16") if name in flags]


def keep_to(cores: int) -> None:
    """Let this process run on so many cores, by which TensorFlow, JAX and OpenMP size their thread pools."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])


def peak_rss_mib(pid: int | str = "self") -> float:
    """Most memory that a process has held, in MiB; where there is no /proc, this process alone can be asked."""
    status = Path(f"/proc/{pid}/status")
    if status.exists():
        # Not ru_maxrss: that counts from before exec, too.
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines.get("VmHWM", "0 kB").split()[0]) / 1024
    if pid != "self":
        return float("nan")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def _cpu_info() -> dict[str, str]:
    file = Path("/proc/cpuinfo")
    if not file.exists():
        return {}
    lines = (line.partition(":") for line in file.read_text().split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}
