"""Who is suspected from when on, when others are asked again, and what becomes of a suspicion."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from tests.support.suspects import LATE, LEASE, NOW, Company
from unicron_ctl.controller.failure_detector import leases
from unicron_ctl.controller.failure_detector.leases import check_leases, sign_of_life
from unicron_ctl.controller.failure_detector.probes import ROUND_SECONDS
from unicron_ctl.controller.model.finding import What
from unicron_ctl.controller.model.job_state import Ending, Identity, JobState, Phase
from unicron_ctl.controller.model.requests import Probe
from unicron_ctl.controller.model.suspicion import Suspicions
from unicron_ctl.shared.protocol import structs

GRACE = 5.0  # the default restart_grace
KEY = ("1", 0)


def job_of(company: Company) -> JobState:
    return company.view.state.jobs["1"]


def suspected(company: Company) -> list[tuple[str, int]]:
    """Whom a tick suspects, of those whom nobody suspected before."""
    company.view.suspicions = Suspicions(missing_check_at=company.view.suspicions.missing_check_at)
    check_leases(company.view)
    return list(company.view.suspicions.open)


def test_an_agent_is_suspected_once_its_word_is_late(company: Company):
    company.last_heard(NOW - LATE)
    assert suspected(company) == [] and not leases.late_agents(company.view)
    company.last_heard(NOW - LATE - 0.25)
    assert suspected(company) == [KEY]
    company.last_heard(NOW - LATE - 0.5, 2)
    assert [agent.element for agent in leases.late_agents(company.view)] == [2, 0], "the longest silent first"
    before = company.view.suspicions.open[KEY]
    check_leases(company.view)
    assert company.view.suspicions.open[KEY] is before and before.since == NOW - LATE - 0.25


def test_iterations_that_end_are_a_sign_of_life_of_all_their_members(company: Company):
    job, agent = job_of(company), company.last_heard(NOW - 5.0)
    stepped = company.view.job(job).stepped
    stepped.before = NOW - LATE
    assert suspected(company) == []
    stepped.before = NOW - LATE - 0.25
    assert suspected(company) == [KEY] and company.view.suspicions.open[KEY].since == stepped.before
    members = job.members
    for phase, inside, condemned, sign in (
        (Phase.RUNNING, True, False, stepped.before),
        (Phase.OFFERING, True, False, stepped.before),
        (Phase.BREAKING, True, False, agent.last_heard),
        (Phase.RUNNING, False, False, agent.last_heard),
        (Phase.RUNNING, True, True, agent.last_heard),
    ):
        job.phase, job.condemned = phase, {0: "it hangs"} if condemned else {}
        job.members = members if inside else {slot: who for slot, who in members.items() if slot}
        assert sign_of_life(company.view, agent) == sign, (phase, inside, condemned)
    job.phase, job.members, job.condemned = Phase.RUNNING, members, {}
    stepped.before = NOW - 7.0
    assert sign_of_life(company.view, agent) == agent.last_heard
    assert sign_of_life(company.view, replace(agent, job="9")) == agent.last_heard, "of a job that is not known"


def test_slurms_word_that_a_task_ended_is_looked_into_at_once(company: Company):
    company.view.live.suspect(company.last_heard(NOW - 0.5), NOW)
    assert suspected(company) == [KEY]
    before = company.view.suspicions.open[KEY]
    check_leases(company.view)
    assert company.view.suspicions.open[KEY] is before


def test_agents_that_do_not_come_back_to_a_restarted_controller_are_suspected_after_the_grace(company: Company):
    view = company.view
    view.live.remove("1", 0)
    for ago, check_at, found in (
        (GRACE, NOW, []),
        (GRACE + 0.25, NOW + 0.25, []),
        (GRACE + 0.25, NOW, [KEY]),
    ):
        view.started_at, view.suspicions.missing_check_at = NOW - ago, check_at
        assert suspected(company) == found, (ago, check_at)
    before = view.suspicions.open[KEY]
    assert before.since == view.started_at and view.suspicions.missing_check_at == NOW + leases.MISSING_SECONDS
    view.suspicions.missing_check_at = NOW
    check_leases(view)
    assert view.suspicions.open[KEY] is before


def test_an_agent_that_has_ended_is_missed_only_where_its_ranks_have_to_start_again(company: Company):
    """A world of plain programs that breaks needs the agents again whose ranks had ended well."""
    view, job = company.view, job_of(company)
    members, settings = job.members, job.settings
    plain = msgspec.structs.replace(settings, mode=structs.RESTART)
    view.live.remove("1", 0)
    for gone, of_mode, phase, lost, condemned, inside, found in (
        ("agent died", plain, Phase.BREAKING, False, False, True, []),
        ("finished", plain, Phase.BREAKING, False, False, True, [KEY]),
        ("finished", settings, Phase.BREAKING, False, False, True, []),
        ("finished", plain, Phase.RUNNING, False, False, True, []),
        ("finished", plain, Phase.BREAKING, True, False, True, []),
        ("finished", plain, Phase.BREAKING, False, True, True, []),
        ("finished", plain, Phase.BREAKING, False, False, False, []),
    ):
        job.agents[0].gone, job.settings, job.phase = gone, of_mode, phase
        job.lost = {0: Identity("a", 0)} if lost else {}
        job.condemned = {0: "it hangs"} if condemned else {}
        job.members = members if inside else {slot: who for slot, who in members.items() if slot}
        view.suspicions.missing_check_at = 0.0
        assert suspected(company) == found, (gone, phase, lost, condemned, inside)


def test_others_are_asked_again_when_the_word_is_late_and_every_two_seconds(company: Company):
    """What was silent before its word was late may have stopped for a moment only."""
    for seconds, asked, again in (
        (LATE + 0.25, 0.25, True),
        (LATE + 0.25, 0.125, False),
        (LATE, 0.5, False),
        (10.0, ROUND_SECONDS, False),
        (10.0, ROUND_SECONDS + 0.25, True),
    ):
        suspicion = company.suspect(seconds=seconds, asked=asked)
        suspicion.probing, number = 2 if seconds < LEASE else 0, suspicion.number
        out = check_leases(company.view)
        assert (suspicion.number > number) == again, (seconds, asked)
        if again:
            (probe,) = [one for one in out.requests if isinstance(one, Probe)]
            assert probe.number == suspicion.number and suspicion.begun == NOW


def test_nobody_is_asked_while_nobody_at_all_is_heard(company: Company):
    suspicion = company.suspect(asked=ROUND_SECONDS + 0.25)
    company.view.suspicions.alone_since, number = NOW - 10.0, suspicion.number
    out = check_leases(company.view)
    assert suspicion.number == number and not out.requests and not out.sends


def test_whom_silence_took_is_remembered_and_a_node_that_nobody_reached_stays_under_question(company: Company):
    """Both count for the controller's doubt of itself; who is shown dead, or ended on a living node, does not."""
    company.slurm.reasons["n1"] = "rack 3 has burnt"
    for answers, states, what, given_up, ending in (
        ("own=SS 2=SS 3=SS", "IDLE", What.NODE_LOST, True, False),
        ("own=XR", "IDLE", What.AGENT_DIED, False, False),
        ("own=XX 2=XX", "IDLE", What.AGENT_DIED, True, True),
        ("", "DOWN", What.NODE_LOST, False, False),
    ):
        company.view.suspicions = Suspicions()
        company.list_slurm(n1=states)
        company.suspect(answers=answers, asked=1.0)
        (finding,) = check_leases(company.view).findings
        now = company.view.suspicions
        assert finding.what is what and not now.open and not now.rounds.get(1), (answers, states)
        assert (KEY in now.given_up, "n1" in now.ending_nodes) == (given_up, ending), (answers, states)


