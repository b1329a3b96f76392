"""Who is asked about a silent agent, how many, and what is made of their answers."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from tests.support.suspects import LATE, NOW, Company
from unicron_ctl.controller.failure_detector import probes
from unicron_ctl.controller.failure_detector.probes import (
    ANSWER_SECONDS,
    CONTROL,
    MOST_ASKED,
    WITNESSES,
    needed_witnesses,
    on_probe,
    on_reached,
    send_probes,
    slurm_calls_dead,
)
from unicron_ctl.controller.model.node_state import NodeState
from unicron_ctl.controller.model.requests import Probe
from unicron_ctl.controller.model.suspicion import OWN, Answer, EndingNode, Suspicion
from unicron_ctl.controller.model.view import Outcome
from unicron_ctl.shared.protocol import structs, wire
from unicron_ctl.shared.protocol.reach import Reach


def ending(company: Company, number: int = 7, refused: bool = False) -> EndingNode:
    """The node of element 0 is under question, in the round of that number."""
    agent = company.agent()
    found = EndingNode("1", 0, agent.agent, "n1", NOW - 10.0, (agent.door, "n1:slurmd"), probe=number, refused=refused)
    company.view.suspicions.ending_nodes["n1"] = found
    return found


def asked(company: Company, suspicion: Suspicion) -> tuple[list[Probe], int]:
    """What is asked now: own tries, and the number of witnesses."""
    out = Outcome()
    send_probes(company.tick(), suspicion, out)
    assert all(isinstance(send.message, wire.Reach) for send in out.sends)
    return out.requests, len(out.sends)


# ---------------------------------------------------------------- asking
def test_two_witnesses_are_asked_and_more_in_place_of_those_that_cannot_say_anything(company: Company):
    for answers, unanswered, count in (
        ("", {}, 2),
        ("own=SS", {}, 2),
        ("2=SS", {}, 1),
        ("2=SS 3=SS", {}, 0),
        ("2=SS 3=SS 4=SS", {}, 0),
        ("2=UU", {}, 2),
        ("b0=RR", {}, 2),
        ("b0=RR 2=SS", {}, 1),
        ("", {1: ANSWER_SECONDS - 0.25}, 1),
        ("", {1: ANSWER_SECONDS}, 2),
        ("", {1: 0.25, 2: 0.25}, 0),
    ):
        suspicion = company.suspect(answers=answers, asked=1.0)
        suspicion.asked |= {("1", element): NOW - ago for element, ago in unanswered.items()}
        suspicion.asked[OWN] = NOW - 0.25
        assert asked(company, suspicion)[1] == count, (answers, unanswered)


def test_in_one_round_no_more_than_eight_are_asked(company: Company):
    agents = [*(("1", element) for element in range(1, 5)), *(("2", element) for element in range(3)), ("3", 0)]
    for count, more in ((MOST_ASKED - 3, 2), (MOST_ASKED - 2, 1), (MOST_ASKED - 1, 0), (MOST_ASKED, 0)):
        suspicion = company.suspect(asked=3.0)
        suspicion.asked = dict.fromkeys(agents[:count], NOW - 3.0)
        assert asked(company, suspicion)[1] == more, count


def test_the_controllers_own_sockets_try_once_in_a_round(company: Company):
    suspicion = company.suspect()
    ((probe,), _) = asked(company, suspicion)
    assert probe.targets == (*suspicion.targets, "") and probe.number == suspicion.number and suspicion.probing == 2
    assert asked(company, suspicion)[0] == [], "that one has not ended"
    company.view.suspicions.begin_round(suspicion, NOW)
    assert asked(company, suspicion)[0] == [], "nor has it in the next round"
    on_probe(company.view.suspicions, probe, 0, Reach.SILENT)
    on_probe(company.view.suspicions, probe, 1, Reach.SILENT)
    assert suspicion.answers[OWN].unreachable, "the answers came late, and count all the same"
    company.view.suspicions.begin_round(suspicion, NOW)
    assert len(asked(company, suspicion)[0]) == 1
    assert asked(company, company.suspect(answers="own=SS"))[0] == [], "it has answered"
    suspicion = company.suspect()
    suspicion.targets = ("", "")
    assert asked(company, suspicion)[0] == [], "there is nothing to try"
    suspicion.targets = ("n1:1", "")
    assert len(asked(company, suspicion)[0]) == 1 and suspicion.probing == 1


def test_a_refusal_of_slurmd_is_held_against_the_slurmd_of_a_node_that_is_not_under_question(company: Company):
    company.suspect(1)
    for suspicion, control in (
        (company.suspect(), ""),
        (ending(company), ""),
        (ending(company, refused=True), "n3:slurmd"),
    ):
        ((probe,), _) = asked(company, suspicion)
        assert probe.targets[CONTROL] == control
    company.view.suspicions.open.clear()
    company.view.suspicions.ending_nodes.clear()
    assert asked(company, replace(ending(company, refused=True), probing=0))[0][0].targets[CONTROL] == "n2:slurmd"
    company.view.live.slurmds = {"n7": "n7:slurmd"}
    ((probe,), _) = asked(company, ending(company, refused=True))
    assert probe.targets[CONTROL] == "n7:slurmd", "this controller has reached that one"
    company.view.slurm.seen = None
    assert company.tick().in_service == []


def test_its_own_job_is_asked_first_and_of_the_others_those_that_are_heard(company: Company):
    suspicion = company.suspect(2)
    company.last_heard(NOW - LATE, 3)
    company.last_heard(NOW - LATE - 0.25, 4)
    company.last_heard(NOW - LATE, 1, "2")
    company.last_heard(NOW - LATE - 0.25, 2, "2")
    company.view.live.add(replace(company.agent(0, "3"), job="4", node="n3"))  # on the silent one's node
    company.suspect(0, job="3")
    company.agent(0, "1").expired = True

    def witnesses() -> list[tuple[str, int]]:
        return [(one.job, one.element) for one in probes.witnesses(company.tick(), suspicion)]

    assert witnesses() == [("1", 3), ("1", 1), ("2", 0), ("2", 1)]
    suspicion.asked = {("1", 1): NOW, ("2", 0): NOW}
    assert witnesses() == [("1", 3), ("2", 1)]


@pytest.mark.parametrize(
    ("already", "others", "needed"), [(0, 0, 1), (0, 1, 1), (0, 2, 2), (1, 0, 1), (1, 1, 2), (3, 0, 2)]
)
def test_as_many_witnesses_must_agree_as_there_are_up_to_two(company: Company, already: int, others: int, needed: int):
    suspicion = company.suspect()
    suspicion.asked = {OWN: NOW, **{("1", element): NOW for element in range(1, already + 1)}}
    keys = [key for key in company.view.live.leases if key not in suspicion.asked and key != suspicion.key]
    for job, element in keys[others:]:
        company.view.live.remove(job, element)
    assert needed_witnesses(company.tick(), suspicion) == needed and WITNESSES == 2


def test_where_an_agent_and_its_nodes_slurmd_are_tried(company: Company):
    """The host is Slurm's, where that is an address: no user chooses what others connect to."""
    assert probes.targets(company.view, "n1", "elsewhere:9") == ("elsewhere:9", "n1:slurmd")
    assert probes.targets(company.view, "n77", "elsewhere:9") == ("elsewhere:9", "")
    assert probes.slurmd_address(company.view, "n77") == ""
    for address in ("10.0.0.1", "fd00::2"):
        company.slurm.node_facts["n1"] = {"address": address}
        company.list_slurm()
        assert probes.targets(company.view, "n1", "elsewhere:9") == (f"{address}:9", f"{address}:slurmd")


