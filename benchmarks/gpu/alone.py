"""One rank without Unicron: the template's model trains on the card, with Megatron-core's local layers."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.rows import on_card, patience, row
from sbatch_templates import build_dataset, train_gpt
from sbatch_templates.training_metrics import read_metrics
from tests.support.processes import of_a_world

LIMIT = 60.0
SCRIPT = Path(train_gpt.__file__)
MODEL = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 512 --micro-batches 4".split()
SMALL = "--num-layers 2 --hidden-size 64 --seq-length 64 --micro-batches 4".split()
TRAINING = "--train-iterations 12 --warmup 2".split()


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="unicron-gpu-") as name:
        prefix = Path(name, "text")
        build_dataset.build(build_dataset.find_files(SCRIPT.parent, [".py"], recursive=False), prefix)
        for kind, words in (("fp32", []), ("bf16", ["--bf16"])):
            with row(f"one rank, no Unicron, {kind}") as saw:
                metrics = Path(name, kind)
                command = [sys.executable, str(SCRIPT), "--data-path", str(prefix), "--metrics", str(metrics)]
                done = subprocess.run(
                    [*command, *(MODEL if on_card() else SMALL), *TRAINING, *words],
                    env=of_a_world(1)[0],
                    capture_output=True,
                    text=True,
                    timeout=LIMIT * patience(),
                    check=False,
                )
                sys.stderr.write(done.stderr[-4000:])
                assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-600:]}"
                records = read_metrics(metrics)
                losses = [each["loss"] for each in records]
                took = sorted(each["seconds"] for each in records[2:])
                text = f"loss {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} iterations of "
                text += f"{1e3 * took[len(took) // 2]:.0f} ms, {'NCCL' if on_card() else 'gloo'}"
                saw(text, ok=losses[-1] < losses[0], losses=losses)
    return 0


if __name__ == "__main__":
    sys.exit(main())
