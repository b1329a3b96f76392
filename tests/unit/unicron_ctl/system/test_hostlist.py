"""Node names in Slurm's notation."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron.ctl.slurm.squeue import hosts
from unicron.ctl.system.hostlist import fold


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["n1"], "n1"),
        (["n3", "n1", "n2", "n7"], "n[1-3,7]"),
        (["n08", "n09", "n10", "n11"], "n[08-11]"),
        (["n01", "n1", "n2"], "n01,n[1-2]"),
        (["login", "a-1", "a-2", "b1x"], "a-[1-2],b1x,login"),
        (["n10", "n9"], "n[9-10]"),
        (["n1", "n1"], "n1"),
    ],
)
def test_numbers_are_folded(names: list[str], text: str) -> None:
    assert fold(names) == text


NAMES = st.builds("{}{}".format, st.sampled_from(["n", "gpu", "a-"]), st.text("0129", max_size=3))


@settings(max_examples=50)
@given(st.lists(NAMES, max_size=12))
def test_nothing_is_lost_and_nothing_is_added(names: list[str]) -> None:
    assert sorted(hosts(fold(names))) == sorted(set(names))
