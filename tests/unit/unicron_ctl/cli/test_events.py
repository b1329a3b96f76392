"""`unicronctl events`: as many lines as were asked for, of those that are chosen, whatever the log holds besides."""

from __future__ import annotations

import json
import re
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from syrupy.assertion import SnapshotAssertion

from tests.support.world import FakeSlurm, World
from unicron_ctl.cli import event_groups, events
from unicron_ctl.controller.api import answers
from unicron_ctl.controller.model.asker import EVERYBODY
from unicron_ctl.shared.commands.times import SINCE, duration, moment, short
from unicron_ctl.shared.log import records
from unicron_ctl.shared.log import store as stores
from unicron_ctl.shared.log.records import Event
from unicron_ctl.shared.log.store import Store
from unicron_ctl.shared.protocol import wire
from unicron_ctl.shared.protocol.answer_schema import ASKED_TOO_MUCH
from unicron_ctl.shared.system import columns
from unicron_ctl.shared.system.errors import UserError

STEP = records.Step(
    iteration=1, loss=1.0, seconds=0.5, ranks=2, nodes=2, flops=1e9, train_iterations=9, micro_batches=8, computed=8
)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Behind each of 40 decisions are nine steps of the training; a node was lost, and came back, long ago."""
    store, world = Store(tmp_path / "events.sqlite"), World(FakeSlurm(3))
    world.slurm.submit("1", 1, user="ann", uid=1000)
    world.start_job(nodes=1)
    world.run(2.0)
    kinds = [records.WorldProved(reason="works"), *[STEP] * 9]
    happened = [Event(1 + n, 1000.0 + n, "1", 0, kinds[n % 10]) for n in range(400)]
    happened[10] = Event(11, 1010.0, "", 0, records.NodeLost(node="n2", element=1, reason="n2 is lost"))
    happened[20] = Event(21, 1020.0, "", 0, records.NodeResumed(node="n2", reason="n2 is back"))
    store.append(happened)
    world.core.state.last_event = 400

    def ask(question: dict[str, Any], address: str | None = None, timeout: float = 3.0) -> Any:
        arguments = dict(question)
        sent = wire.encode(wire.Ask(what=arguments.pop("kind"), args=arguments))
        heard = wire.decode(sent)
        try:
            return answers.answer(world.core, store, heard.what, heard.args, EVERYBODY)
        except answers.Unanswerable as error:
            raise UserError(str(error)) from None

    monkeypatch.setattr(events, "ask_controller", ask)
    return store


def shown(*words: str) -> list[str]:
    done = run(*words)
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()


def run(*words: str) -> Any:
    return CliRunner().invoke(events.command, list(words))


def ids(*words: str) -> list[int]:
    return [json.loads(line)["id"] for line in shown("--json", *words)]


def test_so_many_lines_as_were_asked_for(log: Store) -> None:
    assert len(shown("-n", "12")) == 12 and all(" steady job 1: works" in line for line in shown("-n", "12"))
    assert len(shown()) == 40
    assert len(shown("-n", "12", "--steps")) == 12 and " step" in shown("-n", "12", "--steps")[-1]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard output is one, of 80 columns."""
    for module in (events, columns):
        monkeypatch.setattr(module, "terminal_width", lambda: 80)


def storm(store: Store, nodes: int = 500) -> None:
    """One failure on so many nodes, within a second, and what was done about it, interleaved."""
    usual = {"kind_of_failure": "rank", "severity": 1, "cause": "ecc_error", "action": "isolate", "detected_by": "exit"}
    happened: list[Event] = []
    for n in range(nodes):
        about = {"element": n, "node": f"gpu{n + 1:03}"}
        kinds: list[records.Record] = [
            records.FailureDetected(slots=[n], reason="exited with 1: ecc_error", source="agent", **usual, **about),  # type: ignore[arg-type]
            records.FailureAction(failure=401 + 4 * n, text=f"move 1_{n} off gpu{n + 1:03}"),
            records.SlurmAction(action="drain", reason=f"drain gpu{n + 1:03} for job 1", **about),  # type: ignore[arg-type]
            records.Break(number=n, lost=[(n, "a", 0)], reason=f"slot {n} exited with 1"),
        ]
        happened += [Event(401 + 4 * n + k, 2000.0 + n / nodes, "1", 3, kind) for k, kind in enumerate(kinds)]
    store.append(happened)


