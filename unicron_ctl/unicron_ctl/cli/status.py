"""`unicronctl status`, `jobs`, `nodes`, `explain`: the controller's answers as tables, or with `--json` as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click

from unicron_ctl.cli.filter_options import Filters, filter_options
from unicron_ctl.shared.commands import status_tables
from unicron_ctl.shared.commands.alternative import alternative
from unicron_ctl.shared.commands.options import controller_option, print_json
from unicron_ctl.shared.protocol.answer_schema import Explanation, Job, Node, NodeHistory, Status
from unicron_ctl.shared.protocol.client import as_struct, ask_controller
from unicron_ctl.shared.system.columns import Cell, Listing, show, terminal_width
from unicron_ctl.shared.system.errors import PROBLEM_FOUND, WRONG_USE, UserError

INTERVAL = 2.0  # seconds
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def _show(data: object, as_json: bool, parts: Callable[[bool], Iterable[Listing | Cell]]) -> None:
    """Print an answer. parts: makes its tables, folded for people or not."""
    if as_json:
        print_json(data, indent=2)
    else:
        show(parts(terminal_width() is not None))


@click.command(name="status")
@json_option
@click.option("--watch", is_flag=True, help="The same as `unicronctl top`.")
@filter_options("user", "partition", "nodes", "since")
@controller_option()
def command(as_json: bool, watch: bool, filters: Filters, controller: str | None) -> int:
    """Show what needs an admin, jobs, nodes and the last failures.

    The options choose jobs, nodes and failures; what needs an admin is always said. The exit status is 3 if something
    does.
    """
    if as_json and watch:
        raise UserError("--json and --watch exclude each other: `unicronctl events -f --json` streams", WRONG_USE)
    if watch:
        from unicron_ctl.cli import top

        top.watch(INTERVAL, filters, controller)
        return 0
    data = ask_controller({"kind": "status", **filters}, controller)
    _show(data, as_json, lambda folded: status_tables.status(as_struct(data, Status), folded, bool(filters)))
    return PROBLEM_FOUND if data["attention"] else 0


@click.command(name="jobs")
@json_option
@filter_options("user", "partition", "nodes", "since")
@controller_option()
def jobs(as_json: bool, filters: Filters, controller: str | None) -> None:
    """List protected jobs. With --since: those that have run since then."""
    data = ask_controller({"kind": "jobs", **filters}, controller)
    _show(data, as_json, lambda folded: [status_tables.jobs(as_struct(data, list[Job]), folded, bool(filters))])


@click.command(name="nodes")
@json_option
@filter_options("user", "partition", "nodes")
@controller_option()
def nodes(as_json: bool, filters: Filters, controller: str | None) -> None:
    """List nodes and who uses them. With --user: those on which that user's jobs run."""
    data = ask_controller({"kind": "nodes", **filters}, controller)
    _show(data, as_json, lambda folded: [status_tables.nodes(as_struct(data, list[Node]), folded)])


@click.command(name="explain")
@click.argument("job", required=False)
@click.option("--node", metavar="NODE", help="Explain what the log holds against a node instead.")
@json_option
@controller_option()
def explain(job: str | None, node: str | None, as_json: bool, controller: str | None) -> None:
    """Explain why a job was treated as it was. JOB is an id or a name."""
    if (job is None) is (node is None):
        raise UserError("name either a JOB or --node NODE", WRONG_USE)
    if node is not None:
        history = ask_controller({"kind": "history", "node": node}, controller)
        _show(history, as_json, lambda _: status_tables.node_history(as_struct(history, NodeHistory)))
        return
    data = ask_controller({"kind": "explain", "job": job}, controller)
    data["alternative"] = (
        None if data["ended"] else alternative(ask_controller({"kind": "scenario"}, controller), data["job"])
    )
    _show(data, as_json, lambda _: status_tables.explanation(as_struct(data, Explanation)))
