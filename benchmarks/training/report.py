"""From turns to ratios, JSON and a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from benchmarks.training.contenders import BARE

OURS = "headrace"
LIMIT = "limit"
WIDTH = 140
# Contender -> how fast the engine is to be beside it, at least.
TARGETS = {LIMIT: 0.97, "keras_fit_best": 1.0, "torch_compile": 1.0}
COLUMNS = (
    "contender",
    "step ms, median",
    "least",
    "CPU ms",
    "vs limit",
    "headrace vs it",
    "peak MiB",
    "first step after s",
    "CPU s",
)
_RAW = ("turns", "start_up_wall_s", "start_up_cpu_s", "first_call_steps")


def summarize(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Add statistics and ratios to what the driver has measured for one model.

    Ratios are medians over the rounds of ratios within a round, so that what slows a whole round cancels out. The limit
    is the bare step that is faster here, compiled by XLA or not.

    Args:
        measured: `contenders: {name: {status, processes: [{turns: [{wall_s, cpu_s, ...}], ...}], ...}}` and
            `steps_per_turn`.

    Returns:
        The same with `limit` and `targets`, where each contender with status `ok` has in place of its processes `step_ms`
        and `cpu_ms` (median, min, processes: the rounds of each), `speed_vs_limit` (above 1: faster than the bare step),
        `headrace_speedup` (above 1: the engine is faster), `peak_rss_mib`, `start_up` (medians of wall_s, cpu_s from
        process start to the first step's end) and `last_loss`.
    """
    steps = measured["steps_per_turn"]
    walls = {
        name: _step_ms(entry, "wall_s", steps)
        for name, entry in measured["contenders"].items()
        if entry["status"] == "ok"
    }
    limit = min((name for name in BARE if name in walls), key=lambda name: statistics.median(_flat(walls[name])))
    contenders = {}
    for name, entry in measured["contenders"].items():
        contenders[name] = dict(entry)
        if name in walls:
            first = {key: value for key, value in entry["processes"][0].items() if key not in _RAW}
            contenders[name] = {key: value for key, value in entry.items() if key != "processes"} | {
                **first,
                **_costs(entry["processes"], walls[name], _step_ms(entry, "cpu_s", steps)),
                "speed_vs_limit": _ratio(walls[limit], walls[name]),
                "headrace_speedup": _ratio(walls[name], walls[OURS]) if OURS in walls else None,
            }
    return {**measured, "limit": limit, "contenders": contenders, "targets": _targets(contenders, limit)}


def _step_ms(entry: Mapping[str, Any], key: str, steps: int) -> list[list[float]]:
    """Milliseconds a step, by process and round."""
    return [[1000 * turn[key] / steps for turn in process["turns"]] for process in entry["processes"]]


def _flat(processes: list[list[float]]) -> list[float]:
    return [value for rounds in processes for value in rounds]


def _costs(processes: list[dict[str, Any]], walls: list[list[float]], cpus: list[list[float]]) -> dict[str, Any]:
    return {
        "step_ms": _statistics(walls),
        "cpu_ms": _statistics(cpus),
        "peak_rss_mib": max(turn["peak_rss_mib"] for process in processes for turn in process["turns"]),
        "start_up": {
            "wall_s": _start_up_s(processes, "start_up_wall_s", walls),
            "cpu_s": _start_up_s(processes, "start_up_cpu_s", cpus),
        },
        "last_loss": processes[-1]["turns"][-1]["loss"],
    }


def _start_up_s(processes: list[dict[str, Any]], key: str, step_ms: list[list[float]]) -> float:
    """Of a first call of several steps, those after the first are taken away."""
    return statistics.median(
        process[key] - (process["first_call_steps"] - 1) * statistics.median(rounds) / 1000
        for process, rounds in zip(processes, step_ms, strict=True)
    )


def _statistics(processes: list[list[float]]) -> dict[str, Any]:
    values = _flat(processes)
    return {"median": statistics.median(values), "min": min(values), "processes": processes}


def _ratio(numerators: list[list[float]], denominators: list[list[float]]) -> float:
    return statistics.median(n / d for n, d in zip(_flat(numerators), _flat(denominators), strict=True))


def _targets(contenders: Mapping[str, Any], limit: str) -> dict[str, Any]:
    """Contender -> how fast the engine is to be beside it, how fast it is, and whether that is enough."""
    targets = {}
    for name, least in TARGETS.items():
        entry = contenders.get(limit if name == LIMIT else name, {})
        if (speedup := entry.get("headrace_speedup")) is not None:
            targets[name] = {"at_least": least, "measured": speedup, "reached": speedup >= least}
    return targets


def rows(model: Mapping[str, Any]) -> list[list[str]]:
    """The cells of a model's table, as text, in the order of COLUMNS."""
    lines = []
    for name, entry in model["contenders"].items():
        if entry["status"] != "ok":
            lines.append([name, entry["status"], *[""] * (len(COLUMNS) - 2)])
            continue
        variant = ", ".join(f"{key}={value}" for key, value in entry["variant"].items())
        speedup = entry["headrace_speedup"]
        lines.append(
            [
                f"{name} ({variant})" if variant else name,
                f"{entry['step_ms']['median']:.2f}",
                f"{entry['step_ms']['min']:.2f}",
                f"{entry['cpu_ms']['median']:.2f}",
                f"{entry['speed_vs_limit']:.2f}",
                "" if speedup is None else f"{speedup:.2f}",
                f"{entry['peak_rss_mib']:.0f}",
                f"{entry['start_up']['wall_s']:.1f}",
                f"{entry['start_up']['cpu_s']:.1f}",
            ]
        )
    return lines


def title(name: str, model: Mapping[str, Any]) -> str:
    """A line on what was trained, and how busy the machine was."""
    before, after = model["load_average"]
    return (
        f"{name}: batch {model['batch_size']}, {model['num_parameters']:,} parameters, {model['steps_per_turn']} steps a "
        f"turn, load average {before:.1f} before and {after:.1f} after"
    )


def target_lines(model: Mapping[str, Any]) -> list[str]:
    """Each target in a line."""
    return [
        f"{OURS} is {target['measured']:.3f} times as fast as {model['limit'] if name == LIMIT else name}, "
        f"wanted {target['at_least']}: {'reached' if target['reached'] else 'not reached'}"
        for name, target in model["targets"].items()
    ]


def table(name: str, model: Mapping[str, Any]) -> Table:
    """For a terminal."""
    result = Table(title=title(name, model), title_justify="left")
    for index, column in enumerate(COLUMNS):
        result.add_column(column, justify="right" if index else "left")
    for row in rows(model):
        result.add_row(*row)
    return result


def markdown(result: Mapping[str, Any]) -> str:
    """All tables of a result, for README.md."""
    parts = []
    for name, model in result["models"].items():
        lines = [COLUMNS, ("---", *["---:"] * (len(COLUMNS) - 1)), *rows(model)]
        parts += [f"**{title(name, model)}**", "\n".join(f"| {' | '.join(line)} |" for line in lines)]
        parts.append("\n".join(f"- {line}" for line in target_lines(model)))
    return "\n\n".join(part for part in parts if part)
