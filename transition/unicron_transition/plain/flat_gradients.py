"""The gradients of any torch module: they add up in flat buckets, which are reduced over the ranks at this place in all
replicas.

Each parameter's `grad` is a view of its bucket, so backward passes add to it in place. With `fully_shard` these are the
local shards, to which its reduce-scatter in the replica adds. Every micro-batch has the weight
1/total on every rank; with a loss per token the sum is divided by the tokens of all micro-batches after the reduce. A
bucket ends with a mark for each parameter that has a gradient from some micro-batch. A parameter without one in the
whole job keeps None, as in a loop of torch alone, and the optimizer skips it.

The reduce of a bucket begins in the last backward pass, when all of its gradients are there, as in torch's
DistributedDataParallel; always in the order of the buckets, the last layers first. The last bucket, with the first
layers, is reduced after that pass together with the ledger's proof, since a collective of its own would cost as much as
a small bucket.
"""

from __future__ import annotations

import math
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby
from typing import Any

import torch

from unicron_transition.iteration import flips
from unicron_transition.iteration.accumulation import Accumulation, PeerLost, Sum, Work, evaluating, wait_out
from unicron_transition.iteration.ledger import Ledger, Loss, Proof, hear_parts, tell_parts
from unicron_transition.seams import dtensors, fully_shard, modules
from unicron_transition.seams.table import UnsupportedLayout

BUCKET_BYTES = 1 << 25  # a larger parameter has a bucket of its own
BYTES = 8  # of float64; each byte is an element, since even bf16 has whole numbers up to 256 exactly
LOSS = "forward_step returns the mean loss of its micro-batch, or (sum of losses, tokens)"


class Bucket:
    """The gradients of some parameters of one dtype and device in one flat tensor, followed by the marks and by room
    for the proof of `proof` micro-batches (`Accumulation.reduce`)."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], proof: int = 0):
        self.parameters = list(parameters)
        own = [dtensors.local(parameter) for parameter in parameters]
        count, like = sum(each.numel() for each in own), own[0]
        self._proof_of = proof
        sizes = [count, len(parameters), 2 * proof * (1 + BYTES)]
        self.flat = torch.zeros(sum(sizes), dtype=like.dtype, device=like.device)
        self.gradients, self._marks, self._proof = self.flat.split(sizes)
        pieces = self.gradients.split([each.numel() for each in own])
        # `data`: each view has a version counter of its own, which rises with each added gradient
        self.views = [piece.view(each.shape).data for piece, each in zip(pieces, own, strict=True)]
        self._grads = [fully_shard.gradient(*pair) for pair in zip(parameters, self.views, strict=True)]

    def put(self, proof: Proof) -> None:
        """Put this rank's proof into the bucket, before the reduce. In one piece: right after a backward pass each of
        torch's calls takes 10 us."""
        whole = bytes([*proof.counts, *proof.wishes])  # of one rank, so each is 0 or 1
        numbers = struct.pack(f"{2 * self._proof_of}d", *proof.losses, *proof.tokens)
        self._proof.copy_(torch.frombuffer(bytearray(whole + numbers), dtype=torch.uint8))

    def proven(self) -> Proof:
        """Return the sum of the ranks' proofs, after the reduce."""
        found, count = self._proof.real if self._proof.is_complex() else self._proof, self._proof_of
        whole = found.cpu().to(torch.int64)
        numbers = struct.unpack(f"{2 * count}d", whole[2 * count :].to(torch.uint8).numpy().tobytes())
        small = whole[: 2 * count].tolist()
        return Proof(small[:count], small[count:], list(numbers[:count]), list(numbers[count:]))

    def attach(self) -> None:
        """Make the backward pass add to this bucket."""
        for parameter, grad in zip(self.parameters, self._grads, strict=True):
            if parameter.grad is not grad:
                parameter.grad = grad

    def detached_parameters(self) -> Iterator[int]:
        """Yield the numbers of the parameters whose gradients are not in this bucket."""
        pairs = zip(self.parameters, self._grads, strict=True)
        return (number for number, (parameter, grad) in enumerate(pairs) if parameter.grad is not grad)

    def versions(self) -> list[int]:
        """Return each view's version, which changes with each gradient."""
        return [modules.version(view) for view in self.views]

    def mark(self, used: Sequence[bool]) -> None:
        """Mark the parameters that got a gradient here, before the reduce."""
        if all(used):
            self._marks.fill_(1)
        else:
            self._marks.copy_(torch.tensor(used))

    def release_unused(self) -> None:
        """Remove, after the reduce, the gradients of parameters that got none on any rank."""
        for parameter, mark in zip(self.parameters, self._marks.tolist(), strict=True):
            if not mark:
                parameter.grad = None


