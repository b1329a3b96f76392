"""Waits that gloo does not end are abandoned: for a connection of a group, and for a message after a cut."""

from __future__ import annotations

import threading

import pytest

from tests.support.texts import raises_text
from unicron_transition.seams import gloo
from unicron_transition.seams.gloo import abandonable_connections, run_until

GONE = ConnectionError("gone")


def test_results_and_errors_come_through():
    assert run_until(lambda: 42, lambda: False, GONE) == 42
    with pytest.raises(ZeroDivisionError):
        run_until(lambda: 1 / 0, lambda: False, GONE)


def test_what_hangs_is_left_as_soon_as_the_generation_is_lost():
    free, answers = threading.Event(), iter([False, False, True])
    with pytest.raises(ConnectionError, match="gone"):
        run_until(free.wait, lambda: next(answers), GONE)
    assert run_until(lambda: 43, lambda: False, GONE) == 43, "what came after does not wait for it"
    free.set()


def test_a_group_that_hangs_says_that_a_member_was_lost(monkeypatch, snapshot):
    from torch.distributed import distributed_c10d

    free = threading.Event()
    monkeypatch.setattr(distributed_c10d, "ProcessGroupGloo", free.wait)
    lost = raises_text(ConnectionError, snapshot)
    with lost, abandonable_connections(lambda: True):
        distributed_c10d.ProcessGroupGloo()
    free.set()


def test_one_thread_serves_all_that_do_not_hang():
    run_until(lambda: None, lambda: False, GONE)
    before = threading.active_count()
    names = {run_until(lambda: threading.current_thread().ident, lambda: False, GONE) for _ in range(20)}
    assert len(names) == 1 and threading.active_count() == before


def test_torch_gets_its_own_class_back():
    import torch
    from torch.distributed import distributed_c10d

    original = distributed_c10d.ProcessGroupGloo
    group = original(torch.distributed.HashStore(), 0, 1)
    with pytest.raises(KeyError), abandonable_connections(lambda: False):
        assert distributed_c10d.ProcessGroupGloo is not original
        made = distributed_c10d.ProcessGroupGloo(torch.distributed.HashStore(), 0, 1)
        assert type(made) is original and isinstance(group, distributed_c10d.ProcessGroupGloo)
        assert not isinstance(7, distributed_c10d.ProcessGroupGloo)
        raise KeyError
    assert distributed_c10d.ProcessGroupGloo is original


@pytest.mark.parametrize(
    ("looks", "over"),
    [
        ([(0.0, False), (9.0, False)], False),
        ([(0.0, True), (0.2, True)], False),
        ([(0.0, True), (0.31, True)], True),
        ([(0.0, True), (0.2, False), (0.4, True)], False),
        ([(5.0, False), (6.0, True), (6.4, True)], True),
    ],
)
def test_it_is_over_when_the_connections_have_been_cut_for_a_while(monkeypatch, looks, over):
    clock = iter([now for now, _ in looks])
    monkeypatch.setattr(gloo.time, "monotonic", lambda: next(clock))
    cuts = iter([cut for _, cut in looks])
    found = gloo._CutForAWhile(lambda: next(cuts))
    assert [found() for _ in looks][-1] == over
