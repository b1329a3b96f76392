"""`unicronctl report`: a week summed up, and a bundle about a job for support."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from unicron_ctl.reports import week_report
from unicron_ctl.shared.commands.options import DURATION, controller_option, print_json
from unicron_ctl.shared.protocol.answer_schema import Report
from unicron_ctl.shared.protocol.client import as_struct, ask_controller
from unicron_ctl.shared.settings.config_file import load
from unicron_ctl.shared.settings.notify import load_secrets, wrong_targets
from unicron_ctl.shared.system.errors import WRONG_USE, UserError
from unicron_ctl.shared.system.printable import print_text

WEEK = 604800.0


class JobOrCommand(click.Group):
    """A group in which `report 123` means `report job 123`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["job", *args]
        return super().resolve_command(ctx, args)


@click.group(name="report", cls=JobOrCommand)
def command() -> None:
    """Sum up a week, or pack a bundle about a job for support: `unicronctl report 123`."""


@command.command()
@click.option("--since", "seconds", type=DURATION, default=WEEK, metavar="DURATION", help="How far back [default: 7d].")
@click.option("--html", "as_html", is_flag=True, help="Print a page that needs nothing else.")
@click.option("--json", "as_json", is_flag=True, help="For programs; the keys are stable.")
@click.option("--send", is_flag=True, help="Send it to the targets of [notify] instead of printing it.")
@click.option("--config", "path", type=click.Path(), help="With --send: unicron.toml [default: as unicrond finds it].")
@controller_option()
def week(seconds: float, as_html: bool, as_json: bool, send: bool, path: str | None, controller: str | None) -> None:
    """Sum up failures by cause, and the node-hours that they cost and that healing saved.

    Admins see all jobs, others their own.
    """
    if not seconds > 0.0:
        raise UserError("--since is how far back: write 7d or 30d", WRONG_USE)
    answer = ask_controller({"kind": "report", "seconds": seconds}, controller)
    report = as_struct(answer, Report)
    if send:
        _send(report, path)
    elif as_json:
        print_json(answer, indent=2)
    else:
        print_text(week_report.page(report) if as_html else week_report.text(report), lines=True, nl=False)


def _send(report: Report, path: str | None) -> None:
    """Send the report to all targets. Raises UserError if there is none, or a delivery failed."""
    from unicron_ctl.shared.notices.notices import Message
    from unicron_ctl.shared.notices.notify_targets import Hooks, NotTold, targets

    config = load(path)
    if wrong := list(wrong_targets(config.notify).values()):
        raise UserError(f"{config.path}: [notify] {wrong[0]}", WRONG_USE)
    data = {"version": 1, "report": msgspec.to_builtins(report)}
    message = Message(week_report.title(report), week_report.text(report), data, week_report.page(report))
    deliveries = targets(config.notify, load_secrets(config.notify), Hooks())
    if not deliveries:
        raise UserError(f"{config.path or 'unicron.toml'}: [notify] names nobody: add hook, mail or secrets")
    failed = []
    for name, deliver in deliveries.items():
        try:
            deliver(message)
        except NotTold as error:
            failed.append(f"{name}: {error}")
    if failed:
        raise UserError(f"the report was not sent: {'; '.join(failed)}")


@command.command()
@click.argument("job")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="[default: here, by name]"
)
@click.option("--with-logs", is_flag=True, help="Add the ranks' output and texts of users, which may hold anything.")
@controller_option()
def job(job: str, output: Path | None, with_logs: bool, controller: str | None) -> None:
    """Pack what is known of JOB (an id or a name) into a file for support.

    In it: what the controller answers about the job, its events, the settings, versions, and what `unicronctl doctor`
    finds. You get only what you may see. Texts of users and their programs, reasons included, are in it only with
    --with-logs: then look through it before you send it.
    """
    from unicron_ctl.reports.bundle import pack

    path, left_out = pack(job, output, with_logs, controller)
    for line in left_out:
        print_text(f"unicronctl: left out: {line}", err=True)
    print_text(path)
