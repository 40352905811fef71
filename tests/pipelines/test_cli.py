"""The `headrace` command: lists its sub-commands without importing them, hands everything else on."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from pipelines import cli

PROJECT = Path(__file__).resolve().parents[2]


def invoke(*arguments: str) -> tuple[int, str]:
    outcome = CliRunner().invoke(cli.main, arguments, prog_name="headrace")
    return outcome.exit_code, outcome.output


def test_help_lists_every_command_and_imports_none() -> None:
    code = (
        "import sys; from pipelines.cli import main\n"
        "try: main(['--help'])\n"
        "finally: print([name for name in sys.modules if name in ('pydantic', 'yaml', 'rich', 'pipelines.local')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name, (_, short_help) in cli.COMMANDS.items():
        assert f"  {name}" in done.stdout
        assert short_help in done.stdout
    assert done.stdout.endswith("[]\n")


def test_version() -> None:
    code, output = invoke("--version")
    assert code == 0
    assert output.startswith("headrace ")


def test_unknown_command_is_answered_with_the_nearest() -> None:
    code, output = invoke("rnu")
    assert code == 2
    assert "There is no command 'rnu'. Did you mean 'run'?" in output


def test_a_command_gets_its_arguments_options_and_help(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    @click.argument("words", nargs=-1)
    @click.option("--until")
    def main(words: tuple[str, ...], until: str) -> None:
        """What it does."""
        click.echo(f"{words} {until}")
        raise SystemExit(3)

    module = types.ModuleType("fake_command")
    module.main = main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_command", module)
    monkeypatch.setitem(cli.COMMANDS, "run", ("fake_command:main", "x"))
    assert invoke("run", "a.yaml", "seed=3", "--until", "train") == (3, "('a.yaml', 'seed=3') train\n")
    code, output = invoke("run", "--help")
    assert code == 0
    assert output.startswith("Usage: headrace run [OPTIONS] [WORDS]...")
    assert invoke("run", "--nonsense")[0] == 2


def test_a_command_may_be_a_plain_function(monkeypatch: pytest.MonkeyPatch) -> None:
    def main(arguments: list[str] | None = None) -> int:
        print(arguments)
        return 4

    module = types.ModuleType("fake_command")
    module.main = main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_command", module)
    monkeypatch.setitem(cli.COMMANDS, "serve", ("fake_command:main", "x"))
    assert invoke("serve", "--port=1") == (4, "['--port=1']\n")


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_is_there(name: str) -> None:
    module = cli.COMMANDS[name][0].partition(":")[0]
    assert importlib.util.find_spec(module) is not None, f"{module} does not exist"
    done = subprocess.run(
        [sys.executable, "-m", "pipelines.cli", name, "--help"], cwd=PROJECT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert f"headrace {name}" in done.stdout


def commands_below(command: click.Command) -> Iterator[click.Command]:
    """A command and its sub-commands, at any depth."""
    yield command
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            yield from commands_below(inner)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_is_short_to_ask_for_and_says_everything(name: str) -> None:
    code, output = invoke(name, "-h")
    assert code == 0
    assert (code, output) == invoke(name, "--help")
    module, _, attribute = cli.COMMANDS[name][0].partition(":")
    for command in commands_below(getattr(importlib.import_module(module), attribute)):
        options = [each for each in command.params if isinstance(each, click.Option) and not each.hidden]
        assert command.help, command.name
        assert [option.name for option in options if not option.help] == [], command.name


def test_predict_takes_its_options_at_once() -> None:
    done = CliRunner().invoke(cli.main, ["predict", "--help"])
    assert done.exit_code == 0
    assert "--url" in done.output and "--model" in done.output
