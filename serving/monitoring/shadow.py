"""Shadow traffic: the calls of the serving versions repeated on a second version, whose answers nobody gets.

What differs is counted, as a report: GET /shadow, a table for browsers and JSON for programs.
"""

from __future__ import annotations

import html
import json
import logging
import math
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from serving.calls import Call
from serving.errors import ServingError
from serving.manager import ModelManager
from serving.request_log.sink import size_bytes
from serving.rest.rest_api import Request, Response

logger = logging.getLogger(__name__)

_MAX_QUEUED = 64
_MAX_QUEUED_BYTES = 64 << 20
_MAX_ERRORS = 10  # distinct messages that are kept for a report


@dataclass
class OutputDifference:
    """How one output of the two versions differs.

    Attributes:
        rows: rows compared.
        changed: rows with another value, text or class (the index of the largest of a float row).
        max_abs: largest absolute difference of two finite numbers.
        sum_abs: the sum of these differences.
        numbers: how many there were.
        misshapen: calls whose outputs had another shape or type.
    """

    rows: int = 0
    changed: int = 0
    max_abs: float = 0.0
    sum_abs: float = 0.0
    numbers: int = 0
    misshapen: int = 0

    def add(self, serving: np.ndarray, shadow: np.ndarray) -> None:
        """Compare an output of one call."""
        if serving.shape != shadow.shape or serving.dtype != shadow.dtype:
            self.misshapen += 1
            return
        first, second = (np.atleast_1d(array) for array in (serving, shadow))
        first, second = (array.reshape(len(array), math.prod(array.shape[1:])) for array in (first, second))
        self.rows += len(first)
        if first.dtype.kind == "f":
            with np.errstate(invalid="ignore"):
                difference = np.abs(np.subtract(first, second, dtype=np.float64))
            difference[(first == second) | (np.isnan(first) & np.isnan(second))] = 0.0
            finite = np.isfinite(difference)
            self.max_abs = max(self.max_abs, float(difference.max(initial=0.0, where=finite)))
            self.sum_abs += float(difference.sum(where=finite))
            self.numbers += int(finite.sum())
            changed = ~finite.all(1)
            changed |= first.argmax(1) != second.argmax(1) if first.shape[1] > 1 else (difference > 0).any(1)
        else:
            changed = (first != second).any(1)
        self.changed += int(changed.sum())


@dataclass
class Comparison:
    """What a signature of two versions answered to the same requests.

    Attributes:
        calls: requests that both answered.
        serving_seconds: of these, in the version that serves.
        shadow_seconds: of these, in the shadow.
        errors: message -> number of requests that the shadow alone failed.
        outputs: output alias -> its differences.
    """

    calls: int = 0
    serving_seconds: float = 0.0
    shadow_seconds: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)
    outputs: dict[str, OutputDifference] = field(default_factory=dict)

    def add_error(self, message: str) -> None:
        """Count a request that the shadow failed."""
        known = message in self.errors or len(self.errors) < _MAX_ERRORS
        self.errors[message if known else "others"] += 1

    def add(self, call: Call, shadow_outputs: Mapping[str, np.ndarray], shadow_seconds: float) -> None:
        """Count a request that both answered."""
        self.calls += 1
        self.serving_seconds += call.seconds
        self.shadow_seconds += shadow_seconds
        for alias, array in call.outputs.items():
            difference = self.outputs.setdefault(alias, OutputDifference())
            if alias in shadow_outputs:
                difference.add(array, shadow_outputs[alias])
            else:
                difference.misshapen += 1


