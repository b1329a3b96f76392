"""Every field of every message has a range, and what is beyond it is refused with its name."""

from __future__ import annotations

import typing

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import inspect

from tests.support import hostile
from tests.support.depth import cases
from unicron_ctl.shared.protocol import datagrams, ranges, shared_plans, structs, wire
from unicron_detector.formats import HINT, PROTOCOL

ANY_NUMBER = {"RankStatus.loss", "RankStep.loss", "StepTable.losses"}  # of a training that diverges it is none
ANYTHING = {"Answer.data", "PlanShare.common"}  # what the controller says; a plan's part has a type of its own
KNOWN = {"job": st.just("7"), "element": st.just(1), "slot": st.just(1)}
UNIONS = {"controller": wire.ToController, "agent": wire.ToAgent}
SIDE = {kind: side for side, union in UNIONS.items() for kind in typing.get_args(union)}
ALL = [*SIDE, wire.Answer, datagrams.Hint, shared_plans.PlanCommon, datagrams.Hello, datagrams.Introduction]


def unbounded(kind: inspect.Type, name: str, seen: set[type]) -> list[str]:
    """Fields without a range or a length."""
    match kind:
        case inspect.StructType():
            if kind.cls in seen:
                return []
            seen.add(kind.cls)
            names = [(f"{kind.cls.__name__}.{field.name}", field.type) for field in kind.fields]
            return [found for inner, field in names for found in unbounded(field, inner, seen)]
        case inspect.UnionType():
            parts = [one for one in kind.types if not isinstance(one, inspect.NoneType)]
            if name.startswith("Ask.args"):  # the question looks at its arguments itself
                parts = [one for one in parts if not isinstance(one, inspect.FloatType)]
            return [found for one in parts for found in unbounded(one, name, seen)]
        case inspect.IntType() | inspect.FloatType():
            low, high = kind.ge is not None or kind.gt is not None, kind.le is not None or kind.lt is not None
            return [] if (low and high) or name in ANY_NUMBER else [name]
        case inspect.StrType() | inspect.BytesType():
            return [] if kind.max_length is not None or getattr(kind, "pattern", None) is not None else [name]
        case inspect.LiteralType():
            return []
        case inspect.ListType():
            own = [] if kind.max_length is not None else [name]
            return own + unbounded(kind.item_type, name, seen)
        case inspect.DictType():
            own = [] if kind.max_length is not None else [name]
            return own + unbounded(kind.key_type, name, seen) + unbounded(kind.value_type, name, seen)
        case inspect.TupleType():
            return [found for one in kind.item_types for found in unbounded(one, name, seen)]
        case inspect.BoolType():
            return []
    return [] if name in ANYTHING else [name]


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_field_has_a_range(kind):
    assert unbounded(inspect.type_info(kind), kind.__name__, set()) == []


@pytest.mark.parametrize("kind", [*SIDE, datagrams.Hint], ids=lambda kind: kind.__name__)
def test_what_is_at_the_ends_of_the_ranges_is_taken_and_what_is_beyond_refused(kind):
    info = inspect.type_info(kind)
    decoder = UNIONS.get(SIDE.get(kind, ""), kind)
    form = HINT if kind is datagrams.Hint else PROTOCOL

    @settings(max_examples=cases(15), deadline=None, suppress_health_check=list(HealthCheck))
    @given(hostile.inside(info, KNOWN).map(msgspec.msgpack.encode))
    def taken(data):
        try:
            wire.decode(data, decoder, form)
        except wire.BadMessage as error:
            assert "each slot" in str(error), error

    @settings(max_examples=cases(60), deadline=None, suppress_health_check=list(HealthCheck))
    @given(hostile.beyond(info, KNOWN))
    def refused(beyond):
        path, data = beyond
        with pytest.raises(wire.BadMessage):
            wire.decode(data, decoder, form)
            pytest.fail(f"{kind.__name__}{path} takes what is beyond its range")

    taken()
    refused()


HARMFUL = [  # each ended the first release's controller, or made it drop a job
    (structs.Settings(name="x", user="ann", weight=1e308), "weight"),
    (structs.Settings(name="x", user="ann", weight=float("nan")), "weight"),
    (structs.Settings(name="x", user="ann", weight=-1.0), "weight"),
    (structs.Settings(name="x", user="ann", min_nodes=-1), "min_nodes"),
    (structs.Settings(name="x", user="ann", ranks_per_node=10**13), "ranks_per_node"),
]


@pytest.mark.parametrize("given_, field", HARMFUL, ids=lambda value: getattr(value, "name", str(value)))
def test_settings_that_ended_the_controller_are_refused_by_name(given_, field):
    first = {"job": "7", "element": 0, "agent": "a", "node": "n", "address": "n", "slots": [0]}
    data = msgspec.msgpack.encode({"kind": "register", "v": wire.VERSION, **first, "settings": given_})
    with pytest.raises(wire.BadMessage, match=rf"\$\.settings\.{field}"):
        wire.decode(data)


@pytest.mark.parametrize(
    "message",
    [
        wire.Timing(job="7", slot=0, generation=2**63, at=1.0, seconds={}),
        wire.Status(
            job="7", element=0, agent="a", sent=1.0, ranks={0: structs.RankStatus(state="running", micro_batches=2**60)}
        ),
        wire.Status(
            job="7",
            element=0,
            agent="a",
            sent=1.0,
            ranks={0: structs.RankStatus(state="running", flops_per_iteration=float("inf"))},
        ),
        wire.Steps(job="7", element=0, agent="a", reports=[structs.StepReport(1, 1, total=10**12, at=1.0, ranks=[])]),
        wire.Status(job="7", element=0, agent="a", sent=1e300),
    ],
    ids=["generation", "micro-batches", "FLOP", "total", "sent"],
)
def test_messages_that_ended_the_controller_are_refused(message):
    with pytest.raises(wire.BadMessage, match=r"Expected `(int|float)` <="):
        wire.decode(wire.encode(message))


def test_a_hint_with_an_impossible_status_is_refused():
    hint = datagrams.Hint(v=1, kind="task_exit", job="7", element=0, node="n", status=2**40)
    with pytest.raises(wire.BadMessage):
        datagrams.hint(wire.encode(hint))


@pytest.mark.parametrize("slots", [[2], [2, 2], [0, 1], [3, 2], [2, 3, 4]])
def test_a_registration_has_the_slots_of_its_element(slots):
    given_ = {"name": "x", "user": "ann", "ranks_per_node": 2}
    first = {"job": "7", "element": 1, "agent": "a", "node": "n", "address": "n", "slots": slots}
    data = msgspec.msgpack.encode({"kind": "register", "v": wire.VERSION, **first, "settings": given_})
    with pytest.raises(wire.BadMessage, match="slots 2 to 3"):
        wire.decode(data)


def test_the_agent_refuses_periods_that_make_no_sense():
    for period in (0.0, 1e-9, float("nan"), 1e9):
        with pytest.raises(wire.BadMessage):
            wire.decode(wire.encode(wire.Welcome(heartbeat_period=period, controller="x")), wire.ToAgent)
    assert wire.decode(
        wire.encode(wire.Welcome(heartbeat_period=ranges.LEAST_BEAT, controller="x")), wire.ToAgent
    ).heartbeat_period == pytest.approx(0.01)
