"""The tables of Slurm's words: whole, compared with the words of the releases, and never wrong about a new one."""

from __future__ import annotations

import itertools
import logging
import tomllib

import pytest

from tests.support.processes import ROOT
from unicron_ctl.controller.sense.slurm_states import NODE_STATES
from unicron_ctl.shared.slurm import command_line, pending_reasons, squeue, states
from unicron_ctl.shared.slurm.slurm_client import ElementInfo, NodeInfo, current_reason
from unicron_detector.failures.classify import default_classifier
from unicron_planner.simulate import history

SEEN = tomllib.loads((ROOT / "docs" / "behaviour" / "slurm-states.toml").read_text())
FACTS = "7 2 9 STATE ann 1000 1970-01-02T00:00:01 5:00 PRIORITY N/A main (null) n3 (null)".split()


def element(word: str, reason: str = "None", priority: int = 17) -> ElementInfo:
    """As squeue would show it."""
    cells = [{"STATE": word, "PRIORITY": str(priority)}.get(cell, cell) for cell in FACTS]
    (fact,) = squeue.parse_facts("\x1f".join([*cells, ""]))
    texts = {"ArrayJobID": "7", "ArrayTaskID": "2", "RestartCnt": "1", "exit_code": "0", "Reason": reason}
    return squeue.complete(fact, texts)


def node(said: str) -> NodeInfo:
    found = command_line.parse_node(f"NodeName=n1 Arch=x86_64 State={said} Weight=1 Reason=fan [root@2026-01-01]")
    assert found is not None
    return found


def test_the_tables_have_the_words_of_all_releases_and_no_others() -> None:
    assert states.JOB_WORDS.keys() - {states.UNKNOWN} == SEEN["jobs"].keys() | SEEN["job_flags"].keys()
    assert states.NODE_WORDS.keys() == SEEN["nodes"].keys() | set(SEEN["sinfo"]["words"])
    assert SEEN["sinfo"]["signs"] == states.SIGNS
    dates = [row.get(key) for row in (SEEN["jobs"] | SEEN["nodes"]).values() for key in ("since", "until")]
    assert {"22.05", "24.11", "25.11", "26.05"} == SEEN["releases"].keys() >= set(dates) - {None}


@pytest.mark.parametrize("word", SEEN["jobs"])
def test_each_job_is_one_of_pending_there_or_over(word: str) -> None:
    info = element(word)
    assert [info.state == "PENDING", info.state in states.OCCUPIES, info.state in states.OVER].count(True) == 1
    assert info.state == word or word in states.WAITS
    assert states.ENDED_BADLY < states.OVER and states.WORKS < states.OCCUPIES and states.LEAVES < states.OCCUPIES


@pytest.mark.parametrize("row", SEEN["seen"], ids=lambda row: row["asked"][:40])
def test_a_hold_is_what_slurm_holds_whatever_word_stays_after_the_release(row: dict[str, str]) -> None:
    holds = row["priority"] == "0"
    info = element(row["word"], row["reason"], 0 if holds else 17)
    assert (info.state, info.held) == ("PENDING", holds)
    assert ("holds" in (said := pending_reasons.explain_pending(info, 0.0)) or "is held" in said) == holds


@pytest.mark.parametrize("reason", SEEN["holds"]["names"] + SEEN["holds"]["texts"])
def test_what_holds_an_element_is_read_in_its_reason_too(reason: str) -> None:
    info = element("PENDING", reason)
    assert info.held and pending_reasons.understand(reason).bar is pending_reasons.Bar.HOLD
    assert "begun" not in pending_reasons.explain_pending(info, 0.0)
    assert "`scontrol release`" in pending_reasons.explain_pending(element("REQUEUE_HOLD", "Resources", 0), 0.0)


