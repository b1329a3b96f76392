"""The layouts in which a job can run: how fast each is, the cost of a change, and when the job changes to the plan's.

For another layout all ranks start again from a checkpoint; the planner charges that (docs/design/planning.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from unicron_ctl.controller.model.job_state import JobState, Phase
from unicron_ctl.controller.model.job_view import JobView
from unicron_ctl.controller.model.view import Outcome, View
from unicron_ctl.controller.plan.planning import NOMINAL_RATE, JobInput
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol.structs import Settings
from unicron_detector.words import plural
from unicron_planner.problem import layouts as planner
from unicron_planner.problem.gpus import gpu_memory, gpu_peak
from unicron_planner.problem.layouts import JobFacts, Split
from unicron_planner.problem.megatron_costs import Gpt, Hardware
from unicron_transition.generations.layout import parse_layout

NEVER_SAVES = -1  # `structs.RankStatus.saved` of a script without checkpoints
WHOLE = (Phase.RUNNING, Phase.OFFERING, Phase.ENTERING)  # phases in which ranks that stop can save the whole state
Table = Mapping[int, float]  # FLOP/s by number of nodes


# ------------------------------------------------------------ the planner's input
def with_layouts(view: View, job: JobState, found: JobInput, gres: str, peak: float) -> JobInput:
    """Adds the job's throughput in each of its layouts, if it has stated any. gres: of a node that it may be given;
    peak: the most FLOP/s of a node."""
    if not job.layout:
        return found
    live, every = view.job(job), tables(view, job.settings, job.settings.max_nodes, gres, job)
    capped = {
        name: {count: min(rate, count * peak) for count, rate in table.items() if count <= found.trains}
        for name, table in possible(live, every).items()
    }
    capped.setdefault(job.layout, dict.fromkeys(range(1, found.trains + 1), 0.0))
    least = min(planner.smallest(split, live.per_node) for split in splits(job.settings) if split.name in capped)
    return replace(
        found,
        unit=least,
        layouts=capped,
        layout=job.layout,
        restart_seconds=_restart_seconds(view, live, found.nodes, every.get(job.layout, {})),
    )


def _restart_seconds(view: View, job: JobView, nodes: int, now: Table) -> float:
    """D_transition of a start in another layout. The planner charges it at the rate of `nodes` nodes; if the job has
    just lost some, its rate before was higher, which this corrects."""
    seconds = view.config.transition_seconds + lost_seconds(view, job)
    before, after = now.get(view.state.assignment.get(job.state.job, 0), 0.0), now.get(nodes, 0.0)
    return seconds * before / after if before > after > 0 else seconds


def tables(
    view: View, settings: Settings, most: int, gres: str, job: JobState | None = None
) -> dict[str, dict[int, float]]:
    """T by layout and number of nodes, 1 to `most`, of the layouts that fit. job: None before it has begun."""
    seen = _measurements(view, settings, job)
    rates = [rate / nodes for one in view.state.jobs.values() for nodes, rate in one.measured.items() if not one.over]
    usual = _round(sum(rates) / len(rates)) if rates else NOMINAL_RATE
    as_key = tuple((name, tuple(sorted(table.items()))) for name, table in sorted(seen.items()))
    return _rates(tuple(splits(settings)), _planner_facts(settings, gres, usual), as_key, most)


@lru_cache(maxsize=256)
def _rates(
    ways: tuple[Split, ...], known: JobFacts, seen: tuple[tuple[str, tuple[tuple[int, float], ...]], ...], most: int
) -> dict[str, dict[int, float]]:
    """The planner's rates, cached: each listing asks for them, and they are costly for a large job."""
    return planner.rates(ways, known, {name: dict(table) for name, table in seen}, range(1, most + 1))


def _round(rate: float) -> float:
    """Rounds to 0.1 %: measurements change with every iteration, and smaller differences must not change plans."""
    return float(f"{rate:.4g}")


def problem(settings: Settings) -> str:
    """Why a job with these layouts and this model cannot be planned for; empty if it can. Agents check their own
    settings; this is for hostile messages."""
    try:
        _planner_facts(settings, "", NOMINAL_RATE)
        found = [split.name for split in splits(settings)]
    except KeyError as error:
        return f"the model's {error.args[0]} is missing"
    except ValueError as error:
        return str(error)
    return "" if found == settings.layouts else f"layouts are written as {', '.join(found)}"


