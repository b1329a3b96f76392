"""Sends tensors from rank to rank, in pieces, through memory that the backend can send, with checksums that show
damage. The caller decides who sends again."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from unicron_transition.seams.modules import copy_all
from unicron_transition.snapshot.image_format import digest

PIECE = 1 << 26  # bytes that are sent at a time, so that a large tensor on a slow link shows progress
CHUNK = 1 << 18  # 64-bit words that are summed at a time, so that their weights stay in the cache


# ------------------------------------------------------------ from one rank to all
def broadcast(
    tensors: Sequence[torch.Tensor],
    source: int,
    device: torch.device,
    group: Any,
    receives: bool,
    moved: Callable[[int], None] = lambda size: None,
    spoil: bool = False,
) -> None:
    """Collective over `group` (or the world): its rank `source` sends the tensors to all. A member that neither sends
    nor receives gets them into spare memory. device: of the backend's messages. moved(size): called after each message.
    spoil: an injected fault of the sender."""
    sends = dist.get_rank(group) == source
    flat = [raw_bytes(tensor) for tensor in tensors]
    for message in _messages(flat):
        with _on_wire(message, device, sends, receives) as wire:
            dist.broadcast(_spoil(wire) if spoil else wire, group=group, group_src=source)
            moved(wire.numel())
    for tensor, raw in zip(tensors, flat, strict=True):
        if receives and raw.data_ptr() != tensor.data_ptr():
            tensor.copy_(raw.view(tensor.dtype).view(tensor.shape))


def broadcast_bytes(
    data: bytes | None, source: int, device: torch.device, group: dist.ProcessGroup | None = None
) -> tuple[bytes, bool]:
    """Return the bytes of rank `source` of the group (or world), and whether they arrived undamaged."""
    mine = as_tensor(data or b"")
    front = torch.cat([torch.tensor([len(mine)]), checksum(mine)]).to(device)
    dist.broadcast(front, group=group, group_src=source)
    size, *wanted = front.tolist()
    wire = torch.empty(size, dtype=torch.uint8, device=device)
    if data:
        wire.copy_(mine)
    dist.broadcast(wire, group=group, group_src=source)
    received = wire.cpu()
    return received.numpy().tobytes(), checksum(received).tolist() == wanted


# ------------------------------------------------------------ between pairs of ranks
def send(
    outgoing: Mapping[int, Sequence[torch.Tensor]],
    incoming: Mapping[int, Sequence[torch.Tensor]],
    device: torch.device,
    group: Any = None,
    check: Callable[[], None] = lambda: None,
    spoil: bool = False,
) -> None:
    """Send flat tensors of one dtype to some ranks of the group, and receive others. Both sides of a pair cut the same
    stream into the same messages, so the rounds of all ranks match. check(): called before a round's data are trusted.
    device, spoil: as for :func:`broadcast`."""
    ends = [(dist.isend, *each) for each in outgoing.items()] + [(dist.irecv, *each) for each in incoming.items()]
    for messages in zip_longest(*(_messages(tensors) for _, _, tensors in ends)):
        with contextlib.ExitStack() as staged:
            operations = []
            for (kind, rank, _), message in zip(ends, messages, strict=True):
                if message is None:
                    continue
                sends = kind is dist.isend
                wire = staged.enter_context(_on_wire(message, device, sends, not sends))
                if spoil and sends:
                    wire, spoil = _spoil(wire), False
                operations.append(dist.P2POp(kind, wire, group=group, group_peer=rank))
            for work in dist.batch_isend_irecv(operations):
                work.wait()  # a connection that is shut down ends it, with an error
            check()


def send_checked(
    outgoing: Mapping[int, Sequence[torch.Tensor]],
    incoming: Mapping[int, Sequence[torch.Tensor]],
    device: torch.device,
    group: Any = None,
    check: Callable[[], None] = lambda: None,
    spoil: bool = False,
) -> list[int]:
    """Do the same as :func:`send`, and return the ranks whose data arrived damaged."""
    send(outgoing, incoming, device, group, check, spoil)
    sums = {rank: [checksum(*tensors)] for rank, tensors in outgoing.items()}
    theirs = {rank: [torch.zeros(2, dtype=torch.int64)] for rank in incoming}
    send(sums, theirs, device, group, check)
    return [rank for rank, tensors in incoming.items() if not torch.equal(checksum(*tensors), theirs[rank][0])]


def gather(number: int, device: torch.device, group: Any = None) -> list[int]:
    """Collective: return the numbers of all ranks of the group."""
    numbers = torch.zeros(dist.get_world_size(group), dtype=torch.int64)
    numbers[dist.get_rank(group)] = number
    numbers = numbers.to(device)
    dist.all_reduce(numbers, group=group)
    return numbers.tolist()


# ------------------------------------------------------------ what goes over the wire
def as_tensor(data: bytes) -> torch.Tensor:
    """Return the bytes as a tensor on the CPU, shape (len(data),), uint8."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, flat: a view if it is contiguous, otherwise a copy."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _messages(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Cut the flat tensors into messages of at most PIECE bytes, in order."""
    message: list[torch.Tensor] = []
    left = PIECE
    for tensor in tensors:
        while tensor.numel():
            count = left // tensor.itemsize
            part, tensor = tensor[:count], tensor[count:]
            message.append(part)
            left -= part.nbytes
            if not left:
                yield message
                message, left = [], PIECE
    if message:
        yield message


@contextlib.contextmanager
def _on_wire(message: list[torch.Tensor], device: torch.device, sends: bool, receives: bool) -> Iterator[torch.Tensor]:
    """Give a flat tensor on `device` for a message: filled before, if this rank sends, and copied out afterwards, if it
    receives."""
    wire = message[0]
    if (sends or receives) and len(message) == 1 and wire.device.type == device.type:
        yield wire
        return
    wire = torch.empty(sum(map(torch.numel, message)), dtype=wire.dtype, device=device)
    parts = list(wire.split([part.numel() for part in message]))
    if sends:
        copy_all(parts, message)
    yield wire
    if receives:
        copy_all(message, parts)


def _spoil(wire: torch.Tensor) -> torch.Tensor:
    """Inject a fault: flip a few bits on the way."""
    damaged = wire.clone()
    damaged.view(torch.uint8)[damaged.nbytes // 2] ^= 0x41
    return damaged


# ------------------------------------------------------------ the checksum
def checksum(*tensors: torch.Tensor) -> torch.Tensor:
    """Return a digest of the raw bytes of tensors in this order, to compare with other ranks. Shape (2,), int64, on the
    CPU. Tensors on a GPU are summed there: copying them to the host would take longer than sending them."""
    total = torch.zeros(2, dtype=torch.int64)
    for number, raw in enumerate(map(raw_bytes, tensors)):
        total += (2 * number + 1) * (_digest(raw) if raw.is_cpu else sum_on_gpu(raw))
    return total


def _digest(raw: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(digest(raw.numpy().data)), dtype=torch.int64)


def sum_on_gpu(raw: torch.Tensor) -> torch.Tensor:
    """Return two sums over bytes as 64-bit words, modulo 2^64, the second with odd weights by position to detect
    permutations. The upper half of each word is first mixed into the lower one, since two flips of the top bit would
    cancel. Any single wrong word is detected. Shape (2,), int64, on the CPU."""
    if raw.storage_offset() % 8:
        raw = raw.clone()
    whole = raw.numel() // 8 * 8
    words, rest = raw[:whole].view(torch.int64), raw[whole:].to(torch.int64)
    weights = _odd_numbers(raw.device)
    plain, weighted = rest.sum(), (rest * weights[: rest.numel()]).sum()
    for begin in range(0, words.numel(), CHUNK):
        part = words[begin : begin + CHUNK]
        part = torch.bitwise_right_shift(part, 32).bitwise_xor_(part)
        total = part.sum()
        plain = plain + total
        weighted = weighted + (part * weights[: part.numel()]).sum() + 2 * begin * total
    return torch.stack([plain, weighted]).cpu()


@functools.cache
def _odd_numbers(device: torch.device) -> torch.Tensor:
    return 2 * torch.arange(CHUNK, device=device, dtype=torch.int64) + 1
