"""torchtitan on a machine without accelerators, which it does not support by itself: with its own trainer, or under a
session.

python torchtitan_on_cpu.py torchtitan|unicron OPTIONS
"""

from __future__ import annotations

import json
import random
import sys
import types
from pathlib import Path

MADE_FOR_GPUS = "torchtitan.models.moe.kernels"  # imports triton, which only torch's builds for GPUs bring
WORDS = "a session heals what it trains with the ranks that are left in one iteration of many".split()


def on_cpu() -> None:
    """What a device module has and `torch.cpu` has not; and sums, because gloo cannot multiply and add at once."""
    import torch
    import torch._utils
    from torch.distributed.fsdp import FSDPModule

    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.get_device_name = lambda device=None: "CPU"
    torch.cpu.get_device_properties = lambda device=None: types.SimpleNamespace(total_memory=1 << 34)
    torch.cpu.current_device = lambda: 0
    torch.cpu.memory_stats = lambda device=None: {}
    torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None
    divide = FSDPModule.set_gradient_divide_factor

    def divide_by(self: FSDPModule, factor: float) -> None:
        divide(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = divide_by
    kernels = types.ModuleType(MADE_FOR_GPUS)
    kernels.generate_permute_indices = None
    sys.modules[MADE_FOR_GPUS] = kernels


def make_assets(folder: Path) -> None:
    """A tokenizer of single bytes, and documents of these words: torchtitan's wheel has neither."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|begin|>", "<|end|>"]
    tokenizer = Tokenizer(models.BPE(vocab={each: number for number, each in enumerate(special + letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(special)
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    named = {"bos_token": special[0], "eos_token": special[1]}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "documents").mkdir()
    draw = random.Random(1)
    texts = (" ".join(draw.choices(WORDS, k=draw.randint(10, 100))) for _ in range(400))
    lines = (json.dumps({"text": text}) for text in texts)
    (folder / "documents" / "train.json").write_text("\n".join(lines))


def main() -> int:
    """Train."""
    on_cpu()
    which = sys.argv.pop(1)
    if which == "unicron":
        from tests.support.gates import slow
        from unicron.torchtitan import main as healed
        from unicron_transition.torchtitan.streams import Streams

        slow(Streams)
        return healed()
    from torchtitan.train import Trainer
    from torchtitan.train import main as own

    own(Trainer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
