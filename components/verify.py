"""Step `verify`: the proof that every form, and the running server, answers as the Keras model does."""

from __future__ import annotations

import json
import statistics as stats
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from components import artifacts, formats, metrics, model_files, progress
from components.config import VerifyConfig
from components.errors import HeadraceError
from components.examples import read_arrays, shard_files
from components.formats import Arrays, Format
from components.preprocessing import Preprocessing
from serving.client import GrpcClient, RestClient
from serving.server import ModelServer

FILE = "proof.json"
REQUEST_LOG = "request_log.tfrecord"
EXAMPLE_REQUEST = "example_request.json"
LATENCY_BATCHES = (1, 32)
_LATENCY_ROUNDS = 20
_SERVED_NAME = "candidate"
_REQUEST_SIZE = 16


@dataclass(frozen=True)
class VerifyResult:
    """The proof.

    Attributes:
        formats: For each form: `format, size_bytes, latency_ms_batch_1, latency_ms_batch_32` (medians),
            `max_abs_difference, top1_agreement, num_examples, passed`.
        server: `grpc` and `rest`: `num_examples, max_abs_difference, top1_agreement, passed`.
    """

    formats: list[dict[str, Any]]
    server: dict[str, dict[str, Any]]


def verify(
    *, examples: Path, transform: Path, model: Path, exported: Path, proof: Path, config: VerifyConfig
) -> VerifyResult:
    """Compare every form with the Keras model on held-out examples, then ask the embedded server over gRPC and REST.

    Args:
        examples: Artifact of `ingest`, whose test split is asked.
        transform: Artifact of `transform`.
        model: Artifact of `train`.
        exported: Artifact of `export`.
        proof: Where the artifact is written: `proof.json`, and the server's request log.
        config: The limits.

    Raises:
        HeadraceError: a form or the server differs by more than its limit; nothing is written, so nothing can be pushed.
    """
    made_by = {examples: "ingest", transform: "transform", model: "train", exported: "export"}
    for path, step in made_by.items():
        artifacts.open_artifact(path, step=step)
    inputs = {"examples": examples, "transform": transform, "model": model, "exported": exported}
    with artifacts.writing(proof, step="verify", inputs=inputs, config=config) as out:
        parity = _Parity(examples, Preprocessing.load(transform), model, exported, config)
        rows = [parity.check(form) for form in formats.read_formats(exported)]
        rows.append(parity.check_serialized(examples))
        server = parity.check_server(out.path / REQUEST_LOG)
        parity.write_example_request(out.path / EXAMPLE_REQUEST)
        _stop_on_difference(
            [*rows, *({"format": f"server over {name}", **row} for name, row in server.items())], config
        )
        out.result = VerifyResult(formats=rows, server=server)
        (out.path / FILE).write_text(json.dumps(_without_times(asdict(out.result)), indent=1))
    return out.result


