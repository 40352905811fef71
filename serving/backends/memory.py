"""Memory: that of an unloaded version goes back to the system, and what stays is not searched for garbage.

By itself it would not. On x86, TensorFlow's allocator for oneDNN keeps what it ever had (tensorflow/core/common_runtime/
mkl_cpu_allocator.h), and glibc keeps what is freed in the middle of its heap.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from typing import Any

# <malloc.h>
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def set_up() -> None:
    """Choose the system's allocator for this process; to be called before TensorFlow is imported.

    Activations of large batches then come from the heap, which is kept between calls; weights come from the system.
    """
    os.environ.setdefault("TF_ONEDNN_USE_SYSTEM_ALLOCATOR", "1")
    mallopt = getattr(_libc(), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)  # glibc's largest
        mallopt(_M_TRIM_THRESHOLD, 2**30)


def settle() -> None:
    """Keep the garbage collector away from what is in memory now, until `give_back`.

    With TensorFlow that is some 370,000 objects; a full collection looked at all of them, while no request went on, and
    requests with large JSON bodies set it off often.
    """
    gc.collect()
    gc.freeze()


def give_back() -> None:
    """Free what unloaded models leave behind: graphs in reference cycles, and free pieces of the heap."""
    gc.unfreeze()
    settle()
    malloc_trim = getattr(_libc(), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def _libc() -> Any:
    return ctypes.CDLL(None) if sys.platform == "linux" else None
