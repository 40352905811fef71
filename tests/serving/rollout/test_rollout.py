"""The steps of a rollout, with pages of metrics as files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from components.monitor.comparisons import Comparison, Verdict
from components.monitor.findings import Findings, MonitorResult
from components.monitor.report import prometheus
from serving.errors import Code, ServingError
from serving.rollout import commands, readings
from serving.rollout.judge import CallCounts, Decision, Thresholds
from serving.rollout.places import VersionFolder
from serving.rollout.readings import ServerPages
from serving.rollout.rollout import Observers, Rollout
from serving.traffic import ROLLOUT_FILE, TRAFFIC_FILE, Traffic, read_traffic, write_traffic


def page(calls: Mapping[int, tuple[int, int]], states: Mapping[int, tuple[str, str]] | None = None) -> str:
    """A page of metrics: version -> calls and how many of them failed; all calls took at most 10 ms."""
    lines = []
    for version, (count, errors) in calls.items():
        labels = f'model="m",version="{version}",signature="serving_default",api="rest"'
        lines += [
            f'headrace_signature_calls_total{{{labels},code="OK"}} {count - errors}',
            f'headrace_signature_calls_total{{{labels},code="INTERNAL"}} {errors}',
            f'headrace_signature_calls_total{{{labels},code="CANCELLED"}} 0',
            f'headrace_signature_seconds_bucket{{{labels},le="0.01"}} {count - errors}',
            f'headrace_signature_seconds_bucket{{{labels},le="+Inf"}} {count - errors}',
            f'headrace_signature_calls_total{{{labels.replace("m", "other", 1)},code="OK"}} 77',
        ]
    for version, (state, code) in (states or {}).items():
        lines.append(f'headrace_version_state{{model="m",version="{version}",state="{state}",code="{code}"}} 1')
    return "\n".join(lines) + "\n"


@pytest.fixture
def base_path(tmp_path: Path) -> Path:
    path = tmp_path / "m"
    for number in (1, 2, 3):
        (path / str(number)).mkdir(parents=True)
        (path / str(number) / "saved_model.pb").touch()
    return path


class Server:
    """A page of metrics that a test changes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.show({})

    def show(self, calls: Mapping[int, tuple[int, int]], **more: Any) -> None:
        self.path.write_text(page(calls, **more))


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path / "page")


def test_deploy_promote_and_roll_back(base_path: Path) -> None:
    rollout = Rollout(VersionFolder(base_path))
    assert rollout.deploy(2, 0.25) == read_traffic(base_path) == Traffic(3, 2, 0.25)
    assert rollout.deploy(2, 0.5) == Traffic(3, 2, 0.5)
    assert rollout.promote() == read_traffic(base_path) == Traffic(2)
    assert rollout.deploy() == Traffic(2, 3, 0.1)
    assert rollout.rollback() == Traffic(2)
    assert rollout.rollback() == Traffic(3)  # stable before 2
    assert rollout.rollback() == Traffic(2)  # the next lower one, for the history knows none before 3
    assert [event["action"] for event in rollout.history()] == [
        *["deploy", "deploy", "promote", "deploy", "rollback", "rollback", "rollback"]
    ]


def test_what_was_stable_without_a_rollout_is_gone_back_to(base_path: Path) -> None:
    rollout = Rollout(VersionFolder(base_path))
    rollout.deploy(2, 1)
    write_traffic(base_path, Traffic(3))  # by hand
    rollout.deploy(1, 1)
    assert rollout.rollback() == Traffic(3)
    assert [event["action"] for event in rollout.history()] == ["promote", "found", "promote", "rollback"]


def test_the_first_version_gets_all_requests(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "saved_model.pb").touch()
    rollout = Rollout(VersionFolder(tmp_path))
    assert rollout.deploy() == Traffic(7)
    with pytest.raises(ServingError, match=r"no version before 7"):
        rollout.rollback()


