"""The demo's result: the cost of each failure, and each job's losses compared with an undisturbed run's. All numbers
are read from the runs."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import msgspec

from unicron_ctl.lab.demo.stage import Stage
from unicron_ctl.lab.demo.story import Injury, Story
from unicron_ctl.shared.settings.places import TEMPLATES
from unicron_ctl.shared.system.columns import Listing
from unicron_ctl.shared.system.errors import UserError

LOSS_TOLERANCE = 1e-3  # relative: fp32 sums in another order differ by 1e-7, which adds up over Adam's steps
GRADIENT_TOLERANCE = 1e-6  # absolute, fp32: only the order of sums differs


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
    """A repaired node that came back at `at` and trained at `used_at`."""

    job: str
    at: float
    used_at: float | None


class DemoJobResult(msgspec.Struct, kw_only=True):
    """A job compared with its undisturbed run.

    gradient_differences: by iteration, for the first one of each generation. Each is the difference between the
    gradient that the optimizer got and one computed undisturbed from the same parameters (`verify.py`).
    """

    name: str
    iterations: int
    loss: float
    reference_loss: float
    max_loss_difference: float
    max_gradient_difference: float
    gradient_differences: dict[str, float]
    ledger_violations: int


class DemoResult(msgspec.Struct, kw_only=True):
    """The JSON of `unicronctl demo`."""

    failures: list[DemoFailure]
    joins: list[DemoJoin]
    jobs: list[DemoJobResult]


def collect(story: Story) -> DemoResult:
    """Reads the result from the finished runs."""
    return DemoResult(
        failures=[_failure(story, injury) for injury in story.injuries if injury.kind != "join"],
        joins=[
            DemoJoin(job=injury.job, at=injury.injected_at, used_at=injury.healed_at)
            for injury in story.injuries
            if injury.kind == "join"
        ],
        jobs=[_job(story.stage, job.name) for job in story.stage.jobs],
    )


def _failure(story: Story, injury: Injury) -> DemoFailure:
    record = story.record(injury)
    if record is None:
        raise UserError(f"the controller has no record of: {injury.what}")
    seen = {
        "kind": injury.kind,
        "job": injury.job,
        "what": injury.what,
        "injected_at": injury.injected_at,
        "resumed_at": record.stepped_at or record.resumed_at,
        "restored_at": injury.healed_at,
        "neighbours_kept": len(injury.neighbours),
    }
    return msgspec.convert(msgspec.structs.asdict(record) | seen, DemoFailure)


def _job(stage: Stage, name: str) -> DemoJobResult:
    read_metrics = runpy.run_path(str(TEMPLATES / "training_metrics.py"))["read_metrics"]
    records, reference = (
        read_metrics(stage.metrics(name), LOSS_TOLERANCE),
        read_metrics(stage.folder / f"{name}-reference" / "metrics"),
    )
    by_iteration = {record["iteration"]: record["loss"] for record in reference}
    losses = {record["iteration"]: record["loss"] for record in records}
    last = max(losses)
    missing = set(range(last + 1)) - (losses.keys() & by_iteration.keys())
    if missing:
        raise UserError(
            f"{name}: no loss of iterations {sorted(missing)[:10]} in one of the two runs: see {stage.folder}"
        )
    differences = [abs(losses[i] - by_iteration[i]) / abs(by_iteration[i]) for i in losses]
    gradients = stage.verify_gradients(name)
    return DemoJobResult(
        name=name,
        iterations=len(losses),
        loss=losses[last],
        reference_loss=by_iteration[last],
        max_loss_difference=max(differences),
        max_gradient_difference=max(gradients.values(), default=0.0),
        gradient_differences=gradients,
        ledger_violations=stage.known_job(name).ledger_violations or 0,
    )


def problems(result: DemoResult) -> list[str]:
    """Return a line for each number that is out of tolerance; none when all is well."""
    found = []
    for job in result.jobs:
        if job.max_loss_difference > LOSS_TOLERANCE:
            found.append(
                f"{job.name}: losses differ from the reference by {job.max_loss_difference:.1e}, more "
                f"than {LOSS_TOLERANCE:.0e}"
            )
        if job.max_gradient_difference > GRADIENT_TOLERANCE:
            found.append(
                f"{job.name}: a gradient differs by {job.max_gradient_difference:.1e}, more than "
                f"{GRADIENT_TOLERANCE:.0e}"
            )
        if job.ledger_violations:
            found.append(f"{job.name}: {job.ledger_violations} iterations did not count every micro-batch exactly once")
    return found


def tables(result: DemoResult) -> list[Listing]:
    """Returns the two tables that the demo prints at its end."""
    failures = Listing(
        "job",
        "what",
        "sev",
        "cause",
        "by",
        "found",
        "again",
        "kept",
        "taken",
        "twice",
        "whole",
        optional=["by", "found", "taken"],
    )
    for f in result.failures:
        began = f.injected_at
        failures.add_row(
            f.job,
            f.kind,
            str(f.severity),
            f.cause,
            f.detected_by.replace(" ", "-"),
            f"{f.detected_at - began:.2f}",
            _after(f.resumed_at, began),
            str(f.reused_micro_batches),
            str(f.redistributed_micro_batches),
            str(f.recomputed_micro_batches),
            _after(f.restored_at, began),
        )
    for join in result.joins:
        failures.add_row(join.job, "join", *["-"] * 8, _after(join.used_at, join.at))
    failures.add_note("rank: kill -9 of one; node: power-off; join: a repaired node comes back and goes to this job")
    failures.add_note("found, again, whole: seconds until the failure was detected, the next step, full strength")
    failures.add_note("kept, taken: micro-batches in survivors' gradients, and taken over from the lost rank")
    failures.add_note("twice: micro-batches taken over although the lost rank had finished them")
    losses = Listing("job", "iterations", "loss", "reference", "loss diff", "gradient diff")
    for job in result.jobs:
        losses.add_row(
            job.name,
            str(job.iterations),
            f"{job.loss:.6f}",
            f"{job.reference_loss:.6f}",
            f"{job.max_loss_difference:.1e}",
            f"{job.max_gradient_difference:.1e}",
        )
    losses.add_note("reference: an undisturbed run with the same seed; diff: the largest difference of all iterations,")
    losses.add_note("relative for losses, absolute for gradients")
    return [failures, losses]


def _after(when: float | None, began: float) -> str:
    return "-" if when is None else f"{when - began:.2f}"


def write_json(result: DemoResult, path: Path) -> None:
    """Writes the result as JSON. Raises UserError if the file cannot be written."""
    try:
        path.write_text(json.dumps(msgspec.to_builtins(result), indent=2) + "\n")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; choose another place with --json") from None