@pytest.mark.parametrize(
    ("part", "name", "value", "goes_on"),
    [
        ("agent", "last_heard", NOW - 10.0, True),
        ("agent", "last_heard", NOW - 9.75, False),
        ("agent", "agent", "another", False),
        ("status", "leaving", "stopped by SIGTERM", False),
        ("record", "agent", "another", False),
        ("job", "agents", {}, False),
        ("job", "ended", Ending(0, "it has trained to the end", NOW), False),
    ],
)
def test_a_suspicion_ends_when_the_agent_speaks_or_is_the_jobs_no_more(company: Company, part, name, value, goes_on):
    job, agent = job_of(company), company.agent()
    company.suspect(asked=1.0)
    setattr({"job": job, "record": job.agents[0], "agent": agent, "status": agent.status}[part], name, value)
    check_leases(company.view)
    assert (KEY in company.view.suspicions.open) == goes_on


@pytest.mark.parametrize("over", [False, True])
def test_an_agent_that_has_not_come_back_is_suspected_until_its_job_is_over(company: Company, over: bool):
    company.suspect(asked=1.0)
    company.view.live.remove("1", 0)
    job_of(company).ended = Ending(0, "it has trained to the end", NOW) if over else None
    check_leases(company.view)
    assert (KEY in company.view.suspicions.open) != over


