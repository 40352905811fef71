"""What a run came to, in print: metrics, the gate, the exports, where everything lies and how to serve it."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from components import html_page, object_store
from pipelines.config import PipelineConfig
from pipelines.local import BEST, RunResult

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
    for piece in _pieces(result, config.evaluate.min_slice_examples):
        _print(console, piece)
    for line in _places(result, config):
        _print(console, line)


def markdown(title: str, notes: Sequence[str], result: RunResult, min_slice_examples: int) -> str:
    """The summary as Markdown.

    Args:
        title: Its heading.
        notes: Paragraphs below it.
        result: What became of each step.
        min_slice_examples: Smaller slices say little.
    """
    pieces: list[Table | Text] = [_steps(result), *_pieces(result, min_slice_examples)]
    paragraphs = [note.replace("\n", "  \n") for note in notes]
    return "\n\n".join([f"# {title}", *paragraphs, *map(_in_markdown, pieces)]) + "\n"


def html(title: str, notes: Sequence[str], result: RunResult, min_slice_examples: int) -> str:
    """The summary as a page; the arguments are those of `markdown`."""
    return _page(title, [*map(Text, notes), _steps(result), *_pieces(result, min_slice_examples)])


def evaluation_page(values: Mapping[str, Any]) -> str:
    """A page of what `evaluate` returned, with every slice, the worst first."""
    table = _table("Slices of the test split", "slice", "examples", *values["metrics"]["test"])
    for piece in values["slices"]:
        numbers = (_number(piece["metrics"].get(metric)) for metric in values["metrics"]["test"])
        table.add_row(Text(f"{piece['feature']}={piece['value']}"), str(piece["num_examples"]), *numbers)
    return _page("Evaluation", [*_metrics(values, 1), *([table] if values["slices"] else [])])


def verification_page(values: Mapping[str, Any]) -> str:
    """A page of what `verify` returned."""
    return _page("Forms of the model", _forms(values))


def _pieces(result: RunResult, min_slice_examples: int) -> Iterator[Table | Text]:
    parts: dict[str, Callable[[Mapping[str, Any]], Iterator[Table | Text]]] = {
        "validate": _anomalies,
        "tune": _tuned,
        "evaluate": lambda values: _metrics(values, min_slice_examples),
        "optimize": _optimized,
        "compress": _compressed,
        "verify": _forms,
        "deploy": _deployed,
        "monitor": _monitoring,
    }
    for name, part in parts.items():
        if values := result.result_of(name):
            yield from part(values)


def _steps(result: RunResult) -> Table:
    table = _table("Steps", "step", "state", "seconds")
    table.add_column("why")
    for step in result.steps:
        seconds = f"{step.seconds:.1f}" if step.seconds else ""
        table.add_row(step.name, step.state, seconds, Text("\n".join(step.reasons)))
    return table


def _page(title: str, pieces: Iterable[Table | Text]) -> str:
    return html_page.document(title, [f"<h1>{escape(title)}</h1>", *map(_in_html, pieces)])


def _in_html(piece: Table | Text) -> str:
    if isinstance(piece, Text):
        return f"<p>{escape(piece.plain)}</p>".replace("\n", "<br>")
    headings, *rows = _lines(piece)
    return f"<h2>{escape(str(piece.title))}</h2>\n{html_page.table(headings, (('', row) for row in rows))}"


def _in_markdown(piece: Table | Text) -> str:
    if isinstance(piece, Text):
        return piece.plain
    headings, *rows = _lines(piece)
    lines = [[cell.replace("|", "\\|").replace("\n", "<br>") for cell in line] for line in (headings, *rows)]
    lines.insert(1, ["---"] * len(headings))
    return f"## {piece.title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _lines(table: Table) -> list[list[str]]:
    """The headings of a table, and then its rows, in plain text."""
    columns = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    return [list(line) for line in zip(*columns, strict=True)]


def _print(console: Console, piece: Table | Text | str) -> None:
    if isinstance(piece, Table):
        console.print()
        console.print(piece)
    else:
        console.print(piece, markup=False, soft_wrap=True)


def _anomalies(values: Mapping[str, Any]) -> Iterator[Table | Text]:
    """What is odd in the data."""
    if found := values.get("anomalies", ()):
        table = Table(title="Anomalies", title_justify="left", title_style="bold", box=None, pad_edge=False)
        for heading in ("split", "feature", "kind", "what is wrong, and what to do"):
            table.add_column(heading, overflow="fold")
        for each in found:
            table.add_row(*(Text(each[key]) for key in ("split", "feature", "kind", "message")))
        yield table


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


def _tuned(values: Mapping[str, Any]) -> Iterator[Table | Text]:
    """The settings of the best trial."""
    counts = ", ".join(f"{count} {state}" for state, count in values["num_trials"].items() if count)
    written = _number(values["value_as_written"], ", as written {:.4f}")
    yield Text(
        f"Tuned: {counts}; best is trial {values['trial']}, validation {values['metric']} {values['value']:.4f}{written}"
    )
    for path, value in values["settings"].items():
        yield Text(f"  {path}: {json.dumps(value)}")


def _optimized(values: Mapping[str, Any]) -> Iterator[Table | Text]:
    """What each stage made of the model."""
    if not values["stages"]:
        return
    table = _table("Optimized model", "after", "weights", "zeros", "values", "size", "zipped", "validation")
    for stage in values["stages"]:
        table.add_row(
            stage["method"],
            f"{stage['num_parameters']:,}",
            f"{stage['zero_share']:.1%}",
            f"{stage['distinct_values']:,}",
            _size(stage["size_bytes"]),
            _size(stage["zipped_bytes"]),
            ", ".join(f"{name} {_number(value)}" for name, value in stage["validation"].items()),
        )
    yield table


def _compressed(values: Mapping[str, Any]) -> Iterator[Table | Text]:
    """Where int8 ranges are from, and what else is to be said of a form; what it is worth, `verify` says."""
    if not (told := [form for form in values["formats"] if form["ranges"] or form["notes"]]):
        return
    table = _table("Compressed forms", "form", "ranges")
    table.add_column("notes")
    for form in told:
        table.add_row(form["format"], form["ranges"] or "", "\n".join(form["notes"]))
    yield table


def _forms(values: Mapping[str, Any]) -> Iterator[Table | Text]:
    metric, keras = values["metric"], values["keras"]
    latencies = [f"batch {size}\np50 / p99 ms" for size in (1, 32)]
    columns = ("size", "zipped", "load\nms", *latencies, metric, "drop", "largest\ndifference", "same\nanswer", "ECE")
    table = _table("Forms", "form", *columns)
    for form in sorted(values["formats"], key=_passed_and_fast):
        name = form["format"] if form["passed"] else Text(form["format"], style="red")
        table.add_row(
            name,
            _star("size", form) + _size(form.get("size_bytes")),
            _size(form.get("zipped_bytes")),
            _number(form.get("load_ms"), "{:.1f}"),
            _star("latency", form) + _latency(form, 1),
            _latency(form, 32),
            _number(form.get("value")),
            _number(form.get("drop")),
            _number(form.get("max_abs_difference"), "{:.1e}"),
            _number(form.get("top1_agreement"), "{:.2%}"),
            _number(form.get("calibration_error")),
        )
    yield table
    calibration = _number(keras["calibration_error"], ", expected calibration error (ECE) {:.4f}")
    yield Text(
        f"The Keras model on {keras['num_examples']} test examples: {metric} {_number(keras['value'])}{calibration}"
    )
    yield Text(f"* no form that passed has both a better {metric} and a smaller size, or a lower latency")
    for form in values["formats"]:
        if not form["passed"]:
            yield Text.assemble(("Left out: ", "red"), f"{form['format']}: {form['reason']}")
    for protocol, proof in values["server"].items():
        name = {"grpc": "gRPC", "rest": "REST"}.get(protocol, protocol)
        difference = _number(proof["max_abs_difference"], "{:.1e}")
        yield Text(f"Server over {name}: passed, {proof['num_examples']} examples, largest difference {difference}")


def _passed_and_fast(form: Mapping[str, Any]) -> tuple[bool, float]:
    return not form["passed"], form.get("latency_ms_p50_batch_1", float("inf"))


def _star(cost: str, form: Mapping[str, Any]) -> str:
    return "* " if cost in form["pareto_front"] else ""


def _latency(form: Mapping[str, Any], batch_size: int) -> str:
    times = [form.get(f"latency_ms_p{percentile}_batch_{batch_size}") for percentile in (50, 99)]
    return " / ".join(f"{time:.3f}" if time < 1 else f"{time:.2f}" for time in times if time is not None)


def _deployed(values: Mapping[str, Any]) -> Iterator[Table | Text]:
    if values["canary"] is None:
        yield Text(f"Deployed: version {values['stable']} gets all requests")
    else:
        share = f"{values['canary_share']:.0%} of the requests"
        yield Text(f"Deployed: version {values['canary']} gets {share}, version {values['stable']} the rest")


def _monitoring(values: Mapping[str, Any]) -> Iterator[Table | Text]:
    alarms = [f"{each['kind']} of {each['name']}" for each in values["alarms"]]
    found = ", ".join(dict.fromkeys(alarms)) or "nothing to report"
    yield Text(f"Monitoring: {values['status']}, {values['num_examples']} requested examples, {found}")


def _places(result: RunResult, config: PipelineConfig) -> Iterator[str]:
    run_dir = result.run_dir.absolute()
    yield ""
    yield f"Artifacts, config.yaml and summary.json: {run_dir}"
    if (result.result_of("validate") or {}).get("anomalies"):
        yield f"The anomalies of the data, as a page: {run_dir / 'statistics/anomalies.html'}"
    if result.result_of("tune"):
        yield f"The best settings, as a configuration: {run_dir / BEST}"
        yield f"The trials, in pictures: {run_dir / 'tuned/trials/report.html'}"
    if (picture := run_dir / "proof/pictures/pareto.svg").is_file():
        yield f"The forms in a picture: {picture}"
    if (page := run_dir / "monitoring/report.html").is_file():
        yield f"What it is asked, in pictures: {page}"
    pushed = result.result_of("push")
    if pushed is None:
        return
    base_path, _, version = object_store.absolute(pushed["version_path"]).rpartition("/")
    name = pushed.get("model_name", config.name)
    yield f"Pushed model, version {pushed['version']}: {base_path}/{version}"
    yield f"Forms: {', '.join(pushed['formats'])}"
    if (card := run_dir / "pushed/model_card.html").is_file():
        yield f"Its model card: {card}"
    yield "Serve it:"
    yield f"  {serve_command(name, base_path)}"
    yield "Ask it:"
    yield f"  {curl_command(name, run_dir)}"


def serve_command(name: str, base_path: str) -> str:
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