def test_a_share_of_one_promotes_at_once(base_path: Path) -> None:
    assert Rollout(VersionFolder(base_path)).deploy(3, 1) == Traffic(3)


def test_refusals(base_path: Path, tmp_path: Path) -> None:
    rollout = Rollout(VersionFolder(base_path))
    with pytest.raises(ServingError, match=r"has no version 9, only \[1, 2, 3\]"):
        rollout.deploy(9)
    for refused in (rollout.promote, lambda: rollout.verdict(Observers(ServerPages([])))):
        with pytest.raises(ServingError, match="is on trial"):
            refused()
    rollout.deploy(3)
    with pytest.raises(ServingError, match="version 3 is on trial with 10% of the requests"):
        rollout.deploy(1)
    rollout.promote()
    with pytest.raises(ServingError, match="version 3 is the stable one already"):
        rollout.deploy(3)
    with pytest.raises(ServingError) as raised:
        VersionFolder(tmp_path / "nowhere")
    assert raised.value.code is Code.NOT_FOUND
    (base_path / ROLLOUT_FILE).write_text("{")
    with pytest.raises(ServingError, match=r"rollout\.json is damaged"):
        rollout.rollback()
    assert read_traffic(base_path) == Traffic(3)


def test_only_what_happens_after_deploy_is_judged(base_path: Path, server: Server) -> None:
    rollout = Rollout(VersionFolder(base_path))
    server.show({2: (5000, 0), 3: (400, 400)})
    rollout.deploy(3, 0.1, ServerPages([str(server.path)]))
    observers = Observers(ServerPages([str(server.path)]))
    assert rollout.verdict(observers).decision is Decision.WAIT
    server.show({2: (7000, 0), 3: (600, 400)})
    assert rollout.verdict(observers).decision is Decision.PROMOTE
    server.show({2: (100, 0), 3: (10, 10)})  # restarted: counts from zero
    assert rollout.verdict(observers).decision is Decision.ROLL_BACK


def test_a_counter_that_is_gone_is_no_restart() -> None:
    def counted(calls: Mapping[int, tuple[int, int]], started: float) -> readings.Reading:
        return readings.read_counters(
            {"a": readings.parse(page(calls) + f"process_start_time_seconds {started}\n")}, "m"
        )

    before = counted({1: (70, 0), 2: (5000, 0), 3: (400, 4)}, 1.5)
    forgotten = readings.since(counted({2: (5100, 0), 3: (450, 5)}, 1.5), before)
    assert readings.calls_of(2, forgotten).calls == 100
    assert (readings.calls_of(3, forgotten).calls, readings.calls_of(3, forgotten).errors) == (50, 1)
    loaded_anew = readings.since(counted({2: (5100, 0), 3: (30, 2)}, 1.5), before)
    assert (readings.calls_of(2, loaded_anew).calls, readings.calls_of(3, loaded_anew).calls) == (100, 30)
    restarted = readings.since(counted({2: (6000, 0), 3: (450, 5)}, 9.5), before)
    assert (readings.calls_of(2, restarted).calls, readings.calls_of(3, restarted).calls) == (6000, 450)


