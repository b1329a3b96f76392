"""`unicronctl simulate`: the cost of a failure trace under several policies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec import UNSET, UnsetType

from unicron_ctl.shared.commands.options import Number, print_json
from unicron_ctl.shared.system.columns import Listing, show
from unicron_ctl.shared.system.errors import WRONG_USE, UserError
from unicron_ctl.shared.system.printable import print_text
from unicron_detector.words import plural
from unicron_planner.problem.objective import PlanError, number
from unicron_planner.problem.scenario import load as load_scenario
from unicron_planner.simulate import history, simulate
from unicron_planner.simulate.cases import CASE, NODES, case
from unicron_planner.simulate.engine import Result
from unicron_planner.simulate.figure import draw, draw_history, page
from unicron_planner.simulate.generate import DAYS, FIXED_DAYS, GENERATORS
from unicron_planner.simulate.policies import BOUND_NAME, Policy, policy
from unicron_planner.simulate.trace import Trace, load, make, with_notice, write
from unicron_planner.solver.plan import flops_text


class PolicyResult(msgspec.Struct, kw_only=True):
    """One item of the JSON of `unicronctl simulate`."""

    policy: str
    mean_waf: float
    ideal_waf: float
    efficiency: float
    """A share of the ideal."""
    lost: dict[str, float]
    """Shares of the ideal, which add up to 1 with `efficiency`."""
    failures: int
    """The number of failures that hit a job."""
    plans: int
    """Number of times that nodes were redistributed."""
    sources: list[str] | UnsetType = UNSET
    all_running: dict[str, float] | UnsetType = UNSET
    """mean_waf, ideal_waf and efficiency if each of the six jobs keeps a node."""


PolicyResults = list[PolicyResult]


@dataclass(frozen=True)
class Options:
    """The options of the command line."""

    trace: str | None
    generate: str | None
    from_sacct: str | None
    checkpoint_minutes: float | None
    setup_minutes: float | None
    days: float | None
    seed: int | None
    scenario: str | None
    nodes: int | None
    policy: tuple[str, ...]
    notice: float | None
    until: float | None
    save_trace: str | None
    figure: str | None
    html: str | None
    sources: bool
    json: bool


@click.command(name="simulate")
@click.option(
    "--trace",
    type=click.Path(),
    metavar="FILE",
    help="CSV `seconds,event,node,cause`, or a public format, which is detected: churn `ms,add|remove,node`, lines "
    "`date, time, nodes`, CSV with node, start and stop, JSON of faults with start and end, or what "
    "`sacctmgr show event -P` prints.",
)
@click.option("--generate", metavar="NAME", help="Make a trace instead: trace-a, trace-b, unicron, llama3 or rsc1.")
@click.option(
    "--from-sacct",
    type=click.Path(),
    metavar="FILE",
    help="What Unicron would have saved here: FILE is made by `sacct -a -D -X -P -S START -o "
    "Cluster,JobID,User,JobName,State,ExitCode,Submit,Start,End,NNodes`.",
)
@click.option(
    "--checkpoint-minutes", type=Number(0), metavar="MINUTES", help="Minutes between two checkpoints there [30]."
)
@click.option("--setup-minutes", type=Number(0), metavar="MINUTES", help="Minutes that a start takes there [14].")
@click.option(
    "--days", type=Number(0, min_open=True), help="Length of a generated trace [365; trace-a always 56, trace-b 7]."
)
@click.option("--seed", type=int, help="Seed of a generated trace [0].")
@click.option(
    "--scenario", type=click.Path(), metavar="SCENARIO.toml", help="Cluster and jobs; without it six jobs on 16 nodes."
)
@click.option("--nodes", type=click.IntRange(1), metavar="N", help="Nodes for those six jobs, instead of 16.")
@click.option(
    "--policy",
    multiple=True,
    metavar="NAME",
    help="Can be repeated; default: unicron. clairvoyant: an upper bound, since it knows the future.",
)
@click.option(
    "--notice",
    type=Number(0),
    metavar="SECONDS",
    help="Nodes that leave have been announced so long before, as spot instances are; see the policy unicron-notice.",
)
@click.option(
    "--until", type=Number(0), metavar="SECONDS", help="End of the replay; default: a day after the last event."
)
@click.option("--save-trace", type=click.Path(), metavar="FILE", help="Write the trace as CSV.")
@click.option("--figure", type=click.Path(), metavar="FILE", help="Draw WAF over time and the losses (.png or .svg).")
@click.option("--html", type=click.Path(), metavar="FILE", help="Write a self-contained page.")
@click.option("--sources", is_flag=True, help="Also say where each policy's figures come from.")
@click.option("--json", is_flag=True, help="Print JSON.")
def command(**values: Any) -> None:
    """Replay a failure trace under several policies, or say what a site's failures have cost."""
    options = Options(**values)
    if [bool(options.trace), bool(options.generate), bool(options.from_sacct)].count(True) != 1:
        raise click.UsageError("give one of --trace FILE, --generate NAME and --from-sacct FILE")
    alone = (options.days, options.seed, options.nodes, options.notice, options.until)
    numbers = [value is not None for value in alone]
    others = options.policy or options.scenario or options.html or options.save_trace or options.sources
    if options.from_sacct and (others or any(numbers)):
        raise click.UsageError("--from-sacct goes with --figure, --json, --checkpoint-minutes and --setup-minutes only")
    if not options.from_sacct and (options.checkpoint_minutes is not None or options.setup_minutes is not None):
        raise click.UsageError("--checkpoint-minutes and --setup-minutes are for --from-sacct")
    if options.trace and (options.days is not None or options.seed is not None):
        raise click.UsageError("--days and --seed are for --generate: leave them out")
    if options.scenario and options.nodes:
        raise click.UsageError("--nodes is for the six jobs: leave --scenario or --nodes out")
    try:
        if options.from_sacct:
            _judge_history(options.from_sacct, options)
        else:
            _replay_trace(options)
    except PlanError as error:
        raise UserError(str(error), WRONG_USE) from None