def test_on_a_terminal_one_failure_of_500_nodes_is_one_line(
    log: Store, terminal: None, snapshot: SnapshotAssertion
) -> None:
    """Defect: it was 500, of which 100 were shown."""
    storm(log)
    lines = shown("-n", "5")
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines).replace("\n    ", " ").splitlines()
    assert len(text) == 5 and sum("gpu[001-500]" in line for line in text) == 3
    assert "\n".join(line.split(" ", 1)[1] for line in text) == snapshot
    assert text[1].split()[0] == moment(2000.0)
    assert len(ids("-n", "5")) == 5, "JSON stays event by event"


def test_on_a_pipe_nothing_is_folded(log: Store, snapshot: SnapshotAssertion) -> None:
    storm(log, 3)
    assert [line.split(" ", 1)[1] for line in shown("--kind", "break")] == snapshot


def test_what_is_not_equal_or_long_ago_is_a_line_of_its_own(snapshot: SnapshotAssertion) -> None:
    def event(time: float, **more: Any) -> dict[str, Any]:
        return {"id": 1, "time": time, "job": "7", "generation": 0, "kind": "node_lost", **more}

    found = [
        event(0.0, node="n1", reason="n1 is lost"),
        event(1.0, node="n2", reason="n2 is lost: slurmd is away"),
        event(2.0, node="n3", reason="n3 is lost"),
        event(11.0, node="n4", reason="n4 is lost"),
        event(12.0, node="n5", reason="n5 is lost", job="8"),
        event(13.0, kind="told", nodes=["n1", "n2", "n3"], reason="to n1, n2, n3"),
        event(14.0, kind="most_silent", nodes=3, silent=2),
    ]
    assert [event_groups.line_of(group).partition(" ")[2] for group in event_groups.together(found)] == snapshot


def test_a_line_about_several_ranks_says_which_be_it_of_one_event_or_of_several() -> None:
    alike = [
        {"kind": "failure_detected", "slots": [4, 5, 6, 7]},
        {"kind": "rank_start", "slot": 4, "others": [5, 6, 7]},
        {"kind": "exit_noted", "slot": 4, "others": [5, 6, 7]},
    ]
    apart = [
        {"kind": one["kind"], **({"slots": [slot]} if "slots" in one else {"slot": slot})}
        for one in alike
        for slot in range(4, 8)
    ]
    for found, times in ((alike, ""), (apart, " (4 times)")):
        events = [{"id": 1, "time": 0.0, "job": "7", "generation": 1, "reason": "ends", **one} for one in found]
        lines = [event_groups.line_of(group).partition(" ")[2] for group in event_groups.together(events)]
        assert lines == [f"{one['kind']} job 7 g1 of slots 4-7: ends{times}" for one in alike]


def test_a_line_begins_with_the_date_and_the_offset(log: Store) -> None:
    """Defect: a bare time: of which day was nowhere."""
    at = datetime.fromisoformat(shown("-n", "1")[0].split()[0])
    assert at.tzinfo is not None and at.timestamp() == 1390.0


OF_JOB = [number for number in range(1, 401) if number not in (11, 21)]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("-n 12", list(range(389, 401))),
        ("--after 100 -n 3", [101, 102, 103]),
        ("--kind node_lost,node-resumed", [11, 21]),
        ("--kind node_lost --kind node_resumed", [11, 21]),
        ("--kind node_lost --after 11", []),
        ("--node n[2-3]", [11, 21]),
        ("--node n3", []),
        ("--node n2 --kind node_resumed", [21]),
        ("--user ann -n 5000", OF_JOB),
        ("--partition main -n 5000", list(range(1, 401))),  # its nodes', too
    ],
)
def test_events_are_chosen_wherever_they_are(log: Store, words: str, found: list[int]) -> None:
    assert ids(*words.split()) == found


def test_lines_leave_out_steps_unless_they_are_chosen(log: Store) -> None:
    assert len(shown("--after", "391")) == 0 and len(shown("--after", "390")) == 1
    assert len(shown("--kind", "step", "-n", "7")) == 7


def test_since_a_time_and_how_many_more_there_are(log: Store, snapshot: SnapshotAssertion) -> None:
    assert ids("--since", moment(1350.0)) == list(range(351, 401))
    done = run("--since", moment(1350.0), "-n", "3", "--json")
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == [398, 399, 400]
    assert done.stderr == snapshot


