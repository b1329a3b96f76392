"""The limit of open files, and what is said when it is low."""

from __future__ import annotations

import resource

import pytest

from unicron_ctl.shared.system.descriptors import CONNECTIONS, MOST, OWN, raise_limit, shortage

INFINITE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "asked", "granted"),
    [
        (1024, 4096, (4096, 4096), 4096),
        (1024, 1 << 20, (MOST, 1 << 20), MOST),
        (1024, INFINITE, (MOST, INFINITE), MOST),
        (4096, 4096, None, 4096),
        (1 << 20, 1 << 20, None, 1 << 20),
        (INFINITE, INFINITE, None, MOST),
    ],
)
def test_as_many_as_the_system_grants(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, asked: tuple[int, int] | None, granted: int
) -> None:
    calls = []
    monkeypatch.setattr(resource, "getrlimit", lambda what: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: calls.append(limits))
    assert raise_limit() == granted
    assert calls == ([asked] if asked else [])


def test_a_refusal_leaves_the_limit_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(what: int, limits: tuple[int, int]) -> None:
        raise PermissionError

    monkeypatch.setattr(resource, "getrlimit", lambda what: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert raise_limit() == 1024


def test_too_few_are_one_line_that_says_what_to_do(snapshot) -> None:
    assert shortage(CONNECTIONS + OWN) == ""
    assert shortage(CONNECTIONS + OWN - 1) and [shortage(100), shortage(1024)] == snapshot