class _Parity:
    """The held-out examples with the Keras model's answers, and the comparisons with them."""

    def __init__(
        self, examples: Path, preprocessing: Preprocessing, model: Path, exported: Path, config: VerifyConfig
    ) -> None:
        self.config, self.exported = config, exported
        self.output = formats.output_name(preprocessing.output_spec)
        test = read_arrays(examples, "test")
        # Rows in the order of the source are alike where it is sorted; a sample is not.
        num_examples = len(test[preprocessing.info.label])
        self.rows = np.random.default_rng(config.seed).permutation(num_examples)[: config.num_examples]
        chosen = {name: test[name][self.rows] for name in preprocessing.raw_inputs}
        transformed = preprocessing.transform_in_batches(chosen)
        self.feeds: dict[str, Arrays] = {"raw": chosen, "transformed": transformed}
        network = model_files.load_model(model)
        self.reference = model_files.Predictor(network, preprocessing.output_spec)(transformed)

    def check(self, form: Format) -> dict[str, Any]:
        """Compare and time one form."""
        progress.report(f"comparing {form.name}")
        feed = self.feeds[form.inputs]
        run = formats.make_runner(form, self.exported, self.output)
        row = self._compare(formats.answer_in_batches(run, feed), form)
        latencies = {f"latency_ms_batch_{n}": _latency_ms(run, feed, n) for n in LATENCY_BATCHES}
        return {"format": form.name, "size_bytes": formats.size_bytes(self.exported / form.path), **latencies, **row}

    def check_serialized(self, examples: Path) -> dict[str, Any]:
        """Compare the signature that takes serialized tf.Example."""
        signature = tf.saved_model.load(str(self.exported / "saved_model")).signatures["serve_examples"]
        records = tf.data.TFRecordDataset([str(file) for file in shard_files(examples, "test")])
        serialized = tf.constant(list(records.as_numpy_iterator()))
        serialized = tf.gather(serialized, self.rows)
        return {
            "format": "saved_model: tf.Example",
            **self._compare(signature(examples=serialized)[self.output].numpy()),
        }

    def check_server(self, request_log: Path) -> dict[str, dict[str, Any]]:
        """Serve the SavedModel and compare what comes back over the network; the requests are logged."""
        progress.report("asking the server over gRPC and REST")
        count = min(self.config.num_server_examples, len(self.reference))
        feed = {name: values[:count] for name, values in self.feeds["raw"].items()}
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "1").symlink_to((self.exported / "saved_model").resolve())
            with (
                ModelServer(_SERVED_NAME, Path(directory), request_log_file=request_log) as server,
                GrpcClient(f"127.0.0.1:{server.grpc_port}") as grpc,
                RestClient(f"http://127.0.0.1:{server.rest_port}") as rest,
            ):
                return {
                    name: self._compare(self._ask(client, feed)) for name, client in (("grpc", grpc), ("rest", rest))
                }

    def write_example_request(self, file: Path) -> None:
        """A REST predict request of one held-out example, to try the server with."""
        instance = {name: _jsonable(values[0]) for name, values in self.feeds["raw"].items()}
        file.write_text(json.dumps({"instances": [instance]}))

    def _ask(self, client: GrpcClient | RestClient, feed: Arrays) -> np.ndarray:
        def run(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
            return np.asarray(client.predict(_SERVED_NAME, arrays)[self.output])

        return formats.answer_in_batches(run, feed, _REQUEST_SIZE)

    def _compare(self, answers: np.ndarray, form: Format | None = None) -> dict[str, Any]:
        """Compare answers with the Keras model's; by default as those of a form that must be exact."""
        reference = self.reference[: len(answers)]
        # Values of a regression are compared on the scale of their own spread, probabilities as they are.
        scale = max(float(self.reference.std()), 1e-12) if self.reference.ndim == 1 else 1.0
        difference = float(np.abs(reference - answers).max()) / scale
        agreement = metrics.top1_agreement(reference, answers)
        if form is None or form.exact:
            passed = agreement >= self.config.min_top1_agreement and difference <= self.config.max_abs_difference
        else:
            passed = agreement >= _least_in_sample(form.min_top1_agreement, len(answers))
        return {
            "max_abs_difference": difference,
            "top1_agreement": agreement,
            "num_examples": len(answers),
            "passed": bool(passed),
        }


def _without_times(result: dict[str, Any]) -> dict[str, Any]:
    """The result without latencies: the same proof has the same bytes. The manifest holds them."""
    rows = [{name: value for name, value in row.items() if not name.startswith("latency")} for row in result["formats"]]
    return {**result, "formats": rows}


def _least_in_sample(limit: float | None, num_examples: int) -> float:
    """The agreement below which a form that reached `limit` on the whole test split cannot be the same: three deviations."""
    share = limit or 0.0
    return share - 3 * (share * (1 - share) / num_examples) ** 0.5


def _jsonable(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value.tolist()


def _latency_ms(run: formats.Runner, feed: Arrays, batch_size: int) -> float:
    batch = {name: values[:batch_size] for name, values in feed.items()}
    run(batch)
    seconds = []
    for _ in range(_LATENCY_ROUNDS):
        start = time.perf_counter()
        run(batch)
        seconds.append(time.perf_counter() - start)
    return stats.median(seconds) * 1e3


def _stop_on_difference(rows: list[dict[str, Any]], config: VerifyConfig) -> None:
    failed = [
        f"{row['format']} (largest difference {row['max_abs_difference']:.2g}, same answer on {row['top1_agreement']:.4f})"
        for row in rows
        if not row["passed"]
    ]
    if failed:
        raise HeadraceError(
            f"Not what was trained: {', '.join(failed)}. Limits of exact forms: verify.max_abs_difference "
            f"{config.max_abs_difference}, verify.min_top1_agreement {config.min_top1_agreement}. Leave the form out of "
            "export.formats or compress.formats, or look for the layer that the converter changes."
        )
