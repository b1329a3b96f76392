"""`unicronctl inject` and `unicronctl punish`: break training on purpose, once or at random."""

from __future__ import annotations

import random
import time
from pathlib import Path

import click
from msgspec.structs import asdict, replace

from unicron_ctl.lab.cluster import LocalCluster
from unicron_ctl.lab.commands.cluster import STATE_DIR
from unicron_ctl.shared.commands.options import Number, controller_option, print_json
from unicron_ctl.shared.protocol.answer_schema import Injection
from unicron_ctl.shared.protocol.client import as_struct, ask_controller
from unicron_ctl.shared.protocol.questions import InjectOrder
from unicron_ctl.shared.system.errors import WRONG_USE, UserError
from unicron_ctl.shared.system.printable import print_text
from unicron_detector.chaos.inject import EXCEPTIONS, FAULTS, InjectError, parse
from unicron_detector.words import plural

DEFAULT_FAULTS = (
    "rank-kill,exception:python,exception:nccl,hang-stop,slow:1.5,full-disk,corrupt-message,corrupt-checkpoint"
)
REFUSABLE = ("oom-kill",)  # faults that an agent may refuse
REFUSED_SECONDS = 1.0  # in which the agent refuses
LOST_NODE = "lost-node"
_HELP = "\b\n" + "\n".join(f"{name:16} {line}" for name, (_, _, line) in FAULTS.items())
_CLASSES = f"CLASS: {', '.join(EXCEPTIONS)}."


def _check_fault(fault: str) -> str:
    try:
        parse(fault)
    except InjectError as error:
        raise UserError(str(error), WRONG_USE) from None
    return fault


def _print(done: Injection, as_json: bool) -> None:
    if as_json:
        print_json(done)
        return
    verb = "would inject" if done.dry_run else "injected"
    lasts = f" for {done.seconds:g} s" if done.seconds else ""
    print_text(f"{verb} {done.fault} into job {done.job}, slot {done.slot} on {done.node}{lasts}")


def _order(order: InjectOrder, controller: str | None) -> Injection:
    """Ask the controller to inject a fault."""
    return as_struct(ask_controller({"kind": "inject", **asdict(order)}, controller), Injection)


@click.command(name="inject", epilog=f"{_HELP}\n\n{_CLASSES}")
@click.argument("fault")
@click.option("--job", metavar="JOB", help="By id or name [default: the only one, or that on --node].")
@click.option("--slot", type=click.IntRange(0), metavar="S", help="This rank [default: any].")
@click.option("--node", metavar="N", help="A rank on this node; with lost-node the node.")
@click.option("--seconds", type=Number(0, 86400), default=0.0, metavar="T", help="How long it lasts.")
@click.option("--dry-run", is_flag=True, help="Only say what would be broken.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@STATE_DIR
@controller_option()
def command(
    fault: str,
    job: str | None,
    slot: int | None,
    node: str | None,
    seconds: float,
    dry_run: bool,
    as_json: bool,
    state_dir: Path,
    controller: str | None,
) -> None:
    """Break one rank of a job; refused unless the controller's configuration allows it."""
    job = job if job is not None else _only_job(controller, node)
    order = InjectOrder(job=job, fault=_check_fault(fault), slot=slot, node=node, seconds=seconds, dry_run=dry_run)
    done = _order(replace(order, dry_run=True) if fault == LOST_NODE else order, controller)
    if fault == LOST_NODE and not dry_run:
        done = _lose_node(done, controller, state_dir)
    if not dry_run and fault in REFUSABLE:
        _raise_refusal(done, controller)
    _print(done, as_json)


def _only_job(controller: str | None, node: str | None) -> str:
    """Return the only job, or the only one on the node. Raises UserError unless there is exactly one."""
    found = [
        job["job"]
        for job in ask_controller({"kind": "jobs"}, controller)
        if not job["ended"] and (node is None or any(e["node"] == node and not e["gone"] for e in job["elements"]))
    ]
    if len(found) != 1:
        where = f" on {node}" if node else ""
        raise UserError(f"{len(found) or 'no'} jobs run{where}: name one with --job, see `unicronctl jobs`", WRONG_USE)
    return str(found[0])


def _lose_node(done: Injection, controller: str | None, state_dir: Path) -> Injection:
    """Cut the node's power, on the local cluster. The controller logs the order first."""
    node = done.node
    try:
        cluster = LocalCluster.load(state_dir)
        local = node in cluster.spec.node_names
    except UserError:
        local = False
    if not local:
        raise UserError(
            f"{node} is not a node of a local cluster in {state_dir}: cut its power yourself, for example with "
            f"`ipmitool -H {node}-bmc chassis power off` or `ssh {node} 'echo b > /proc/sysrq-trigger'`"
        )
    order = InjectOrder(job=done.job, fault=done.fault, slot=done.slot, node=node, seconds=done.seconds)
    logged = _order(order, controller)
    cluster.power_off(node)
    return logged


def _raise_refusal(done: Injection, controller: str | None) -> None:
    """Raise UserError if the agent refuses the order."""
    deadline = time.monotonic() + REFUSED_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.1)
        for event in ask_controller({"kind": "events", "after": done.event}, controller):
            if event["kind"] == "inject_refused" and event["slot"] == done.slot:
                raise UserError(event["reason"])