# ---------------------------------------------------------------- answers
def test_a_witness_is_heard_that_was_asked_in_this_round(company: Company):
    view, agent = company.view, company.agent(2)
    suspicion = company.suspect(asked=1.0)
    suspicion.asked["1", 2] = NOW

    def hear(*words: str, number: int = suspicion.number, element: int = 2) -> Answer | None:
        suspicion.answers.clear()
        who = company.agent(element)
        message = wire.ReachAnswer(job="1", element=element, agent=agent.agent, number=number, words=list(words))
        on_reached(view.suspicions, who, f"1_{who.element}", message)
        return suspicion.answers.get(("1", element))

    assert hear("silent", "reached") == Answer("1_2 on n3", Reach.SILENT, Reach.REACHED)
    assert hear("silent", "maybe") == Answer("1_2 on n3", Reach.SILENT, Reach.UNKNOWN), "a later release's word"
    assert hear("silent") is None and hear("silent", "silent", "silent") is None
    assert hear("silent", "silent", number=suspicion.number + 1) is None
    assert hear("silent", "silent", element=3) is None, "it was not asked"


def test_what_the_own_sockets_found_counts_as_reached_at_once_and_as_unreached_in_the_end(company: Company):
    suspicions = company.view.suspicions
    for first, second, reached in (
        (Reach.SILENT, Reach.REFUSED, [None, False]),
        (Reach.REACHED, Reach.SILENT, [True, True]),
        (Reach.SILENT, Reach.REACHED, [None, True]),
        (None, None, [None, False]),
    ):
        suspicion = company.suspect()
        ((probe,), _) = asked(company, suspicion)
        seen = []
        for place, found in enumerate((first, second)):
            on_probe(suspicions, probe, place, found)
            seen.append(suspicion.reached)
        assert seen == reached and suspicion.probing == 0, (first, second)
        own = suspicion.answers[OWN]
        assert (own.door, own.slurmd) == (first or Reach.UNKNOWN, second or Reach.UNKNOWN)
        assert probes.slurmd_answers(suspicion) == (second is Reach.REACHED)
        on_probe(suspicions, probe, 0, Reach.REFUSED)
        assert suspicion.answers[OWN] is own, "no try is under way"


