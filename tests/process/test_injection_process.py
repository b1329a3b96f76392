"""Faults injected into real ranks, under real agents and a controller: each is seen as what it is, and healed."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

from tests.support.jobs import FOREVER, TINY_PLAIN, World
from unicron_ctl.shared.system.errors import UserError
from unicron_transition.snapshot.image_format import BadImage, read_page

pytestmark = pytest.mark.process
# Silent faults: place -> what the rank's log says it hit. The lowest bit of a number changes no training.
PLACES = {
    "forward:0:once": "the output of",
    "gradient:0:once": "the gradient of",
    "wire:0:once": "what is sent into",
    "weight:0": r"[\w.]+,",
    "moment:0": r"\w*avg\w*",
    "memory:0": r"\S+\.image",
    "file:0": r"(?!state-)\S+\.image",
}
SILENT = 8.0  # seconds for which the network is lost: well beyond the lease
# Of the floor: a busy machine has kept a rank waiting for a second just before it was killed.
SETTINGS = "allow_inject = true\nhang_floor_seconds = 3.0\nlease_periods = 2.5\n"


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inject")
    environment = {"TINY_ITERATIONS": FOREVER, "TINY_SLOW": "0.02", "UNICRON_AUDIT": "0", "UNICRON_COMPARE": "0"}
    environment |= {"TINY_CHECKPOINTS": str(folder / "checkpoints"), "TINY_CHECKPOINT_EVERY": "25"}
    with World(folder, 2, SETTINGS, TINY_PLAIN, **environment) as running:
        running.wait(lambda: running.trains([0, 1], 15), "15 iterations")
        yield running


def healed(job: World, more: int = 14) -> None:
    """Both train again, long enough for a deadline to be learned."""
    job.trains_on([0, 1], more)


def strike(job: World, fault: str, **more) -> dict:
    """Injects into slot 1; returns the failure that the controller sees."""
    known = {failure["id"] for failure in job.failures()}
    job.ask("inject", fault=fault, job="7", slot=1, **more)
    failures = lambda: [f for f in job.failures() if f["id"] not in known]  # noqa: E731
    return job.wait(lambda: next(iter(failures()), None), f"{fault} is seen")


@pytest.mark.parametrize(
    ("fault", "cause", "by"),
    [
        pytest.param("rank-kill", "killed_from_outside", "process exit", marks=pytest.mark.wide),
        pytest.param("exception:cuda", "illegal_memory_access", "exception", marks=pytest.mark.wide),
        pytest.param("oom", "host_out_of_memory", "exception", marks=pytest.mark.wide),
        pytest.param("full-disk", "disk_full", "exception", marks=pytest.mark.wide),
        ("hang-gil", "task_hang", "statistics"),
    ],
)
def test_a_fault_is_caught_for_what_it_is_and_heals(job, fault, cause, by):
    failure = strike(job, fault)
    assert failure["slots"] == [1] and failure["detected_by"] == by, failure
    assert failure["cause"] == cause, failure
    healed(job)
    assert job.job()["ledger_violations"] == 0


def test_a_bit_flips_in_each_place_of_a_session_and_the_rank_says_where(job):
    healed(job, 3)
    before = len(job.failures())
    for fault, what in PLACES.items():
        job.ask("inject", fault=f"flip:{fault}", job="7", slot=1)
        line = re.compile(rf"flipped bit 0 in {what}[^\n]* \[injected\]")
        job.wait(lambda line=line: line.search(job.agents[1].log), fault, 60.0)
    assert any(map(is_damaged, (job.folder / "checkpoints").rglob("*.image"))), "its reader will know"
    healed(job, 3)
    assert len(job.failures()) == before


def is_damaged(path: Path) -> bool:
    with contextlib.suppress(OSError):
        page = read_page(path)  # of a whole file
        try:
            page.check_file()
        except BadImage:
            return True
    return False


def test_a_slow_rank_trains_on(job):
    before = len(job.failures())
    job.ask("inject", fault="slow:1.5", job="7", slot=1, seconds=1.0)
    healed(job)
    assert len(job.failures()) == before


def test_garbage_from_an_agent_is_dropped(job):
    before = len(job.failures())
    job.ask("inject", fault="corrupt-message", job="7", slot=1)
    job.wait(lambda: job.events("bad_message"), "the garbage is reported")
    healed(job)
    assert len(job.failures()) == before


@pytest.mark.parametrize(
    "fault", [pytest.param("lost-network", marks=pytest.mark.long), pytest.param("black-hole", marks=pytest.mark.wide)]
)
def test_who_is_silent_and_reached_by_nobody_is_lost_and_comes_back(job, fault):
    """Whether its ranks' connections break or, as with lost packets, do not: its peers are not blamed."""
    before = max(event["id"] for event in job.events())
    failure = strike(job, fault, seconds=SILENT)
    assert (failure["kind"], failure["slots"], failure["detected_by"]) == ("node", [1], "lease and witnesses"), failure
    assert not news(job, before, "agent_back"), "it is lost while it is silent"
    job.wait(lambda: news(job, before, "agent_back"), "the agent speaks again")
    healed(job)
    assert not [event for event in news(job, before, "failure_detected") if event["slots"] == [0]]
    assert job.job()["ledger_violations"] == 0


def news(job: World, before: int, kind: str) -> list[dict]:
    """The events of this kind since."""
    return [event for event in job.events(kind) if event["id"] > before]


def test_the_kernel_kills_for_want_of_memory_or_the_agent_says_why_it_cannot_be_done(job):
    known = {failure["id"] for failure in job.failures()}
    job.ask("inject", fault="oom-kill", job="7", slot=1)
    struck = lambda: [f for f in job.failures() if f["id"] not in known]  # noqa: E731
    job.wait(lambda: struck() or job.events("inject_refused"), "it is killed, or the agent refuses")
    if not struck():
        assert "cgroup" in job.events("inject_refused")[0]["reason"]
        return
    assert struck()[0]["cause"] == "host_out_of_memory" and struck()[0]["detected_by"] == "process exit", struck()
    healed(job)


def test_it_is_refused_where_the_configuration_does_not_allow_it(job):
    job.reload(SETTINGS.replace("allow_inject = true", "allow_inject = false"))
    job.wait(lambda: job.events("configured"), "the configuration is read again")
    with pytest.raises(UserError, match="allow_inject = true"):
        job.ask("inject", fault="rank-kill", job="7", slot=1)
    job.reload(SETTINGS)  # the other tests have the same controller, in whatever order they run
    job.wait(lambda: len(job.events("configured")) == 2, "and again")
