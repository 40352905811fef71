"""The driver gives turns and leaves out who is missing or wrong; ratios and goals follow. The servers here pretend."""

from __future__ import annotations

import copy
import itertools
import json
import re
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.serving import __main__ as command
from benchmarks.serving import contenders, driver, environments, report, scenarios
from benchmarks.serving.contenders import CALL, CONTENDERS, GRPC, REST, Contender
from benchmarks.serving.driver import Settings
from benchmarks.serving.processes import ServerError
from benchmarks.serving.workloads import WORKLOADS, Served

# Serves x / 2 + 2 as TF Serving does; `special` may spoil it.
FAKE = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
arguments = json.loads(sys.argv[1])
count = 0

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def do_POST(self):
        global count
        count += 1
        rows = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["instances"]
        answer = {"predictions": [[value / 2 + 2 for value in row] for row in rows]}
        exec(arguments["special"], globals(), locals() | {"answer": answer})
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass

ThreadingHTTPServer(("127.0.0.1", arguments["ports"][0]), Handler).serve_forever()
"""
FAKE_CALL = """
import json, sys
import numpy as np
rows = np.load("rows.npy")
print(json.dumps({"answers": (rows / 2 + 2).tolist()}), flush=True)
for line in sys.stdin:
    print(json.dumps({"latencies_s": [0.25, 0.25], "wall_s": 0.5, "cpu_s": float(line)}), flush=True)
