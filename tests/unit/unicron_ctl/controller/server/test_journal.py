"""What unicrond writes to standard error."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TextIO

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.support.processes import undated
from tests.support.scenarios import trained
from tests.support.world import FakeSlurm, World
from unicron_ctl.controller.model.cluster_state import ClusterState
from unicron_ctl.controller.server import event_lines, journal
from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.records import Event

log = logging.getLogger("unicron.controller")


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    logger = logging.getLogger(journal.ROOT)
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


@pytest.fixture
def in_the_journal(monkeypatch: pytest.MonkeyPatch) -> Iterator[TextIO]:
    """A file that JOURNAL_STREAM names."""
    with tempfile.TemporaryFile("w+") as stream:
        status = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
        yield stream


@pytest.fixture
def stream() -> io.StringIO:
    """Where the log goes."""
    found = io.StringIO()
    journal.start("unicrond", stream=found)
    return found


def written(stream: TextIO) -> list[str]:
    stream.seek(0)
    return undated(stream.read()).splitlines()


def test_a_line_has_the_program_and_the_level(stream: TextIO, snapshot: SnapshotAssertion) -> None:
    log.debug("not asked for")
    log.info("two\nlines  of %s", "text")
    log.warning("look")
    assert written(stream) == snapshot


def test_no_control_character_of_a_job_reaches_who_reads_the_log(stream: io.StringIO) -> None:
    log.info("failure_detected: %s", "\x1b]0;gone\x07\x9b2J \u202e")
    try:
        raise ValueError("\x1b[2J")
    except ValueError:
        log.exception("could not answer")
    lines = stream.getvalue().splitlines()
    assert len(lines) > 3 and all(line.isprintable() for line in lines) and "]0;gone" in lines[0]


def test_the_level_can_be_chosen(stream: TextIO) -> None:
    journal.start("unicrond", "error", stream)
    log.warning("no")
    journal.start("unicrond", "debug", stream)
    log.debug("yes")
    assert written(stream) == ["DEBUG unicrond: yes"]


def test_priorities_in_the_journal(in_the_journal: TextIO) -> None:
    journal.start("unicrond", "debug", in_the_journal)
    for level in (logging.CRITICAL, logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG):
        log.log(level, "text")
    marks = {"CRITICAL": 2, "ERROR": 3, "WARNING": 4, "INFO": 6, "DEBUG": 7}
    assert written(in_the_journal) == [f"<{mark}>{level} unicrond: text" for level, mark in marks.items()]


def test_each_line_of_a_traceback_has_the_priority(in_the_journal: TextIO, snapshot: SnapshotAssertion) -> None:
    journal.start("unicrond", stream=in_the_journal)
    try:
        raise ValueError("bad")
    except ValueError:
        log.exception("job 7 is set aside")
    lines = written(in_the_journal)
    assert [lines[0], lines[-1]] == snapshot
    assert all(line.startswith("<3>") for line in lines)


def test_a_redirected_standard_error_is_not_the_journal(in_the_journal: TextIO, tmp_path: Path) -> None:
    """JOURNAL_STREAM is inherited by what a service starts."""
    assert journal.is_journal(in_the_journal)
    with (tmp_path / "log").open("w") as other:
        assert not journal.is_journal(other)
    assert not journal.is_journal(io.StringIO())
    assert not any(journal.is_journal(in_the_journal, variables) for variables in ({}, {"JOURNAL_STREAM": "x"}))


def test_an_output_that_is_gone_ends_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w", buffering=1)
    journal.start("unicrond", stream=stream)
    log.error("nobody reads this")
    assert capfd.readouterr().err == ""
    with pytest.raises(BrokenPipeError):
        stream.close()


def tell(record: records.Record, job: str = "7") -> None:
    event_lines.log_event(Event(12, 1.0, job, 3, record), ClusterState())


def test_each_kind_of_event_has_a_line_unless_it_is_listed_here() -> None:
    """Defect: nothing was logged when a job was set aside, or a configuration read again."""
    without = """
        agent_registered agent_confirmed agent_gone agent_back job_confirmed ranks_ready rank_start started_cold
        exit_noted leave_out step steady timing entered offer offer_withdrawn number_used reinstated state_awaited
        last_copy newcomers_wait layout_wanted layout_chosen spares stacks overdue degraded degraded_over anomaly
        anomaly_over slurmd_reached node_health unpinned allotted unreadable told
    """
    assert {tag for tag, kind in records.KINDS.items() if kind not in event_lines.LEVELS} == set(without.split())


def test_what_was_done_about_a_failure_and_what_job_came_is_in_the_line(
    stream: TextIO, snapshot: SnapshotAssertion
) -> None:
    """Defect: both lines had the event's kind alone."""
    world = World(FakeSlurm(2))
    world.slurm.submit("1", 2)
    world.start_job(nodes=2)
    world.core.append("1", 1, records.FailureAction(failure=3, text="set n2 down in Slurm"))
    for told in [*world.log, *world.core.events]:
        event_lines.log_event(told, world.core.state)
    assert [line for line in written(stream) if re.search("failure_action|job_registered", line)] == snapshot