def test_an_own_try_is_about_the_agent_or_the_node_whose_round_began_it(company: Company):
    suspicions, suspicion = company.view.suspicions, company.suspect()
    node = ending(company, number=70)
    node.probing = 2
    ((probe,), _) = asked(company, suspicion)
    on_probe(suspicions, replace(probe, number=probe.number + 1), 0, Reach.SILENT)
    assert suspicion.probing == 2 and node.probing == 2, "of a round that is over"
    on_probe(suspicions, replace(probe, number=70), 0, Reach.SILENT)
    assert suspicion.probing == 2 and node.probing == 1
    on_probe(suspicions, replace(probe, number=70), CONTROL, Reach.REACHED)
    assert node.control is Reach.REACHED and suspicion.control is None and node.probing == 1
    on_probe(suspicions, replace(probe, number=71), CONTROL, Reach.SILENT)
    assert node.control is Reach.REACHED
    suspicions.given_up[suspicion.key] = suspicions.open.pop(suspicion.key)
    on_probe(suspicions, probe, 0, Reach.REACHED)
    assert suspicion.reached, "of one that was given up meanwhile"


def test_whether_a_majority_is_missing_and_may_go_on_by_itself(company: Company):
    for element, missing in ((0, (True, False)), (1, (True, False)), (2, (False, True))):
        company.suspect(element)
        tick = company.tick()
        assert tick.missing_majority("1") == tick.missing_majority("1") == missing, element
    job = company.view.state.jobs["1"]
    job.settings = msgspec.structs.replace(job.settings, mode=structs.RESTART)
    assert company.tick().missing_majority("1") == (False, False), "a plain program cannot go on without the rest"


def test_a_firewall_that_refuses_is_likelier_than_the_end_of_most_agents(company: Company):
    everybody = list(company.view.live.leases)
    for agents, refused, answers, many in (
        (9, 4, "own=XX", False),
        (9, 5, "own=XX", True),
        (9, 5, "own=XR", False),
        (9, 5, "own=SS", False),
        (8, 4, "own=XX", False),
        (3, 2, "own=XX", True),
        (1, 1, "own=XX", False),
    ):
        company.view.suspicions.open.clear()
        for job, element in everybody[agents:]:
            company.view.live.remove(job, element)
        for job, element in everybody[:refused]:
            company.suspect(element, answers=answers, job=job)
        assert company.tick().many_refuse == many, (agents, refused, answers)
        everybody = everybody[:agents]


def test_slurms_word_on_a_node_counts_while_it_hears_another_and_nobody_here_has_set_it_down(company: Company):
    view, every = company.view, [f"n{n}" for n in range(1, 11)]
    unheard = "IDLE,NOT_RESPONDING"
    for states, others, out_of_service, drained, word in (
        ("IDLE", "IDLE", False, False, ""),
        (unheard, "IDLE", False, False, "NOT_RESPONDING"),
        ("DOWN,NOT_RESPONDING", "IDLE", False, False, "DOWN+NOT_RESPONDING"),
        (unheard + ",POWERING_UP", "IDLE", False, False, ""),
        (unheard, unheard, False, False, ""),
        (unheard, "IDLE", True, False, ""),
        (unheard, "IDLE", True, True, "NOT_RESPONDING"),
    ):
        view.state.out_of_service = {"n1"} if out_of_service else set()
        view.state.nodes["n1"] = NodeState(drained=drained)
        company.list_slurm(**{**dict.fromkeys(every, others), "n1": states})
        assert slurm_calls_dead(company.tick(), "n1") == word, (states, others, out_of_service, drained)
    assert slurm_calls_dead(company.tick(), "n77") == ""
