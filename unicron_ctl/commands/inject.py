"""`unicronctl inject` and `unicronctl punish`: break training on purpose, once or at random.

JSON (`--json`) of inject, one line of it per fault of punish: fault, job, slot, node, seconds, at, dry_run.
"""

from __future__ import annotations

import json
import random
import time
from typing import Any

import click

from detector.inject import EXCEPTIONS, FAULTS, InjectError, parse
from unicron_ctl.errors import WRONG_USE, UserError
from unicron_ctl.query import ask

DEFAULT_FAULTS = "rank-kill,exception:python,exception:nccl,hang-stop,slow:1.5,corrupt-message"
_controller = click.option(
    "--controller",
    metavar="ADDRESS",
    help="tcp://HOST:PORT [default: UNICRON_CONTROLLER, state folder, configuration].",
)
_HELP = "\b\n" + "\n".join(f"{name:16} {line}" for name, (_, _, line) in FAULTS.items())
_CLASSES = f"CLASS: {', '.join(EXCEPTIONS)}."


def _checked(fault: str) -> str:
    try:
        parse(fault)
    except InjectError as error:
        raise UserError(str(error), WRONG_USE) from None
    return fault


def _line(done: dict[str, Any]) -> str:
    verb = "would inject" if done["dry_run"] else "injected"
    lasts = f" for {done['seconds']:g} s" if done["seconds"] else ""
    return f"{verb} {done['fault']} into job {done['job']}, slot {done['slot']} on {done['node']}{lasts}"


@click.command(name="inject", epilog=f"{_HELP}\n\n{_CLASSES}")
@click.argument("fault")
@click.option("--job", required=True, metavar="JOB", help="By id or name.")
@click.option("--slot", type=click.IntRange(0), metavar="S", help="This rank [default: any].")
@click.option("--node", metavar="N", help="A rank on this node.")
@click.option("--seconds", type=click.FloatRange(0, 86400), default=0.0, metavar="T", help="How long it lasts.")
@click.option("--dry-run", is_flag=True, help="Only say what would be broken.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_controller
def command(
    fault: str,
    job: str,
    slot: int | None,
    node: str | None,
    seconds: float,
    dry_run: bool,
    as_json: bool,
    controller: str | None,
) -> None:
    """Break one rank of a job; refused unless the controller's configuration allows it."""
    question = {"kind": "inject", "fault": _checked(fault), "job": job, "seconds": seconds, "dry_run": dry_run}
    if slot is not None:
        question["slot"] = slot
    if node is not None:
        question["node"] = node
    done = ask(question, controller)
    click.echo(json.dumps(done) if as_json else _line(done))


@click.command(name="punish")
@click.option("--mtbf", type=click.FloatRange(0.1), required=True, metavar="SECONDS", help="Mean time between faults.")
@click.option("--minutes", type=click.FloatRange(0, min_open=True), required=True, metavar="M", help="How long.")
@click.option("--faults", default=DEFAULT_FAULTS, show_default=True, metavar="LIST", help="Chosen from at random.")
@click.option("--job", metavar="JOB", help="Only this job, by id or name.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of times, faults, jobs and slots.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
@_controller
def punish(
    mtbf: float, minutes: float, faults: str, job: str | None, seed: int, as_json: bool, controller: str | None
) -> None:
    """Inject faults at random, at exponential intervals, until the time is up."""
    kinds = [_checked(fault.strip()) for fault in faults.split(",") if fault.strip()]
    if not kinds:
        raise UserError("--faults is empty: name at least one, see `unicronctl inject --help`", WRONG_USE)
    rng = random.Random(seed)
    until = time.monotonic() + 60.0 * minutes
    count = idle = 0
    while (wait := rng.expovariate(1.0 / mtbf)) < until - time.monotonic():
        time.sleep(wait)
        victims = _victims(controller, job)
        if not victims:
            idle += 1
            continue
        name, slot = rng.choice(victims)
        done = ask({"kind": "inject", "fault": rng.choice(kinds), "job": name, "slot": slot}, controller)
        count += 1
        click.echo(json.dumps(done) if as_json else _line(done))
    time.sleep(max(0.0, until - time.monotonic()))
    if not as_json:
        words = f", {idle} times nobody trained" if idle else ""
        click.echo(
            f"{count} faults in {minutes:g} minutes (seed {seed}){words}; `unicronctl status` shows what became of them"
        )


def _victims(controller: str | None, only: str | None) -> list[tuple[str, int]]:
    """(job, slot) of all members of jobs that train."""
    jobs = ask({"kind": "jobs"}, controller)
    return [
        (job["job"], slot)
        for job in jobs
        if not job["ended"] and only in (None, job["job"], job["name"])
        for slot in job["members"]
    ]
