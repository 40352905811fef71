"""Look at what a pushed model is asked: `python -m pipelines.monitor [CONFIG] [section.key=value ...] [--every SECONDS]`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from components.environment import noise_kept_in, set_environment
from pipelines import alarm
from pipelines.exits import reported
from pipelines.local import LOG, interruptible, only_run_in
from pipelines.steps import Step, step_named

if TYPE_CHECKING:
    from pipelines.config import PipelineConfig

ALARM = 4


def look(
    config: PipelineConfig,
    *,
    runs_dir: Path,
    run_arguments: Sequence[str] = (),
    step: Step | None = None,
    clock: Callable[[], float] = time.time,
) -> int:
    """Run the step `monitor` on the artifacts of a run, and do what the config asks for at an alarm.

    Args:
        config: The experiment.
        runs_dir: Where its artifacts are.
        run_arguments: The command line that a retraining run is started with.
        step: The step; default: `monitor`.
        clock: Unix time in seconds.

    Returns:
        0, or 4 at an alarm.

    Raises:
        HeadraceError: the step failed, or something that is to be done at an alarm did.
    """
    from components import artifacts
    from components.errors import HeadraceError

    step = step or step_named("monitor")
    run_dir = runs_dir / config.name
    paths = {name: run_dir / name for name in (*step.inputs, step.output)}
    for name in step.inputs:
        artifacts.read_manifest(paths[name])  # before TensorFlow is loaded, and a folder made for a name that is wrong
    with only_run_in(run_dir), noise_kept_in(run_dir / LOG):
        result = step.load()(**paths, config=config.step_config(step.section))
    report: dict[str, Any] = json.loads((run_dir / step.output / "monitor.json").read_text())
    click.echo(_line(report))
    click.echo(f"The page: {(run_dir / step.output / 'report.html').absolute()}")
    if not result.alarms:
        return 0
    failures = alarm.fire(
        config.monitor.on_alarm,
        report,
        run_arguments=run_arguments,
        run_dir=run_dir,
        now_seconds=clock(),
    )
    if failures:
        raise HeadraceError("\n".join(failures))
    return ALARM


def watch(look_once: Callable[[], int], every_seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
    """Look again and again. What fails is told, and the next look is made all the same; a wrong config ends it."""
    from components.errors import ConfigError, HeadraceError

    while True:
        start = time.monotonic()
        try:
            look_once()
        except ConfigError:
            raise
        except HeadraceError as error:
            click.echo(f"Error: {error}", err=True)
        sleep(max(0.0, every_seconds - (time.monotonic() - start)))


def _line(report: dict[str, Any]) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(report["time_seconds"]))
    found = [f"{each['kind']} of {each['name']} {each['where']}".rstrip() for each in report["alarms"]]
    return f"{when} {report['status']}: {report['num_requests']} requests, {report['num_examples']} examples" + (
        f"; {', '.join(dict.fromkeys(found))}" if found else ""
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("arguments", nargs=-1, metavar="[CONFIG] [section.key=value ...]")
@click.option(
    "--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), help="Where the run's artifacts are."
)
@click.option(
    "--every",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Look again and again, until SIGTERM or Ctrl-C; without it: once.",
)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(arguments: tuple[str, ...], runs_dir: Path, every: float | None, debug: bool) -> None:
    """Compare what a pushed model is asked with what it was trained on, and do what monitor.on_alarm says.

    CONFIG is the YAML file that the model was trained with (default: the only one in configs/, or chicago_taxi.yaml);
    section.key=value overrides a setting.

    Exit codes: 0 no alarm, or too few examples to judge; 1 failed, or what was to be done at an alarm did; 2 the
    configuration is wrong; 4 an alarm; 130 interrupted.
    """
    with reported(debug=debug), interruptible():
        from pipelines.config import load_config, split_arguments

        config = load_config(*split_arguments(arguments))
        set_environment()

        def look_once() -> int:
            return look(config, runs_dir=runs_dir, run_arguments=arguments)

        if every is not None:
            watch(look_once, every)
        code = look_once()
    raise SystemExit(code)


if __name__ == "__main__":
    main(prog_name="python -m pipelines.monitor")