class Shadow:
    """Repeats calls on the version that has a label. A listener of Models; serving never waits for it.

    Args:
        manager: the served models; one without the label has no shadow.
        label: of the shadow version, such as `canary`.
        sampling_rate: the share of the calls that is repeated, 0 to 1.

    Attributes:
        dropped: calls that were not repeated, because the shadow was slower than they came, or they are larger than all
            that may wait for it.
    """

    def __init__(self, manager: ModelManager, label: str, sampling_rate: float = 1.0) -> None:
        self.dropped = 0
        self._manager = manager
        self._label = label
        self._sampling_rate = sampling_rate
        self._queue: queue.SimpleQueue[tuple[Call, int, int] | None] = queue.SimpleQueue()
        self._queued = self._queued_bytes = 0
        self._counting = threading.Lock()  # of these and `dropped`; serving takes it, so it is never held for long
        self._found: dict[tuple[str, int, int, str], Comparison] = {}
        self._lock = threading.Lock()  # of `_found`
        self._thread = threading.Thread(target=self._repeat_all, name="shadow", daemon=True)
        self._thread.start()

    def __call__(self, call: Call) -> None:
        """Take a call to repeat; returns at once."""
        number = self._manager.labels(call.version.model_name).get(self._label)
        if number is None or number == call.version.number or call.error is not None:
            return
        if random.random() >= self._sampling_rate:
            return
        size = size_bytes(call.inputs) + size_bytes(call.outputs)
        with self._counting:
            if self._queued >= _MAX_QUEUED or self._queued_bytes + size > _MAX_QUEUED_BYTES:
                self.dropped += 1
                return
            self._queued += 1
            self._queued_bytes += size
        self._queue.put((call, number, size))

    def close(self) -> None:
        """Repeat what is queued, then end."""
        self._queue.put(None)
        self._thread.join()

    def _repeat_all(self) -> None:
        while (taken := self._queue.get()) is not None:
            call, number, size = taken
            try:
                self._repeat(call, number)
            except Exception:
                logger.exception("a call could not be compared with its shadow")
            with self._counting:
                self._queued -= 1
                self._queued_bytes -= size
            del taken, call  # else they would stay until the next one comes

    def _repeat(self, call: Call, number: int) -> None:
        name = call.version.model_name
        started = time.perf_counter()
        outputs: Mapping[str, np.ndarray] = {}
        failure = ""
        try:
            with self._manager.lease(name, number, None) as version:
                outputs = version.loaded.run(call.signature_name, call.inputs, list(call.outputs))
        except ServingError as error:
            failure = str(error)
        seconds = time.perf_counter() - started
        with self._lock:
            key = (name, call.version.number, number, call.signature_name)
            comparison = self._found.setdefault(key, Comparison())
            if failure:
                comparison.add_error(failure)
            else:
                comparison.add(call, outputs, seconds)

    def answer(self, request: Request) -> Response:
        """The report, as a page where the client would rather have that."""
        if "text/html" in request.headers.get("accept", ""):
            return Response(200, self.page().encode(), "text/html; charset=utf-8")
        return Response(200, json.dumps(self.report(), indent=1).encode())

    def report(self) -> dict[str, Any]:
        """What has been found, JSON-able: `dropped`, and in `comparisons` an entry for each signature and pair of
        versions."""
        with self._lock:
            return {
                "dropped": self.dropped,
                "comparisons": [_entry(*key, comparison) for key, comparison in sorted(self._found.items())],
            }

    def page(self) -> str:
        """The report as an HTML page."""
        report = self.report()
        rows = [
            [
                *(entry[key] for key in _ROW_KEYS),
                *entry["mean_milliseconds"].values(),
                alias,
                *difference.values(),
            ]
            for entry in report["comparisons"]
            for alias, difference in (entry["outputs"] or {"": {}}).items()
        ]
        lines = ("".join(f"<td>{html.escape(_cell(cell))}</td>" for cell in row) for row in rows)
        table = "".join(f"<tr>{line}</tr>" for line in lines)
        errors = "".join(
            f"<li>{count} &times; {html.escape(message)}</li>"
            for entry in report["comparisons"]
            for message, count in entry["errors"].items()
        )
        return _PAGE.format(
            head="".join(f"<th>{title}</th>" for title in _TITLES),
            table=table,
            dropped=report["dropped"],
            errors=f"<h2>Errors of the shadow</h2><ul>{errors}</ul>" if errors else "",
        )


_TITLES = (
    "model", "signature", "serving", "shadow", "calls", "shadow errors", "ms serving", "ms shadow",
    "output", "rows", "rows changed", "mean |difference|", "max |difference|", "misshapen",
)  # fmt: skip
_ROW_KEYS = ("model", "signature", "serving_version", "shadow_version", "calls", "shadow_errors")
_PAGE = """<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>Shadow traffic</title>
<style>body {{ font: 14px system-ui, sans-serif; margin: 2rem; }} td, th {{ padding: .3rem .7rem; text-align: right; }}
tr:nth-child(even) {{ background: #f4f4f4; }}</style>
<h1>Shadow traffic</h1>
<p>Calls repeated on a second version; {dropped} were not, for lack of time.</p>
<table><tr>{head}</tr>{table}</table>{errors}
</html>
"""


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _entry(model: str, serving: int, shadow: int, signature: str, found: Comparison) -> dict[str, Any]:
    calls = max(found.calls, 1)
    return {
        "model": model,
        "signature": signature,
        "serving_version": serving,
        "shadow_version": shadow,
        "calls": found.calls,
        "shadow_errors": found.errors.total(),
        "mean_milliseconds": {
            "serving": 1000 * found.serving_seconds / calls,
            "shadow": 1000 * found.shadow_seconds / calls,
        },
        "outputs": {
            alias: {
                "rows": output.rows,
                "rows_changed": output.changed,
                "mean_abs_difference": output.sum_abs / max(output.numbers, 1),
                "max_abs_difference": output.max_abs,
                "misshapen": output.misshapen,
            }
            for alias, output in sorted(found.outputs.items())
        },
        "errors": dict(found.errors),
    }