def buckets(parameters: Iterable[torch.nn.Parameter], size: int, proof: int = 0) -> list[Bucket]:
    """Put the parameters into buckets of at most `size` bytes, the same in every rank. The last layers, whose gradients
    come first, are in the first buckets; the last bucket has room for the proof of `proof` micro-batches."""
    made: list[list[torch.nn.Parameter]] = []
    kinds = {parameter: (str(parameter.dtype), str(parameter.device)) for parameter in reversed(list(parameters))}
    for _, alike in groupby(sorted(kinds, key=kinds.__getitem__), kinds.__getitem__):
        room = 0
        for parameter in alike:
            needed = dtensors.local(parameter).numel() * parameter.element_size()
            if needed > room:
                made.append([])
                room = size
            made[-1].append(parameter)
            room -= needed
    return [Bucket(each, proof if each is made[-1] else 0) for each in made]


class PlainGradients(Accumulation):
    """The gradients of one module, for the `parameters` (name -> parameter) that the optimizer trains."""

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: dict[str, torch.nn.Parameter],
        scale: Callable[[torch.Tensor], torch.Tensor],
        forward_step: Callable[..., Any],
        work: Work,
    ):
        super().__init__(work)
        self._model, self._module = model, modules.original_module(model)
        self._tree = modules.ModuleTree(self._module)
        self._lanes, self._lane = work.layout.lanes, work.layout.lane(work.place)
        self._parts, self._part = work.layout.context, work.layout.coordinate(work.place).context
        self._sharded = dtensors.sharding_modules(self._module)
        self._scale = scale
        """Multiplies a loss before its backward pass (a GradScaler's)."""
        self._forward_step = forward_step
        """`forward_step(micro_batch, model)` returns the mean loss, or (sum of losses, tokens), 0-d tensors."""
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._buckets = buckets(parameters.values(), BUCKET_BYTES, work.total)
        self._number = {id(each): number for number, bucket in enumerate(self._buckets) for each in bucket.parameters}
        self._tensor = work.layout.tensor
        self._compared = False  # with other tensor ranks
        self._used = 0  # a sum over the passes of which parameters each of them reached
        self._seen: list[list[int]] = []  # versions of the views after the last pass
        self._untouched: list[list[int]] = []  # versions of the views without any gradient
        self._sums: list[Sum] = []  # the pending reduces, in the order of the buckets
        self._missing: list[set[int]] = []  # in the last backward pass: each bucket's missing gradients, by identity
        self._task = -1  # torch's number for that backward pass
        self._nested: set[int] = set()  # buckets with gradients from a nested backward pass, which wait
        self._deferred: Exception | None = None
        self._held = False  # no reduce begins in a backward pass
        self._passes = 0  # iterations with complete backward passes
        # A call for each gradient took 7 % of a small model's backward passes; one bucket does not need it.
        for parameter in parameters.values() if len(self._buckets) > 1 else ():
            parameter.register_post_accumulate_grad_hook(self._note_there)

    def _note_there(self, parameter: torch.Tensor) -> None:
        number = self._number[id(parameter)]
        if modules.backward_pass() != self._task:  # reentrant checkpointing may add to it again
            self._nested.add(number)
        if number < len(self._sums):
            self._deferred = UnsupportedLayout(
                f"unicron can't heal {self._names[id(parameter)]}: one backward pass makes its gradient in several "
                "parts; use torch.utils.checkpoint with use_reentrant=False"
            )
        elif self._missing:
            self._missing[number].discard(id(parameter))
            self._begin_complete()

    def _begin_complete(self) -> None:
        """Begin the reduces of complete buckets in order. A hook must not raise, so errors are kept for later."""
        while (number := len(self._sums)) < len(self._buckets) - 1 and self._deferred is None:
            if self._missing[number] or number in self._nested:
                return
            if self._work.over():
                self._deferred = PeerLost("a member of the generation is gone")
                return
            try:
                self._begin_bucket(number)
            except RuntimeError as error:
                self._deferred = error

    def _begin_bucket(self, number: int) -> None:
        bucket, untouched = self._buckets[number], self._untouched[number]
        bucket.mark([now != before for now, before in zip(bucket.versions(), untouched, strict=True)])
        if self._work.healed:
            self._snapshots.copy_before_reduce(number, bucket.flat)
        flips.before_reduce(bucket.gradients)
        self._sums.append(self._work.begin_sum(bucket.flat))

    def _watch_pass(self, loss: torch.Tensor, last: bool) -> None:
        """Watch the backward pass of this loss; in the last one of an iteration reduces may begin."""

        def note(gradient: torch.Tensor) -> None:
            self._task = modules.backward_pass()

        if loss.requires_grad and len(self._buckets) > 1:  # without a gradient torch raises an error
            loss.register_hook(note)
        early = last and not self._held and self._passes > 0 and len(self._buckets) > 1
        self._missing = [set(map(id, bucket.parameters)) for bucket in self._buckets] if early else []

    # ------------------------------------------------------------ computing
    def drop(self) -> None:
        for bucket in self._buckets:
            bucket.flat.zero_()
            bucket.attach()
        self._untouched = [bucket.versions() for bucket in self._buckets]
        self._used, self._seen = 0, self._untouched
        self._snapshots.forget()
        self._forget_sums()
        self._whole = True

    def begin_iteration(self, ordered: bool, total: int) -> None:
        super().begin_iteration(ordered, total)
        self._held = False

    def hold_reduces(self) -> None:
        self._held = True

    def _forget_sums(self) -> None:
        self._sums, self._missing, self._deferred = [], [], None

    def _rounds(self, indices: Sequence[int]) -> Iterator[tuple[list[int], int, bool]]:
        """Yield (micro-batches that the lanes compute at the same time, this lane's own, whether it counts). A lane
        without one computes that of another, since all of them take part in each collective."""
        for first in range(0, len(indices), self._lanes):
            together = list(indices[first : first + self._lanes])
            counts = self._lane < len(together)
            yield together, together[self._lane if counts else 0], counts

    def _compute(self, ledger: Ledger) -> None:
        before, owed = self._buffer_versions(), ledger.todo()
        for together, index, counts in self._rounds(owed):
            self._next()
            self._begin_forward(ledger, index)
            flips.before_forward(self._model)
            loss = self._loss(ledger, index, self._fetch(ledger.iteration, index), counts)
            self._begin_backward()
            scaled = self._scale(loss)
            self._watch_pass(scaled, last=together[-1] == owed[-1])
            fully_shard.sum_gradients(self._sharded)
            scaled.backward()
            self._missing = []
            self._end_backward(time.perf_counter())
            self._note_used()
            self._finish(ledger, together)
        fully_shard.gather_anew(self._sharded)
        self._check_untouched(before)
        self._passes += bool(owed)

    def _loss(self, ledger: Ledger, index: int, micro_batch: Any, counts: bool) -> torch.Tensor:
        """Compute the forward pass of a micro-batch, note it in the ledger if it counts, and return the loss with its
        weight."""
        loss, tokens = self._parse_result(self._forward_step(micro_batch, self._model))
        if any((ledger.tokens[done] is None) != (tokens is None) for done in ledger.tokens):
            raise TypeError(f"{LOSS}: the same of them for every micro-batch")
        if counts:
            ledger.losses[index], ledger.tokens[index] = loss.detach().clone(), tokens
        weighted = loss if tokens is not None else loss / (self.total * self._parts)
        return weighted if counts else weighted * 0.0

    # ------------------------------------------------------------ the losses of a replica of several ranks
    def _note_used(self) -> None:
        """Note which parameters the last pass has reached. `fully_shard` adds the gradients that each lane has in their
        order, so with others in another lane it adds those of different parameters."""
        if self._lanes * self._parts > 1:
            before, self._seen = self._seen, [bucket.versions() for bucket in self._buckets]
            pairs = zip(chain.from_iterable(before), chain.from_iterable(self._seen), strict=True)
            self._used = zlib.crc32(bytes(was != now for was, now in pairs), self._used)

    def parts(self, ledger: Ledger) -> list[float]:
        ranks = self._lanes * self._parts
        if ranks * self._tensor == 1:
            return []
        known = {index: Loss(loss, ledger.tokens[index]) for index, loss in ledger.losses.items()}
        told = tell_parts(known, sorted(ledger.done), self._parts, self._part)
        return [self._used, -self._used, *self._common_parameters(ranks), *told]

    def _common_parameters(self, ranks: int) -> list[float]:
        """Return, in the first iteration, checksums of the parameters that tensor ranks have in common, each at the
        place of its lane and part. They differ if the ranks have built the model with different seeds."""
        if self._tensor == 1 or self._compared:
            return []
        mine = 0
        for each in self._tree.parameters:
            if not dtensors.is_cut_over(each, "tensor"):
                mine = zlib.crc32(dtensors.local(each).detach().cpu().reshape(-1).view(torch.uint8).numpy().data, mine)
        numbers = [-math.inf] * (2 * ranks)
        place = 2 * (self._lane * self._parts + self._part)
        numbers[place : place + 2] = [mine, -mine]
        return numbers

    def take_parts(self, ledger: Ledger, numbers: Sequence[float]) -> None:
        if not numbers:
            return
        if numbers[0] != -numbers[1]:
            raise UnsupportedLayout(
                "unicron can't heal a sharded module whose micro-batches reach different parameters: fully_shard "
                "adds the gradients of a replica's ranks in their order, so let every forward pass use the same"
            )
        own = 2 + len(self._common_parameters(self._lanes * self._parts))
        if any(numbers[place] != -numbers[place + 1] for place in range(2, own, 2)):
            raise UnsupportedLayout(
                "unicron can't heal a module with parameters that differ between the tensor ranks that share them: "
                "give all ranks of a replica the same seed before they build the model (torch.manual_seed)"
            )
        self._compared = True
        ledger.shared = hear_parts(numbers[own:], sorted(ledger.done), self._parts)

    @staticmethod
    def _parse_result(result: Any) -> tuple[torch.Tensor, Any]:
        """Parse the result of a forward step into (loss, tokens or None)."""
        loss, tokens = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        if not isinstance(loss, torch.Tensor) or loss.dim() or (tokens is not None and not _is_number(tokens)):
            raise TypeError(f"{LOSS}, 0-d tensors: this one returned {_describe(result)}")
        return loss, tokens

    def evaluate(
        self, iteration: int, indices: Sequence[int], fetch: Callable[[int, int], Any]
    ) -> dict[int, tuple[torch.Tensor, Any]]:
        before, own = self._buffer_versions(), dict[int, Loss]()
        with evaluating([self._model]):
            for _, index, counts in self._rounds(indices):
                self._begin_evaluation(iteration, index)
                loss = Loss(*self._parse_result(self._forward_step(fetch(iteration, index), self._model)))
                own |= {index: loss} if counts else {}
        self._check_buffers(before)
        fully_shard.gather_anew(self._sharded)  # the root's parameters are still whole
        if self._lanes * self._parts > 1:
            told = self._work.inside(tell_parts(own, indices, self._parts, self._part))
            own = hear_parts(told, indices, self._parts)
        return {
            index: (torch.as_tensor(loss), 1 if tokens is None else tokens) for index, (loss, tokens) in own.items()
        }

    def _check_untouched(self, before: dict[str, tuple[int, int]]) -> None:
        """Raise :class:`UnsupportedLayout` for a model or script that would be trained incorrectly."""
        self._check_buffers(before)
        for bucket in reversed(self._buckets):
            for number in reversed(list(bucket.detached_parameters())):
                raise UnsupportedLayout(
                    f"the gradient of {self._names[id(bucket.parameters[number])]} was replaced while it was computed: "
                    "leave zero_grad(), step() and .grad to the session"
                )

    def _check_buffers(self, before: dict[str, tuple[int, int]]) -> None:
        changed = [name for name, version in self._buffer_versions().items() if before.get(name) != version]
        if changed:
            raise UnsupportedLayout(
                f"unicron can't heal {changed[0]}: a buffer that a forward pass changes depends on who computes what. "
                "Use a layer without running statistics, or register it with persistent=False if it is a mere cache"
            )

    def _buffer_versions(self) -> dict[str, tuple[int, int]]:
        """Return name -> numbers that change whenever the buffer does."""
        return {name: (id(buffer), modules.version(buffer)) for name, buffer in self._tree.persistent_buffers}

    # ------------------------------------------------------------ reducing
    def reduce(self, ledger: Ledger, proof: Proof) -> Proof:
        if self._deferred is not None:
            raise self._deferred
        self._weigh_sum(self.own_sum(), after=False)
        last = len(self._buckets) - 1
        while len(self._sums) < last:
            self._begin_bucket(len(self._sums))
        if last < 0:
            self._sums.append(self._work.begin_sum(alone := proof.tensor()))
        else:
            self._buckets[last].put(proof)
            self._begin_bucket(last)
        for each in self._sums:
            each.finish()
        proof_sum = Proof.of(alone) if last < 0 else self._buckets[last].proven()
        for each in self._sums:
            each.check()
        self._weigh_sum(self._reduce_result(), after=True)
        return proof_sum

    def drain(self, unblock: Callable[[], Any]) -> None:
        wait_out([each.work for each in self._sums if each.work is not None], unblock)
        if self._sharded:  # its pass may have been broken off in a collective of the replica
            fully_shard.reset(self._module)

    def proven(self, tokens: float) -> float:
        for bucket in self._buckets:
            if tokens:
                bucket.gradients /= tokens
            bucket.release_unused()
        return tokens or float(self.total)

    def restore(self) -> bool:
        undone = super().restore()
        self._forget_sums()
        for bucket in self._buckets:
            bucket.attach()
        return undone

    def _tensors_to_reduce(self) -> Iterator[torch.Tensor]:
        return (bucket.flat for bucket in self._buckets)

    def _open_gradients(self) -> Iterator[flips.Entry]:
        for bucket in self._buckets[len(self._sums) :]:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                yield f"the gradient of {self._names[id(parameter)]}", view

    def own_sum(self) -> Iterator[torch.Tensor]:
        return (bucket.gradients for bucket in self._buckets)

    _reduce_result = own_sum


def _is_number(value: Any) -> bool:
    return not value.dim() if isinstance(value, torch.Tensor) else isinstance(value, int | float)


def _describe(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_describe, value))})"
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
