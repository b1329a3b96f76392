"""The small collectives of an iteration, apart from those of gradients and activations.

A result counts only if the device is done with it and the generation still stands: an aborted NCCL collective returns
without raising and leaves partial data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unicron_detector.processes.rank_messages import Plan
from unicron_transition.generations.groups import Groups
from unicron_transition.generations.member_links import MOST_BYTES, MemberLinks
from unicron_transition.generations.meshes import WorldGroups
from unicron_transition.iteration.accumulation import PeerLost, Sum
from unicron_transition.iteration.rank_process import Process
from unicron_transition.seams import gloo, megatron_core

SENT_SECONDS = 10.0  # time of a living peer to take a message of an exchange that it has begun
SENT_TIME = timedelta(seconds=SENT_SECONDS)
FIRST_TAG = 1 << 20  # pipelines send with tag 0
MOST_NUMBERS = MOST_BYTES // 8  # of one message between members


@dataclass(frozen=True)
class CommitResult:
    """The result of a commit."""

    offer: Plan | None = None
    """The plan that all members hold."""
    first: bool = False
    """Some rank does not know the order of its gradients yet."""
    save: bool = False
    """Some rank wants a checkpoint of the state after this step."""
    busy: bool = False
    """Some rank's last checkpoint is still being written."""
    unsound: bool = False
    """Some rank has a loss or a gradient that is not finite: nobody steps."""
    told: tuple[float, ...] = ()
    """The maximum of each number that the members have told, UNKNOWN where none has; empty if a member is of a release
    that tells none."""


class Exchange:
    """The exchanges of one rank. They raise RuntimeError or PeerLost if a peer is gone."""

    def __init__(
        self,
        process: Process,
        links: Callable[[], MemberLinks | None] = lambda: None,
        groups: Groups | WorldGroups | None = None,
    ):
        self._process = process
        self._links = links  # returns those among all members of the present generation, if it has any
        self._groups = groups  # None if they are those that Megatron keeps
        self._sending: list[Any] = []  # sent by the last exchange; the next one ends after it has arrived
        self.tells: Callable[[], bool] = lambda: True
        """Whether all members are of a release that tells numbers in a commit, and can refuse it."""

    # ------------------------------------------------------------ groups
    @property
    def data_parallel(self) -> Any:
        """The ranks at this rank's place in all replicas; None for the whole world."""
        if self._process.layout.size == 1:
            return None
        if self._groups is None:
            return megatron_core.module("parallel_state").get_data_parallel_group(with_context_parallel=True)
        return self._groups.alike

    @property
    def replica(self) -> Any:
        """The ranks of this rank's replica."""
        if self._groups is None:
            return megatron_core.module("parallel_state").get_model_parallel_group()
        return self._groups.replica

    # ------------------------------------------------------------ sums and largest numbers
    def inside(self, numbers: Sequence[float]) -> list[float]:
        """Return the maximum of each number over the ranks of the replica."""
        return self._largest(torch.tensor(numbers, dtype=torch.float64), self.replica, inside=True).tolist()

    def sum_inside(self, number: float) -> float:
        """Return the sum of the numbers of the replica's ranks."""
        tensor = torch.tensor(number, dtype=torch.float64).to(self._process.device)
        if self._process.layout.size > 1:
            work = dist.all_reduce(tensor, group=self.replica, async_op=True)
            work.wait()
            self._check(work, inside=True)
        return float(tensor)

    def begin_sum(self, tensor: torch.Tensor) -> Sum:
        """Begin to sum a tensor in place over the ranks at this place in all replicas."""
        if dist.get_world_size(self.data_parallel) == 1:
            return Sum(tensor, None, lambda: None)
        work = dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self.data_parallel, async_op=True)
        return Sum(tensor, work, lambda: self._check(work))

    def from_last_stage(self, loss: float) -> float:
        """Return the loss, which only the last stage has computed."""
        if self._process.layout.pipeline == 1:
            return loss
        last = megatron_core.module("parallel_state").is_pipeline_last_stage(ignore_virtual=True)
        value, bad = self.inside([loss if last and math.isfinite(loss) else -math.inf, float(not math.isfinite(loss))])
        return math.nan if bad else value

    def commit(
        self,
        offer: Plan | None,
        first: bool,
        save: bool = False,
        busy: bool = False,
        unsound: bool = False,
        told: Sequence[float] = (),
    ) -> CommitResult:
        """Commit the step with all members; the arguments are this rank's own. told: as many numbers in all of them."""
        held, tells = float(offer.generation if offer else 0), self.tells()
        numbers = [held, -held, float(first), float(save), float(busy), *([float(unsound), *told] if tells else [])]
        most, least, *others = self.most(numbers)
        same = offer is not None and most == -least == held
        anybody = [number > 0 for number in others[: 3 + tells]]
        if same and not any(anybody[3:]):
            self.wait_until_sent()  # the groups end with this iteration
        first, save, busy, unsound = [*anybody, False][:4]
        return CommitResult(offer if same else None, first, save, busy, unsound, tuple(others[4:]))

    def furthest(self, state: tuple[int, int]) -> tuple[int, int]:
        """Return the (base, version) of the members; a newcomer has none, or an older one."""
        base, version = state
        newest = self.largest(version)
        return self.largest(base if version == newest else -1), newest

    def largest(self, number: int) -> int:
        """Return the maximum of a number over all members."""
        return int(self._largest(torch.tensor([number], dtype=torch.int64), None))

    def most(self, numbers: Sequence[float]) -> list[float]:
        """Return the maximum of each number over all members, in messages that each fit into the buffers of a
        connection; whole numbers up to 2^53 are exact."""
        parts = torch.tensor(numbers, dtype=torch.float64).split(MOST_NUMBERS)
        return [number for part in parts for number in self._largest(part, None).tolist()]

    def all_there(self) -> None:
        """Wait until all members have come here."""
        self._largest(torch.zeros(1), None)

    def wait_until_sent(self) -> None:
        """Wait until the peers have taken what the last exchange sent, before their connections end. gloo sends only
        what its receiver asks for, and a slow one asks after this rank has the result. Raises RuntimeError if a peer is
        gone, or takes nothing for SENT_SECONDS."""
        for _, work in self._sending:
            work.wait(SENT_TIME)
        self._sending.clear()

    def _largest(self, tensor: torch.Tensor, group: Any, inside: bool = False) -> torch.Tensor:
        if dist.get_world_size(group) == 1:
            return tensor
        if self._process.backend == "gloo":
            links = self._links() if group is None else None
            if links is not None:
                largest, self._sending = largest_of_all(tensor, group, links)
            else:
                largest, self._sending = gloo.exchange(lambda: largest_of_all(tensor, group))
            self._check(None, inside)
            return largest
        sent = tensor.to(self._process.device)
        work = dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=group, async_op=True)
        work.wait()
        largest = sent.cpu()  # waits for the device
        self._check(work, inside)
        return largest

    def _check(self, work: Any, inside: bool = False) -> None:
        """Raise PeerLost if the result of a collective may be garbage: NCCL raises nothing when one fails."""
        asks = self._process.backend == "nccl" and work is not None
        if asks and work.is_completed() and _has_error(work):
            raise PeerLost("the exchange failed: its communicator reports an error")
        if self._process.channel is not None and self._process.watch.disturbed(inside):
            raise PeerLost("the generation ended during an exchange of its members")

    def tie_embeddings(self, model: Sequence[Any]) -> bool:
        """Give the last stage the first stage's embedding if they share it. Returns whether this rank's has changed."""
        if self._process.layout.pipeline == 1:
            return False
        parallel_state = megatron_core.module("parallel_state")
        group = parallel_state.get_embedding_group(check_initialized=False)
        if group is None or dist.get_world_size(group) == 1 or dist.get_rank(group) < 0:
            return False
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        module = model[-1 if last else 0].module
        while hasattr(module, "module"):
            module = module.module
        # with layers of multi-token prediction the last stage also embeds tokens
        further = getattr(getattr(module, "config", None), "mtp_num_layers", None)
        if not getattr(module, "share_embeddings_and_output_weights", False) and not further:
            return False
        weight = module.shared_embedding_or_output_weight().data
        before = weight.clone() if last else weight
        dist.broadcast(weight, group=group, group_src=0)
        return last and not torch.equal(before, weight)


