"""Step `verify`: every form against the Keras model on the whole test split, then the running server."""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from components import artifacts, formats, metrics, model_files, progress
from components.config import VerifyConfig
from components.errors import ConfigError, HeadraceError, did_you_mean
from components.formats import Arrays, Format
from components.preprocessing import Preprocessing
from components.verify import pareto, speed
from components.verify.held_out import HeldOut
from components.verify.limits import broken_limits, check_patterns, limits_of
from serving.client import GrpcClient, RestClient
from serving.request_log.log import read_records, write_records
from serving.server import ModelServer

FILE = "proof.json"
REQUEST_LOG = "request_log.tfrecord"
EXAMPLE_REQUEST = "example_request.json"
PREDICTIONS = "predictions.npy"
PICTURE = "pictures/pareto.svg"
_SERVED_NAME = "candidate"
_REQUEST_SIZE = 16
_SAVED_MODEL = "saved_model"


@dataclass(frozen=True)
class VerifyResult:
    """The proof.

    Attributes:
        metric: By which forms are compared.
        keras: Of the Keras model: `num_examples, value, calibration_error`.
        formats: For each form: `format, size_bytes, zipped_bytes, load_ms, latency_ms_p50_batch_1` (p99, and 32, alike),
            `num_examples, value, drop, calibration_error, calibration_error_increase, max_abs_difference,
            top1_agreement, passed, reason, pareto_front`; without those that could not be measured.
        server: `grpc` and `rest`: `num_examples, max_abs_difference, top1_agreement, passed, reason`.
    """

    metric: str
    keras: dict[str, Any]
    formats: list[dict[str, Any]]
    server: dict[str, dict[str, Any]]


def verify(
    *, examples: Path, transform: Path, model: Path, exported: Path, proof: Path, config: VerifyConfig
) -> VerifyResult:
    """Measure every form on the whole test split, then ask the embedded server over gRPC and REST.

    Args:
        examples: Artifact of `ingest`, whose test split is asked.
        transform: Artifact of `transform`.
        model: Artifact of `train`.
        exported: Artifact of `export`.
        proof: Where the artifact is written: `proof.json` without times, a picture with them, the server's request log, and
            the Keras model's predictions of the test split.
        config: The limits.

    Raises:
        ConfigError: the task has no such metric, or the export no such form.
        HeadraceError: the SavedModel, the server or a form that may not be left out breaks a limit; nothing is written,
            so nothing can be pushed.
    """
    made_by = {examples: "ingest", transform: "transform", model: "train", exported: "export"}
    for path, step in made_by.items():
        artifacts.open_artifact(path, step=step)
    inputs = {"examples": examples, "transform": transform, "model": model, "exported": exported}
    with artifacts.writing(proof, step="verify", inputs=inputs, config=config) as out:
        gate = _Gate(examples, Preprocessing.load(transform), model, exported, config)
        rows = [gate.check(form) for form in gate.forms]
        rows.append(gate.check_serialized())
        server = gate.check_server(out.path / REQUEST_LOG)
        gate.stop_on_failure([*rows, *({"format": f"server over {name}", **row} for name, row in server.items())])
        fronts = pareto.on_front(rows, gate.metric)
        rows = [{**row, "pareto_front": fronts[row["format"]]} for row in rows]
        out.result = VerifyResult(metric=gate.metric, keras=gate.keras(), formats=rows, server=server)
        (out.path / FILE).write_text(json.dumps(_without_times(asdict(out.result)), indent=1))
        (out.path / PICTURE).parent.mkdir()
        pareto.draw(rows, gate.metric, out.path / PICTURE)
        gate.write_example_request(out.path / EXAMPLE_REQUEST)
        np.save(out.path / PREDICTIONS, gate.held_out.answers)
    return out.result