@click.command(name="punish")
@click.option("--mtbf", type=Number(0.1), required=True, metavar="SECONDS", help="Mean time between faults.")
@click.option("--minutes", type=Number(0, min_open=True), required=True, metavar="M", help="How long.")
@click.option("--faults", default=DEFAULT_FAULTS, show_default=True, metavar="LIST", help="Chosen from at random.")
@click.option("--job", metavar="JOB", help="Only this job, by id or name.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the times, faults, jobs and slots.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@STATE_DIR
@controller_option()
def punish(
    mtbf: float,
    minutes: float,
    faults: str,
    job: str | None,
    seed: int,
    as_json: bool,
    state_dir: Path,
    controller: str | None,
) -> None:
    """Inject faults at random, at exponential intervals, until the time is up. Lost nodes are powered on again."""
    kinds = [_check_fault(fault.strip()) for fault in faults.split(",") if fault.strip()]
    if not kinds:
        raise UserError("--faults is empty: name at least one, see `unicronctl inject --help`", WRONG_USE)
    rng = random.Random(seed)
    until = time.monotonic() + 60.0 * minutes
    off: dict[str, float] = {}  # node -> the time at which its power returns
    count = idle = refused = 0
    try:
        while (wait := rng.expovariate(1.0 / mtbf)) < until - time.monotonic():
            time.sleep(wait)
            _restore(off, state_dir, time.monotonic())
            victims = _victims(controller, job)
            if not victims:
                idle += 1
                continue
            name, slot = rng.choice(victims)
            order = InjectOrder(job=name, fault=rng.choice(kinds), slot=slot)
            if order.fault == "corrupt-checkpoint":
                order.slot = None  # the rank that sends the state next
            try:
                if order.fault == LOST_NODE:
                    done = _lose_node(_order(replace(order, dry_run=True), controller), controller, state_dir)
                    off[done.node] = time.monotonic() + done.seconds
                else:
                    done = _order(order, controller)
            except UserError as error:  # the rank may have died meanwhile
                refused += 1
                print_text(f"not injected: {error}", err=True)
                continue
            count += 1
            _print(done, as_json)
        time.sleep(max(0.0, until - time.monotonic()))
    finally:
        _restore(off, state_dir, float("inf"))
    if not as_json:
        rest = f", {plural(idle, 'time')} nobody trained" if idle else ""
        rest += f", {refused} not injected" if refused else ""
        print_text(
            f"{plural(count, 'fault')} in {minutes:g} minutes (seed {seed}){rest}; "
            "`unicronctl status` shows what became of them"
        )


def _restore(off: dict[str, float], state_dir: Path, now: float) -> None:
    """Power on the nodes that have been off for long enough."""
    for node in [node for node, at in off.items() if at <= now]:
        del off[node]
        LocalCluster.load(state_dir).power_on(node)


def _victims(controller: str | None, only: str | None) -> list[tuple[str, int]]:
    """Return (job, slot) for all members of jobs that train."""
    jobs = ask_controller({"kind": "jobs"}, controller)
    return [
        (job["job"], slot)
        for job in jobs
        if not job["ended"] and only in (None, job["job"], job["name"])
        for slot in job["members"]
    ]