def _replay_trace(options: Options) -> None:
    policies = [policy(name) for name in options.policy or ("unicron",)]
    nodes = options.nodes or NODES
    cluster = load_scenario(options.scenario) if options.scenario else case(CASE, nodes)
    trace = _trace(options, cluster.nodes)
    if options.notice is not None:
        trace = with_notice(trace, options.notice)
    if path := options.save_trace:
        _write_file(path, lambda: write(trace, path))
    results = [simulate(cluster, trace, each) for each in policies]
    # The best plan for the six jobs leaves some without nodes, but the controller gives each its minimum.
    all_running = (
        [] if options.scenario else [simulate(case(CASE, nodes, all_run=True), trace, each) for each in policies]
    )
    title = f"{trace.name}: {plural(cluster.nodes, 'node')}, {plural(len(cluster.jobs), 'job')}"
    _draw(options, results, trace, title)
    if options.json:
        _print_json(results, all_running, policies if options.sources else ())
        return
    _show(results, policies if options.sources else ())
    if all_running:
        print_text("the six jobs' best plan leaves some without nodes; if each keeps one, as the controller has it:")
        _show(all_running, ())


def _draw(options: Options, results: Sequence[Result], trace: Trace, title: str) -> None:
    """Write the figure and the page, if they are wanted."""
    if options.figure:
        draw(results, trace.until, options.figure, title)
    if options.html:
        file = Path(options.html)
        _write_file(options.html, lambda: file.write_text(page(results, trace.until, title), encoding="utf-8"))


def _print_json(results: Sequence[Result], all_running: Sequence[Result], sourced: Sequence[Policy]) -> None:
    items = [msgspec.convert(result.to_dict(), PolicyResult) for result in results]
    for item, each in zip(items, sourced, strict=False):
        item.sources = list(each.sources)
    for item, result in zip(items, all_running, strict=False):
        whole = result.to_dict()
        item.all_running = {name: whole[name] for name in ("mean_waf", "ideal_waf", "efficiency")}
    print_json(items, indent=2)


def _judge_history(path: str, options: Options) -> None:
    def seconds(minutes: float | None, option: str, default: float) -> float:
        return default if minutes is None else 60.0 * number(minutes, option)

    costs = history.Costs(
        checkpoint=seconds(options.checkpoint_minutes, "--checkpoint-minutes", history.Costs.checkpoint),
        setup=seconds(options.setup_minutes, "--setup-minutes", history.Costs.setup),
    )
    left_out: list[str] = []
    found = history.judge(history.load(path, left_out), costs)
    if left_out:
        records = plural(len(left_out), "record")
        print_text(f"unicronctl: {records} left out as unreadable; the first: {left_out[0]}", err=True)
    if options.figure:
        draw_history(found, options.figure, f"{Path(path).name}: node-hours lost to failures")
    if options.json:
        print_json(found.to_dict(), indent=2)
    else:
        print_text("\n".join(_history_text(found, costs)), lines=True)