class _Gate:
    """Measures the forms of an export and judges them."""

    def __init__(
        self, examples: Path, preprocessing: Preprocessing, model: Path, exported: Path, config: VerifyConfig
    ) -> None:
        self.config, self.exported, self.forms = config, exported, formats.read_formats(exported)
        self.metric = config.metric or config.primary_metric
        known = metrics.TASK_METRICS[preprocessing.output_spec.task]
        if self.metric not in known:
            task = preprocessing.output_spec.task
            raise ConfigError(
                f"verify.metric: a {task} task has no metric '{self.metric}'.{did_you_mean(self.metric, known)}"
            )
        check_patterns(config, self.forms)
        self.limits = {form.name: limits_of(form, config) for form in self.forms}
        progress.report("asking the Keras model")
        self.held_out = HeldOut(
            examples,
            preprocessing,
            model_files.load_model(model),
            metric=self.metric,
            sample_size=max(config.num_server_examples, *speed.BATCH_SIZES),
            seed=config.seed,
        )

    def keras(self) -> dict[str, Any]:
        """What forms are compared with."""
        measured = {"value": self.held_out.value}
        return {
            "num_examples": len(self.held_out.answers),
            **metrics.jsonable(measured),
            "calibration_error": self.held_out.calibration_error,
        }

    def check(self, form: Format) -> dict[str, Any]:
        """Measure one form. What cannot be loaded or run fails, with the error for a reason."""
        progress.report(f"comparing {form.name}")
        path = self.exported / form.path
        row = {
            "format": form.name,
            "size_bytes": formats.size_bytes(path),
            "zipped_bytes": formats.zipped_bytes(path),
        }
        try:
            run = formats.make_runner(form, self.exported, self.held_out.output)
            row |= self.held_out.compare(self.held_out.ask(run, form.inputs))
            sample = self.held_out.feed(form.inputs, self.held_out.sample)
            row |= {"load_ms": speed.load_ms(path), **speed.latency_ms(run, sample, self.config.latency_rounds)}
        except HeadraceError as error:
            row["reason"] = str(error)
        return self._judged(row, form.name)

    def check_serialized(self) -> dict[str, Any]:
        """Compare the signature that takes serialized tf.Example."""
        signature = tf.saved_model.load(str(self.exported / _SAVED_MODEL)).signatures["serve_examples"]
        batches = self.held_out.serialized()
        answers = np.concatenate([signature(examples=batch)[self.held_out.output].numpy() for batch in batches])
        return self._judged({"format": f"{_SAVED_MODEL}: tf.Example", **self.held_out.compare(answers)}, _SAVED_MODEL)

    def check_server(self, request_log: Path) -> dict[str, dict[str, Any]]:
        """Serve the SavedModel and compare what comes back over the network; the requests are logged, without times."""
        progress.report("asking the server over gRPC and REST")
        count = min(self.config.num_server_examples, len(self.held_out.sample_rows))
        feed = {name: values[:count] for name, values in self.held_out.sample.items()}
        rows = self.held_out.sample_rows[:count]
        with tempfile.TemporaryDirectory() as directory:
            base_path, log = Path(directory) / _SERVED_NAME, Path(directory) / REQUEST_LOG
            base_path.mkdir()
            (base_path / "1").symlink_to((self.exported / _SAVED_MODEL).resolve())
            with (
                ModelServer(_SERVED_NAME, base_path, request_log_file=log) as server,
                GrpcClient(f"127.0.0.1:{server.grpc_port}") as grpc,
                RestClient(f"http://127.0.0.1:{server.rest_port}") as rest,
            ):
                found = {
                    name: self._judged(self.held_out.differences(self._ask(client, feed), rows), _SAVED_MODEL)
                    for name, client in (("grpc", grpc), ("rest", rest))
                }
            write_records(
                request_log,
                [
                    replace(record, time_seconds=0.0, latency_seconds=0.0, request_id=str(number))
                    for number, record in enumerate(read_records(log))
                ],
            )
        return found

    def write_example_request(self, file: Path) -> None:
        """A REST predict request of one held-out example, to try the server with."""
        instance = {name: _jsonable(values[0]) for name, values in self.held_out.sample.items()}
        file.write_text(json.dumps({"instances": [instance]}))

    def stop_on_failure(self, rows: list[dict[str, Any]]) -> None:
        """Stop if a form failed that may not be left out.

        Raises:
            HeadraceError: naming the forms and their reasons.
        """
        failed = [
            f"{row['format']}: {row['reason']}"
            for row in rows
            if not row["passed"] and (row["format"] not in self.limits or self._stops(row["format"]))
        ]
        if failed:
            raise HeadraceError(
                f"Not what was trained, or not within its limits: {'; '.join(failed)}. Look for the layer that the "
                "converter changes, mend the limits under verify (exact, inexact, limits), or set verify.on_failure to "
                "omit, which leaves out any form but the SavedModel."
            )

    def _stops(self, name: str) -> bool:
        return name == _SAVED_MODEL or self.limits[name].on_failure == "fail"

    def _judged(self, row: dict[str, Any], form: str) -> dict[str, Any]:
        reasons = [row["reason"]] if "reason" in row else broken_limits(row, self.limits[form], self.metric)
        return {**row, "passed": not reasons, "reason": "; ".join(reasons)}

    def _ask(self, client: GrpcClient | RestClient, feed: Arrays) -> np.ndarray:
        def run(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
            return np.asarray(client.predict(_SERVED_NAME, arrays)[self.held_out.output])

        return formats.answer_in_batches(run, feed, _REQUEST_SIZE)


def _without_times(result: dict[str, Any]) -> dict[str, Any]:
    """The result without what differs from run to run: the same proof has the same bytes. The manifest holds the times."""

    def kept(name: str) -> bool:
        return not name.startswith("latency_ms") and name not in ("load_ms", "pareto_front")

    rows = [{name: value for name, value in row.items() if kept(name)} for row in result["formats"]]
    return {**result, "formats": rows}


def _jsonable(value: Any) -> Any:
    """As TF Serving's REST API takes it: bytes that are no text, such as an image's, in base64."""
    value = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
    if isinstance(value, list):
        return [_jsonable(each) for each in value]
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(value).decode()}
