"""fetch(iteration, index) for any dataset with a length and samples by number."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Any, Protocol

ROUNDS = 6
MASK = (1 << 64) - 1


class Permutation:
    """A bijection of 0 to size - 1 without a table, a different one for each key.

    It is a Feistel network of ROUNDS rounds over the smallest even number of bits that holds the size, with cycle
    walking: a result that is no sample is encrypted again, until it is one. See J. Black and P. Rogaway, "Ciphers with
    arbitrary finite domains", CT-RSA 2002. It shuffles, but keeps nothing secret. Raises ValueError for a size below 1.

    Examples
    --------
    >>> shuffled = unicron.data.Permutation(10**12, 42)
    >>> shuffled(7) == unicron.data.Permutation(10**12, 42)(7), shuffled(7) == shuffled(8)
    (True, False)
    """

    def __init__(self, size: int, *key: int):
        if size < 1:
            raise ValueError(f"a permutation of {size} samples: there must be one at least")
        self.size = size
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._low = (1 << self._half) - 1
        seed = hashlib.blake2b(repr((size, *key)).encode(), digest_size=8 * ROUNDS).digest()
        self._keys = struct.unpack(f"<{ROUNDS}Q", seed)

    def __call__(self, number: int) -> int:
        """Return the place of sample `number`. Raises IndexError for a number outside."""
        if not 0 <= number < self.size:
            raise IndexError(f"{number} is not one of {self.size} samples")
        place = self._walk(number)
        while place >= self.size:
            place = self._walk(place)
        return place

    def _walk(self, number: int) -> int:
        left, right = number >> self._half, number & self._low
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._low)
        return left << self._half | right


def _mix(value: int) -> int:
    # the finalizer of SplitMix64 (G. L. Steele, D. Lea and C. H. Flood, OOPSLA 2014)
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31


class MapStyle(Protocol):
    """A dataset with random access, such as a `torch.utils.data.Dataset` that has a length."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, number: int) -> Any:
        """Return one sample."""


class Fetch:
    """A session's `fetch`: any micro-batch, by iteration and index, on any rank and any number of times.

    Samples follow each other without a gap, so a micro-batch may have the last ones of an epoch and the first ones of
    the next.

    Parameters
    ----------
    dataset
        Any object with a length and samples by number.
    micro_batch_size
        Samples of a micro-batch.
    micro_batches
        Micro-batches of an iteration, as the session has them.
    seed
        Determines the order of the samples in each epoch. None: they keep their own order.
    repeat
        Start the dataset again at its end; otherwise a sample after it raises IndexError.
    collate
        `collate(samples)` returns a micro-batch; by default torch's `default_collate`.

    Raises
    ------
    ValueError
        For sizes below 1, or a dataset without samples.

    Examples
    --------
    >>> fetch = unicron.data.Fetch("abcdefg", micro_batch_size=2, micro_batches=2, collate="".join)
    >>> fetch(0, 0), fetch(0, 1), fetch(1, 1)
    ('ab', 'cd', 'ga')
    """

    def __init__(
        self,
        dataset: MapStyle,
        *,
        micro_batch_size: int,
        micro_batches: int,
        seed: int | None = None,
        repeat: bool = True,
        collate: Callable[[list[Any]], Any] | None = None,
    ):
        if micro_batch_size < 1 or micro_batches < 1:
            raise ValueError(
                f"micro_batch_size {micro_batch_size} and micro_batches {micro_batches} must be at least 1"
            )
        self._length = len(dataset)
        if self._length < 1:
            raise ValueError("the dataset has no samples: check its path")
        self._dataset, self._size, self._micro_batches = dataset, micro_batch_size, micro_batches
        self._seed, self._repeat, self._collate = seed, repeat, collate
        self._orders: dict[int, Permutation] = {}  # epoch -> its order, for the last epochs

    def __call__(self, iteration: int, index: int) -> Any:
        """Return micro-batch `index` of `iteration`. Raises IndexError if there is none."""
        samples = [self._dataset[number] for number in self.numbers(iteration, index)]
        if self._collate is not None:
            return self._collate(samples)
        from torch.utils.data import default_collate

        return default_collate(samples)

    def numbers(self, iteration: int, index: int) -> Sequence[int]:
        """Return the numbers of its samples."""
        if iteration < 0 or not 0 <= index < self._micro_batches:
            raise IndexError(f"iteration {iteration} has no micro-batch {index} of {self._micro_batches}")
        first = (iteration * self._micro_batches + index) * self._size
        return [self._number(sample) for sample in range(first, first + self._size)]

    def _number(self, sample: int) -> int:
        epoch, place = divmod(sample, self._length)
        if epoch and not self._repeat:
            raise IndexError(
                f"sample {sample} of {self._length}: build the dataset with as many samples as the training takes"
            )
        return place if self._seed is None else self._order(epoch)(place)

    def _order(self, epoch: int) -> Permutation:
        if epoch not in self._orders:
            if len(self._orders) > 1:
                self._orders.clear()
            self._orders[epoch] = Permutation(self._length, int(self._seed or 0), epoch)
        return self._orders[epoch]


def megatron(dataset: MapStyle, *, micro_batch_size: int, micro_batches: int) -> Fetch:
    """Make a `fetch` for Megatron's GPTDataset or a blend of them, which is shuffled and as long as the training. The
    micro-batches are those of Megatron-LM's own sampler with `--dataloader-type single`."""
    return Fetch(dataset, micro_batch_size=micro_batch_size, micro_batches=micro_batches, repeat=False)
