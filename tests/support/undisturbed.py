"""Ranks of ``benchmarks.cost`` that count what an iteration of their last block takes: collectives, and messages to the
agent. It comes into COST_FOLDER/counted.KIND.RANK."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

import torch.distributed as dist

from benchmarks.cost import gates, plain_ranks
from unicron_detector.processes import rank_channel
from unicron_transition.iteration import exchange
from unicron_transition.seams import gloo

counted: Counter[str] = Counter()


def count(owner: Any, name: str, what: str) -> None:
    """Each call of a function, under a name of its kind."""
    original: Callable[..., Any] = getattr(owner, name)

    def counting(*arguments: Any, **keywords: Any) -> Any:
        counted[what] += 1
        return original(*arguments, **keywords)

    setattr(owner, name, counting)


def last_block(iterations: Iterable[object]) -> Iterator[object]:
    """The iterations; what was counted in those of the last block is written."""
    for number, iteration in enumerate(iterations, 1):
        if number == gates.ITERATIONS - gates.EACH:
            counted.clear()
        if number == gates.ITERATIONS:
            found = {what: times / gates.EACH for what, times in counted.items()}
            (gates.FOLDER / f"counted.{gates.KIND}.{gates.RANK}").write_text(json.dumps(found))
        yield iteration


if __name__ == "__main__":
    count(dist, "all_reduce", "all-reduce")
    count(exchange, "largest_of_all", "exchange")
    count(gloo, "run_until", "waits of another thread")
    count(rank_channel.RankChannel, "send", "message")
    gates.train(last_block(plain_ranks.healed() if gates.KIND == "healed" else plain_ranks.plain()))