"""


def fake(special: str = "", **facts: Any) -> Contender:
    return Contender("fake", settings={"special": special}, rest=CONTENDERS["headrace"].rest, **facts)


@pytest.fixture
def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Contender]:
    """A table of contenders to fill; their scripts are the fakes."""
    (tmp_path / "fake.py").write_text(FAKE)
    (tmp_path / "fake_call.py").write_text(FAKE_CALL)

    def save(workload: Any, folder: Path) -> Served:
        rows = workload.rows()
        return Served(folder / "saved_model", folder / "model.keras", rows, rows / 2 + 2)

    table: dict[str, Contender] = {}
    monkeypatch.setattr(contenders, "_SCRIPTS", tmp_path)
    monkeypatch.setattr(driver, "CONTENDERS", table)
    monkeypatch.setattr(driver, "save", save)
    monkeypatch.setattr(driver, "_PAUSE_S", 0.0)
    monkeypatch.setattr(driver, "_RETRY_S", 0.02)
    return table


def measure(table: dict[str, Contender], tmp_path: Path, **changes: Any) -> dict[str, Any]:
    settings = Settings(
        **{"peers": tmp_path, "clients": (1, 2), "rounds": 2, "seconds": 0.02, "timeout_s": 60.0, **changes}
    )
    return driver.measure(["half_plus_two"], table, settings, lambda _: None)["half_plus_two"]["contenders"]


def test_everyone_has_a_turn_in_each_round_for_each_number_of_clients(
    pretend: dict[str, Contender], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend |= {"headrace": fake(), "other": fake(), "call": Contender("fake_call")}
    readings = itertools.count(100, 0.5)
    monkeypatch.setattr(driver, "cpu_s", lambda _: next(readings))
    found = measure(pretend, tmp_path)
    assert [entry["status"] for entry in found.values()] == ["ok"] * 3
    for name in ("headrace", "other"):
        turns = found[name]["turns"][REST]
        assert {clients: len(played) for clients, played in turns.items()} == {"1": 2, "2": 2}
        for turn in turns["2"]:
            assert turn["requests"] >= 2 and 0 < turn["p50_ms"] <= turn["p99_ms"]
            assert turn["cpu_us"] * turn["requests"] == pytest.approx(0.5e6), "of the turn, not of the warm-up"
            assert 0 < turn["client_cpu_us"] < 1e6
    assert found["call"]["turns"] == {
        CALL: {
            "1": [
                {"requests": 2, "cpu_us": 1e4, "requests_per_s": 4.0, "p50_ms": 250, "p99_ms": 250, "client_cpu_us": 0}
            ]
            * 2
        }
    }
    assert found["headrace"]["rss_mib"] > 5 and "numpy" in found["headrace"]["versions"]


@pytest.mark.parametrize(
    ("special", "message"),
    [
        ("answer['predictions'][0][0] += 0.01", "cannot start: the answer is ["),
        ("answer['predictions'][0].append(1)", "cannot start: the answer is ["),
        ("sys.exit(3)", "cannot start: "),
        ("answer['predictions'][0][0] += count > 16", "failed over REST with 1 clients in round 1: the answer is ["),
        ("if count > 16: import os; os._exit(3)", "failed over REST with 1 clients in round 1: "),
    ],
)
def test_who_answers_wrongly_or_dies_is_out_and_the_others_go_on(
    pretend: dict[str, Contender], tmp_path: Path, special: str, message: str
) -> None:
    pretend |= {"headrace": fake(), "other": fake(special)}
    found = measure(pretend, tmp_path, clients=(1,), rounds=1, timeout_s=1.0 if "sys.exit" in special else 60.0)
    assert found["other"]["status"].startswith(message)
    assert "turns" not in found["other"]
    assert found["headrace"]["status"] == "ok"


def test_who_is_not_installed_is_named_with_what_to_do(pretend: dict[str, Contender], tmp_path: Path) -> None:
    pretend |= {"headrace": fake(), "other": fake(environment="kserve")}
    found = measure(pretend, tmp_path, clients=(1,), rounds=1)
    assert found["other"]["status"] == f"not installed: no {tmp_path}/kserve/bin/python; see --prepare"
    assert found["headrace"]["status"] == "ok"


def test_the_order_differs_from_round_to_round_and_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Player:
        def __init__(self, name: str) -> None:
            self.name, self.contender, self.turns = name, fake(), {}

        def play(self, protocol: str, clients: int, seconds: float) -> dict[str, Any]:
            order.append(self.name)
            return {}

    orders = []
    for number in (0, 1, 2, 0):
        order.clear()
        driver._play_round({}, {name: Player(name) for name in "abcde"}, (REST, GRPC), 8, 1.0, number)  # type: ignore[misc]
        orders.append(list(order))
    assert orders[0] == orders[3] != orders[1] != orders[2]
    assert all(sorted(each) == list("abcde") for each in orders)


@pytest.mark.parametrize("name", [name for name, each in CONTENDERS.items() if each.rest and not each.is_echo])
def test_every_dialect_sends_the_row_and_finds_the_answer(name: str) -> None:
    row, expected = np.arange(6, dtype=np.float32).reshape(1, 2, 3) / 8, np.array([[0.5, 2.0]], np.float32)
    (exchange,) = CONTENDERS[name].exchanges(REST, row, expected)
    head, _, body = exchange.request.partition(b"\r\n\r\n")
    assert re.match(rb"POST /\S+ HTTP/1.1\r\n", head) and b"Content-Length: %d" % len(body) in head
    numbers = [0.0, 0.125, 0.25, 0.375, 0.5, 0.625]
    sent = re.findall(r"-?\d+\.\d+", body.decode())
    assert list(map(float, sent)) == [round(number, 3) for number in numbers]
    shapes = {
        "bentoml": [[0.5, 2.0]],
        "mlserver": {"outputs": [{"name": "output_0", "data": [0.5, 2.0]}]},
    }
    answer = shapes.get(name.partition("_")[0], {"predictions": [[0.5, 2.0]]})
    exchange.check(json.dumps(answer).encode())
    for wrong in (json.dumps(answer).replace("2.0", "2.01"), json.dumps(answer).replace("2.0", "NaN"), "[]", "{"):
        with pytest.raises(contenders.LoadError):
            exchange.check(wrong.encode())


def test_rows_are_the_same_in_every_process_and_short_in_json() -> None:
    rows = WORKLOADS["mlp"].rows()
    assert rows.shape == (16, 32) and rows.dtype == np.float32
    np.testing.assert_array_equal(rows, WORKLOADS["mlp"].rows())
    (exchange,) = CONTENDERS["headrace"].exchanges(REST, rows[:1], rows[:1])
    assert all(len(number) <= 6 for number in re.findall(rb"-?\d+\.\d+", exchange.request.partition(b"\r\n\r\n")[2]))


def turn(cpu_us: float, rate: float = 100.0, client_cpu_us: float = 1.0) -> dict[str, float]:
    latency = {"p50_ms": 1.0, "p99_ms": 2.0}
    return {"requests": 10, "cpu_us": cpu_us, "requests_per_s": rate, "client_cpu_us": client_cpu_us, **latency}


def entry(*turns: dict[str, float], protocol: str = REST, clients: str = "8") -> dict[str, Any]:
    return {"status": "ok", "versions": {}, "rss_mib": 5.0, "turns": {protocol: {clients: list(turns)}}}


# The second round was disturbed for all alike: ratios within it are as in the others.
MEASURED: dict[str, Any] = {
    "mlp": {
        "load_average": [0.1, 1.2],
        "contenders": {
            "headrace": entry(turn(100, 900), turn(1000, 90), turn(100, 900)),
            "kserve": entry(turn(1500, 100), turn(15000, 10), turn(1400, 100)),
            "litserve": entry(turn(1300, 90, 9500), turn(13000, 9, 95000), turn(1200, 90, 9500)),
            "fastapi_signature": entry(turn(300, 800), turn(3000, 80), turn(300, 800)),
            "bentoml": {"status": "not installed: no python; see --prepare"},
            "model_run": entry(turn(20), turn(20), turn(20), protocol=CALL, clients="1"),
            "signature_call": entry(turn(100), turn(100), turn(100), protocol=CALL, clients="1"),
        },
    }
}


def test_ratios_are_medians_of_those_within_a_round_and_goals_take_the_best_peer() -> None:
    result = report.summarize(copy.deepcopy(MEASURED))
    results = result["workloads"]["mlp"]["results"][REST]["8"]
    assert results["headrace"]["cpu_us"] == 100 and results["headrace"]["vs_headrace"] == 1.0
    assert results["kserve"]["vs_headrace"] == pytest.approx(15.0)
    goals = {(goal["other"], goal["quantity"]): goal for goal in result["goals"]}
    cheapest = goals["litserve", "cpu_us"]  # fastapi_signature is no peer
    assert cheapest["measured"] == pytest.approx(1 / 13) and cheapest["reached"]
    fastest = goals["kserve", "requests_per_s"]
    assert fastest["measured"] == pytest.approx(9.0) and fastest["reached"]
    call = goals["signature_call", "cpu_us"]
    assert call["measured"] == pytest.approx(0.2) and not call["reached"]
    assert len(goals) == len(result["goals"]) == 3, "others were not measured"
    assert report.goal_lines(result)[-1] == (
        "mlp, call, 1 client: CPU a request of model_run is 0.200 of signature_call's, wanted at most 0.15: not reached"
    )


def test_the_tables_tell_ratios_limits_of_the_client_and_who_is_missing() -> None:
    result = report.summarize(copy.deepcopy(MEASURED))
    text = report.markdown(result)
    assert "**mlp, REST, load average 0.1 before and 1.2 after**" in text
    assert "| contender | CPU us, 8 | requests/s, 8 | p50 / p99 ms, 8 |" in text
    assert "| headrace | 100 (1) | 900 | 1.00 / 2.00 |" in text
    assert "| litserve | 1300 (13) | 90* | 1.00 / 2.00 |" in text
    assert "| model_run | 20 | 100 | 1.00 / 2.00 |" in text
    assert "- mlp: bentoml: not installed: no python; see --prepare" in text


def test_without_the_server_there_are_no_ratios() -> None:
    measured = copy.deepcopy(MEASURED)
    del measured["mlp"]["contenders"]["headrace"]
    result = report.summarize(measured)
    assert [goal["ours"] for goal in result["goals"]] == ["model_run"]
    assert "None" not in report.markdown(result)


def test_the_command_writes_json_that_it_can_show(
    pretend: dict[str, Contender], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend |= {"headrace": fake(), "kserve": fake()}
    output = tmp_path / "results" / "serving.json"
    arguments = ["--models", "half_plus_two", "--contenders", "headrace,kserve", "--clients", "2", "--rounds", "1"]
    answer = CliRunner().invoke(command.main, [*arguments, "--seconds", "0.1", "--output", str(output)])
    assert answer.exit_code == 0, answer.output
    result = json.loads(output.read_text(), parse_constant=pytest.fail)
    assert set(result) == {"benchmark", "machine", "rounds", "seconds", "workloads", "goals"}
    assert set(result["workloads"]["half_plus_two"]["results"][REST]["2"]) == {"headrace", "kserve"}
    assert "half_plus_two, REST, load average" in answer.output
    shown = CliRunner().invoke(command.main, ["--show", str(output)])
    assert shown.output == report.markdown(result) + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "mpl"], "there is no 'mpl'; there are half_plus_two"),
        (["--contenders", "tfserving"], "there is no 'tfserving'"),
        (["--clients", "8,many"], "numbers with commas, received '8,many'"),
        (["--clients", "0"], "numbers with commas, received '0'"),
        (["--scenario", "flood"], "there is no 'flood'; there are large_reply"),
    ],
)
def test_the_command_refuses_what_there_is_not(arguments: list[str], message: str) -> None:
    answer = CliRunner().invoke(command.main, arguments)
    assert answer.exit_code == 2
    assert message in re.sub(r"[│\s]+", " ", answer.output)


def test_peers_are_installed_with_the_libraries_of_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(environments.subprocess, "run", lambda arguments, check: ran.append(arguments))
    environments.prepare(tmp_path, ["litserve"], lambda _: None)
    assert ran[0][1:] == ["-m", "venv", str(tmp_path / "litserve")]
    assert ran[1][0] == str(tmp_path / "litserve" / "bin" / "python")
    assert "litserve==0.2.19" in ran[1] and any(each.startswith("tensorflow==2.") for each in ran[1])


def test_scenarios_that_fail_are_told_and_end_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(limits: scenarios.Limits, show: Any) -> dict[str, Any]:
        raise contenders.LoadError(f"{limits.requests} requests were lost")

    def hold(limits: scenarios.Limits, show: Any) -> dict[str, Any]:
        return {"rss_mib": [1.0, *[2.0] * 9], "REST": {"requests": 3, "p50_ms": 1234.5678}}

    monkeypatch.setitem(scenarios.SCENARIOS, "memory", lose)
    monkeypatch.setitem(scenarios.SCENARIOS, "reload", hold)
    output = tmp_path / "scenarios.json"
    arguments = ["--scenario", "reload,memory", "--requests", "2000", "--output", str(output)]
    answer = CliRunner().invoke(command.main, arguments)
    assert answer.exit_code == 1
    lines = [
        "- reload: ok",
        "  - rss_mib: 1 at first, 2 at last",
        "  - REST: requests 3, p50_ms 1,235",
        "- memory: failed: 2000 requests were lost",
    ]
    assert answer.output.splitlines() == lines
    assert CliRunner().invoke(command.main, ["--show", str(output)]).output.splitlines() == lines


def test_too_few_open_files_are_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenarios.resource, "getrlimit", lambda _: (256, 4096))
    with pytest.raises(ServerError, match="11000 open files are needed, ulimit -n allows 4096"):
        scenarios.slow_clients(scenarios.Limits(requests=1000, slow_clients=10_000), lambda _: None)
    limits = []
    monkeypatch.setattr(scenarios.resource, "setrlimit", lambda what, limit: limits.append((what, limit)))
    scenarios._allow_open_files(1000)
    assert limits == [(resource.RLIMIT_NOFILE, (1000, 4096))]


@pytest.mark.slow
def test_the_server_loses_nothing_in_the_scenarios() -> None:
    limits = scenarios.Limits(requests=400, slow_clients=50)
    found = scenarios.reload(limits, lambda _: None)
    assert found["versions_seen"] == [1, 2, 3, 4, 5] and found["requests"] > 5 * 8
    memory = scenarios.memory(limits, lambda _: None)
    assert [memory[protocol]["requests"] for protocol in (REST, GRPC)] == [400, 640]  # 10 a sample, by 8 clients: 16
