"""Host lists as Slurm reads and writes them."""

from __future__ import annotations

import random

import pytest

from unicron_ctl.shared.slurm.host_lists import fold, hosts, natural


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("n[1-3,07-08],m", ["n1", "n2", "n3", "n07", "n08", "m"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("n[0-999999999]", []),
        ("n[0-65535][0-1]", []),
        ("n" + "[0-65535]" * 1000, []),
        ("n[" + "0-65535," * 1000 + "1]", []),
        ("n[0-1]" + ",m[0-65535]", []),
        ("n" + "[0-1]" * 17, []),
        ("n[0-65535],m", []),
        ("n[" + "9" * 5000 + "]", []),
        ("n[" + "0" * 4000 + "1-65535]", []),
        ("n" * 16000 + "[0-65535]", []),
        ("[1]" * 5000 + "[0-65535]", []),
        ("n[3-1],m", []),
        ("n[],m", []),
        ("n[a-b]", []),
    ],
)
def test_host_lists(text: str, names: list[str]) -> None:
    assert hosts(text) == names


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["n1"], "n1"),
        (["gpu004", "gpu001", "gpu002", "gpu003", "gpu007"], "gpu[001-004,007]"),
        (["n9", "n10", "n11", "m"], "m,n[9-11]"),
        (["n099", "n100"], "n[099-100]"),
        (["n1", "n2", "n07", "n08"], "n[1-2,07-08]"),
        (["r1n1", "r1n2", "r2n1"], "r1n[1-2],r2n1"),
        (["n1-ib", "n2-ib", "n2"], "n2,n[1-2]-ib"),
        (["a", "a", "b"], "a,b"),
    ],
)
def test_names_are_folded(names: list[str], text: str) -> None:
    assert fold(names) == text


def test_what_is_folded_is_read_again() -> None:
    chance = random.Random(4)
    for _ in range(300):
        names = {f"{chance.choice('ab')}{chance.randrange(14):0{chance.choice((1, 2, 3))}}" for _ in range(20)}
        names |= {f"r{chance.randrange(3)}-{chance.randrange(120):03}" for _ in range(20)} | {"head"}
        assert sorted(hosts(fold(names))) == sorted(names)


def test_the_natural_order() -> None:
    assert sorted(["n10", "n2", "m", "n2-1"], key=natural) == ["m", "n2", "n2-1", "n10"]
