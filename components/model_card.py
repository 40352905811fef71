"""The model card: what a pushed model is, on what it was trained, what it reaches and where that ends.

Its parts follow Mitchell et al., Model Cards for Model Reporting, https://arxiv.org/abs/1810.03993.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from components import html_page
from components.config import CardConfig

FILE = "model_card.md"
PAGE = "model_card.html"
NUM_SLICES = 20
_SPLITS = ("train", "validation", "test")

Origins = Mapping[str, Mapping[str, Any]]


def markdown(name: str, config: CardConfig, origins: Origins) -> str:
    """The card as Markdown.

    Args:
        name: Of the model.
        config: What only its makers know.
        origins: Artifact -> what `artifacts.origin` says of it: examples, statistics, transform, model, evaluation,
            exported and proof.
    """
    parts = {
        "Model details": _details(origins),
        "Intended use": _said(config, "intended_use", "out_of_scope_use"),
        "Data": _data(origins),
        "Metrics": _metrics(origins["evaluation"]["result"]),
        "Slices": _slices(origins["evaluation"]["result"]),
        "Gate": [f"- {reason}" for reason in origins["evaluation"]["result"]["reasons"]],
        "Forms": _forms(origins["proof"]["result"]),
        "Limits": [
            *_said(config, "ethical_considerations", "caveats"),
            *_listed(
                "Found in the data",
                [*origins["examples"]["result"]["warnings"], *origins["statistics"]["result"]["warnings"]],
            ),
        ],
        "Provenance": _provenance(origins),
    }
    lines = [f"# Model card: {name}"]
    for title, part in parts.items():
        lines += ["", f"## {title}", "", *part]
    return "\n".join([*lines, ""])


def page(name: str, text: str) -> str:
    """The card as a page, from its Markdown; HTML in it is shown, not obeyed."""
    from markdown_it import MarkdownIt

    return html_page.document(f"Model card: {name}", [MarkdownIt("js-default").render(text)])


def _details(origins: Origins) -> Iterator[str]:
    model = origins["model"]
    training, built = model["config"], model["config"]["model"]
    yield from _table(
        ("", ""),
        [
            ("Network", f"{built['name']} {built['args'] or ''}"),
            ("Trainable parameters", f"{model['result']['num_parameters']:,}"),
            ("Task", origins["examples"]["config"]["task"]),
            ("Training", f"{model['result']['epochs']} epochs, the weights of epoch {model['result']['best_epoch']}"),
            ("Precision, seed", f"{training['precision']}, {training['seed']}"),
            ("Energy used", "not measured"),
            *((f"Version of {package}", version) for package, version in sorted(_versions(origins).items())),
        ],
    )


def _said(config: CardConfig, *fields: str) -> list[str]:
    """What the config says, and plainly where it says nothing."""
    lines = []
    for field in fields:
        title = field.replace("_", " ").capitalize()
        lines += [f"**{title}**: {getattr(config, field) or f'not stated (`card.{field}`)'}", ""]
    return lines


def _listed(title: str, items: Sequence[str]) -> list[str]:
    return [f"**{title}**:", "", *(f"- {item}" for item in items)] if items else [f"**{title}**: nothing"]


def _data(origins: Origins) -> Iterator[str]:
    examples = origins["examples"]
    data, counts = examples["config"], examples["result"]["num_examples"]
    place = f"Source: `{data['source']}`, path `{data['path']}`"
    yield f"{place}, label `{examples['result']['label']}`, split by {_split(data['split'])}."
    yield ""
    yield from _table(("split", "examples"), [(split, f"{counts[split]:,}") for split in _SPLITS if split in counts])
    yield ""
    yield from _table(("feature", "type"), sorted(examples["result"]["features"].items()))


def _split(split: Mapping[str, Any]) -> str:
    if split["method"] == "column":
        return f"column `{split['column']}`"
    return f"hash of {', '.join(f'`{key}`' for key in split['key']) or 'the row'}"


def _metrics(evaluation: Mapping[str, Any]) -> Iterator[str]:
    columns = {split: evaluation["metrics"][split] for split in _SPLITS if split in evaluation["metrics"]}
    columns["majority answer"] = evaluation["baseline"]
    if champion := evaluation["champion"]:
        columns[f"champion, version {champion['version']}"] = champion["metrics"]
    names = dict.fromkeys(name for values in columns.values() for name in values)
    yield from _table(
        ("metric", *columns), [(name, *(_number(values.get(name)) for values in columns.values())) for name in names]
    )


def _slices(evaluation: Mapping[str, Any]) -> Iterator[str]:
    slices = evaluation["slices"]
    if not slices:
        yield "None were asked for (`evaluate.slices`)."
        return
    names = list(slices[0]["metrics"])
    yield f"Of the test split, the worst by {evaluation['primary_metric']} first."
    yield ""
    yield from _table(
        ("slice", "examples", *names),
        [
            (f"{each['feature']}={each['value']}", each["num_examples"], *(_number(each["metrics"][n]) for n in names))
            for each in slices[:NUM_SLICES]
        ],
    )
    if len(slices) > NUM_SLICES:
        yield ""
        yield f"{len(slices) - NUM_SLICES} more are in `evaluation.json`."


def _forms(proof: Mapping[str, Any]) -> Iterator[str]:
    metric = proof["metric"]
    yield from _table(
        ("form", "bytes", "p50 ms, batch 1", metric, "drop", "same answer", "pushed"),
        [
            (
                form["format"],
                f"{form['size_bytes']:,}" if "size_bytes" in form else "",
                *(_number(form.get(name)) for name in ("latency_ms_p50_batch_1", "value", "drop", "top1_agreement")),
                "yes" if form["passed"] else f"no: {form['reason']}",
            )
            for form in proof["formats"]
        ],
    )


def _provenance(origins: Origins) -> Iterator[str]:
    data = origins["examples"]["outside"]["data"]
    rows = [("data", data or "not known: the source reads no file")]
    rows += [(name, origins[name]["digest"]) for name in ("examples", "transform", "model", "exported")]
    rows.append(("source of the training", origins["model"]["source"]))
    yield from _table(("", "SHA-256"), rows)
    yield ""
    yield "`lineage.json` beside this file has every step."


def _versions(origins: Origins) -> dict[str, str]:
    return {package: version for origin in origins.values() for package, version in origin["versions"].items()}


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    yield _row(header)
    yield _row(["---"] * len(header))
    for row in rows:
        yield _row(row)


def _row(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _cell(value: Any) -> str:
    return " ".join(str(value).replace("\\", "\\\\").replace("|", "\\|").split())


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.4g}"
