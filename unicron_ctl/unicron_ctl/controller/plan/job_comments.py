"""The story of a job in its AdminComment, for `squeue`, `sacct` and the site's own tools.

Everybody may read a comment. So it says only what `squeue` and `unicronctl jobs` show to everybody: the number of
failures, the lost time, and the date of the last one; neither a cause nor a node.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

from unicron_ctl.controller.model import permission
from unicron_ctl.controller.model.job_state import FAILURES_KEPT, JobState
from unicron_ctl.controller.model.requests import OURS, Action, Run
from unicron_ctl.controller.model.view import Listing, Outcome, View
from unicron_ctl.shared.slurm.admin_comment import HOLD_PREFIX, is_shown, own_part
from unicron_ctl.shared.slurm.slurm_client import ElementInfo
from unicron_ctl.shared.slurm.states import OCCUPIES

AGAIN_SECONDS = 60.0  # between two comments on one job
REPEAT_SECONDS = 600.0  # before the same comment is written again that Slurm does not show
MOST_AT_ONCE = 10  # jobs; more wait for the next listing


@dataclass
class Comments:
    """Recent comments. A restart loses them, but Slurm shows them."""

    written: dict[str, tuple[str, float]] = field(default_factory=dict)
    """job -> text and time."""


def comment_on_jobs(view: View, memory: Comments, listing: Listing, out: Outcome) -> None:
    """Asks for the comments that are due, on jobs that were healed. A comment that is not allowed is recorded once."""
    memory.written = {job: last for job, last in memory.written.items() if job in view.state.jobs}
    actions = list[Action]()
    for job in view.state.jobs.values():
        text, element = story(job), _first(job, listing)
        if not text or element is None or is_shown(element.admin_comment, text) or len(actions) >= MOST_AT_ONCE:
            continue
        last, at = memory.written.get(job.job, ("", 0.0))
        if view.now - at < (REPEAT_SECONDS if last == text else AGAIN_SECONDS):
            continue
        memory.written[job.job] = text, view.now
        action = Action("comment", job.job, element.element, "", "says what has happened to the job", text)
        if not permission.withheld(view, action, out):
            actions.append(action)
    if actions:
        out.requests.append(Run(tuple(actions)))


def story(job: JobState) -> str:
    """The comment; empty for a job without healed failures."""
    healed = [failure for failure in job.failures if failure.healed]
    if not healed or job.disowned or job.set_aside or not job.submitted:
        return ""
    more = " or more" if len(job.failures) == FAILURES_KEPT else ""
    last = datetime.fromtimestamp(healed[-1].detected_at, UTC).strftime("%Y-%m-%dT%H:%MZ")
    what = f"{len(healed)}{more} failure{'s' * (len(healed) != 1)} healed, {job.lost_seconds:.0f} s lost, last {last}"
    ended = f", ended with {job.ended.code}" if job.ended is not None else ""
    return f"{OURS}: {what}{ended}"


def _first(job: JobState, listing: Listing) -> ElementInfo | None:
    """The first element that occupies a node; one comment is enough. An element that was held as it started keeps its
    comment, which shows at the next requeue that the hold is ours."""
    there = (e for _, e in sorted(listing.rows_of(job.job).items()) if e.state in OCCUPIES)
    return next((e for e in there if not own_part(e.admin_comment).startswith(HOLD_PREFIX)), None)
