"""`unicronctl simulate`: what a failure trace would have cost under several policies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click

from unicron.ctl.system.errors import WRONG_USE, UserError
from unicron.planner.problem.model import PlanError


@click.command(name="simulate")
@click.option(
    "--trace",
    "trace_path",
    type=click.Path(),
    metavar="FILE",
    help="CSV `seconds,event,node,cause`, or a public format, which is found out: churn `ms,add|remove,node`, CSV with "
    "node, start and stop, JSON of faults with start and end, or what `sacctmgr show event -P` prints.",
)
@click.option("--generate", metavar="NAME", help="Make a trace instead: trace-a, trace-b, unicron, llama3 or rsc1.")
@click.option(
    "--from-sacct",
    "history",
    type=click.Path(),
    metavar="FILE",
    help="What Unicron would have saved here: FILE is made by `sacct -a -D -X -P -S START -o "
    "JobID,User,JobName,State,ExitCode,Submit,Start,End,NNodes`.",
)
@click.option(
    "--checkpoint-minutes", type=click.FloatRange(0), metavar="MINUTES", help="Between checkpoints there [30]."
)
@click.option("--setup-minutes", type=click.FloatRange(0), metavar="MINUTES", help="Of a start there [14].")
@click.option("--days", type=float, help="Length of a generated trace [365; trace-a always 56, trace-b 7].")
@click.option("--seed", type=int, help="Seed of a generated trace [0].")
@click.option(
    "--scenario", type=click.Path(), metavar="SCENARIO.toml", help="Cluster and jobs; without it six jobs on 16 nodes."
)
@click.option("--nodes", type=click.IntRange(1), metavar="N", help="Nodes for those six jobs, instead of 16.")
@click.option(
    "--policy",
    "names",
    multiple=True,
    metavar="NAME",
    help="Can be repeated; default: unicron. clairvoyant: a bound that no plan can pass, for it knows the future.",
)
@click.option("--until", type=float, metavar="SECONDS", help="End of the replay; default: a day after the last event.")
@click.option("--save-trace", type=click.Path(), metavar="FILE", help="Write the trace as CSV.")
@click.option("--figure", type=click.Path(), metavar="FILE", help="Draw WAF over time and the losses (.png or .svg).")
@click.option("--html", "html_path", type=click.Path(), metavar="FILE", help="Write a self-contained page.")
@click.option("--sources", is_flag=True, help="Also say where each policy's figures come from.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    trace_path,
    generate,
    history,
    checkpoint_minutes,
    setup_minutes,
    days,
    seed,
    scenario,
    nodes,
    names,
    until,
    save_trace,
    figure,
    html_path,
    sources,
    as_json,
) -> None:
    """Replay a failure trace under several policies, or say what a site's failures have cost."""
    if [bool(trace_path), bool(generate), bool(history)].count(True) != 1:
        raise click.UsageError("give one of --trace FILE, --generate NAME and --from-sacct FILE")
    given = [option is not None for option in (days, seed, nodes, until)]
    if history and (names or scenario or html_path or save_trace or sources or any(given)):
        raise click.UsageError("--from-sacct goes with --figure, --json, --checkpoint-minutes and --setup-minutes only")
    if not history and (checkpoint_minutes is not None or setup_minutes is not None):
        raise click.UsageError("--checkpoint-minutes and --setup-minutes are for --from-sacct")
    if trace_path and (days is not None or seed is not None):
        raise click.UsageError("--days and --seed are for --generate: leave them out")
    if scenario and nodes:
        raise click.UsageError("--nodes is for the six jobs: leave --scenario or --nodes out")
    try:
        if history:
            _judge(history, checkpoint_minutes, setup_minutes, figure, as_json)
            return
        _run(
            trace_path,
            generate,
            days,
            seed,
            scenario,
            nodes,
            names or ("unicron",),
            until,
            save_trace,
            figure,
            html_path,
            sources,
            as_json,
        )
    except PlanError as error:
        raise UserError(str(error), WRONG_USE) from None


def _run(
    trace_path, generate, days, seed, scenario, nodes, names, until, save_trace, figure, html_path, sources, as_json
) -> None:
    from unicron.planner.problem.scenario import load as load_scenario
    from unicron.planner.simulate import simulate
    from unicron.planner.simulate.cases import CASE, NODES, case
    from unicron.planner.simulate.policies import policy
    from unicron.planner.simulate.trace import write

    policies = [policy(name) for name in names]
    cluster = load_scenario(scenario) if scenario else case(CASE, nodes or NODES)
    trace = _generated(generate, days, seed, cluster.nodes, until) if generate else _loaded(trace_path, until)
    if save_trace:
        _written(save_trace, lambda: write(trace, save_trace))
    results = [simulate(cluster, trace, each) for each in policies]
    title = f"{trace.name}: {cluster.nodes} nodes, {len(cluster.jobs)} jobs"
    if figure:
        from unicron.planner.simulate.figure import draw

        draw(results, trace.until, figure, title)
    if html_path:
        from unicron.planner.simulate.figure import page

        _written(html_path, lambda: Path(html_path).write_text(page(results, trace.until, title), encoding="utf-8"))
    if as_json:
        click.echo(
            json.dumps(
                [
                    result.to_dict() | ({"sources": list(each.sources)} if sources else {})
                    for result, each in zip(results, policies, strict=True)
                ],
                indent=2,
            )
        )
    else:
        _show(results, policies if sources else ())


