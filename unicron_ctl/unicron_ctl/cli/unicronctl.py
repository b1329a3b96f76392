"""`unicronctl`: a group whose commands are imported only when they are called, so that `--help` stays instant."""

from __future__ import annotations

import functools
import importlib
import sys

import click
from click.shell_completion import CompletionItem

from unicron_ctl.shared.commands.table import Command, rooms
from unicron_ctl.shared.system.printable import print_text
from unicron_ctl.shared.system.program import run
from unicron_ctl.shared.system.release import version_option

COMMANDS = {
    "classify": Command("unicron_ctl.cli.classify:command", "Name the failure and severity of a log or message."),
    "config": Command("unicron_ctl.cli.config_check:command", "Check unicron.toml against the cluster's partitions."),
    "events": Command("unicron_ctl.cli.events:command", "Show the event log."),
    "explain": Command("unicron_ctl.cli.status:explain", "Explain why a job was treated as it was."),
    "jobs": Command("unicron_ctl.cli.status:jobs", "List protected jobs."),
    "logs": Command("unicron_ctl.cli.logs:command", "Show the output of a job's ranks, in the order of time."),
    "nodes": Command("unicron_ctl.cli.status:nodes", "List nodes and who uses them."),
    "pause": Command("unicron_ctl.cli.pause:command", "Change nothing in Slurm for a while."),
    "ping": Command("unicron_ctl.cli.ping:command", "Ask the controller for a sign of life."),
    "plan": Command("unicron_ctl.cli.plan:command", "Compute the best assignment of nodes to jobs."),
    "resume": Command("unicron_ctl.cli.pause:resume", "End a pause."),
    "retire": Command("unicron_ctl.cli.retire:command", "Give back to Slurm all that Unicron has taken."),
    "schema": Command("unicron_ctl.cli.schema:command", "Print the JSON Schema of a command's JSON."),
    "status": Command("unicron_ctl.cli.status:command", "Show what needs an admin, jobs, nodes, failures."),
    "template": Command("unicron_ctl.cli.templates:command", "Print or copy a batch script to start from."),
    "top": Command("unicron_ctl.cli.top:command", "Show the status, the worst first, until Ctrl-C."),
}


@functools.cache
def commands() -> dict[str, Command]:
    """Return all commands by name: the core's, and those of the installed rooms."""
    table = dict(COMMANDS)
    for room in rooms():
        table |= getattr(room, "COMMANDS", {})
    return table


class LazyGroup(click.Group):
    """A click group over the tables of commands; a command's module is imported when it is first needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name) or commands().get(cmd_name)  # for the core's, the rooms are not loaded
        if entry is None:
            return None
        module_name, attribute = entry.target.split(":")
        command: click.Command = getattr(importlib.import_module(module_name), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # click's own method would import every command for its help text, which the table has.
        with formatter.section("Commands"):
            formatter.write_dl([(name, commands()[name].line) for name in self.list_commands(ctx)])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        # click's own method would do the same here, while the shell waits.
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [
            CompletionItem(name, help=commands()[name].line)
            for name in self.list_commands(ctx)
            if name.startswith(incomplete)
        ]


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=False,
    invoke_without_command=True,
)
@version_option
@click.pass_context
def unicronctl(ctx: click.Context) -> None:
    """Self-healing large-model training on Slurm."""
    if ctx.invoked_subcommand is None:
        print_text(ctx.get_help(), lines=True)


def main() -> None:
    """Entry point of the `unicronctl` program."""
    sys.exit(run("unicronctl", unicronctl))
