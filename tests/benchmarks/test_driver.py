"""The driver gives turns, picks the fastest settings and tells who is missing; its contenders here only pretend."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.training import __main__ as command
from benchmarks.training import driver, report
from benchmarks.training.contenders import CONTENDERS
from benchmarks.training.driver import ContenderError, Settings
from benchmarks.training.turns import Turns

# Stands in for a Python interpreter; it is fastest with XLA and with 8 steps an execution.
FAKE = """#!{python} -S
import json, os, sys, time
given = json.loads(sys.argv[-1])
settings, name = given["settings"], given["contender"]
ready = {{"num_parameters": 7, "forward_difference": 0.0, "versions": {{}}, "start_up_wall_s": 1.0, "start_up_cpu_s": 1.0,
          "first_call_steps": 1}}
def say(message):
    print(json.dumps(message), flush=True)
with open({log!r}, "a") as log:
    log.write(f"{{os.getpid()}} {{name}} {{settings}}\\n")
{special}
say({{"ready": ready}})
for number, line in enumerate(sys.stdin):
    steps = json.loads(line)["steps"]
    step_s = 0.01 if settings.get("xla") else 0.02
    step_s += abs(settings.get("steps_per_execution", 1) - 8) / 1000 + 0.001 * bool(settings.get("jit_compile"))
    if number == 1 and settings.get("steps_per_execution") == 8 and not settings["jit_compile"]:
        step_s *= 10  # the first turn of a trial was disturbed
    say({{"wall_s": steps * step_s, "cpu_s": steps * step_s, "peak_rss_mib": 50.0, "loss": 0.5}})
"""


class Fakes:
    """Makes interpreters that pretend."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.log = folder / "started.log"

    def make(self, special: str = "") -> str:
        path = self._folder / f"python{len(list(self._folder.iterdir()))}"
        path.write_text(FAKE.format(python=sys.executable, log=str(self.log), special=special))
        path.chmod(0o755)
        return str(path)

    def settings(self, special: str = "", **changes: Any) -> Settings:
        interpreters = dict.fromkeys(("project", "torch", "jax"), self.make(special))
        return Settings(
            **{"processes": 2, "rounds": 2, "steps": 16, "threads": 1, "interpreters": interpreters, **changes}
        )


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    monkeypatch.setattr(driver, "_PAUSE_S", 0.0)
    return Fakes(tmp_path)


def measure(contenders: list[str], settings: Settings) -> dict[str, Any]:
    return driver.measure(["mlp"], contenders, settings, lambda _: None)["mlp"]


def test_the_fastest_settings_of_a_trial_take_part(fakes: Fakes) -> None:
    measured = measure(["headrace", "keras_fit_best"], fakes.settings())["contenders"]
    assert measured["headrace"]["variant"] == {"xla": True}
    assert measured["keras_fit_best"]["variant"] == {"jit_compile": False, "steps_per_execution": 8}
    # 32 steps an execution do not fit into turns of 16.
    trial = {tuple(tried["variant"].values()): tried["step_ms"] for tried in measured["keras_fit_best"]["trial"]}
    assert trial == pytest.approx({(True, 1): 28.0, (True, 8): 21.0, (False, 1): 27.0, (False, 8): 20.0})
    assert [[len(process["turns"]) for process in entry["processes"]] for entry in measured.values()] == [[2, 2]] * 3


def test_only_those_who_take_part_live_on_and_none_stays_behind(fakes: Fakes) -> None:
    alive: dict[str, int] = {}

    def count(line: str) -> None:
        pids = [int(started.split()[0]) for started in fakes.log.read_text().splitlines()] if fakes.log.exists() else []
        alive[line] = sum(Path(f"/proc/{pid}").exists() for pid in pids)

    driver.measure(["mlp"], ["headrace", "keras_fit_best"], fakes.settings(), count)
    assert alive["mlp: process 1, round 1 of 2"] == alive["mlp: process 2, round 2 of 2"] == 3
    assert max(alive.values()) == 3
    count("after")
    assert alive["after"] == 0


def test_the_reference_comes_first_even_if_nobody_asked_for_it(fakes: Fakes) -> None:
    measured = measure(["keras_fit"], fakes.settings())
    assert list(measured["contenders"]) == ["bare_xla", "keras_fit"]
    started = [line.partition(" ")[2] for line in fakes.log.read_text().splitlines()]
    assert started == ["bare_xla {'xla': True}", "keras_fit {}"] * 2
    assert (measured["num_parameters"], measured["steps_per_turn"], measured["batch_size"]) == (7, 16, 1024)


def test_who_is_not_installed_is_told_and_the_others_go_on(fakes: Fakes) -> None:
    settings = fakes.settings()
    missing = fakes.make("say({'failed': \"not installed: No module named 'torch'\"}); sys.exit()")
    settings.interpreters.update(torch=missing, jax="/no/such/python")
    measured = measure(["torch_eager", "keras_jax", "keras_fit"], settings)["contenders"]
    assert measured["torch_eager"] == {"status": "not installed: No module named 'torch'"}
    assert measured["keras_jax"]["status"].startswith("not installed: ") and "/no/such/python" in str(measured)
    assert measured["keras_fit"]["status"] == "ok"


