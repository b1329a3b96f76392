"""The demo's result: the cost of each failure, and a comparison of each job with an undisturbed run."""

from __future__ import annotations

import json
import math
import runpy
from pathlib import Path

import msgspec

from unicron_ctl.lab.demo.stage import Stage
from unicron_ctl.lab.demo.story import Injury, Story
from unicron_ctl.shared.commands.status_tables import Column, listing, number
from unicron_ctl.shared.settings.places import TEMPLATES
from unicron_ctl.shared.system.columns import Listing
from unicron_ctl.shared.system.errors import UserError

LOSS_TOLERANCE = 1e-3  # relative: fp32 sums in another order differ by 1e-7, which grows over Adam's steps
GRADIENT_TOLERANCE = 1e-6  # absolute: only the order of fp32 sums differs


class DemoFailure(msgspec.Struct, kw_only=True):
    """A failure that the demo caused, and what it cost."""

    kind: str
    job: str
    what: str
    severity: int
    cause: str
    detected_by: str
    injected_at: float
    detected_at: float
    resumed_at: float | None
    restored_at: float | None
    iteration: int | None
    reused_micro_batches: int
    recomputed_micro_batches: int
    redistributed_micro_batches: int
    actions: list[str]
    reason: str
    neighbours_kept: int


class DemoJoin(msgspec.Struct, kw_only=True):
    """A repaired node that came back."""

    job: str
    at: float
    used_at: float | None
    """The time at which the job trained on it."""


class DemoJobResult(msgspec.Struct, kw_only=True):
    """A job compared with its undisturbed run."""

    name: str
    iterations: int
    loss: float
    reference_loss: float
    max_loss_difference: float
    max_gradient_difference: float
    gradient_differences: dict[str, float]
    """For the first iteration of each generation: the difference between the optimizer's gradient and one computed
    without failures from the same parameters (`verify.py`)."""
    ledger_violations: int


class DemoResult(msgspec.Struct, kw_only=True):
    """The JSON of `unicronctl demo`."""

    failures: list[DemoFailure]
    joins: list[DemoJoin]
    jobs: list[DemoJobResult]


def collect(story: Story) -> DemoResult:
    """Read the result from the finished runs."""
    joins = [injury for injury in story.injuries if injury.kind == "join"]
    return DemoResult(
        failures=[_failure(story, injury) for injury in story.injuries if injury.kind != "join"],
        joins=[DemoJoin(job=join.job, at=join.injected_at, used_at=join.healed_at) for join in joins],
        jobs=[_job(story.stage, job.name) for job in story.stage.jobs],
    )


def _failure(story: Story, injury: Injury) -> DemoFailure:
    record = story.record(injury)
    if record is None:
        raise UserError(f"the controller has no record of: {injury.what}")
    observed = {
        "kind": injury.kind,
        "job": injury.job,
        "what": injury.what,
        "injected_at": injury.injected_at,
        "resumed_at": record.stepped_at or record.resumed_at,
        "restored_at": injury.healed_at,
        "neighbours_kept": len(injury.neighbours),
    }
    return msgspec.convert(msgspec.structs.asdict(record) | observed, DemoFailure)


def _job(stage: Stage, name: str) -> DemoJobResult:
    read_metrics = runpy.run_path(str(TEMPLATES / "training_metrics.py"))["read_metrics"]
    losses, expected = (
        {record["iteration"]: record["loss"] for record in records}
        for records in (
            read_metrics(stage.metrics(name), math.inf),  # losses before the job went back are wrong
            read_metrics(stage.folder / f"{name}-reference" / "metrics"),
        )
    )
    reached = stage.known_job(name).iteration  # an iteration that was given up, and not made again, does not count
    losses = {iteration: loss for iteration, loss in losses.items() if iteration <= reached}
    last = max(losses)
    if missing := set(range(last + 1)) - (losses.keys() & expected.keys()):
        raise UserError(
            f"{name}: no loss of iterations {sorted(missing)[:10]} in one of the two runs: see {stage.folder}"
        )
    differences = [abs(losses[i] - expected[i]) / abs(expected[i]) for i in losses]
    gradients = stage.verify_gradients(name)
    return DemoJobResult(
        name=name,
        iterations=len(losses),
        loss=losses[last],
        reference_loss=expected[last],
        max_loss_difference=max(differences),
        max_gradient_difference=max(gradients.values(), default=0.0),
        gradient_differences=gradients,
        ledger_violations=stage.known_job(name).ledger_violations or 0,
    )