def test_an_answer_that_is_cut_is_asked_on(log: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer costs the controller little, and together they are all."""
    whole = ids("-n", "5000"), ids("--node", "n2"), ids("--after", "7", "-n", "300"), ids("--kind", "steady")
    monkeypatch.setattr(stores, "TAIL_ROWS", 16)
    monkeypatch.setattr(stores, "TAIL_BYTES", 1500)
    assert whole == (ids("-n", "5000"), ids("--node", "n2"), ids("--after", "7", "-n", "300"), ids("--kind", "steady"))


def test_who_asks_too_much_waits_and_goes_on(log: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    ask, asked, slept = events.ask_controller, list[int](), list[float]()

    def busy(question: dict[str, Any], address: str | None = None) -> Any:
        asked.append(1)
        if len(asked) % 3:
            raise UserError(ASKED_TOO_MUCH)
        return ask(question, address)

    monkeypatch.setattr(events, "ask_controller", busy)
    monkeypatch.setattr(events.time, "sleep", slept.append)
    assert ids("-n", "2") == [399, 400] and slept == [1.0, 1.0]


def test_what_comes_later_is_followed_without_reading_the_log_again(
    log: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defect: with nothing found yet, the next question began at the end of the log, or at its beginning."""
    ask, asked = events.ask_controller, list[dict[str, Any]]()

    def noting(question: dict[str, Any], address: str | None = None) -> Any:
        asked.append(question)
        return ask(question, address)

    def sleep(seconds: float) -> None:
        if len(asked) > 2:
            raise KeyboardInterrupt
        if len(asked) == 1:
            log.append([Event(401, 2000.0, "", 0, records.NodeLost(node="n3", element=1, reason="n3 is lost"))])

    monkeypatch.setattr(events, "ask_controller", noting)
    monkeypatch.setattr(events.time, "sleep", sleep)
    done = run("-f", "--node", "n3")
    assert done.exit_code == 0 and [line.split()[1:3] for line in done.output.splitlines()] == [["node_lost:", "n3"]]
    assert [question.get("after", 0) for question in asked] == [0, 400, 401]


@pytest.mark.parametrize(
    "words",
    [
        *(("--kind", "nod_lost"), ("--user", "anne"), ("--user", "root"), ("--partition", "mian")),
        *(("--node", "n[1-9]"), ("--node", "n11"), ("--node", "n[1-")),
    ],
    ids=" ".join,
)
def test_a_wrong_value_is_one_line(log: Store, words: tuple[str, ...], snapshot: SnapshotAssertion) -> None:
    done = run(*words)
    assert isinstance(done.exception, UserError) and "\n" not in str(done.exception)
    assert str(done.exception) == snapshot


NOW = datetime(2026, 11, 27, 14, 0).astimezone()


@pytest.mark.parametrize(
    ("text", "seconds_ago"),
    [
        ("2h", 7200.0),
        ("1h30m", 5400.0),
        ("13:30", 1800.0),
        ("13:59:58", 2.0),
        ("15:00", 23 * 3600.0),
        ("2026-11-27", 14 * 3600.0),
        ("2026-11-27T13:00", 3600.0),
        ("2026-11-27 13:00:30", 3570.0),
    ],
)
def test_times_as_people_write_them(monkeypatch: pytest.MonkeyPatch, text: str, seconds_ago: float) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Clock:
            return cls.fromtimestamp(NOW.timestamp(), tz)

    monkeypatch.setattr("unicron_ctl.shared.commands.times.datetime", Clock)
    assert SINCE.convert(text, None, None) == NOW.timestamp() - seconds_ago


@pytest.mark.parametrize("text", ["2 hours", "yesterday", "25:00", "2026-13-01", "7", "2999-01-01"])
def test_a_time_that_is_none(text: str, snapshot: SnapshotAssertion) -> None:
    with pytest.raises(click.BadParameter) as refused:
        SINCE.convert(text, None, None)
    assert re.sub(r"(?<=00:00)[+-]\d\d:\d\d", "", refused.value.message) == snapshot, "in any time zone"


def test_how_times_are_written() -> None:
    now = time.time()
    assert datetime.fromisoformat(moment(now)).timestamp() == pytest.approx(now, abs=1e-3)
    assert short(NOW.timestamp(), NOW.timestamp()) == "11-27T14:00:00"
    assert short(NOW.timestamp(), NOW.timestamp() + 300 * 86400) == "2026-11-27T14:00"
    assert [duration(seconds) for seconds in (3.04, 90.0, 7500.0)] == ["3.0s", "1m30s", "2h05m"]


@pytest.mark.parametrize("without", [1, "x " * 21, "abcdefghij " * 21, "x" * 2001])
def test_wrong_kinds_are_refused(without: Any) -> None:
    """Defect: 21 long words took the controller hours."""
    with pytest.raises(answers.Unanswerable, match=r"events: .*without"):
        answers.answer(None, None, "events", {"without": without}, EVERYBODY)  # type: ignore[arg-type]
