"""`unicronctl`: a group whose commands are imported only when they are called, so that `--help` stays instant."""

from __future__ import annotations

import importlib
import sys

import click
from click.shell_completion import CompletionItem

from unicron_ctl.shared.system.printable import print_text
from unicron_ctl.shared.system.program import run
from unicron_ctl.shared.system.release import version_option

# name -> ("module:click command", one line for `unicronctl --help`)
COMMANDS: dict[str, tuple[str, str]] = {
    "backup": ("unicron_ctl.cli.backup:command", "Copy unicrond's state folder into a file."),
    "check-folder": ("unicron_ctl.cli.check_folder:command", "Say whether two hosts can share a state folder."),
    "checkpoint": ("unicron_ctl.cli.checkpoint:command", "Show, convert and verify checkpoints."),
    "classify": ("unicron_ctl.cli.classify:command", "Name the failure and severity of a log or message."),
    "cluster": ("unicron_ctl.cli.cluster:command", "Run a private Slurm cluster on this machine."),
    "config": ("unicron_ctl.cli.config_check:command", "Check unicron.toml against the cluster's partitions."),
    "demo": ("unicron_ctl.cli.demo:command", "Train two jobs, break them, watch them heal."),
    "doctor": ("unicron_ctl.cli.doctor:command", "Find what is wrong with the installation, on one host or all."),
    "events": ("unicron_ctl.cli.events:command", "Show the event log."),
    "explain": ("unicron_ctl.cli.explain:command", "Explain why a job was treated as it was."),
    "inject": ("unicron_ctl.cli.inject:command", "Break a rank on purpose, where the configuration allows it."),
    "jobs": ("unicron_ctl.cli.jobs:command", "List protected jobs."),
    "logs": ("unicron_ctl.cli.logs:command", "Show the output of a job's ranks, in the order of time."),
    "nodes": ("unicron_ctl.cli.nodes:command", "List nodes and who uses them."),
    "pair-test": ("unicron_ctl.cli.pair_test:command", "Find the bad node by tests between pairs of nodes."),
    "pause": ("unicron_ctl.cli.pause:command", "Change nothing in Slurm for a while."),
    "ping": ("unicron_ctl.cli.ping:command", "Ask the controller for a sign of life."),
    "plan": ("unicron_ctl.cli.plan:command", "Compute the best assignment of nodes to jobs."),
    "punish": ("unicron_ctl.cli.inject:punish", "Break ranks at random until the time is up."),
    "report": ("unicron_ctl.cli.reporting:command", "Sum up a week, or pack a bundle about a job for support."),
    "restore": ("unicron_ctl.cli.backup:restore", "Put a backup into unicrond's state folder."),
    "resume": ("unicron_ctl.cli.pause:resume", "End a pause."),
    "retire": ("unicron_ctl.cli.retire:command", "Give back to Slurm all that Unicron has taken."),
    "schema": ("unicron_ctl.cli.schema:command", "Print the JSON Schema of a command's JSON."),
    "setup": ("unicron_ctl.cli.setup:command", "Write unicron.toml, and say what else an installation takes."),
    "simulate": ("unicron_ctl.cli.simulate:command", "Replay a failure trace under several policies."),
    "status": ("unicron_ctl.cli.status:command", "Show what needs an admin, jobs, nodes, failures."),
    "top": ("unicron_ctl.cli.top:command", "Show the status, the worst first, until Ctrl-C."),
    "template": ("unicron_ctl.cli.templates:command", "Print or copy a batch script to start from."),
    "web": ("unicron_ctl.cli.web.web_command:command", "Serve a read-only page, or print a link to it."),
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

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        # So does this; the shell waits for it.
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [
            CompletionItem(name, help=COMMANDS[name][1])
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
