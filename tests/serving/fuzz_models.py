"""Damaged models: a campaign that loads them beside a good one, in processes of their own.

    python -m tests.serving.fuzz_models --seed 0 --cases 1000

Each case damages one file of a version: flipped bits, a cut, zeros, a piece twice, or a changed node of the graph. What
may happen is that the version is refused with an error, or that it loads, where nothing can notice the damage; the good
one has to answer in any case. What must not happen is that the process dies or hangs. Case `n` of a seed is the same in
each campaign.
"""

from __future__ import annotations

import collections
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

FILES = (
    "saved_model.pb",
    "variables/variables.index",
    "variables/variables.data-00000-of-00001",
    "assets/vocabulary.txt",
    "assets.extra/tf_serving_warmup_requests",
    "model.tflite",
    "model.onnx",
)
_SECONDS = 300.0  # for the slowest case: the first one imports TensorFlow


@dataclass(frozen=True)
class Outcome:
    """What became of a case.

    Attributes:
        case: its number.
        file: the damaged file.
        result: `refused`, `loaded`, `hung` or `died: ...`.
    """

    case: int
    file: str
    result: str


def _flip_bits(data: bytearray, random: random.Random) -> None:
    for _ in range(random.randint(1, 8)):
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def _cut(data: bytearray, random: random.Random) -> None:
    del data[random.randrange(len(data)) :]


def _zero(data: bytearray, random: random.Random) -> None:
    start = random.randrange(len(data))
    length = min(random.randint(1, 64), len(data) - start)
    data[start : start + length] = bytes(length)


def _repeat(data: bytearray, random: random.Random) -> None:
    start = random.randrange(len(data))
    data[start:start] = data[start : start + random.randint(1, 64)]


def _change_graph(data: bytearray, random: random.Random) -> None:
    """Change one node of a SavedModel: its operation, inputs or an attribute. What is written is sound as a message."""
    from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

    message = SavedModel.FromString(bytes(data))
    graph = random.choice(message.meta_graphs).graph_def
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    node = random.choice(nodes)
    kind = random.choice(["op", "inputs", "attribute"])
    if kind == "op":
        node.op = random.choice(nodes).op
    elif kind == "inputs":
        inputs = random.sample(list(node.input), random.randint(0, len(node.input)))
        node.ClearField("input")
        node.input.extend(inputs)
    elif node.attr:
        attribute = node.attr[random.choice(sorted(node.attr))]
        number = random.choice([-1, 0, 1, 2, 7, 20, 2**20, 2**31 - 1])
        which = attribute.WhichOneof("value")
        if which == "type":
            attribute.type = random.randint(1, 23)
        elif which == "shape":
            attribute.shape.dim.add().size = number
        elif which == "tensor":
            attribute.tensor.tensor_shape.dim.add().size = number
        else:
            attribute.i = number
    data[:] = message.SerializeToString(deterministic=True)


DAMAGES: tuple[Callable[[bytearray, random.Random], None], ...] = (_flip_bits, _cut, _zero, _repeat)


def damage(version_path: Path, seed: int, case: int, files: Sequence[str] = FILES) -> str:
    """Damage one of the files that a version has, as the numbers say, and return its name."""
    chance = random.Random(f"{seed} {case}")
    name = chance.choice([name for name in files if (version_path / name).is_file()])
    data = bytearray((version_path / name).read_bytes())
    damages = (*DAMAGES, _change_graph) if name == "saved_model.pb" else DAMAGES
    chance.choice(damages)(data, chance)
    (version_path / name).write_bytes(data)
    return name


def campaign(models: Sequence[Path], seed: int, cases: int) -> Iterator[Outcome]:
    """Run cases, each on a copy of one of the models, in turn.

    Args:
        models: version directories; the first is also the good one that has to go on answering.
        seed: of the damages.
        cases: how many.
    """
    case = 0
    while case < cases:
        arguments = [*map(str, models), f"--seed={seed}", f"--first={case}", f"--cases={cases}", "--worker"]
        command = [sys.executable, "-m", "tests.serving.fuzz_models", *arguments]
        file = ""
        with (
            tempfile.TemporaryFile("w+") as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as worker,
        ):
            watchdog = _Watchdog(worker)
            for line in worker.stdout or ():
                watchdog.pat()
                kind, _, rest = line.strip().partition(" ")
                if kind == "damaged":
                    file = rest
                elif kind in ("refused", "loaded"):
                    yield Outcome(case, file, kind)
                    case += 1
            watchdog.stop()
            if worker.wait() != 0:
                errors.seek(0)
                last = errors.read().strip().rpartition("\n")[2]
                yield Outcome(case, file, "hung" if watchdog.has_bitten else f"died: {worker.returncode} {last}")
                case += 1