@pytest.mark.parametrize(
    ("special", "message"),
    [
        ("ready['num_parameters'] += name == 'keras_fit'", "another model: 8 parameters, not 7"),
        ("ready['forward_difference'] = 0.1 * (name == 'keras_fit')", "another model: its logits differ by 0.1"),
        ("ready['forward_difference'] = float('nan') if name == 'keras_fit' else 0.0", "its logits differ by nan"),
        ("if name == 'keras_fit': sys.exit('out of luck')", "ended with code 1: out of luck"),
        ("if name == 'keras_fit': time.sleep(60)", "no answer in 1 s"),
        (
            "if name == 'keras_fit': say({'ready': ready}), input(), say({}), input(), sys.exit(4)",
            "failed in round 1: ended with code 4",
        ),
    ],
)
def test_a_contender_that_trains_another_model_or_dies_is_left_out(fakes: Fakes, special: str, message: str) -> None:
    measured = measure(["keras_fit"], fakes.settings(special, timeout_s=1.0))["contenders"]
    assert message in measured["keras_fit"]["status"]
    assert [len(process["turns"]) for process in measured["bare_xla"]["processes"]] == [2, 2]


def test_without_the_reference_there_is_nothing_to_compare_with(fakes: Fakes) -> None:
    with pytest.raises(ContenderError, match="ended with code 3"):
        measure(["keras_fit"], fakes.settings("sys.exit(3)"))


def test_the_order_differs_from_round_to_round_and_repeats_from_run_to_run() -> None:
    class Player:
        def __init__(self, name: str) -> None:
            self.name: str = name
            self.turns: list[str] = []

        def play(self, num_steps: int) -> str:
            order.append(self.name)
            return self.name

    orders = []
    for number in (0, 1, 2, 0):
        order: list[str] = []
        driver._play_round({}, {name: Player(name) for name in "abcde"}, 1, number)  # type: ignore[misc]
        orders.append(order)
    assert orders[0] == orders[3] != orders[1] != orders[2]
    assert all(sorted(order) == list("abcde") for order in orders)


def test_the_command_writes_json_and_a_table(fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.sys, "executable", fakes.make())
    arguments = ["--models", "mlp,resnet", "--processes", "1", "--rounds", "3", "--steps", "8", "--threads", "1"]
    arguments += ["--torch-python", "/no/such/python", "--jax-python", "/no/such/python"]
    output = tmp_path / "results" / "training.json"
    answer = CliRunner().invoke(command.main, [*arguments, "--output", str(output)])
    assert answer.exit_code == 0, answer.output
    result = json.loads(output.read_text(), parse_constant=pytest.fail)
    assert set(result) == {"benchmark", "machine", "processes", "rounds", "threads", "models"}
    assert {"cpu", "cores", "load_average", "time"} <= set(result["machine"])
    for model in result["models"].values():
        assert set(model["contenders"]) == set(CONTENDERS)
        ours = model["contenders"]["headrace"]
        assert set(ours) == {
            *("status", "variant", "trial", "num_parameters", "forward_difference", "versions", "step_ms", "cpu_ms"),
            *("peak_rss_mib", "start_up", "last_loss", "speed_vs_limit", "headrace_speedup"),
        }
        assert [len(rounds) for rounds in ours["step_ms"]["processes"]] == [3]
        assert model["targets"]["limit"]["reached"] is True
    assert "headrace (xla=True)" in answer.output and "not installed" in answer.output
    shown = CliRunner().invoke(command.main, ["--show", str(output)])
    assert shown.output == report.markdown(result) + "\n"


def test_the_command_refuses_unknown_names() -> None:
    answer = CliRunner().invoke(command.main, ["--models", "resnet,mpl"])
    assert answer.exit_code == 2
    assert re.search(r"there is no 'mpl'; there are resnet,\s*transformer,\s*mlp", answer.output)


def test_turns_answer_each_command_and_end_with_the_input() -> None:
    answers = io.StringIO()
    turns = Turns(io.StringIO('{"steps": 3}\n{"steps": 5}\n'), answers, started_at=0.0)
    turns.started(8)
    turns.ready(num_parameters=7)
    seen = []
    for num_steps in turns:
        seen.append(num_steps)
        turns.finish(0.25)
    ready, first, second = map(json.loads, answers.getvalue().splitlines())
    assert seen == [3, 5]
    assert (ready["ready"]["first_call_steps"], ready["ready"]["num_parameters"]) == (8, 7)
    assert ready["ready"]["start_up_wall_s"] > 0 and ready["ready"]["start_up_cpu_s"] > 0
    assert first["loss"] == second["loss"] == 0.25
    assert 0 <= first["wall_s"] < 5 and first["peak_rss_mib"] > 5