def test_a_page_is_fetched_and_read_once(base_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = Rollout(VersionFolder(base_path))
    rollout.deploy(3, 0.1)
    parsed = []
    parse = readings.parse
    monkeypatch.setattr(readings, "parse", lambda text: parsed.append(text) or parse(text))
    server.show({2: (10, 0), 3: (10, 0)})
    rollout.verdict(Observers(ServerPages([str(server.path)])))
    assert len(parsed) == 1


def test_a_page_of_tf_serving_tells_no_versions(base_path: Path, server: Server) -> None:
    server.path.write_text(':tensorflow:serving:request_count{model_name="m",status="OK"} 7\n:xla:compilations 1\n')
    with pytest.raises(ServingError, match="is a TF Serving, whose metrics do not tell versions apart"):
        Rollout(VersionFolder(base_path)).deploy(3, 0.1, ServerPages([str(server.path)]))
    assert read_traffic(base_path) is None


def test_servers_are_added_up(tmp_path: Path) -> None:
    pages = {"a": readings.parse(page({3: (10, 1)})), "b": readings.parse(page({3: (20, 2)}))}
    counts = readings.calls_of(3, readings.read_counters(pages, "m"))
    assert (counts.calls, counts.errors, counts.timed_calls) == (30, 3, 27)
    assert readings.calls_of(4, readings.read_counters(pages, "m")) == CallCounts()


def watch(rollout: Rollout, server: Server, shows: list[Any], **more: Any) -> tuple[Decision, list[str]]:
    """Watch while the page changes; each look but the first is preceded by the next of `shows`."""
    lines: list[str] = []
    seconds = iter(range(1000))
    decision = rollout.watch(
        Observers(ServerPages([str(server.path)]), thresholds=Thresholds(min_calls=100)),
        report=lines.append,
        clock=lambda: float(next(seconds)),
        sleep=lambda _: shows.pop(0)(),
        **more,
    )
    return decision, lines


def test_watch_promotes_in_steps(base_path: Path, server: Server) -> None:
    rollout = Rollout(VersionFolder(base_path))
    rollout.deploy(3, 0.1, ServerPages([str(server.path)]))
    shares = []

    def show(calls: Mapping[int, tuple[int, int]]) -> Any:
        def act() -> None:
            traffic = rollout.place.traffic()
            assert traffic is not None
            shares.append(traffic.canary_share)
            server.show(calls)

        return act

    shows = [show({2: (900, 0), 3: (99, 0)}), show({2: (950, 0), 3: (110, 0)}), show({2: (1000, 0), 3: (150, 0)})]
    shows.append(show({2: (1500, 0), 3: (650, 0)}))
    decision, lines = watch(rollout, server, shows, shares=[0.05, 0.5])
    assert (decision, rollout.place.traffic(), shares) == (Decision.PROMOTE, Traffic(3), [0.1, 0.1, 0.5, 0.5])
    assert "the canary gets 50% of the requests" in lines and lines[-1] == "version 3 gets all requests"
    assert rollout.history()[-1]["action"] == "promote" and rollout.history()[-1]["reasons"]


def test_watch_takes_a_bad_canary_back(base_path: Path, server: Server) -> None:
    rollout = Rollout(VersionFolder(base_path))
    rollout.deploy(3, 0.1, ServerPages([str(server.path)]))
    decision, _ = watch(rollout, server, [lambda: server.show({2: (500, 0), 3: (50, 25)})])
    assert (decision, rollout.place.traffic()) == (Decision.ROLL_BACK, Traffic(2))
    assert rollout.history()[-1]["reasons"][0].startswith("50.00% of the canary's 50 calls failed")


def test_watch_takes_a_version_back_that_does_not_load(base_path: Path, server: Server) -> None:
    rollout = Rollout(VersionFolder(base_path))
    rollout.deploy(3, 0.1, ServerPages([str(server.path)]))
    server.show({}, states={2: ("AVAILABLE", "OK"), 3: ("END", "DATA_LOSS")})
    assert watch(rollout, server, [])[0] is Decision.ROLL_BACK
    assert "could not load version 3: DATA_LOSS" in rollout.history()[-1]["reasons"][0]


def test_drift_speaks_against_a_canary(base_path: Path, server: Server, tmp_path: Path) -> None:
    rollout = Rollout(VersionFolder(base_path))
    rollout.deploy(3, 0.1, ServerPages([str(server.path)]))
    server.show({2: (300, 0), 3: (300, 0)})
    alarms = tmp_path / "metrics.prom"
    observers = Observers(ServerPages([str(server.path)]), [str(alarms)])

    def written(*verdicts: Verdict, model: str = "m") -> str:
        found = [
            Comparison("drift", f"miles{i}", "jensen_shannon", "previous", "", 0.3, 0.1, 0.0, verdict, "")
            for i, verdict in enumerate(verdicts)
        ]
        result = MonitorResult("ok", 1, 1, 1, None, 1, None, [one for one in found if one.verdict == "alarm"])
        return prometheus(Findings(model, 0.0, result, found, [], {}, {}, [], None))

    alarms.write_text(written("ok", "too_few"))  # a distance above its threshold alone is no alarm
    assert rollout.verdict(observers).decision is Decision.PROMOTE
    alarms.write_text(written("ok", "alarm"))
    verdict = rollout.verdict(observers)
    assert verdict.decision is Decision.ROLL_BACK
    assert verdict.reasons[0] == "monitor has an alarm: drift miles1 previous"
    alarms.write_text(written("alarm", model="other"))
    with pytest.raises(ServingError, match=r"hold no headrace_monitor_alarms of model m"):
        rollout.verdict(observers)


def test_watch_ends_undecided(base_path: Path, server: Server) -> None:
    rollout = Rollout(VersionFolder(base_path))
    rollout.deploy(3, 0.1)
    decision, lines = watch(rollout, server, [lambda: None] * 5, timeout_seconds=3)
    assert (decision, rollout.place.traffic()) == (Decision.WAIT, Traffic(2, 3, 0.1))
    assert lines[-1] == "time is up, and the traffic stays as it is"


def test_watch_ends_when_somebody_else_steps_in(base_path: Path, server: Server) -> None:
    rollout = Rollout(VersionFolder(base_path))
    rollout.deploy(3, 0.1)
    with pytest.raises(ServingError, match="somebody else changed the traffic"):
        watch(rollout, server, [lambda: Rollout(VersionFolder(base_path)).rollback()])
    assert rollout.place.traffic() == Traffic(2)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("missing/page", "cannot be read"),
        ("http://127.0.0.1:1", "/monitoring/prometheus/metrics cannot be read"),
        (__file__, "gives no page of Prometheus metrics"),
    ],
)
def test_metrics_that_cannot_be_read(base_path: Path, url: str, message: str) -> None:
    rollout = Rollout(VersionFolder(base_path))
    with pytest.raises(ServingError, match=message):
        rollout.deploy(3, 0.1, ServerPages([url]))
    assert rollout.place.traffic() is None