def problems(result: DemoResult) -> list[str]:
    """Return a line for each number that is out of tolerance."""
    found = []
    for job in result.jobs:
        for what, difference, most in (
            ("losses differ from the reference", job.max_loss_difference, LOSS_TOLERANCE),
            ("a gradient differs", job.max_gradient_difference, GRADIENT_TOLERANCE),
        ):
            if difference > most:
                found.append(f"{job.name}: {what} by {difference:.1e}, more than {most:.0e}")
        if job.ledger_violations:
            found.append(f"{job.name}: {job.ledger_violations} iterations did not count every micro-batch exactly once")
    return found


FAILURE_COLUMNS = (
    Column("job", lambda failure: failure.job),
    Column("what", lambda failure: failure.kind),
    Column("sev", lambda failure: str(failure.severity)),
    Column("cause", lambda failure: failure.cause),
    Column("by", lambda failure: failure.detected_by.replace(" ", "-"), leaves=1),
    Column("found", lambda failure: _after(failure.detected_at, failure.injected_at), leaves=2),
    Column("again", lambda failure: _after(failure.resumed_at, failure.injected_at)),
    Column("kept", lambda failure: str(failure.reused_micro_batches)),
    Column("taken", lambda failure: str(failure.redistributed_micro_batches), leaves=3),
    Column("twice", lambda failure: str(failure.recomputed_micro_batches)),
    Column("whole", lambda failure: _after(failure.restored_at, failure.injected_at)),
)
LOSS_COLUMNS = (
    Column("job", lambda job: job.name),
    Column("iterations", lambda job: str(job.iterations)),
    Column("loss", lambda job: f"{job.loss:.6f}"),
    Column("reference", lambda job: f"{job.reference_loss:.6f}"),
    Column("loss diff", lambda job: f"{job.max_loss_difference:.1e}"),
    Column("gradient diff", lambda job: f"{job.max_gradient_difference:.1e}"),
)


def tables(result: DemoResult) -> list[Listing]:
    """Return the two tables that the demo prints at its end."""
    failures = listing(FAILURE_COLUMNS, result.failures)
    for join in result.joins:
        failures.add_row(join.job, "join", *["-"] * 8, _after(join.used_at, join.at))
    failures.add_note("rank: kill -9 of one; node: power-off; join: a repaired node comes back and goes to this job")
    failures.add_note("flip: a bit of a weight in one rank's memory, found by comparing; all go back to a sound state")
    failures.add_note("found, again, whole: seconds until the failure was detected, the next step, full strength")
    failures.add_note("kept, taken: micro-batches in survivors' gradients, and taken over from the lost rank")
    failures.add_note("twice: micro-batches taken over although the lost rank had finished them")
    losses = listing(LOSS_COLUMNS, result.jobs)
    losses.add_note("reference: an undisturbed run with the same seed; diff: the largest difference of all iterations,")
    losses.add_note("relative for losses, absolute for gradients")
    return [failures, losses]


def _after(when: float | None, began: float) -> str:
    return number(None if when is None else when - began, 2)


def write_json(result: DemoResult, path: Path) -> None:
    """Write the result as JSON. Raises UserError if the file cannot be written."""
    try:
        path.write_text(json.dumps(msgspec.to_builtins(result), indent=2) + "\n")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; choose another place with --json") from None