@pytest.mark.parametrize("word", ["HIBERNATING", "?", "REQUEUE2", states.UNKNOWN])
def test_a_job_in_a_state_of_a_later_release_is_neither_over_nor_pending(
    word: str, caplog: pytest.LogCaptureFixture, snapshot
) -> None:
    states._warn.cache_clear()
    with caplog.at_level(logging.WARNING):
        found = [element(word, priority=0) for _ in range(3)]
    assert {info.state for info in found} == {states.UNKNOWN} <= states.OCCUPIES and not found[0].held
    assert states.UNKNOWN not in states.OVER | states.WORKS and found[0].node == "n3"
    assert caplog.messages == snapshot


@pytest.mark.parametrize("base", ["IDLE", "ALLOCATED", "MIXED"])
def test_a_flag_of_a_later_release_makes_no_node_healthy(base: str, caplog: pytest.LogCaptureFixture) -> None:
    states._warn.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert not any(node(f"{base}+{flag}").healthy for flag in ("HAUNTED", "HAUNTED", "DYNAMIC_NORM+HAUNTED"))
    assert len(caplog.records) == 1 and "HAUNTED" in caplog.text
    assert node(f"{base}+HAUNTED").reason == "fan" and node(base).reason == ""


def test_a_node_without_any_state_is_not_healthy() -> None:
    assert not NodeInfo("n1", frozenset(), "", "n1", 1, None, 0).healthy


HEALTHY = "CLOUD COMPLETING DYNAMIC_FUTURE DYNAMIC_NORM PLANNED RESERVED PERFCTRS RESUME POWER_UP POWER_DOWN".split()
HEALTHY += ["REBOOT_REQUESTED", "POWERED_DOWN", "POWERING_UP", "POWERING_DOWN"]


@pytest.mark.parametrize("flag", [word for word, row in SEEN["nodes"].items() if "base" not in row])
def test_each_flag_of_a_node(flag: str) -> None:
    assert node(f"IDLE+{flag}").healthy == (flag in HEALTHY), flag
    assert node(f"IDLE+{flag}").asleep == flag.startswith("POWERED") | flag.startswith("POWERING")


def test_external_and_blocked_nodes_get_no_work_and_dynamic_ones_do() -> None:
    """As 26.05 shows them: an external node has no slurmd, and a blocked one is beside a job that is alone there."""
    assert not node("IDLE+EXTERNAL").healthy and not node("IDLE+BLOCKED").healthy
    assert node("IDLE+DYNAMIC_NORM").healthy and node("MIXED+CLOUD+PLANNED").heard
    assert current_reason(frozenset({"IDLE", "EXTERNAL"}), "shed") == "shed"


def test_the_words_that_others_choose_from_are_in_the_tables() -> None:
    assert set(NODE_STATES) <= states.NODE_WORDS.keys()
    for word, signal in itertools.product(states.OVER, ("0", "9")):
        run = history.Run("7", "ann", "x", word, f"1:{signal}", 0.0, 0.0, 1.0, 1)
        assert (history.cause_of(run) is not None) == (word in states.ENDED_BADLY), word


@pytest.mark.parametrize("row", SEEN["seen_nodes"], ids=lambda row: row["state"])
def test_nodes_as_they_were_seen(row: dict[str, str]) -> None:
    assert node(row["state"]).healthy == row["work"]


@pytest.mark.parametrize("word", [*SEEN["jobs"], *SEEN["job_flags"]])
def test_the_severity_table_knows_each_state_of_a_job(word: str) -> None:
    """`unicronctl classify --slurm`. What waits has not failed, whoever holds it."""
    short = SEEN["jobs"].get(word, {}).get("short", word)
    for said in {word} if word == "EXPEDITING" else {word, short}:
        verdict = default_classifier().slurm(said)
        assert verdict.rule != "slurm-default", said
        assert word not in states.WAITS or verdict.cause == "finished", said
        assert word not in states.ENDED_BADLY or verdict.cause != "finished", said


@pytest.mark.parametrize("word", sorted((SEEN["nodes"].keys() | set(SEEN["sinfo"]["words"])) - {"?"}))
def test_the_severity_table_knows_each_state_of_a_node(word: str) -> None:
    verdict = default_classifier().slurm(word)
    assert verdict.rule != "slurm-default"
    assert word in states.UNUSABLE or verdict.cause == "finished"