def invoke(command: Any, *arguments: Any) -> tuple[int, str]:
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def test_commands(base_path: Path, server: Server) -> None:
    code, output = invoke(commands.deploy, base_path, "--version", 3, "--canary_share", 0.2, "--server", server.path)
    assert (code, output) == (0, "version 3 gets 20% of the requests, 2 the rest\n")
    assert json.loads((base_path / TRAFFIC_FILE).read_text()) == {"stable": 2, "canary": 3, "canary_share": 0.2}
    fast = ("--server", server.path, "--every_seconds", 0, "--timeout_seconds", 0)
    assert invoke(commands.promote, base_path, "--if_healthy", *fast)[0] == commands.UNDECIDED
    server.show({2: (300, 0), 3: (300, 100)})
    assert invoke(commands.promote, base_path, "--if_healthy", *fast)[0] == commands.ROLLED_BACK
    assert invoke(commands.deploy, base_path)[0] == 0
    server.show({2: (300, 0), 3: (300, 0)})
    assert invoke(commands.promote, base_path, "--if_healthy", *fast)[0] == 0
    assert invoke(commands.rollback, base_path) == (0, "version 2 gets all requests\n")
    code, output = invoke(commands.promote, base_path)
    assert code == 1 and output == f"Error: no version of {base_path} is on trial\n"


@pytest.mark.parametrize(
    "arguments", [["--canary_share", "0.5", "--canary_share", "0.1"], ["--watch"], ["--canary_share", "2"]]
)
def test_usage_errors(base_path: Path, arguments: list[str]) -> None:
    assert invoke(commands.deploy, base_path, *arguments)[0] == 2
    assert read_traffic(base_path) is None
