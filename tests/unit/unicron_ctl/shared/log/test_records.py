"""Every kind of record: it is written, read again, folded and thinned; what cannot be read costs its own job only."""

from __future__ import annotations

import pickle
import types
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import inspect

from tests.support import hostile
from tests.support.depth import cases
from tests.support.world import MICRO_BATCHES, World
from unicron_ctl.controller.model.cluster_state import ClusterState
from unicron_ctl.controller.model.fold import Unfoldable, fold, replay
from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.records import KINDS, Event, Record
from unicron_ctl.shared.log.thinning import KEPT_FIRST, KEPT_LAST, redundant
from unicron_ctl.shared.protocol.structs import RankStep, Settings, StepReport
from unicron_ctl.shared.protocol.wire import Plan, Steps
from unicron_detector.failures import escalation_table

SLOTS = st.integers(0, 5)
TEXTS = st.text(max_size=8)
# Fields whose values come from a set, whatever their type says.
KNOWN: dict[tuple[str, str], st.SearchStrategy[Any]] = {
    ("FailureDetected", "severity"): st.integers(1, 3),
    ("ActionFailed", "severity"): st.integers(1, 3),
    ("ActionFailed", "state"): st.sampled_from([state.value for state in escalation_table.State]),
    ("EscalationFacts", "severity"): st.integers(1, 3),
    ("EscalationFacts", "state"): st.sampled_from([state.value for state in escalation_table.State]),
    ("EscalationFacts", "event"): st.sampled_from([event.value for event in escalation_table.Event]),
    ("FailureDetected", "slots"): st.lists(SLOTS, min_size=1, max_size=3),
    ("LostProcess", "slot"): SLOTS,
}
ALL_KINDS = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def some(kind: Any) -> st.SearchStrategy[Any]:
    """Values of an annotated type, as they can stand in a record."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return struct(kind)
    arguments = typing.get_args(kind)
    match typing.get_origin(kind):
        case typing.Annotated:  # a field of a message
            return hostile.inside(inspect.type_info(kind), {})
        case typing.Union | types.UnionType:
            return st.one_of([some(argument) for argument in arguments])
        case origin if origin is list:
            return st.lists(some(arguments[0]), max_size=3)
        case origin if origin is tuple:
            return st.tuples(*(some(argument) for argument in arguments))
        case origin if origin is dict:
            return st.dictionaries(some(arguments[0]), some(arguments[1]), max_size=3)
    simple: dict[Any, st.SearchStrategy[Any]] = {
        float: st.floats(allow_nan=False, allow_infinity=False),
        int: st.integers(-3, 99),
        str: TEXTS,
        bool: st.booleans(),
        type(None): st.none(),
    }
    return simple[kind]


def struct(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Any such struct."""
    if kind is records.Crew:  # as many incarnations as slots
        pairs = st.dictionaries(SLOTS, SLOTS, max_size=3)
        return st.builds(lambda agent, who: records.Crew(agent, list(who), list(who.values())), TEXTS, pairs)
    fields = msgspec.structs.fields(kind)
    known = {f.name: KNOWN[kind.__name__, f.name] for f in fields if (kind.__name__, f.name) in KNOWN}
    return st.builds(kind, **{f.name: some(f.type) for f in fields if f.name not in known}, **known)


def _states() -> list[ClusterState]:
    """Without the job, with it new, running, offering, breaking and over."""
    world = World()
    agents = world.start_job(nodes=3)
    running = len(world.log)
    world.iterate("1", 0)
    agents[2].die(2)
    agents[2].ready()
    world.run(0.5)
    assert world.job().phase == "offering"
    offering = len(world.log)
    breaking = [e.kind for e in world.log].index("break") + 1
    fresh = [Event(1, 1000.0, "1", 0, records.JobRegistered(settings=Settings(name="a", user="b")))]
    over = [*world.log, Event(len(world.log) + 1, 2000.0, "1", 3, records.JobEnded(code=0))]
    logs = [[], fresh, world.log[:running], world.log[:offering], world.log[:breaking], over]
    return [replay(log) for log in logs]


