"""The local runner: order, reuse and its reasons, the gate, the lock, resume after a kill, what the command says."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from rich.console import Console

from components import artifacts, progress
from components.errors import ConfigError, DataError, HeadraceError
from pipelines import local
from pipelines.exits import reported
from pipelines.local import run
from pipelines.reuse import differences
from tests.pipelines import fakes

PROJECT = Path(__file__).resolve().parents[2]


def states(result: local.RunResult) -> dict[str, str]:
    return {step.name: step.state for step in result.steps}


def test_first_run_runs_every_step_in_order_and_records_itself(tmp_path: Path) -> None:
    calls: list[str] = []
    config = fakes.config_of()
    result = run(config, runs_dir=tmp_path, steps=fakes.table(calls=calls), console=fakes.quiet())
    assert calls == ["make", "shape", "judge", "ship"]
    assert set(states(result).values()) == {"done"}
    assert result.exit_code == 0
    assert result.result_of("make") == {"num_words": 1}
    assert result.result_of("nothing") is None
    summary = json.loads((tmp_path / "tiny/summary.json").read_text())
    assert summary["exit_code"] == 0
    assert [step["name"] for step in summary["steps"]] == calls
    assert yaml.safe_load((tmp_path / "tiny/config.yaml").read_text())["name"] == "tiny"


def test_second_run_reuses_every_step_without_loading_one(tmp_path: Path) -> None:
    run(fakes.config_of(), runs_dir=tmp_path, steps=fakes.table(), console=fakes.quiet())

    class Unloadable(fakes.FakeStep):
        def load(self) -> Any:
            raise AssertionError("a reused step was imported")

    steps = [Unloadable(step.name, step.inputs, step.output, step.section, step.gated) for step in fakes.table()]
    console = fakes.quiet()
    result = run(fakes.config_of(), runs_dir=tmp_path, steps=steps, console=console)
    assert set(states(result).values()) == {"reused"}
    assert result.result_of("ship") == {"num_words": 3}
    assert console.file.getvalue().count("reused") == 4  # type: ignore[attr-defined]


def test_a_changed_setting_runs_its_step_and_those_that_read_other_bytes(tmp_path: Path) -> None:
    run(fakes.config_of(), runs_dir=tmp_path, steps=fakes.table(), console=fakes.quiet())
    console = fakes.quiet()
    config = fakes.config_of(export={"onnx_opset": 15})
    result = run(config, runs_dir=tmp_path, steps=fakes.table(), console=console, explain=True)
    assert states(result) == {"make": "reused", "shape": "done", "judge": "done", "ship": "done"}
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "setting export.onnx_opset: 17 -> 15" in printed
    assert "input shaped changed" in printed
    assert "nothing that it follows from has changed" in printed


def test_a_step_that_makes_the_same_bytes_again_lets_later_ones_be_reused(tmp_path: Path) -> None:
    run(fakes.config_of(), runs_dir=tmp_path, steps=fakes.table(), console=fakes.quiet())
    result = run(fakes.config_of(), runs_dir=tmp_path, steps=fakes.table(), force=["make"], console=fakes.quiet())
    assert states(result) == {"make": "done", "shape": "reused", "judge": "reused", "ship": "reused"}
    assert result.steps[0].reasons == ("--force make was given",)


def test_from_step_runs_it_and_all_later_ones(tmp_path: Path) -> None:
    run(fakes.config_of(), runs_dir=tmp_path, steps=fakes.table(), console=fakes.quiet())
    result = run(fakes.config_of(), runs_dir=tmp_path, steps=fakes.table(), from_step="judge", console=fakes.quiet())
    assert states(result) == {"make": "reused", "shape": "reused", "judge": "done", "ship": "done"}


def test_until_stops_after_the_step(tmp_path: Path) -> None:
    result = run(fakes.config_of(), runs_dir=tmp_path, steps=fakes.table(), until="shape", console=fakes.quiet())
    assert list(states(result)) == ["make", "shape"]
    assert not (tmp_path / "tiny/judged").exists()
    assert result.exit_code == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"until": "jugde"}, "--until: this run has no step 'jugde'. Did you mean 'judge'?"),
        ({"force": ["shap"]}, "--force: this run has no step 'shap'. Did you mean 'shape'?"),
        ({"until": "make", "from_step": "judge"}, "--from-step: this run has no step 'judge'"),
    ],
)
def test_unknown_steps_are_named_before_anything_runs(tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        run(fakes.config_of(), runs_dir=tmp_path, steps=fakes.table(), console=fakes.quiet(), **options)
    assert not list(tmp_path.iterdir())


def test_a_damaged_artifact_is_made_again(tmp_path: Path) -> None:
    run(fakes.config_of(), runs_dir=tmp_path, steps=fakes.table(), console=fakes.quiet())
    (tmp_path / "tiny/shaped/words").unlink()
    result = run(fakes.config_of(), runs_dir=tmp_path, steps=fakes.table(), console=fakes.quiet())
    assert states(result) == {"make": "reused", "shape": "done", "judge": "reused", "ship": "reused"}
    assert "words is missing" in result.steps[1].reasons[0]


def test_closed_gate_skips_what_is_behind_it_with_the_reasons(tmp_path: Path) -> None:
    steps = fakes.table(fakes.write_words, fakes.write_words, fakes.refuse)
    console = fakes.quiet()
    result = run(fakes.config_of(), runs_dir=tmp_path, steps=steps, console=console)
    assert states(result)["ship"] == "skipped"
    assert result.exit_code == 3
    assert "auc 0.4 is below 0.5" in console.file.getvalue()  # type: ignore[attr-defined]
    again = run(fakes.config_of(), runs_dir=tmp_path, steps=steps, console=fakes.quiet())
    assert states(again)["judge"] == "reused"
    assert again.exit_code == 3


def test_gate_stays_closed_when_nobody_judged(tmp_path: Path) -> None:
    steps = fakes.table(fakes.write_words, fakes.write_words, fakes.write_words)
    result = run(fakes.config_of(), runs_dir=tmp_path, steps=steps, console=fakes.quiet())
    assert states(result)["ship"] == "skipped"
    assert result.exit_code == 3


def test_a_failing_step_ends_the_run_and_is_in_the_summary(tmp_path: Path) -> None:
    def fail(*_: Any) -> dict[str, Any]:
        raise DataError("row 3 has no label")

    with pytest.raises(DataError, match="row 3 has no label"):
        run(fakes.config_of(), runs_dir=tmp_path, steps=fakes.table(fakes.write_words, fail), console=fakes.quiet())
    summary = json.loads((tmp_path / "tiny/summary.json").read_text())
    assert summary["exit_code"] == 1
    assert [(step["name"], step["state"]) for step in summary["steps"]] == [("make", "done"), ("shape", "failed")]
    assert summary["steps"][1]["reasons"] == ["row 3 has no label"]
    assert {path.name for path in (tmp_path / "tiny").iterdir()} == {
        ".lock",
        "config.yaml",
        "lineage.json",
        "log.txt",
        "made",
        "summary.json",
    }


def test_the_summary_of_an_earlier_run_does_not_outlive_the_start_of_the_next(tmp_path: Path) -> None:
    summary = tmp_path / "tiny/summary.json"

    def look(*arguments: Any) -> dict[str, Any]:
        assert not summary.exists()
        return fakes.write_words(*arguments)

    run(fakes.config_of(), runs_dir=tmp_path, steps=fakes.table(look), console=fakes.quiet())
    assert summary.exists()
    run(fakes.config_of(), runs_dir=tmp_path, steps=fakes.table(look), force=["make"], console=fakes.quiet())


def test_devices_are_divided_before_the_first_step_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from components.train import devices

    calls: list[str] = []
    monkeypatch.setattr(devices, "prepare", lambda config: calls.append(f"prepare {config.num_devices}"))
    config = fakes.config_of(train={"strategy": "mirrored", "num_devices": 2})
    run(config, runs_dir=tmp_path, steps=fakes.table(calls=calls), until="make", console=fakes.quiet())
    assert calls == ["prepare 2", "make"]


def test_an_interrupted_run_says_so_in_its_summary(tmp_path: Path) -> None:
    def interrupt(*_: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(fakes.config_of(), runs_dir=tmp_path, steps=fakes.table(interrupt), console=fakes.quiet())
    assert json.loads((tmp_path / "tiny/summary.json").read_text())["exit_code"] == 130


def test_two_runs_never_share_a_folder(tmp_path: Path) -> None:
    def run_again(*_: Any) -> dict[str, Any]:
        run(fakes.config_of(), runs_dir=tmp_path, steps=fakes.table(), console=fakes.quiet())
        return {}

    expected = rf"Another run \(process {os.getpid()}\) is using {tmp_path}/tiny"
    with pytest.raises(HeadraceError, match=expected):
        run(fakes.config_of(), runs_dir=tmp_path, steps=fakes.table(run_again), console=fakes.quiet())
    run(fakes.config_of(), runs_dir=tmp_path, steps=fakes.table(), console=fakes.quiet())


def test_what_a_step_reports_is_shown_while_it_runs(tmp_path: Path) -> None:
    def train(*arguments: Any) -> dict[str, Any]:
        progress.report("epoch 1/3 loss [0.5]")
        return fakes.write_words(*arguments)

    console = fakes.quiet()
    run(fakes.config_of(), runs_dir=tmp_path, steps=fakes.table(train), console=console)
    assert "epoch 1/3 loss [0.5]" in console.file.getvalue()  # type: ignore[attr-defined]


def test_reports_without_a_view_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    progress.report("epoch 1/3")
    assert capsys.readouterr().out == "epoch 1/3\n"


def test_spinner_shows_reports_on_a_terminal(tmp_path: Path) -> None:
    def train(*arguments: Any) -> dict[str, Any]:
        progress.report("epoch 2/3 [x]")
        return fakes.write_words(*arguments)

    environment = {"TERM": "xterm"}
    console = Console(file=io.StringIO(), width=160, force_terminal=True, force_interactive=True, _environ=environment)
    run(fakes.config_of(), runs_dir=tmp_path, steps=fakes.table(train), console=console)
    assert "epoch 2/3 [x]" in console.file.getvalue()  # type: ignore[attr-defined]


def run_fakes(runs_dir: Path, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.pipelines.fakes", str(runs_dir)]
    return subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True, **options)


def digests(runs_dir: Path) -> dict[str, str]:
    names = ("made", "shaped", "judged", "shipped")
    return {
        name: artifacts.open_artifact(runs_dir / "tiny" / name, step=step).digest
        for name, step in zip(names, ("make", "shape", "judge", "ship"), strict=True)
    }


def test_a_killed_run_goes_on_and_ends_like_one_that_was_not(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    with run_fakes(whole) as process:
        process.communicate()
    assert process.returncode == 0

    with run_fakes(killed) as process:
        assert process.stdout is not None
        while process.stdout.readline() != "epoch 4\n":
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    assert not (killed / "tiny/shaped").exists()
    assert not (killed / "tiny/summary.json").exists()

    with run_fakes(killed) as process:
        output, _ = process.communicate()
    assert process.returncode == 0
    assert re.search(r"make +reused", output)
    assert re.search(r"started from [5-9]", output)
    assert digests(killed) == digests(whole)
    assert not list((killed / "tiny").glob(".*.tmp-*"))
    assert not list((killed / "tiny").glob(".*.scratch"))


def test_differences_name_what_changed() -> None:
    before = {
        "inputs": {"examples": "1"},
        "config": {"epochs": 3, "optimizer": {"name": "adam"}, "seed": 0, "notes": "", "model": {"args": {"width": 8}}},
        "source": {"components.train": "a", "models.old": "b"},
        "versions": {"keras": "3.12"},
        "outside": {"request_log": None},
    }
    now = {
        "inputs": {"examples": "2"},
        "config": {
            "epochs": 3,
            "optimizer": {"name": "sgd"},
            "seed": 1,
            "notes": "x" * 200,
            "model": {"args": {"width": 9, "depth": 2}},
        },
        "source": {"components.train": "c", "models.new": "b"},
        "versions": {"keras": "3.13"},
        "outside": {"request_log": "x"},
    }
    assert list(differences(before, now, "train")) == [
        "input examples changed",
        "setting model.args.depth: absent -> 2",
        "setting model.args.width: 8 -> 9",
        "setting train.notes changed",
        "setting train.optimizer.name: 'adam' -> 'sgd'",
        "setting seed: 0 -> 1",
        "source of components.train changed",
        "source of models.new is new",
        "source of models.old is gone",
        "version of keras: '3.12' -> '3.13'",
        "outside state: the request log is new",
    ]


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (DataError("row 3 has no label"), 1, "Error: row 3 has no label\n"),
        (ConfigError("no such key"), 2, "Error: no such key\n"),
        (KeyboardInterrupt(), 130, "goes on from here\n"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/x"),
            1,
            "Error: No space left on the disk while writing /x",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 1, "Error: No permission to use /x"),
        (ValueError("shapes differ\nat length"), 1, "Error: ValueError: shapes differ\nThis is a defect of ours; run"),
    ],
)
def test_errors_become_a_message_and_an_exit_code(
    error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left, reported(interrupted="goes on from here"):
        raise error
    assert left.value.code == code
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left, reported(debug=True):
        raise DataError("row 3 has no label")
    assert left.value.code == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a config and its data."""
    monkeypatch.chdir(tmp_path)
    Path("data.csv").write_text("x,label\n1,0\n")
    Path("tiny.yaml").write_text(yaml.safe_dump(fakes.settings()))
    return tmp_path