def _judge(path, checkpoint_minutes, setup_minutes, figure, as_json) -> None:
    from unicron.planner.problem.model import number
    from unicron.planner.simulate import history
    from unicron.planner.simulate.figure import draw_history

    def seconds(minutes: float | None, option: str, default: float) -> float:
        return default if minutes is None else 60.0 * number(minutes, option)

    costs = history.Costs(
        checkpoint=seconds(checkpoint_minutes, "--checkpoint-minutes", history.Costs.checkpoint),
        setup=seconds(setup_minutes, "--setup-minutes", history.Costs.setup),
    )
    found = history.judge(history.load(path), costs)
    if figure:
        draw_history(found, figure, f"{Path(path).name}: node-hours lost to failures")
    click.echo(json.dumps(found.to_dict(), indent=2) if as_json else "\n".join(_told(found, costs)))


def _told(found, costs) -> Iterator[str]:
    """The history in words."""
    told = found.to_dict()
    hours = told["node_hours"] or 1.0
    causes = ", ".join(f"{count} {name}" for name, count in told["causes"].items())
    yield f"{found.runs} runs of {costs.least_nodes} nodes or more: {told['node_hours']:.1f} node-hours"
    yield f"{len(found.failures)} failures after which the job went on{f' ({causes})' if causes else ''}"
    rows = (
        ("lost as it was", "lost_node_hours"),
        ("  of it waiting", "waiting_node_hours"),
        ("lost with Unicron", "lost_node_hours_with_unicron"),
        ("  of it waiting", "waiting_node_hours_with_unicron"),
        ("saved", "saved_node_hours"),
        ("  of it waiting", "saved_waiting_node_hours"),
    )
    for what, name in rows:
        yield f"  {what:<18}{told[name]:>12.1f} node-hours {100 * told[name] / hours:>8.2f} %"
    yield "waiting delays the jobs, on all of their nodes; others may have used these meanwhile"
    yield (
        f"not counted: {found.early} that failed soon after their start (the script's own errors), {found.left} after "
        f"which nobody went on, {found.requeued} that were requeued (why is not told); hangs are not in such a history"
    )
    yield (
        f"taken for granted: checkpoints every {costs.checkpoint / 60:g} min, {costs.setup / 60:g} min to start; with "
        f"Unicron {costs.transition:g} s for a transition; waits are the history's own"
    )
    yield (
        "not known: whether a user had to mend a bug first, which counts as a wait; whether runs of the same user, "
        "name and size go on with each other"
    )


def _loaded(path: str, until: float | None):
    from unicron.planner.simulate.trace import load

    return load(path, until)


def _generated(name: str, days: float | None, seed: int | None, nodes: int, until: float | None):
    from unicron.planner.problem.model import number
    from unicron.planner.simulate.generate import DAYS, FIXED_DAYS, GENERATORS
    from unicron.planner.simulate.trace import make

    if name not in GENERATORS:
        raise PlanError(f"unknown generator {name!r}: use {', '.join(GENERATORS)}")
    length = FIXED_DAYS.get(name, DAYS)
    days = length if days is None else number(days, "--days", positive=True)
    if name in FIXED_DAYS and days != length:
        raise PlanError(f"{name} is {length:g} days long: leave --days out, or end it sooner with --until SECONDS")
    if days > 36500:
        raise PlanError("--days is more than 100 years")
    trace = GENERATORS[name](nodes, days, seed or 0)
    return trace if until is None else make(trace.events, until, trace.name)


def _written(path: str, act) -> None:
    try:
        act()
    except OSError as error:
        raise PlanError(f"can't write {path}: {error.strerror or error}") from None


def _show(results, policies) -> None:
    from unicron.planner.simulate.policies import BOUND_NAME
    from unicron.planner.solver.plan import flops_text

    parts = ("detection", "transition", "sub_healthy", "recompute")
    bound = next((result.mean_waf for result in results if result.policy == BOUND_NAME), 0.0)
    more = f"{'of the bound':>14}" if bound else ""
    click.echo(f"{'policy':<14}{'mean WAF':>14}{'efficiency':>12}" + "".join(f"{part:>13}" for part in parts) + more)
    for result in results:
        shares = "".join(f"{100 * result.lost[part]:>11.2f} %" for part in parts)
        more = f"{100 * result.mean_waf / bound:>12.2f} %" if bound else ""
        click.echo(
            f"{result.policy:<14}{flops_text(result.mean_waf):>14}{100 * result.efficiency:>10.2f} %{shares}{more}"
        )
    click.echo(f"ideal {flops_text(results[0].ideal_waf)}; all shares are of the ideal")
    for each in policies:
        click.echo(f"{each.name}: {'; '.join(each.sources)}")
