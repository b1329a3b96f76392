"""The part of a model that its optimizer does not change: untrained parameters, and buffers. They are in no shard of a
distributed optimizer, so they have an image of their own, named by their checksum, which accompanies the shards.

The image is written only when they have changed. A rank that has them neither from training nor from an image gets them
from another rank of its place.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from unicron_transition.snapshot import contents
from unicron_transition.snapshot.cuts import Cuts, ImageRing, ring_paths
from unicron_transition.snapshot.image_format import UNTRAINED_KIND, BadImage, Image, Key, inventory
from unicron_transition.snapshot.migrate import TrainingState
from unicron_transition.snapshot.tensor_transfer import broadcast_bytes, checksum

MOST_IMAGES = 3  # of the confirmed state, of the next one, and of one that was abandoned
WORD = 8  # bytes; every tensor begins at a multiple


class UntrainedTensors:
    """The untrained tensors of one rank."""

    def __init__(
        self, state: TrainingState, folder: Path | None, slot: int, place: int, size: int, say: Callable[[str], None]
    ):
        trained = {each.data_ptr() for each in state.trained_tensors()}
        self._tensors = [each for each in state.model_tensors() if each.numel() and each.data_ptr() not in trained]
        self._folder = folder  # for images, None for none
        self._place, self._size = place, size  # the rank's place among the places of its replica
        self._slot, self._say = slot, say
        self._ring = (
            None if folder is None else ImageRing(ring_paths(folder, UNTRAINED_KIND, slot, MOST_IMAGES), replace=True)
        )
        self._kept = ""
        self._warned = False
        self.image: Path | None = None  # this slot's image of the tensors kept last, if there is one

    @property
    def bytes(self) -> int:
        """The size of an image of them."""
        return sum(_pad(each) for each in self._tensors)

    def offsets(self) -> dict[int, int]:
        """Return the offset of each tensor in an image, by its address."""
        sizes = itertools.accumulate((_pad(each) for each in self._tensors), initial=0)
        return {each.data_ptr(): offset for each, offset in zip(self._tensors, sizes, strict=False)}

    def update_image(self, version: int) -> str:
        """Write an image of them for state `version` if they have changed, and return its mark, "" if there are none.
        The image before stays until they change again."""
        if not self._tensors or self._ring is None:
            return ""
        mark = checksum(*self._tensors).numpy().tobytes().hex()
        gone = self.image is not None and not self.image.exists()
        if mark != self._kept or gone:
            self._kept, self.image = mark, None
            try:
                self.image = self._ring.write(self._key(version), b"", self.bytes, self._copy_into)
                self._warned = False
            except OSError as error:
                self._complain(error)
        return mark

    def keep_cut(self, cuts: Cuts, version: int) -> bool:
        """Write an image of them for a cut; returns whether that succeeded."""
        return cuts.write(self._key(version), b"", self.bytes, self._copy_into)

    def _key(self, version: int) -> Key:
        return Key(UNTRAINED_KIND, self._slot, version, self._place, self._size, mark=self._kept)

    def _copy_into(self, image: Image) -> None:
        for place, tensor in self._places(contents.raw(image.data[: self.bytes])):
            place.copy_(_raw(tensor))

    def _complain(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            self._say(
                f"no room for {self.bytes >> 20} MiB of what is not trained in {self._folder} "
                f"({error.strerror or error}): no agent makes files with it; give the node more shared memory"
            )

    def find(self, mark: str) -> tuple[Path, torch.Tensor] | None:
        """Find a sound image of that mark, of any rank of this node, and return it with its content."""
        for found in inventory(self._folder) if self._folder is not None and mark else ():
            key = found.key
            if (key.kind, key.place, key.size, key.mark) != (UNTRAINED_KIND, self._place, self._size, mark):
                continue
            try:
                _, flat = contents.read(found)
                if flat.numel() != self.bytes:
                    raise BadImage(f"{found.path}: of another model")
                return found.path, flat
            except (BadImage, OSError) as error:
                self._say(f"training state in memory passed over: {error}")
        return None

    def restore(self, mark: str) -> bool:
        """Restore them from an image of that mark; returns whether there was a sound one."""
        if (found := self.find(mark)) is None:
            return False
        path, flat = found
        for place, tensor in self._places(flat):
            _raw(tensor).copy_(place)
        if self._ring is not None and self._ring.resume_after(path):
            self._kept, self.image = mark, path
        return True

    def exists_somewhere(self, has: bool, device: torch.device, group: Any) -> bool:
        """Collective over `group`, the ranks of this place: return whether one of them has the tensors."""
        return not self._tensors or self._first_holder(has, device, group)[0] is not None

    def _first_holder(self, has: bool, device: torch.device, group: Any) -> tuple[int | None, bool]:
        """Return the first rank of `group` that has the tensors, and whether another one lacks them."""
        me, none = dist.get_rank(group), dist.get_world_size(group)
        most = torch.tensor([-(me if has else none), int(not has)], dtype=torch.int64, device=device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        source = -int(most[0])
        return None if source == none else source, bool(most[1])

    def share(self, has: bool, device: torch.device, group: Any) -> None:
        """Collective over `group`, the ranks of this place: ranks that lack the tensors get them from the first that
        has them. If none has, as without a node's memory, they stay as they are. Raises RuntimeError if a peer is lost
        or the data arrive damaged."""
        if not self._tensors or dist.get_world_size(group) == 1:
            return
        source, lacking = self._first_holder(has, device, group)
        if source is None or not lacking:
            return
        me = dist.get_rank(group)
        for tensor in self._tensors:
            mine = _raw(tensor).cpu().numpy().tobytes() if me == source else None
            data, sound = broadcast_bytes(mine, source, device, group)
            if not sound:
                raise RuntimeError("what of the model is not trained was spoiled on its way")
            if not has:
                _raw(tensor).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def _places(self, flat: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pair each tensor with its bytes in an image."""
        places = flat.split([_pad(each) for each in self._tensors])
        return [(place[: each.nbytes], each) for place, each in zip(places, self._tensors, strict=True)]


def _pad(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // WORD) * WORD


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor's bytes."""
    return tensor.detach().view(-1).view(torch.uint8)
