"""`unicronctl`: a group whose commands are imported only when they are called, so that `--help` stays instant."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence

import click

from unicron_ctl.errors import FAILURE, WRONG_USE, UserError, one_line

# name -> ("module:click command", one line for `unicronctl --help`)
COMMANDS: dict[str, tuple[str, str]] = {
    "classify": ("unicron_ctl.commands.classify:command", "Name the failure and severity of a log or message."),
    "cluster": ("unicron_ctl.commands.cluster:command", "Run a private Slurm cluster on this machine."),
    "config": ("unicron_ctl.commands.config:command", "Check unicron.toml against the cluster's partitions."),
    "demo": ("unicron_ctl.commands.demo:command", "Train two jobs, break them, watch them heal."),
    "events": ("unicron_ctl.commands.events:command", "Show the event log."),
    "explain": ("unicron_ctl.commands.explain:command", "Say why a job was treated as it was."),
    "inject": ("unicron_ctl.commands.inject:command", "Break a rank on purpose, where the configuration allows it."),
    "jobs": ("unicron_ctl.commands.jobs:command", "List protected jobs."),
    "nodes": ("unicron_ctl.commands.nodes:command", "List nodes and who uses them."),
    "pair-test": ("unicron_ctl.commands.pair_test:command", "Find the bad one among nodes by tests between pairs."),
    "plan": ("unicron_ctl.commands.plan:command", "Compute the best assignment of nodes to jobs."),
    "punish": ("unicron_ctl.commands.inject:punish", "Break ranks at random until the time is up."),
    "simulate": ("unicron_ctl.commands.simulate:command", "Replay a failure trace under several policies."),
    "status": ("unicron_ctl.commands.status:command", "Show jobs, nodes and the last failures."),
    "template": ("unicron_ctl.commands.template:command", "Print or copy a batch script to start from."),
}


class LazyGroup(click.Group):
    """A click group over the COMMANDS table; a command's module is imported when it is first needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module_name, attribute = COMMANDS[cmd_name][0].split(":")
        command: click.Command = getattr(importlib.import_module(module_name), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # click's own version imports every command for its help text; the table already has it.
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])


def _version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from importlib.metadata import version  # slow to import, wanted here only

        click.echo(f"unicronctl {version('unicron-slurm')}")
        ctx.exit()


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=False,
    invoke_without_command=True,
)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version.")
@click.pass_context
def unicronctl(ctx: click.Context) -> None:
    """Self-healing large-model training on Slurm."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def run(program: str, command: click.Command, arguments: Sequence[str] | None = None, mark: str = "") -> int:
    """Runs a click command and returns its exit status: 0, 2 for wrong use, 1 for anything else.

    Every error becomes one line on stderr, which begins with `mark`. With UNICRON_DEBUG=1 a traceback comes before it.
    """
    try:
        result = command.main(args=arguments, prog_name=program, standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else program
        return _report(mark + program, f"{error.format_message()} (see '{path} --help')", WRONG_USE)
    except click.ClickException as error:
        return _report(mark + program, error.format_message(), FAILURE)
    except UserError as error:
        return _report(mark + program, str(error), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return _report(mark + program, "interrupted", FAILURE)
    except BrokenPipeError:
        # The reader went away (`unicronctl events | head`). Python would complain again at exit when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE
    except OSError as error:
        return _report(mark + program, str(error), FAILURE)
    except Exception as error:
        hint = "this is a defect; run again with UNICRON_DEBUG=1 for the traceback"
        return _report(mark + program, f"{type(error).__name__}: {error} ({hint})", FAILURE)


def _report(program: str, message: str, status: int) -> int:
    if os.environ.get("UNICRON_DEBUG") == "1":
        traceback.print_exc()
    click.echo(f"{program}: {one_line(message)}", err=True)
    return status


def main() -> None:
    """Entry point of the `unicronctl` program."""
    sys.exit(run("unicronctl", unicronctl))
