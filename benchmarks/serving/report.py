"""From turns to ratios, goals, JSON and tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from benchmarks.serving.contenders import BATCHING, CALL, CONTENDERS, GRPC, OURS, REST

WIDTH = 200
PEERS = "the best peer"
CPU, RATE = "cpu_us", "requests_per_s"
# A client that has so much of a core may be what limits the requests per second.
_CLIENT_LIMIT = 0.8


@dataclass(frozen=True)
class Goal:
    """How one contender is to stand beside another.

    Attributes:
        workload: The model.
        protocol: REST, GRPC or CALL.
        clients: The numbers of clients for which it holds.
        ours: Who.
        other: Beside whom; PEERS: that peer which is best in this quantity.
        quantity: CPU (per request) or RATE (requests per second).
        limit: Of ours divided by the other's: the most of CPU, the least of RATE.
    """

    workload: str
    protocol: str
    clients: tuple[int, ...]
    ours: str
    other: str
    quantity: str
    limit: float


GOALS = (
    Goal("mlp", REST, (8, 32), OURS, PEERS, CPU, 1 / 12),
    Goal("mlp", REST, (8, 32), OURS, PEERS, RATE, 3.0),
    Goal("mlp", GRPC, (8, 32), OURS, "usual_servicer", CPU, 0.65),
    Goal("mlp", GRPC, (8, 32), OURS, "grpc_echo", CPU, 2.0),
    Goal("mlp", CALL, (1,), "model_run", "signature_call", CPU, 0.15),
    Goal("resnet", GRPC, (32,), BATCHING, "usual_servicer", CPU, 0.6),
)


def summarize(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Statistics, ratios and goals of what the driver has measured.

    A ratio is the median over the rounds of ratios within a round, so that what slows a whole round cancels out.

    Args:
        measured: See `driver.measure`.

    Returns:
        `workloads: {name: {load_average, contenders: {name: {status, versions, rss_mib}}, results: {protocol: {clients:
        {contender: {cpu_us, requests_per_s, p50_ms, p99_ms, client_cpu_us, vs_headrace, rounds}}}}}}`, where the first
        five are medians and `vs_headrace` is the CPU beside the embedded server's over the same protocol; and `goals`.
    """
    workloads = {}
    for name, entry in measured.items():
        results: dict[str, dict[str, dict[str, Any]]] = {}
        for contender, found in entry["contenders"].items():
            for protocol, by_clients in found.get("turns", {}).items():
                for clients, turns in by_clients.items():
                    results.setdefault(protocol, {}).setdefault(clients, {})[contender] = _statistics(turns)
        for by_clients in results.values():
            for result in by_clients.values():
                for one in result.values():
                    one["vs_headrace"] = _ratio(one, result[OURS], CPU) if OURS in result else None
        workloads[name] = {
            "load_average": entry["load_average"],
            "contenders": {
                contender: {key: value for key, value in found.items() if key != "turns"}
                for contender, found in entry["contenders"].items()
            },
            "results": results,
        }
    return {"workloads": workloads, "goals": [found for goal in GOALS for found in _reach(goal, workloads)]}


def _statistics(turns: list[dict[str, Any]]) -> dict[str, Any]:
    medians = {key: statistics.median(turn[key] for turn in turns) for key in turns[0] if key != "requests"}
    return {**medians, "rounds": turns}


def _ratio(one: Mapping[str, Any], other: Mapping[str, Any], quantity: str) -> float:
    return statistics.median(a[quantity] / b[quantity] for a, b in zip(one["rounds"], other["rounds"], strict=True))


def _reach(goal: Goal, workloads: Mapping[str, Any]) -> list[dict[str, Any]]:
    """How far a goal was reached, for each number of clients that was measured."""
    found = []
    for clients in goal.clients:
        results = workloads.get(goal.workload, {}).get("results", {}).get(goal.protocol, {}).get(str(clients), {})
        other = _best_peer(results, goal.quantity) if goal.other == PEERS else goal.other
        if goal.ours in results and other in results:
            measured = _ratio(results[goal.ours], results[other], goal.quantity)
            found.append(
                {
                    "workload": goal.workload,
                    "protocol": goal.protocol,
                    "clients": clients,
                    "ours": goal.ours,
                    "other": other,
                    "quantity": goal.quantity,
                    "limit": goal.limit,
                    "measured": measured,
                    "reached": measured >= goal.limit if goal.quantity == RATE else measured <= goal.limit,
                }
            )
    return found


