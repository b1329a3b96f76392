"""A group that cannot be connected any more is left behind."""

from __future__ import annotations

import threading

import pytest

from transition.connecting import interruptible, run_until


def test_results_and_errors_come_through():
    assert run_until(lambda: 42, lambda: False) == 42
    with pytest.raises(ZeroDivisionError):
        run_until(lambda: 1 / 0, lambda: False)


def test_what_hangs_is_left_as_soon_as_the_generation_is_lost():
    free, answers = threading.Event(), iter([False, False, True])
    with pytest.raises(ConnectionError, match="lost while the groups were connected"):
        run_until(free.wait, lambda: next(answers))
    free.set()


def test_torch_gets_its_own_class_back():
    import torch
    from torch.distributed import distributed_c10d

    original = distributed_c10d.ProcessGroupGloo
    group = original(torch.distributed.HashStore(), 0, 1)
    with pytest.raises(KeyError), interruptible(lambda: False):
        assert distributed_c10d.ProcessGroupGloo is not original
        made = distributed_c10d.ProcessGroupGloo(torch.distributed.HashStore(), 0, 1)
        assert type(made) is original and isinstance(group, distributed_c10d.ProcessGroupGloo)
        assert not isinstance(7, distributed_c10d.ProcessGroupGloo)
        raise KeyError
    assert distributed_c10d.ProcessGroupGloo is original
