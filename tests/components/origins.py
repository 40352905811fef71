"""What the artifacts of a small run were made from, without having run it."""

from __future__ import annotations

from typing import Any

SPLIT = {"method": "hash", "key": ["customer"], "column": "split"}
DATA = {"source": "csv", "path": "trips.csv", "label": "tip", "task": "binary", "split": SPLIT}


def origin(step: str, inputs: dict[str, str], result: dict[str, Any] | None = None, **parts: Any) -> dict[str, Any]:
    """As `artifacts.origin` gives it; digest and fingerprint follow from the step's name."""
    facts = {"step": step, "digest": f"digest of {step}", "fingerprint": f"fingerprint of {step}", "inputs": inputs}
    rest = {"config": {}, "source": f"source of {step}", "versions": {"keras": "3.15.1"}, "outside": {}}
    return facts | rest | {"result": result or {}} | parts


def origins() -> dict[str, dict[str, Any]]:
    """From the data to the proof."""
    examples, model, exported = (
        {name: f"digest of {step}"}
        for name, step in (("examples", "ingest"), ("model", "train"), ("exported", "export"))
    )
    metrics = {"auc": 0.9612, "loss": 0.2}
    return {
        "examples": origin(
            "ingest",
            {},
            {
                "num_examples": {"train": 800, "validation": 100, "test": 1100},
                "features": {"fare": "float", "tip": "int"},
                "label": "tip",
                "warnings": ["2 of 2002 files left out"],
            },
            config=DATA,
            outside={"data": "digest of trips.csv"},
        ),
        "statistics": origin("validate", examples, {"warnings": ["test split, 'fare': smallest value -1"]}),
        "transform": origin("transform", examples | {"statistics": "digest of validate"}),
        "model": origin(
            "train",
            examples | {"transform": "digest of transform"},
            {"num_parameters": 15702, "epochs": 7, "best_epoch": 3},
            config={"model": {"name": "tabular", "args": {"width": 64}}, "precision": "float32", "seed": 0},
        ),
        "evaluation": origin(
            "evaluate",
            examples | model,
            {
                "metrics": {"train": metrics, "test": metrics | {"loss": None}},
                "baseline": {"auc": 0.5},
                "champion": {"version": "2", "metrics": {"auc": 0.95}},
                "slices": [
                    {"feature": "company", "value": "A | <b>B</b>", "num_examples": 60, "metrics": {"auc": 0.65}}
                ],
                "reasons": ["passed: test auc 0.9612, at least 0.9"],
                "primary_metric": "auc",
                "blessed": True,
            },
            outside={"champion": "digest of version 2"},
            config={"champion_path": "s3://models/served/taxi"},
        ),
        "exported": origin("export", model),
        "proof": origin(
            "verify",
            exported,
            {
                "metric": "auc",
                "formats": [
                    {
                        "format": "saved_model",
                        "size_bytes": 491371,
                        "value": 0.9612,
                        "latency_ms_p50_batch_1": 0.25,
                        "passed": True,
                        "reason": "",
                    },
                    {"format": "tflite_int8", "passed": False, "reason": "auc drop is 0.3, at most 0.01 allowed"},
                ],
            },
        ),
    }