STATES = pickle.dumps(_states())


@ALL_KINDS
def test_every_kind_is_written_read_and_folded(kind: type[Record]) -> None:
    """Whatever state it comes upon; live and read again it leads to the same one."""

    @settings(max_examples=cases(20), deadline=None, suppress_health_check=list(HealthCheck))
    @given(struct(kind))
    def check(record: Record) -> None:
        again = records.decode(record.kind, records.encode(record))
        assert again == record and type(again) is kind
        assert set(Event(1, 0.0, "1", 0, record).as_dict()) >= set(record.__struct_fields__) - {"kind"}
        if kind is records.Unreadable:
            return
        for live, replayed in zip(pickle.loads(STATES), pickle.loads(STATES), strict=True):
            number = live.last_event + 1
            fold(live, Event(number, 3000.0, "1", 3, record))
            fold(replayed, Event(number, 3000.0, "1", 3, again))
            assert live == replayed and live.last_event == number

    check()


@ALL_KINDS
def test_every_kind_survives_thinning_but_the_middle_of_steps(kind: type[Record]) -> None:
    tag = str(kind.__struct_config__.tag)
    doomed = redundant((number, "1", tag) for number in range(100))
    assert doomed == (list(range(KEPT_FIRST, 100 - KEPT_LAST)) if kind is records.Step else [])


def test_every_kind_has_its_own_name_and_can_be_told_from_others() -> None:
    assert all(name == str(kind.__struct_config__.tag) for name, kind in KINDS.items())
    assert set(KINDS.values()) == set(Record.__subclasses__())


# ---------------------------------------------------------------- what cannot be read
def registered(number: int, job: str) -> Event:
    return Event(number, 1000.0, job, 0, records.JobRegistered(settings=Settings(name="a", user="b")))


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        ("invented_later", b'{"kind": "invented_later", "anything": 1}'),
        ("break", b'{"kind": "break", "number": "one", "lost": []}'),
        ("break", b'{"kind": "break"}'),
        ("step", b"\xff\xfe"),
        ("entered", b""),
    ],
)
def test_a_record_that_cannot_be_read_sets_its_job_aside_and_no_other(kind: str, payload: bytes) -> None:
    unreadable = records.decode(kind, payload)
    assert isinstance(unreadable, records.Unreadable) and unreadable.of == kind and kind in unreadable.reason
    with pytest.raises(Unfoldable):
        fold(replay([registered(1, "1")]), Event(2, 1000.0, "1", 0, unreadable))
    ended = records.JobEnded(code=3)
    state = replay(
        [registered(1, "1"), registered(2, "2"), Event(3, 1001.0, "1", 0, unreadable), Event(4, 1002.0, "2", 0, ended)]
    )
    assert "event 3" in state.jobs["1"].set_aside and kind in state.jobs["1"].set_aside
    assert not state.jobs["2"].set_aside and state.jobs["2"].ended is not None and state.last_event == 4


def test_a_record_that_does_not_fit_sets_its_job_aside() -> None:
    wrong = records.PlanMade(
        plan=Plan(generation=1, members=[0, 1], store="", prefix=""),
        crews=[records.Crew("a", [0, 1], [0])],
        reason="more slots than incarnations",
    )
    state = replay([registered(1, "1"), registered(2, "2"), Event(3, 1001.0, "1", 1, wrong)])
    assert state.jobs["1"].set_aside and not state.jobs["2"].set_aside


def test_a_loss_that_is_no_number_can_be_read_again() -> None:
    world = World()
    (agent,) = world.start_job(nodes=1)
    for iteration, loss in enumerate((float("nan"), float("inf"), 2.0)):
        rank = RankStep(0, list(range(MICRO_BATCHES)), 0.5, loss)
        reports = [StepReport(1, iteration, MICRO_BATCHES, world.now, [rank])]
        world.to_core(agent, Steps(job="1", element=0, agent=agent.agent, reports=reports))
        written = world.log[-1].record
        assert records.decode("step", records.encode(written)) == written
        assert world.job().loss == (loss if loss == 2.0 else None)
    world.check_replay()