def run_command(*arguments: str) -> tuple[int, str]:
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {
        "PYTHONPATH": str(PROJECT)
    }
    code = (
        "import resource, sys; from pipelines.local import main\n"
        "try: main()\n"
        "finally:\n"
        "    used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "    print('HEAVY', sorted({'tensorflow', 'keras', 'numpy', 'kfp'} & set(sys.modules)))\n"
        "    print('CPU', used.ru_utime + used.ru_stime)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_command_on_an_unchanged_run_is_quick_and_loads_no_tensorflow(workplace: Path) -> None:
    run(fakes.config_of(), runs_dir=Path("runs"), steps=fakes.real_table(), console=fakes.quiet())
    code, output = run_command("tiny.yaml", "--explain")
    assert code == 0, output
    assert output.count("reused") == 12
    assert "HEAVY []" in output
    assert float(output.rpartition("CPU ")[2].split()[0]) < 3
    assert "Gate: blessed" in output
    base = workplace / "serving_models/tiny"
    assert f"python -m serving --model_name=tiny --model_base_path={base} --port=8500 --rest_api_port=8501" in output


def test_a_pushed_model_that_was_deleted_is_pushed_again(workplace: Path) -> None:
    run(fakes.config_of(), runs_dir=Path("runs"), steps=fakes.real_table(), console=fakes.quiet())
    (workplace / "serving_models/tiny/1/saved_model.pb").unlink()
    result = run(fakes.config_of(), runs_dir=Path("runs"), steps=fakes.real_table(), console=fakes.quiet())
    assert states(result)["verify"] == "reused"
    assert states(result)["push"] == "done"
    assert "is gone" in result.steps[9].reasons[0]


def test_command_on_a_model_that_was_not_blessed_ends_with_3(workplace: Path) -> None:
    run(fakes.config_of(), runs_dir=Path("runs"), steps=fakes.real_table(blessed=False), console=fakes.quiet())
    code, output = run_command("tiny.yaml")
    assert code == 3, output
    assert output.count("skipped") == 7
    assert "not blessed: nothing was pushed" in output
    assert "python -m serving" not in output
    assert not (workplace / "serving_models").exists()


def test_command_prints_the_config_only_if_asked(workplace: Path) -> None:
    run(fakes.config_of(seed=7), runs_dir=Path("runs"), steps=fakes.real_table(), console=fakes.quiet())
    assert "onnx_opset" not in run_command("tiny.yaml", "seed=7", "--until", "ingest")[1]
    code, output = run_command("tiny.yaml", "seed=7", "--until", "ingest", "--print-config")
    assert code == 0, output
    assert "seed: 7" in output
    assert "onnx_opset: 17" in output


def test_command_says_what_stands_in_the_way_of_its_folder(workplace: Path) -> None:
    Path("runs").write_text("a file in the way")
    code, output = run_command("tiny.yaml")
    assert code == 1, output
    assert "Error: runs is a file, but a folder is needed there. Move it, or choose another folder." in output


def test_command_refuses_step_options_with_kfp(workplace: Path) -> None:
    del workplace
    outcome = CliRunner().invoke(local.main, ["tiny.yaml", "--runner", "kfp", "--until", "train", "--explain"])
    assert outcome.exit_code == 2
    assert "leave out --until, --explain" in outcome.output


class _SlowToGo:
    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass


def test_an_interrupt_within_a_finalizer_is_not_lost() -> None:
    with pytest.raises(KeyboardInterrupt), local.interruptible():
        _SlowToGo()
        time.sleep(5)
