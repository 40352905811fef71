"""What a run came to, in print: metrics, the gate, the exports, where everything lies and how to serve it."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipelines.config import PipelineConfig
from pipelines.local import RunResult

NUM_WORST_SLICES = 2
SPLITS = ("train", "validation", "test")
GRPC_PORT = 8500
REST_PORT = 8501


def print_summary(result: RunResult, config: PipelineConfig, console: Console) -> None:
    """Print the parts of the summary for which the run has results.

    Args:
        result: What became of each step.
        config: The experiment.
        console: Where to print.
    """
    parts: dict[str, Callable[[Mapping[str, Any]], Iterator[Table | Text]]] = {
        "evaluate": lambda values: _metrics(values, config.evaluate.min_slice_examples),
        "compress": _compressed,
        "verify": _exports,
        "monitor": _monitoring,
    }
    for name, part in parts.items():
        if values := result.result_of(name):
            for piece in part(values):
                _print(console, piece)
    for line in _places(result, config):
        _print(console, line)


def _print(console: Console, piece: Table | Text | str) -> None:
    if isinstance(piece, Table):
        console.print()
        console.print(piece)
    else:
        console.print(piece, markup=False, soft_wrap=True)


def _metrics(values: Mapping[str, Any], min_examples: int) -> Iterator[Table | Text]:
    by_split = values["metrics"]
    columns = [(split, by_split[split]) for split in SPLITS if split in by_split]
    worst = worst_slices(values, min_examples)
    table = _table("Metrics", "metric", *(split for split, _ in columns), *(_slice_title(each) for each in worst))
    sources = [metrics for _, metrics in columns] + [each["metrics"] for each in worst]
    baseline = values.get("baseline") or {}
    if baseline:
        table.add_column("majority answer", justify="right")
        sources.append(baseline)
    for metric in dict.fromkeys(name for source in sources for name in source):
        mark = " *" if metric == values.get("primary_metric") else ""
        table.add_row(f"{metric}{mark}", *(_number(source.get(metric)) for source in sources))
    yield table
    yield from _decision(values)


def worst_slices(values: Mapping[str, Any], min_examples: int) -> list[Mapping[str, Any]]:
    """The slices in which the primary metric is worst, the worst first.

    Args:
        values: The result of `evaluate`, which lists the worst slices first.
        min_examples: Smaller slices say little; they count only if all are smaller.
    """
    metric = values.get("primary_metric")
    judged = [each for each in values.get("slices", ()) if each["metrics"].get(metric) is not None]
    judged = [each for each in judged if each["num_examples"] >= min_examples] or judged
    return judged[:NUM_WORST_SLICES]


def _slice_title(values: Mapping[str, Any]) -> str:
    return f"{values['feature']}={values['value']}\n({values['num_examples']} examples)"


def _decision(values: Mapping[str, Any]) -> Iterator[Text]:
    blessed = values["blessed"]
    yield Text.assemble(
        "Gate: ", ("blessed", "bold green") if blessed else ("not blessed: nothing was pushed", "bold red")
    )
    for reason in values.get("reasons", ()):
        yield Text(f"  {reason}")


def _compressed(values: Mapping[str, Any]) -> Iterator[Table | Text]:
    if not values["formats"]:
        return
    table = _table("Compressed forms", "form", "size", "metric", "value", "float32", "drop", "gate")
    for form in values["formats"]:
        verdict = "passed" if form["passed"] else f"left out: {form['reason']}"
        numbers = [_number(form.get(name)) for name in ("value", "baseline_value", "drop")]
        table.add_row(form["format"], _size(form["size_bytes"]), form["metric"], *numbers, verdict)
    yield table


def _exports(values: Mapping[str, Any]) -> Iterator[Table | Text]:
    latency = ("latency_ms_batch_1", "latency_ms_batch_32")
    columns = ("size", "ms, batch 1", "ms, batch 32", "largest difference", "same answer", "examples", "parity")
    table = _table("Exports", "form", *columns)
    for form in values["formats"]:
        table.add_row(
            form["format"],
            _size(form.get("size_bytes")),
            *(_number(form.get(name), "{:.3f}") for name in latency),
            _number(form.get("max_abs_difference"), "{:.1e}"),
            _number(form.get("top1_agreement"), "{:.2%}"),
            str(form["num_examples"]),
            "passed" if form["passed"] else "FAILED",
        )
    yield table
    for protocol, proof in values.get("server", {}).items():
        name = {"grpc": "gRPC", "rest": "REST"}.get(protocol, protocol)
        difference = _number(proof.get("max_abs_difference"), "{:.1e}")
        verdict = "passed" if proof["passed"] else "FAILED"
        examples = f"{proof['num_examples']} examples"
        yield Text(f"Server over {name}: {verdict}, {examples}, largest difference {difference}")


def _monitoring(values: Mapping[str, Any]) -> Iterator[Table | Text]:
    skewed = values.get("skewed") or []
    names = ", ".join(each if isinstance(each, str) else str(each.get("feature", each)) for each in skewed)
    found = f"skewed: {names}" if skewed else "no feature is skewed"
    yield Text(f"Monitoring: {values['status']}, {values['num_examples']} requested examples, {found}")


def _places(result: RunResult, config: PipelineConfig) -> Iterator[str]:
    run_dir = result.run_dir.absolute()
    yield ""
    yield f"Artifacts, config.yaml and summary.json: {run_dir}"
    pushed = result.result_of("push")
    if pushed is None:
        return
    version_path = Path(pushed["version_path"]).absolute()
    name = pushed.get("model_name", config.name)
    yield f"Pushed model, version {pushed['version']}: {version_path}"
    yield "Serve it:"
    yield f"  {serve_command(name, version_path.parent)}"
    yield "Ask it:"
    yield f"  {curl_command(name, run_dir)}"


def serve_command(name: str, base_path: Path) -> str:
    """The command that serves a pushed model."""
    ports = f"--port={GRPC_PORT} --rest_api_port={REST_PORT}"
    return f"{_python()} -m serving --model_name={name} --model_base_path={base_path} {ports}"


def _python() -> str:
    """This interpreter, as one types it from here."""
    interpreter = Path(sys.executable)
    if shutil.which("python") == str(interpreter):
        return "python"
    near = interpreter.is_relative_to(Path.cwd())
    return str(interpreter.relative_to(Path.cwd()) if near else interpreter)


def curl_command(name: str, run_dir: Path) -> str:
    """A request that the served model answers: an example of the proof's, or else its metadata."""
    url = f"http://localhost:{REST_PORT}/v1/models/{name}"
    if (request := _example_request(run_dir)) is None:
        return f"curl {url}/metadata"
    return f"curl -d {shlex.quote(json.dumps(request))} {url}:predict"


def _example_request(run_dir: Path) -> Mapping[str, Any] | None:
    """The request of one held-out example that `verify` wrote, if it is short enough to paste."""
    file = run_dir / "proof" / "example_request.json"
    if not file.is_file() or file.stat().st_size > 4096:
        return None
    request: Mapping[str, Any] = json.loads(file.read_text())
    return request


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _number(value: Any, form: str = "{:.4f}") -> str:
    return "" if value is None else form.format(value)


def _size(num_bytes: int | None) -> str:
    if num_bytes is None:
        return ""
    return f"{num_bytes / 1e6:.2f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.1f} kB"