def _has_error(work: Any) -> bool:
    """Whether a finished collective reports an error. In torch 2.11 `exception` raises TypeError for any error; but
    only this process aborts its communicators, and then its generation is lost anyway."""
    try:
        return work.exception() is not None
    except TypeError:
        return False


def largest_of_all(
    tensor: torch.Tensor, group: Any, links: MemberLinks | None = None
) -> tuple[torch.Tensor, list[Any]]:
    """Return the maximum of each number over the ranks of a gloo group, or over all members by their links, after all
    of them have come here; and what was sent for it, which must be kept until the next such exchange is over.

    Each rank sends what it knows to the ranks 1, 2, 4, ... places further, so a thousand ranks need ten messages in a
    row. gloo's all-reduce goes round a ring twice: for four ranks on two cores it took 3.9 ms, and this 1.3 ms.
    """
    if links is not None:
        return links.largest(tensor), []
    group = dist.group.WORLD if group is None else group
    rank, size = group.rank(), group.size()
    largest, sending, step = tensor, [], 1
    while step < size:  # by the group's own methods: torch's functions add more time than the message takes
        received, tag = torch.empty_like(largest), FIRST_TAG + step
        sending.append((largest, group.send([largest], (rank + step) % size, tag)))
        group.recv([received], (rank - step) % size, tag).wait()
        largest, step = torch.maximum(largest, received), 2 * step
    return largest, sending


def at_commit(optimizer: Any, commit: Callable[[], None]) -> None:
    """Have `optimizer.step()` call `commit` after its last communication, right before the parameters change: in
    Megatron's `step_with_ready_grads`, otherwise before the step. A step that was skipped does not call it."""
    name = "step_with_ready_grads" if hasattr(optimizer, "step_with_ready_grads") else "step"
    original = getattr(optimizer, name)

    def commit_first(*arguments: Any, **keywords: Any) -> Any:
        commit()
        return original(*arguments, **keywords)

    setattr(optimizer, name, commit_first)
