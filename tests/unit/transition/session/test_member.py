"""What a rank tells of an error when it stops."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from unicron_detector.processes.rank_messages import Status
from unicron_transition.generations.layout import Layout
from unicron_transition.iteration.accumulation import PeerLost
from unicron_transition.seams.nccl import Aborter
from unicron_transition.session.member import Member

ABORTED = dist.DistBackendError("NCCL communicator was aborted on rank 0. ")


@pytest.fixture
def told():
    """The statuses that the rank has sent."""
    return []


@pytest.fixture
def member(told):
    process = SimpleNamespace(
        layout=Layout(),
        slot=0,
        watch=SimpleNamespace(give_up=lambda: None, broken=1),
        channel=SimpleNamespace(send=told.append),
        unblocker=SimpleNamespace(unblock=lambda inside: 0),
        aborter=Aborter(),
    )
    made = Member(process, ())
    made.report = lambda state: Status(state=state)
    return made


@pytest.mark.parametrize(
    ("error", "aborts", "text"),
    [
        (ABORTED, True, None),  # defect, seen on a card: survivors were taken for broken, and started again
        (ABORTED, False, "was aborted"),
        (RuntimeError("CUDA error: device-side assert triggered"), True, "CUDA error: device-side assert triggered"),
        (PeerLost("a member of the generation is gone"), False, None),
    ],
)
def test_a_fault_is_told_unless_a_peer_or_this_ranks_own_abort_explains_it(member, told, error, aborts, text):
    member.process.aborter.begun = aborts
    member.stop(error, lambda unblock: None, clean=False)
    assert told[-1].state == "stopped" and (told[-1].fault is None) == (text is None)
    assert text is None or (told[-1].fault.type == type(error).__name__ and text in told[-1].fault.text)