def _history_text(found: history.History, costs: history.Costs) -> Iterator[str]:
    """Yield the history as lines."""
    data = found.to_dict()
    hours = data["node_hours"] or 1.0
    causes = ", ".join(f"{count} {name}" for name, count in data["causes"].items())
    runs = f"{plural(found.runs, 'run')} of {plural(costs.least_nodes, 'node')} or more"
    yield f"{runs}: {data['node_hours']:.1f} node-hours"
    yield f"{plural(len(found.failures), 'failure')} after which the job went on{f' ({causes})' if causes else ''}"
    rows = (
        ("lost without it", "lost_node_hours"),
        ("  of it in queues", "waiting_node_hours"),
        ("lost with Unicron", "lost_node_hours_with_unicron"),
        ("  of it in queues", "waiting_node_hours_with_unicron"),
        ("saved", "saved_node_hours"),
        ("  of it in queues", "saved_waiting_node_hours"),
    )
    for what, name in rows:
        yield f"  {what:<18}{data[name]:>12.1f} node-hours {100 * data[name] / hours:>8.2f} %"
    yield "waiting delays the jobs, on all of their nodes; others may have used these meanwhile"
    yield (
        f"not counted: {found.early} that failed soon after their start (the script's own errors), {found.left} after "
        f"which the job never went on, {found.requeued} that were requeued (for no known reason); hangs do not show in "
        "a history"
    )
    yield (
        f"taken for granted: checkpoints every {costs.checkpoint / 60:g} min, {costs.setup / 60:g} min to start; with "
        f"Unicron {costs.transition:g} s for a transition; waits are the history's own"
    )
    yield (
        "not known: whether a user had to mend a bug first, which counts as a wait; whether runs of the same user, "
        "name and size go on with each other"
    )


def _trace(options: Options, nodes: int) -> Trace:
    """Return the trace of the file, or a generated one for so many nodes."""
    name, until = options.generate, options.until
    if name is None:
        assert options.trace is not None  # command() has checked it
        trace = load(options.trace, until)
        for note in trace.notes:
            print_text(note, err=True)
        return trace
    if name not in GENERATORS:
        raise PlanError(f"unknown generator {name!r}: use {', '.join(GENERATORS)}")
    length = FIXED_DAYS.get(name, DAYS)
    days = length if options.days is None else number(options.days, "--days", positive=True)
    if name in FIXED_DAYS and days != length:
        raise PlanError(f"{name} is {length:g} days long: leave --days out, or end it sooner with --until SECONDS")
    if days > 36500:
        raise PlanError("--days is more than 100 years")
    trace = GENERATORS[name](nodes, days, options.seed or 0)
    return trace if until is None else make(trace.events, until, trace.name)


def _write_file(path: str, write: Callable[[], object]) -> None:
    try:
        write()
    except OSError as error:
        raise PlanError(f"can't write {path}: {error.strerror or error}") from None


def _show(results: Sequence[Result], policies: Sequence[Policy]) -> None:
    parts = ("detection", "transition", "sub_healthy", "recompute")
    bound = next((result.mean_waf for result in results if result.policy == BOUND_NAME), 0.0)
    more = ("bound",) if bound else ()
    table = Listing("policy", "WAF", "efficiency", *parts, *more)
    for result in results:
        shares = [result.efficiency, *(result.lost[part] for part in parts)]
        shares += [result.mean_waf / bound] if bound else []
        table.add_row(result.policy, flops_text(result.mean_waf), *(f"{100 * share:.2f}%" for share in shares))
    if bound:
        table.add_note("bound: of what the bound reaches")
    show([table])
    print_text(f"ideal {flops_text(results[0].ideal_waf)}; shares are of the ideal, those under *bound* of the bound")
    for each in policies:
        print_text(f"{each.name}: {'; '.join(each.sources)}")