def splits(settings: Settings) -> list[Split]:
    """The job's layouts as the planner knows them."""
    found = [parse_layout(name) for name in settings.layouts]
    return [Split(one.text, one.layout.tensor, one.layout.pipeline, one.virtual, one.layout.shard) for one in found]


def _planner_facts(settings: Settings, gres: str, per_node: float) -> JobFacts:
    gpus, sizes = max(1, settings.ranks_per_node), settings.model
    hardware = Hardware(gpus, gpu_peak(gres) or Hardware.peak, gpu_memory(gres))
    if not sizes:
        return JobFacts(gpus, per_node, None, hardware)
    names = ("layers", "hidden", "heads", "seq-length", "vocab", "global-batch")
    if (batch := sizes.get("micro-batch", 1)) < 1:
        raise ValueError(f"the model's micro-batch must be a whole number of 1 or more, not {batch}")
    model = Gpt(*(sizes[name] for name in names))
    return JobFacts(gpus, per_node, model, hardware, sizes.get("micro-batch", 1), bool(sizes.get("recompute")))


def _measurements(view: View, settings: Settings, job: JobState | None) -> dict[str, dict[int, float]]:
    """FLOP/s by layout and number of nodes, of the job itself and of earlier runs of the same name."""
    found: dict[str, dict[int, float]] = {}
    everyone = view.state.jobs.values() if view.config.throughput == "measured" else ()
    others = [one for one in everyone if one is not job]
    for one in [*others, *([job] if job is not None else [])]:
        if (one.settings.name, one.settings.user) == (settings.name, settings.user):
            for name, table in one.by_layout.items():
                found.setdefault(name, {}).update((n, _round(rate)) for n, rate in table.items() if rate > 0)
    return found


def possible(job: JobView, found: Mapping[str, Table]) -> dict[str, Table]:
    """The layouts in which the job can go on. A script without checkpoints would start over, so it keeps its layout."""
    if job.state.iteration < 0 or newest_saved(job) > NEVER_SAVES:
        return dict(found)
    return {name: table for name, table in found.items() if name == job.state.layout}


def newest_saved(job: JobView) -> int:
    """The next iteration of the newest checkpoint that any rank reports; -1 if the script makes none."""
    return max((status.saved for _, _, status in job.all_ranks()), default=NEVER_SAVES)


def lost_seconds(view: View, job: JobView) -> float:
    """The work to repeat after a start in another layout: an iteration if the ranks can save, else all since the newest
    checkpoint."""
    state = job.state
    times = [seconds for _, seconds, _ in state.recent]
    usual = sum(times) / len(times) if times else 0.0
    if state.iteration < 0 or state.phase in WHOLE:
        return usual
    return usual * max(1, state.iteration + 1 - max(0, newest_saved(job)))


# ------------------------------------------------------------ the layout of a job
def first(view: View, settings: Settings, node: str) -> tuple[str, str]:
    """(layout, reason) with which a job begins: the best on all the nodes that it may have. node: of its first
    agent."""
    info, most = view.slurm.node(node), settings.max_nodes
    found = tables(view, settings, most, info.gres if info is not None else "")
    if not found:
        name = settings.layouts[0]
        return name, f"{name}, the first that it states: by the model, none fits into the GPUs' memory"
    best = max(found, key=lambda name: found[name][most])
    others = f" of {', '.join(settings.layouts)}" if len(settings.layouts) > 1 else ""
    return best, f"{best}, the best{others} on {plural(most, 'node')}"


def wishes(view: View, jobs: Sequence[JobState]) -> Outcome:
    """Records which jobs will change to another layout, once the nodes of the plan are there."""
    out, report = Outcome(), view.state.plan_report
    for job in jobs:
        planned = view.state.layouts.get(job.job, "")
        if not job.layout or not planned or planned == (job.relayout or job.layout):
            continue
        if planned == job.layout:
            out.record(job, records.LayoutWanted(layout=planned, reason=f"the plan keeps {planned}"))
        elif _there(view, job):
            why = report.reasons.get(job.job, "") if report is not None else ""
            out.record(job, records.LayoutWanted(layout=planned, reason=why or f"the plan is for {planned}"))
    return out


def _there(view: View, job: JobState) -> bool:
    """Whether the job does not train, or as many nodes have agents as the plan gives."""
    here = [agent for agent in view.job(job).alive() if job.allotted is None or agent.element in job.allotted]
    return job.phase is Phase.FORMING or len(here) >= view.state.assignment.get(job.job, 0)
