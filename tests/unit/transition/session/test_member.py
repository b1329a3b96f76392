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


def stop(member: Member, error: Exception) -> None:
    member.stop(error, lambda unblock: None, clean=False)


def test_what_its_own_abort_makes_a_collective_say_is_no_fault(member, told):
    """Defect, seen on a card: the survivors of a loss were taken for broken, and started again."""
    member.process.aborter.begun = True
    stop(member, ABORTED)
    assert told[-1].state == "stopped" and told[-1].fault is None


def test_the_same_words_without_an_abort_are_told(member, told):
    stop(member, ABORTED)
    assert told[-1].fault.type == "DistBackendError" and "was aborted" in told[-1].fault.text


def test_an_error_of_another_kind_is_told_whatever_was_aborted(member, told):
    member.process.aborter.begun = True
    stop(member, RuntimeError("CUDA error: device-side assert triggered"))
    assert told[-1].fault.text == "CUDA error: device-side assert triggered"


def test_a_lost_peer_is_no_fault(member, told):
    stop(member, PeerLost("a member of the generation is gone"))
    assert told[-1].fault is None
