"""The result of a collective counts only while the generation stands and its communicator reports no error."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from unicron_transition.iteration.exchange import Exchange
from unicron_transition.megatron.gradients import PeerLost


@pytest.fixture
def exchange(monkeypatch):
    """An exchange over a stand-in for NCCL: `state.error` is the communicator's, `state.over` the generation's."""
    state = SimpleNamespace(error=None, over=False, waited=0)

    def all_reduce(tensor, op, group, async_op):
        assert async_op

        def wait():
            state.waited += 1

        return SimpleNamespace(wait=wait, is_completed=lambda: True, exception=lambda: state.error)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    watch = SimpleNamespace(disturbed=lambda inside: state.over)
    process = SimpleNamespace(backend="nccl", device=torch.device("cpu"), channel=object(), watch=watch)
    return Exchange(process), state


def test_the_result_of_a_sound_communicator_counts(exchange):
    made, state = exchange
    assert made.commit(None, False).offer is None and state.waited == 1


@pytest.mark.parametrize(
    ("error", "over", "message"),
    [(RuntimeError("remote process has exited"), False, "communicator reports an error"), (None, True, "ended")],
)
def test_an_error_of_the_communicator_or_an_ended_generation_is_a_lost_peer(exchange, error, over, message):
    """NCCL's collectives return without raising."""
    made, state = exchange
    state.error, state.over = error, over
    with pytest.raises(PeerLost, match=message):
        made.all_there()
