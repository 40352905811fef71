"""Growth with workers: what follows from the lines and times of a launcher."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from benchmarks import workers
from benchmarks.workers import Watch


def test_epochs_are_timed_by_the_chiefs_lines_without_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([110.0, 112.0, 116.0])
    monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=lambda: next(times)))
    watch = Watch(started_at=100.0)
    for worker, line in [
        (None, f"worker 0 is process {os.getpid()}"),
        (1, "epoch 1/3  loss 1.0"),
        (0, "epoch 1/3  loss 1.0"),
        (0, "XLA cannot compile this model"),
        (0, "epoch 2/3  loss 0.9"),
        (0, "epoch 3/3  loss 0.8"),
    ]:
        watch(worker, line)
    result = watch.result(steps_per_epoch=30)
    assert result["steps_per_s"] == pytest.approx(30 / 3)
    assert result["first_epoch_s"] == pytest.approx(10.0)
    assert 5 < result["peak_rss_mib"] < 100_000


def run(rate: float, peak: float = 1.0) -> dict[str, float]:
    return {"steps_per_s": rate, "first_epoch_s": 1 / rate, "peak_rss_mib": peak}


def test_efficiency_is_the_median_of_ratios_within_a_round() -> None:
    # The second round ran on a busy machine.
    runs = {1: [run(10.0), run(2.0), run(10.0)], 2: [run(9.0), run(1.8, peak=5.0), run(8.0)]}
    summary = workers.summarize(runs, 30)
    assert summary["workers"]["1"]["efficiency"] == 1.0
    assert summary["workers"]["2"]["efficiency"] == pytest.approx(0.9)
    assert summary["workers"]["2"]["steps_per_s"] == 8.0
    assert summary["workers"]["2"]["peak_rss_mib"] == 5.0
    assert workers._cells(summary)[1] == ["2", "8.00", "0.90", "5", "0.1"]


def test_a_result_is_shown_as_markdown(tmp_path: Path) -> None:
    file = tmp_path / "workers.json"
    file.write_text(json.dumps({"models": {"tabular": workers.summarize({1: [run(10.0)], 3: [run(5.0)]}, 30)}}))
    answer = CliRunner().invoke(workers.main, ["--show", str(file)])
    assert answer.output.splitlines()[-1] == "| 3 | 5.00 | 0.50 | 1 | 0.2 |"


def test_a_wrong_number_of_workers_is_refused() -> None:
    answer = CliRunner().invoke(workers.main, ["--workers", "1,two"])
    assert answer.exit_code == 2 and "numbers with commas, received '1,two'" in answer.output


def test_the_rows_are_alike_from_run_to_run() -> None:
    job = workers.Job(rows=5, batch_size=1, model={"name": "resnet"}, optimizer={})
    arrays = job.arrays()
    assert arrays["image"].shape == (5, 32, 32, 3) and arrays["image"].dtype == "uint8"
    assert (arrays["image"] == job.arrays()["image"]).all()
