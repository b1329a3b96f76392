"""Rank and agent mean the same by their messages, which agree with those of the controller; what does not fit is
refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgpack
import msgspec
import pytest

from unicron_ctl.agent.connections.rank_socket import for_rank, from_rank
from unicron_ctl.agent.ranks.ranks import AGENTS_OWN
from unicron_ctl.shared.protocol import structs, wire
from unicron_detector.formats import RANKS
from unicron_detector.processes import rank_messages
from unicron_detector.processes.rank_messages import (
    FROM_RANK,
    TO_RANK,
    CollectiveProgress,
    Fault,
    Plan,
    Status,
    Step,
    Timing,
)

OF_THE_CONTROLLER = {kind: each for each in wire.Message.__subclasses__() if (kind := each.__struct_config__.tag)}
STEP = Step(1, 3, [0, 2], [0, 2, 2], 4, 0.5, 2.5, 1000.0, {"data": 0.1}, Status("running", done=[0, 2]))


AGENTS_MESSAGES = [rank_messages.Save(), rank_messages.SavedCheckpoint(7)]


@pytest.mark.parametrize("kind", sorted(TO_RANK.keys() - {each.kind for each in AGENTS_MESSAGES}))
def test_what_a_rank_is_told_has_the_names_and_defaults_of_the_controllers_message(kind):
    """A default that differs would be another message: what has its default is not sent."""
    theirs = {each.name: each for each in msgspec.structs.fields(OF_THE_CONTROLLER[kind])}
    for each in dataclasses.fields(TO_RANK[kind]):
        other = theirs[each.name]
        mine = each.default_factory() if each.default_factory is not dataclasses.MISSING else each.default
        default = other.default_factory() if other.default_factory is not msgspec.NODEFAULT else other.default
        missing = mine is dataclasses.MISSING
        assert missing == (default is msgspec.NODEFAULT) and (missing or mine == default), each.name


def test_a_plan_has_all_that_the_controllers_plan_has():
    assert {each.name for each in dataclasses.fields(Plan)} == set(wire.Plan.__struct_fields__) - {"v", "term"}


def test_a_plan_arrives_as_it_was_sent():
    sent = wire.Plan(generation=3, members=[0, 2], store="h:1", prefix="p", assignment={2: [0], 0: [1, 2]}, source=0)
    arrived = rank_messages.decode(for_rank(sent))
    assert arrived == Plan(3, [0, 2], "h:1", "p", assignment={2: [0], 0: [1, 2]}, source=0)


@pytest.mark.parametrize("sent", AGENTS_MESSAGES)
def test_what_the_agent_itself_tells_a_rank_arrives_as_it_was_sent(sent):
    assert rank_messages.decode(for_rank(sent)) == sent and sent.kind not in OF_THE_CONTROLLER


def test_a_status_says_what_is_the_ranks_to_say():
    assert {each.name for each in dataclasses.fields(Status)} == set(structs.RankStatus.__struct_fields__) - set(
        AGENTS_OWN
    )


@pytest.mark.parametrize(
    "said",
    [
        STEP,
        CollectiveProgress(7),
        CollectiveProgress(0, {"mesh.1.0.1": (9, 8, "gloo:all_gather")}),
        Timing(3, 9.0, {"stepped": 1.5}),
        Fault("OSError", "no", 5.0, "", "", 3, 1),
    ],
)
def test_what_a_rank_says_arrives_as_it_was_said(said):
    head, arrived = from_rank(rank_messages.encode(said, 5, 2))
    assert (head.slot, head.incarnation, arrived) == (5, 2, said)
    assert type(arrived) is FROM_RANK[said.kind]


@pytest.mark.parametrize(
    "more",
    [
        {"loss": {}},
        {"slot": None},
        {"computed": None},
        {"phases": [1.0]},
        {"iteration": "3"},
        {"micro_batches": [[]]},
        {"status": {}},
        {"status": {"state": "running", "fault": "yes"}},
        {"kind": "plan"},
        {"kind": []},
    ],
)
def test_a_message_of_a_rank_that_does_not_fit_is_refused(more):
    fields = msgpack.unpackb(rank_messages.encode(STEP, 0, 0)) | more
    with pytest.raises(msgspec.ValidationError):
        from_rank(msgpack.packb(fields))


@pytest.mark.parametrize("data", [b"", b"\xc1", msgpack.packb([1]), msgpack.packb({"kind": "rank"})])
def test_bytes_that_are_no_message_are_refused(data):
    with pytest.raises(msgspec.MsgspecError):
        from_rank(data)


def test_a_rank_passes_over_what_is_not_for_it():
    assert rank_messages.decode(for_rank(wire.Welcome(heartbeat_period=1.0, controller="c"))) is None
    assert rank_messages.decode(msgpack.packb({"kind": "save", "v": 99})) is None
    with pytest.raises(TypeError):
        rank_messages.decode(msgpack.packb({"kind": "plan", "v": RANKS.number}))


def test_what_is_part_of_no_message_is_not_sent():
    with pytest.raises(TypeError, match="PosixPath"):
        rank_messages.encode(Timing(1, 0.0, {"where": Path("/")}), 0, 0)
