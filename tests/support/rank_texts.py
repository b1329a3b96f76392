"""Texts of many ranks at once, and a classifier that keeps what it judges by words."""

from __future__ import annotations

import random
from collections.abc import Iterator

from unicron_detector.failures.classify import Classifier

ORDINARY = "error cuda nccl rank timeout memory file failed python torch x tensor of the socket line".split()


class Counting(Classifier):
    """A classifier that keeps what it judges by words."""

    def __init__(self) -> None:
        super().__init__()
        self.judged: list[str] = []

    def _by_words(self, text: str, source: str, generic: bool, weak: bool):
        self.judged.append(text)
        return super()._by_words(text, source, generic, weak)


def different(count: int, length: int = 3900) -> Iterator[str]:
    rng = random.Random(count)
    for _ in range(count):
        yield " ".join(f"{rng.choice(ORDINARY)}{rng.randrange(1000)}" for _ in range(length // 6))[:length]


def watchdog(rank: int) -> str:
    return (
        f"[rank{rank}]:[E1126 03:12:27.{rank:06d} {4000 + rank} ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog "
        f"caught collective operation timeout: WorkNCCL(SeqNum={12_000 + rank % 3}, OpType=ALLREDUCE, NumelIn=1, "
        f"NumelOut=1, Timeout(ms)=600000) ran for {600_020 + rank % 9} milliseconds before timing out."
    )
