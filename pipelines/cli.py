"""The `headrace` command: the same code as `python -m pipelines.local | compile | submit` and `python -m serving`."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

import click

from components.errors import did_you_mean

COMMANDS = {
    "init": ("pipelines.init:main", "Make a new project with its own config, data source and model."),
    "run": ("pipelines.local:main", "Run every step on this machine."),
    "folds": ("pipelines.folds:main", "Cross-validate: train and evaluate once for each fold."),
    "compile": ("pipelines.compile:main", "Write the Kubeflow pipeline of a config as YAML."),
    "submit": ("pipelines.submit:main", "Start a run on Kubeflow Pipelines, now or by cron."),
    "diff": ("pipelines.diff:main", "Say in what two Kubeflow pipelines differ."),
    "replay": ("pipelines.replay:main", "Run a step of an earlier run again, here."),
    "image": ("pipelines.kubeflow.image:main", "Build the container image that steps, trainer and server run in."),
    "katib": ("pipelines.kubeflow.katib:main", "Write the search of a config as a Katib Experiment."),
    "serve": ("serving.__main__:main", "Serve a pushed model over gRPC and REST."),
    "manifests": ("pipelines.manifests:main", "Write what puts a pushed model on Kubernetes, KServe or compose."),
    "deploy": ("serving.rollout.commands:deploy", "Put a pushed version on trial, with a share of the requests."),
    "promote": ("serving.rollout.commands:promote", "Give the version on trial all requests."),
    "rollback": ("serving.rollout.commands:rollback", "Take back the version on trial, or go back to the one before."),
    "monitor": ("pipelines.monitor:main", "Compare what a pushed model is asked with what it trained on."),
    "schema": ("pipelines.schema:main", "Infer, compare and relax the schema of data."),
    "lineage": ("pipelines.lineage:main", "Say where a pushed model comes from, and check its digests."),
    "statistics": ("pipelines.statistics:main", "Show what is known of the data, or of two runs side by side."),
    "predict": ("serving.client.commands:predict", "Ask a served model."),
    "client": ("serving.client.commands:main", "Ask it for more: status, metadata, classify, wait, reload."),
    "doctor": ("pipelines.doctor:main", "Say what in this environment would bite, and how to mend it."),
}


class LazyGroup(click.Group):
    """A group that imports a sub-command when it is called, so that the list of them costs nothing."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order in which one meets them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, as a stand-in that imports the real one when it is run."""
        return _stand_in(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, and a word that is no command is answered with the nearest one."""
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"There is no command '{args[0]}'.{did_you_mean(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)


def _stand_in(name: str) -> click.Command:
    target, short_help = COMMANDS[name]

    @click.command(
        name,
        short_help=short_help,
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    @click.pass_context
    def command(context: click.Context, arguments: tuple[str, ...]) -> Any:
        return _call(target, list(arguments), context.command_path)

    return command


def _call(target: str, arguments: list[str], command_path: str) -> Any:
    module_name, _, attribute = target.partition(":")
    function = getattr(importlib.import_module(module_name), attribute)
    if isinstance(function, click.Command):
        return function.main(arguments, prog_name=command_path)
    raise SystemExit(function(arguments))


def _version() -> str:
    try:
        return importlib.metadata.version("headrace")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _print_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"headrace {_version()}")
        context.exit()


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show it.")
def main() -> None:
    """From raw data to a served, monitored Keras model."""


if __name__ == "__main__":
    main(prog_name="headrace")