class _Watchdog:
    """Kills a process that says nothing for too long."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.has_bitten = False
        self._process = process
        self._start()

    def _start(self) -> None:
        self._timer = threading.Timer(_SECONDS, self._bite)
        self._timer.start()

    def _bite(self) -> None:
        self.has_bitten = True
        self._process.kill()

    def pat(self) -> None:
        self.stop()
        self._start()

    def stop(self) -> None:
        self._timer.cancel()


def _work(models: Sequence[Path], seed: int, first: int, cases: int) -> None:
    from serving.server import load_version

    good = load_version(models[0])
    inputs = _inputs(good)
    expected = {name: array.tolist() for name, array in good.run("serving_default", inputs).items()}
    with tempfile.TemporaryDirectory() as folder:
        for case in range(first, cases):
            path = Path(folder) / str(case)
            shutil.copytree(models[case % len(models)], path)
            print("damaged", damage(path, seed, case), flush=True)
            try:
                bad = load_version(path)
                bad.run("serving_default", _inputs(bad))
                result = "loaded"
            except Exception:  # as the server has it
                result = "refused"
            answer = {name: array.tolist() for name, array in good.run("serving_default", inputs).items()}
            if answer != expected:
                raise SystemExit(f"case {case}: the good version answers {answer}, not {expected}")
            print(result, flush=True)
            shutil.rmtree(path)


def _inputs(model: Any) -> dict[str, Any]:
    """Two rows of ones for the default signature, if a damaged model still has it."""
    import numpy as np

    from serving import dtypes

    signature = model.signatures.get("serving_default")
    inputs = {}
    for alias, info in signature.proto.inputs.items() if signature else ():
        shape = [max(dim.size, 2) if axis == 0 else max(dim.size, 1) for axis, dim in enumerate(info.tensor_shape.dim)]
        value = b"blue" if info.dtype == dtypes.STRING else 1
        inputs[alias] = np.full(shape, value, dtypes.DECODED.get(info.dtype, np.dtype(np.float32)))
    return inputs


@click.command()
@click.argument("models", nargs=-1, type=click.Path(path_type=Path))
@click.option("--seed", default=0, show_default=True)
@click.option("--cases", default=200, show_default=True)
@click.option("--first", default=0, hidden=True)
@click.option("--worker", is_flag=True, hidden=True)
def main(models: tuple[Path, ...], seed: int, cases: int, first: int, worker: bool) -> None:
    """Load damaged copies of MODELS (version directories), or of small ones made for it, and count what happens."""
    if worker:
        _work(models, seed, first, cases)
        return
    with tempfile.TemporaryDirectory() as folder:
        counts: collections.Counter[tuple[str, str]] = collections.Counter()
        for outcome in campaign(models or make_models(Path(folder)), seed, cases):
            counts[outcome.file, outcome.result.partition(" ")[0]] += 1
            if outcome.result not in ("refused", "loaded"):
                click.echo(f"case {outcome.case}: {outcome.file}: {outcome.result}")
        for (file, result), count in sorted(counts.items()):
            click.echo(f"{file:45} {result:10} {count}")
        sys.exit(any(result not in ("refused", "loaded") for _, result in counts))


def make_models(folder: Path) -> list[Path]:
    """Three small versions: a SavedModel with variables, table, asset and warm-up request, and the other two files."""
    from serving import tfrecord
    from serving.protos import PredictionLog
    from tests.serving.models import litert_bytes, save_layer_as_onnx, save_session_style

    saved_model, litert, onnx = (folder / name / "1" for name in ("saved_model", "litert", "onnx"))
    saved_model.parent.mkdir()
    save_session_style(saved_model)
    log = PredictionLog()
    log.predict_log.request.inputs["text"].dtype = 7
    log.predict_log.request.inputs["text"].tensor_shape.dim.add().size = 1
    log.predict_log.request.inputs["text"].string_val.append(b"red")
    (saved_model / "assets.extra").mkdir()
    (saved_model / FILES[4]).write_bytes(tfrecord.frame(log.SerializeToString()))
    litert.mkdir(parents=True)
    (litert / "model.tflite").write_bytes(litert_bytes())
    save_layer_as_onnx(onnx / "model.onnx")
    return [saved_model, litert, onnx]


if __name__ == "__main__":
    main()
