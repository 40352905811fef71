"""Ratios, targets and tables follow from the turns that were measured."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from benchmarks.training import report


def entry(*processes: list[float], variant: dict[str, Any] | None = None, **facts: Any) -> dict[str, Any]:
    """A contender whose turns of ten steps took these times, on two cores."""
    return {
        "status": "ok",
        "variant": variant or {},
        "trial": [],
        "processes": [
            {
                "num_parameters": 7,
                "forward_difference": 0.0,
                "versions": {"keras": "3"},
                "start_up_wall_s": 5.0,
                "start_up_cpu_s": 6.0,
                "first_call_steps": 1,
                **facts,
                "turns": [
                    {"wall_s": wall, "cpu_s": 2 * wall, "peak_rss_mib": 100.0 + i, "loss": 3.0 - i}
                    for i, wall in enumerate(walls_s)
                ],
            }
            for walls_s in processes
        ],
    }


MEASURED: dict[str, Any] = {
    "batch_size": 4,
    "steps_per_turn": 10,
    "num_parameters": 7,
    "load_average": [0.1, 1.2],
    "contenders": {
        # The second round was disturbed for all alike: ratios within it are as in the others.
        "bare_xla": entry([2.0, 20.0], [2.2]),
        "bare_graph": entry([1.0, 10.0], [1.0]),
        "headrace": entry([0.8, 8.0], [1.0], variant={"xla": False}),
        "keras_fit_best": entry([0.7, 7.0], [0.8], first_call_steps=8, start_up_wall_s=9.0),
        "torch_compile": {"status": "not installed: No module named 'torch'"},
    },
}


@pytest.fixture
def summary() -> dict[str, Any]:
    return report.summarize(copy.deepcopy(MEASURED))


def test_ratios_are_medians_of_those_within_a_round(summary: dict[str, Any]) -> None:
    contenders = summary["contenders"]
    assert summary["limit"] == "bare_graph"
    assert contenders["headrace"]["speed_vs_limit"] == pytest.approx(1.25)
    assert contenders["headrace"]["headrace_speedup"] == 1.0
    assert contenders["bare_xla"]["speed_vs_limit"] == pytest.approx(0.5)
    assert contenders["bare_xla"]["headrace_speedup"] == pytest.approx(2.5)
    assert contenders["keras_fit_best"]["headrace_speedup"] == pytest.approx(0.875)


def test_times_are_of_one_step_in_milliseconds(summary: dict[str, Any]) -> None:
    ours = summary["contenders"]["headrace"]
    assert [round(ms, 6) for rounds in ours["step_ms"]["processes"] for ms in rounds] == [80.0, 800.0, 100.0]
    assert [len(rounds) for rounds in ours["step_ms"]["processes"]] == [2, 1]
    assert (ours["step_ms"]["median"], ours["step_ms"]["min"]) == pytest.approx((100.0, 80.0))
    assert ours["cpu_ms"]["median"] == pytest.approx(200.0)
    assert (ours["peak_rss_mib"], ours["last_loss"]) == (101.0, 3.0)


def test_the_start_up_of_a_first_call_of_eight_steps_is_told_for_one(summary: dict[str, Any]) -> None:
    assert summary["contenders"]["headrace"]["start_up"] == {"wall_s": 5.0, "cpu_s": 6.0}
    start_up = summary["contenders"]["keras_fit_best"]["start_up"]
    step_s = (0.385 + 0.08) / 2  # the median of each of two processes
    assert start_up == pytest.approx({"wall_s": 9.0 - 7 * step_s, "cpu_s": 6.0 - 7 * 2 * step_s})


def test_targets_are_told_reached_or_not_and_left_out_where_nobody_was_measured(summary: dict[str, Any]) -> None:
    assert summary["targets"] == {
        "limit": {"at_least": 0.97, "measured": pytest.approx(1.25), "reached": True},
        "keras_fit_best": {"at_least": 1.0, "measured": pytest.approx(0.875), "reached": False},
    }
    assert report.target_lines(summary) == [
        "headrace is 1.250 times as fast as bare_graph, wanted 0.97: reached",
        "headrace is 0.875 times as fast as keras_fit_best, wanted 1.0: not reached",
    ]


def test_without_the_engine_there_are_no_targets() -> None:
    measured = copy.deepcopy(MEASURED)
    del measured["contenders"]["headrace"]
    summary = report.summarize(measured)
    assert summary["targets"] == {}
    assert summary["contenders"]["bare_xla"]["headrace_speedup"] is None
    assert "None" not in report.markdown({"models": {"mlp": summary}})


def test_the_table_names_settings_and_who_is_missing(summary: dict[str, Any]) -> None:
    rows = report.rows(summary)
    assert all(len(row) == len(report.COLUMNS) for row in rows)
    assert rows[2] == ["headrace (xla=False)", "100.00", "80.00", "200.00", "1.25", "1.00", "101", "5.0", "6.0"]
    assert rows[4][:3] == ["torch_compile", "not installed: No module named 'torch'", ""]
    text = report.markdown({"models": {"mlp": summary}})
    assert "| headrace (xla=False) | 100.00 |" in text
    assert "**mlp: batch 4, 7 parameters, 10 steps a turn, load average 0.1 before and 1.2 after**" in text