def doubts(company: Company) -> list[str]:
    """What a tick puts on record about agents that are silent and not lost."""
    return [record.reason for _, _, record in check_leases(company.view).records if record.kind == "silence"]


def test_why_a_silent_agent_is_not_lost_is_on_record_once(company: Company, snapshot):
    company.suspect(seconds=LEASE, answers="own=RR", asked=0.25)
    assert not doubts(company), "its lease is not over"
    company.suspect(seconds=LEASE + 0.25, answers="own=RR 2=SS", asked=0.25)
    (said,) = doubts(company)
    assert said == snapshot
    assert not doubts(company)
    company.suspect(answers="own=SS 2=SS", asked=1.0)
    assert not doubts(company), "another witness is asked"


def test_the_command_by_which_a_person_ends_the_wait_for_a_majority_is_on_record(company: Company):
    for element in (1, 2):
        company.suspect(element, asked=1.0)
    for answers, asked, states, said in (
        ("3=SS", 0.75, "IDLE", False),
        ("3=SS", 1.0, "IDLE", True),
        ("", 1.0, "IDLE", False),
        ("", 1.0, "IDLE,NOT_RESPONDING", True),
    ):
        company.list_slurm(n1=states)
        company.suspect(answers=answers, asked=asked)
        found = [reason for reason in doubts(company) if "1_0" in reason]
        assert bool(found) == said, (answers, asked, states)
        assert not said or "NodeName=n1 State=DOWN" in found[0]
        assert not answers or not said or found[0].endswith("(3: agent silent, slurmd silent)")


def given_up_again(company: Company) -> bool:
    """An earlier controller's loss of n1 counts for this one's doubt of itself."""
    company.view.suspicions.given_up.clear()
    check_leases(company.view)
    return KEY in company.view.suspicions.given_up


def test_whom_an_earlier_controller_lost_counts_from_the_grace_on_until_it_comes_back(company: Company):
    view, job = company.view, job_of(company)
    view.live.remove("1", 0)
    job.agents[0].gone = "silent"
    view.started_at = NOW - GRACE
    assert not given_up_again(company)
    view.started_at = NOW - GRACE - 0.25
    out = check_leases(view)
    suspicion = view.suspicions.given_up[KEY]
    assert suspicion.since == view.started_at and suspicion.probing == 2
    assert [one.node for one in out.requests if isinstance(one, Probe)] == ["n1"]
    assert not given_up_again(company), "it is recalled once"


def test_who_was_not_lost_by_silence_or_is_back_or_out_of_service_is_not_recalled(company: Company):
    view, job, agent = company.view, job_of(company), company.agent()
    view.started_at = NOW - GRACE - 0.25
    for gone, back, out_of_service, found in (
        ("silent", False, False, True),
        ("node ended", False, False, True),
        ("finished", False, False, False),
        ("silent", True, False, False),
        ("silent", False, True, False),
    ):
        view.suspicions = Suspicions()
        job.agents[0].gone = gone
        view.live.add(agent) if back else view.live.remove("1", 0)
        view.state.out_of_service = {"n1"} if out_of_service else set()
        assert given_up_again(company) == found, (gone, back, out_of_service)
