"""What the processor of this machine can do, where right numbers depend on it."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest


def int8_saturates() -> bool:
    """Whether sums of int8 products overflow 16 bits in ONNX Runtime and OpenVINO: on x86 without VNNI. Known of Linux only.

    ONNX Runtime's documentation, "Quantize ONNX models", says when and why.
    """
    if platform.machine() != "x86_64" or sys.platform != "linux":
        return False
    return "vnni" not in Path("/proc/cpuinfo").read_text()


needs_exact_int8 = pytest.mark.skipif(int8_saturates(), reason="without VNNI, int8 sums saturate on x86")