def test_a_real_failure_and_what_follows_is_told_with_job_node_event_time_and_level() -> None:
    world, agents = trained(3, 1, seconds=3.0)
    agents[0].die(0, 1, last_line="CUDA error: uncorrectable ECC error encountered")
    world.run(5.0)
    world.core.append("1", 1, records.SlurmAction(action="requeue", element=0, node="", reason="leaves its node"))
    world.core.append("1", 1, records.SlurmDone(action="requeue", element=0, node=""))
    world.core.append("1", 1, records.ElementCutOff(element=1, reason="does not reach the others"))
    world.core.append("", 0, records.RegistrationRefused(peer="8 0", node="n4", reason="n4: it is another's"))
    world.core.append("", 0, records.ConfigReloaded(reason="read again"))
    world.core.append("", 0, records.ConfigRefused(reason="ranks: unknown key"))
    stream = io.StringIO()
    journal.start("unicrond", stream=stream, form="json")
    for told in [*world.log, *world.core.events]:
        event_lines.log_event(told, world.core.state)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    by_kind = {line["text"].partition(":")[0]: line for line in lines}
    expected = {
        "job_registered": ("INFO", "1", None),
        "failure_detected": ("WARNING", "1", "n1"),
        "break": ("INFO", "1", None),
        "slurm_action": ("WARNING", "1", "n1"),
        "slurm_done": ("INFO", "1", "n1"),
        "parted": ("WARNING", "1", "n2"),
        "registration_refused": ("WARNING", "8", "n4"),
        "configured": ("INFO", None, None),
        "config_refused": ("ERROR", None, None),
    }
    seen = {kind: (line["level"], line.get("job"), line.get("node")) for kind, line in by_kind.items()}
    assert {kind: seen.get(kind) for kind in expected} == expected
    ids = {event.id: event.kind for event in [*world.log, *world.core.events]}
    for line in lines:
        assert ids[line["event"]] == line["text"].partition(":")[0]
        assert datetime.fromisoformat(line["time"]).tzinfo is not None


def test_each_event_that_matters_is_a_line_with_job_node_and_number(stream: TextIO, snapshot) -> None:
    tell(records.SlurmAction(action="down", element=-1, node="n3", reason="down n3: its lease"))
    tell(records.JobEnded(code=0), "8")
    tell(records.Timing(slot=0, seconds={}))
    tell(records.IsolationWithheld(node="n4", slots=[], reason="4 nodes are out already"), "")
    assert written(stream) == snapshot


def test_in_json_a_line_is_an_object(stream: io.StringIO) -> None:
    journal.start("unicrond", stream=stream, form="json")
    tell(records.SlurmAction(action="down", element=-1, node="n3", reason="its lease"))
    try:
        raise ValueError("x")
    except ValueError:
        log.exception("broken\nhere")
    told = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert datetime.fromisoformat(told[0].pop("time")).tzinfo is not None
    about = {"level": "WARNING", "program": "unicrond", "job": "7", "node": "n3", "event": 12}
    assert told[0] == about | {"text": "slurm_action: its lease"}
    assert told[1]["text"] == "broken here" and "ValueError: x" in told[1]["traceback"] and len(told) == 2
