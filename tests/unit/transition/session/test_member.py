"""A rank that stops reports an error, unless a peer explains it."""

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
def member():
    """A rank; its `process.sent` has the statuses that it has sent."""
    sent = []
    process = SimpleNamespace(
        layout=Layout(),
        slot=0,
        watch=SimpleNamespace(give_up=lambda: None, broken=1),
        channel=SimpleNamespace(send=sent.append),
        sent=sent,
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
def test_a_fault_is_reported_unless_a_peer_or_this_ranks_own_abort_explains_it(member, error, aborts, text):
    member.process.aborter.begun = aborts
    member.stop(error, lambda unblock: None, clean=False)
    (status,) = member.process.sent
    assert status.state == "stopped" and (status.fault is None) == (text is None)
    assert text is None or (status.fault.type == type(error).__name__ and text in status.fault.text)
