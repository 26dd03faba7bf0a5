"""The command line: one file per command, loaded only when it is called."""

from __future__ import annotations

import importlib
import os
import sys

import click

from autotune import __version__, redact
from autotune.cli.streams import NO_ROOM, discard, flush_answer, prepare_streams
from autotune.cli.suggest import hint_of
from autotune.errors import AutotuneError, EngineUnavailable
from autotune.nearby import near_word
from autotune.report.values import visible

#: Command -> module and its one line of help, so that `--help` imports none of the modules.
_COMMANDS = {
    "search": (
        "autotune.cli.search",
        "Find the fastest vLLM launch configuration for one model on one device.",
    ),
    "scan": ("autotune.cli.scan", "Launch a list of configurations, or one option swept, and show a table."),
    "explain": ("autotune.cli.explain", "Say why a vLLM server did not start, from its log, and what helps."),
    "check": ("autotune.cli.check", "Say whether one vLLM configuration would start, and where memory goes."),
    "blocks": ("autotune.cli.blocks", "Show what the KV block size does, and what a pool is bound by."),
    "simulate": ("autotune.cli.simulate", "Simulate a KV pool and batching policies side by side."),
    "rerun": ("autotune.cli.rerun", "Measure an old answer again after a change, and keep, re-tune or warn."),
    "export": ("autotune.cli.export", "Write a run's best configuration as a file that a deployment needs."),
    "report": ("autotune.cli.report", "Write a run as one HTML page: figures, memory, launches, doubts."),
    "doctor": ("autotune.cli.doctor", "Say what this machine offers to vLLM, and what will bite."),
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(_COMMANDS[cmd_name][0]).command
        if completing():
            from autotune.cli.complete import give_offers

            return give_offers(command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in _COMMANDS and not args[0].startswith("-"):
            near = near_word(args[0], _COMMANDS)
            meant = f" Did you mean {near!r}?" if near else f" There are {', '.join(_COMMANDS)}."
            ctx.fail(f"No such command {args[0][:80]!r}.{meant}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


def completing() -> bool:
    """Whether a shell asks for what may follow (`cli/complete.py`)."""
    return "_AUTOTUNE_COMPLETE" in os.environ


def _dashed(name: str) -> str:
    """vLLM takes --max_model_len as well as --max-model-len; so do all commands."""
    return name.replace("_", "-")


@click.group(
    cls=_LazyGroup,
    invoke_without_command=True,
    epilog='Completion in bash: eval "$(_AUTOTUNE_COMPLETE=bash_source autotune)"; zsh_source, fish_source '
    "likewise.",
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": _dashed},
)
@click.version_option(__version__, prog_name="autotune")
@click.pass_context
def cli(context: click.Context) -> None:
    """Finds the fastest vLLM launch configuration for one model on one card.

    Configurations that vLLM's start-up memory gates would refuse are pruned by arithmetic, before a
    launch is spent on them.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main(argv: list[str] | None = None) -> None:
    """Runs the command line; errors of ours become one line, a hint and their exit code."""
    prepare_streams()
    try:
        code = cli.main(args=argv, prog_name="autotune", standalone_mode=False)
        flush_answer()
    except AutotuneError as error:
        click.echo(visible(f"autotune: {redact.clean(error.message)}"), err=True)
        if error.hint:
            click.echo(visible(f"  {redact.clean(error.hint)}"), err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        hint = hint_of(error) if isinstance(error, click.UsageError) else ""
        if hint:
            click.echo(f"  {hint}", err=True)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("autotune: interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:
        discard(sys.stdout, sys.stderr)
        sys.exit(1)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        discard(sys.stdout)
        click.echo(f"autotune: cannot write: {error.strerror}", err=True)
        sys.exit(EngineUnavailable.exit_code)
    sys.exit(code if isinstance(code, int) else 0)
