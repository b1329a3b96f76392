"""Tables of steps: they say what reports say, and are checked like them."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_ctl.shared.protocol import ranges, structs, wire

PHASES = st.one_of(st.just([]), st.lists(st.floats(0, 1e6), min_size=6, max_size=6))
BATCHES = st.lists(st.integers(0, 99), max_size=4)
RANKS = st.lists(
    st.builds(
        structs.RankStep,
        st.integers(0, 20),
        BATCHES,
        st.floats(ranges.LEAST_STEP, 1e6),
        st.one_of(st.none(), st.floats(allow_nan=False)),
        st.one_of(st.none(), BATCHES),
        PHASES,
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda rank: rank.slot,
)


def message(table: structs.StepTable) -> wire.Steps:
    return wire.Steps(job="1", element=0, agent="a", tables=[table])


@given(RANKS)
def test_a_table_says_what_the_report_says(ranks):
    ranks.sort(key=lambda rank: rank.slot)
    table = wire.decode(wire.encode(message(structs.step_table(2, 3, 100, 5.0, ranks, 7)))).tables[0]
    assert table.report() == structs.StepReport(2, 3, 100, 5.0, ranks, 7)
    half = {rank.slot for rank in ranks[::2]}
    assert table.only(half).rows() == ranks[::2]
    assert table.only(()).slots == []


@pytest.mark.parametrize(
    "field, value",
    [
        ("slots", [1, 0]),
        ("slots", [0, 0]),
        ("slots", [0]),
        ("slots", []),
        ("micro_batches", [[0]]),
        ("seconds", [0.5]),
        ("seconds", [0.5, math.nan]),
        ("seconds", [0.5, -1.0]),
        ("losses", []),
        ("losses", [1.0, 2.0, 3.0]),
        ("phases", b"1234567"),
        ("computed", {7: [0]}),
        ("total", -1),
    ],
)
def test_a_table_that_does_not_fit_is_refused(field, value):
    ranks = [structs.RankStep(slot, [slot], 0.5, 1.0 + slot) for slot in (0, 1)]
    plain = msgspec.to_builtins(message(structs.step_table(2, 3, 4, 5.0, ranks)))
    plain["tables"][0][field] = value
    with pytest.raises(wire.BadMessage):
        wire.decode(msgspec.msgpack.encode(plain))
