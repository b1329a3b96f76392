"""The template's model in a world of processes: what rank 0 prints of each iteration."""

from __future__ import annotations

import json
from pathlib import Path

from sbatch_templates import gpt_options
from tests.support.processes import of_a_world
from tests.support.warm import Script

PLAIN = Path(__file__).with_name("plain_gpt.py")
SESSION = Path(gpt_options.__file__).with_name("train_gpt.py")
ITERATIONS = 6
SMALL = f"--num-layers 4 --hidden-size 64 --seq-length 64 --micro-batches 4 --train-iterations {ITERATIONS}".split()
TP, PP = "--tensor-model-parallel-size 2 ", "--pipeline-model-parallel-size 2 "
INTERLEAVED = PP + "--num-layers-per-virtual-pipeline-stage 1 "
SHARDED, OVERLAP = "--use-distributed-optimizer ", "--overlap-grad-reduce --ddp-bucket-size 20000 "


def train(dataset, ranks: int, *arguments: object, script: Path = PLAIN, **environment: str) -> dict:
    """What rank 0 printed."""
    return json.loads(run(dataset, ranks, *arguments, script=script, **environment).splitlines()[-1])


def run(dataset, ranks: int, *arguments: object, script: Path, **environment: str) -> str:
    """The output of rank 0."""
    started = [
        Script(script, "--data-path", dataset, *SMALL, *arguments, environment=each | environment)
        for each in of_a_world(ranks)
    ]
    ended = [each.wait() for each in started]
    assert [each.returncode for each in ended] == [0] * ranks, ended
    return ended[0].stdout