def _best_peer(results: Mapping[str, Any], quantity: str) -> str | None:
    peers = [name for name in results if CONTENDERS[name].is_peer]
    best = max if quantity == RATE else min
    return best(peers, key=lambda name: results[name][quantity], default=None)


def goal_lines(result: Mapping[str, Any]) -> list[str]:
    """Each goal in a line."""
    lines = []
    for goal in result["goals"]:
        quantity, bound = ("requests/s", "at least") if goal["quantity"] == RATE else ("CPU a request", "at most")
        lines.append(
            f"{goal['workload']}, {goal['protocol']}, {goal['clients']} client{'s' * (goal['clients'] > 1)}: "
            f"{quantity} of {goal['ours']} is {goal['measured']:.3f} of {goal['other']}'s, wanted {bound} "
            f"{goal['limit']:.3g}: {'reached' if goal['reached'] else 'not reached'}"
        )
    return lines


def columns(results: Mapping[str, Any]) -> list[str]:
    """Of the table of one protocol."""
    numbers = list(results)
    return [
        "contender",
        *(f"CPU us, {number}" for number in numbers),
        *(f"requests/s, {number}" for number in numbers),
        *(f"p50 / p99 ms, {number}" for number in numbers),
    ]


def rows(results: Mapping[str, Any]) -> list[list[str]]:
    """The cells of the table of one protocol."""
    names = dict.fromkeys(name for result in results.values() for name in result)
    return [
        [
            name,
            *(_cell(result.get(name), _cpu) for result in results.values()),
            *(_cell(result.get(name), _rate) for result in results.values()),
            *(_cell(result.get(name), _latency) for result in results.values()),
        ]
        for name in names
    ]


def _cell(one: Mapping[str, Any] | None, write: Any) -> str:
    return "" if one is None else write(one)


def _cpu(one: Mapping[str, Any]) -> str:
    ratio = one["vs_headrace"]
    return f"{one[CPU]:.0f}" + (f" ({ratio:.2g})" if ratio is not None else "")


def _rate(one: Mapping[str, Any]) -> str:
    is_limited = one["client_cpu_us"] * one[RATE] / 1e6 > _CLIENT_LIMIT
    return f"{one[RATE]:.0f}" + "*" * is_limited


def _latency(one: Mapping[str, Any]) -> str:
    return f"{one['p50_ms']:.2f} / {one['p99_ms']:.2f}"


def title(name: str, protocol: str, workload: Mapping[str, Any]) -> str:
    """A line on what was asked, and how busy the machine was."""
    before, after = workload["load_average"]
    return f"{name}, {protocol}, load average {before:.1f} before and {after:.1f} after"


def missing(workload: Mapping[str, Any]) -> list[str]:
    """Who could not be measured, and why."""
    return [f"{name}: {entry['status']}" for name, entry in workload["contenders"].items() if entry["status"] != "ok"]


def tables(result: Mapping[str, Any]) -> list[Table]:
    """For a terminal."""
    found = []
    for name, workload in result["workloads"].items():
        for protocol, results in workload["results"].items():
            table = Table(title=title(name, protocol, workload), title_justify="left")
            for index, column in enumerate(columns(results)):
                table.add_column(column, justify="right" if index else "left")
            for row in rows(results):
                table.add_row(*row)
            found.append(table)
    return found


def notes(result: Mapping[str, Any]) -> list[str]:
    """Who is missing, and the goals."""
    return [
        *(f"{name}: {line}" for name, workload in result["workloads"].items() for line in missing(workload)),
        *goal_lines(result),
    ]


def markdown(result: Mapping[str, Any]) -> str:
    """All tables of a result, for README.md."""
    parts = []
    for name, workload in result["workloads"].items():
        for protocol, results in workload["results"].items():
            header = columns(results)
            lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows(results)]
            parts += [f"**{title(name, protocol, workload)}**", "\n".join(f"| {' | '.join(line)} |" for line in lines)]
    parts.append("\n".join(f"- {line}" for line in notes(result)))
    return "\n\n".join(part for part in parts if part)


def scenario_lines(result: Mapping[str, Any]) -> str:
    """What each scenario found, as a list."""
    lines = []
    for name, found in result["scenarios"].items():
        lines.append(f"- {name}: {found['status']}")
        lines += [f"  - {key}: {_fact(value)}" for key, value in found.items() if key != "status"]
    return "\n".join(lines)


def _fact(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_fact(each)}" for key, each in value.items())
    if isinstance(value, list) and len(value) > 6:
        return f"{_fact(value[0])} at first, {_fact(value[-1])} at last"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
