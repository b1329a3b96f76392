"""Programs of Megatron-LM's to try healing on: a stand-in, and the real one where it is to be had.

UNICRON_MEGATRON_LM names a checkout of https://github.com/NVIDIA/Megatron-LM at core_v0.16.1; without it the tests that
are marked `megatron_lm` are left out.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sbatch_templates import megatron_on_cpu

HERE = Path(__file__).resolve().parent
STAND_IN = HERE / "pretrain_stand_in.py"
LAUNCHER = ["-m", "unicron.transition.megatron_lm"]
LINE = re.compile(
    r"iteration +(?P<iteration>\d+)/.* consumed samples: +(?P<samples>\d+) .* lm loss: (?P<loss>\S+) .*"
    r"grad norm: (?P<norm>\S+) "
)
SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --lr-decay-style constant --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 256 --position-embedding-type rope --attention-dropout 0 "
    "--hidden-dropout 0 --log-interval 1 --eval-iters 0 --eval-interval 1000"
).split()


@dataclass(frozen=True)
class Line:
    """What one line of the log says."""

    iteration: int
    samples: int
    loss: float
    norm: float


def lines(log: str) -> list[Line]:
    """All lines of iterations in a log."""
    found = [match.groupdict() for match in LINE.finditer(log)]
    return [Line(int(m["iteration"]), int(m["samples"]), float(m["loss"]), float(m["norm"])) for m in found]


def numbers(log: str, name: str) -> dict[int, float]:
    """iteration -> this number of its line, of the lines that have it."""
    found = re.findall(rf" iteration +(\d+)/.*? {re.escape(name)}: (\S+) \|", log)
    return {int(iteration): float(value) for iteration, value in found}


VALUE = re.compile(r" validation loss at (iteration \d+(?: on \w+ set)?) \| lm loss value: (\S+) ")


def values(log: str) -> list[tuple[str, float]]:
    """All evaluations in a log: (where, loss)."""
    return [(where, float(loss)) for where, loss in VALUE.findall(log)]


def shown(folder: Path) -> dict[int, float]:
    """What TensorBoard would show of the stand-in's files: step -> value. No step may be there twice."""
    found: dict[int, float] = {}
    for path in sorted(folder.iterdir()):
        for line in path.read_text().splitlines():
            step, value = line.split()
            if step == "purge":
                found = {at: told for at, told in found.items() if at < int(value)}
            else:
                assert int(step) not in found, f"step {step} shows twice"
                found[int(step)] = float(value)
    return found


def stand_in(dataset: Path, *options: str) -> list[str]:
    """The stand-in's command, with 16 samples an iteration."""
    small = "--num-layers 2 --hidden-size 64 --seq-length 64 --micro-batches 8 --lr-decay-style constant".split()
    return [sys.executable, str(STAND_IN), "--data-path", str(dataset), *small, *options]


def real(*options: str, healed: bool) -> list[str]:
    """The command of the real `pretrain_gpt.py`, with 8 samples an iteration, where there is no CUDA."""
    script = Path(os.environ["UNICRON_MEGATRON_LM"], "pretrain_gpt.py")
    front: Sequence[str] = LAUNCHER if healed else ()
    return [sys.executable, megatron_on_cpu.__file__, *front, str(script), *SMALL, *megatron_on_cpu.OPTIONS, *options]
