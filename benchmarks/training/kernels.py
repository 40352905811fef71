"""Where a step's time goes: shares of the kinds of operation, on one core, by TensorFlow's or PyTorch's profiler.

python -m benchmarks.training.kernels resnet --xla off
.bench/bin/python -m benchmarks.training.kernels resnet --torch eager
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import tempfile
import time
from pathlib import Path

from benchmarks import machine
from benchmarks.training import workloads
from benchmarks.training.workloads import WORKLOADS

_WARM_UP, _STEPS = 3, 8
# TensorFlow's events that hold others.
_OUTER = re.compile(
    r"^(step|Eager|TFE_|Kernel|Executor|Process|Function|Execute|BlockUntil|Run$|DoCompute|.*__inference_)"
)


def tensorflow_kernels(name: str, *, xla: bool) -> tuple[float, dict[str, float]]:
    """CPU milliseconds of the bare step, and milliseconds by kind of operation (with XLA: by fusion)."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    from benchmarks.training.contenders import bare
    from benchmarks.training.contenders.tensorflow_data import dataset

    _, step = bare.make_step(WORKLOADS[name], xla=xla)
    batches = iter(dataset(workloads.make_data(WORKLOADS[name])))
    for _ in range(_WARM_UP):
        step(*next(batches))
    started = time.process_time()
    for _ in range(_STEPS):
        step(*next(batches))
    cpu_ms = 1000 * (time.process_time() - started) / _STEPS
    with tempfile.TemporaryDirectory() as folder:
        with tf.profiler.experimental.Profile(folder):
            for _ in range(_STEPS):
                step(*next(batches))
        (file,) = Path(folder).rglob("*.xplane.pb")
        space = xplane_pb2.XSpace.FromString(file.read_bytes())
    kinds: collections.Counter[str] = collections.Counter()
    for plane in space.planes:
        for event in (event for line in plane.lines for event in line.events):
            # "<layer>:<kind>"; XLA numbers its own: "convolution.12"
            kind = re.sub(r"\.\d+$", "", plane.event_metadata[event.metadata_id].name.rpartition(":")[2])
            kinds[kind] += event.duration_ps / 1e9 / _STEPS
    return cpu_ms, {kind: ms for kind, ms in kinds.items() if not _OUTER.match(kind)}


def torch_kernels(name: str, *, compiled: bool, channels_last: bool) -> tuple[float, dict[str, float]]:
    """CPU milliseconds of PyTorch's step, and milliseconds by kind of operation."""
    import torch
    from torch.profiler import profile

    from benchmarks.training.contenders import torch_step

    torch.set_num_threads(1)
    data = workloads.make_data(WORKLOADS[name])
    settings = {"compile": compiled, "channels_last": channels_last}
    _, step = torch_step.make_step(WORKLOADS[name], data, settings)
    for _ in range(_WARM_UP):
        step()
    started = time.process_time()
    for _ in range(_STEPS):
        step()
    cpu_ms = 1000 * (time.process_time() - started) / _STEPS
    with profile() as profiled:
        for _ in range(_STEPS):
            step()
    return cpu_ms, {event.key: event.self_cpu_time_total / 1000 / _STEPS for event in profiled.key_averages()}


def main() -> None:
    """Print the most expensive kinds of operation; without click, which PyTorch's environment need not have."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training.kernels", description=__doc__)
    parser.add_argument("model", choices=list(WORKLOADS))
    parser.add_argument("--xla", choices=["on", "off"], default="off")
    parser.add_argument("--torch", choices=["eager", "compile"], help="PyTorch in place of TensorFlow.")
    parser.add_argument("--channels-last", action="store_true", help="PyTorch, images.")
    parser.add_argument("--top", type=int, default=15)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    machine.keep_to(1)
    if given.torch:
        cpu_ms, kinds = torch_kernels(given.model, compiled=given.torch == "compile", channels_last=given.channels_last)
    else:
        cpu_ms, kinds = tensorflow_kernels(given.model, xla=given.xla == "on")
    total = sum(kinds.values())
    print(f"{cpu_ms:.2f} CPU ms a step without the profiler; of what it sees:")
    for kind in sorted(kinds, key=lambda kind: -kinds[kind])[: given.top]:
        print(f"{100 * kinds[kind] / total:5.1f} %  {kind}")


if __name__ == "__main__":
    main()
