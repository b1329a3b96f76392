"""Was the gradient of a recovered iteration right? `python -m unicron_ctl.demo.verify FOLDER TRAIN_GPT_OPTIONS...`

For every file that `train_gpt.py --save-gradients FOLDER` wrote: one undisturbed process computes the iteration's
gradient from the same parameters, over all micro-batches, by Megatron's own schedule and without a Session. Prints
{"ITERATION": largest absolute difference of any element, ...} as JSON. Runs in a process of its own because it needs
torch.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).resolve().parent.parent.parent / "sbatch_templates"


def main() -> None:
    """See the module's text."""
    sys.path.insert(0, str(TEMPLATES))  # as for the script itself
    import train_gpt

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder, options = Path(sys.argv[1]), train_gpt.parse(sys.argv[2:])
    device, backend = train_gpt.prepare(options)
    undisturbed = Undisturbed(options, device, backend)
    found: dict[int, float] = {}
    for path in sorted(folder.glob("*.slot*.pt")):
        iteration = int(path.name.split(".")[0])
        found[iteration] = max(found.get(iteration, 0.0), undisturbed.difference(iteration, path))
    print(json.dumps(dict(sorted(found.items()))))


class Undisturbed:
    """One process with the whole model, which computes any iteration's gradient from given parameters."""

    def __init__(self, options: Any, device: Any, backend: str):
        import torch.distributed as dist
        import train_gpt
        from megatron.core import parallel_state

        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        self._options = options
        self._chunk = train_gpt.build_model(options, device)
        self._fetch = train_gpt.make_fetch(train_gpt.build_dataset(options), options)
        self._forward_step = train_gpt.make_forward_step(device)

    def difference(self, iteration: int, path: Path) -> float:
        """The largest absolute difference between the saved gradient and the one computed here."""
        import torch

        saved = torch.load(path, weights_only=True)
        self._put(saved["parameters"])
        return float((saved["gradient"] - self._clipped(self._gradient(iteration))).abs().max())

    def _put(self, flat: Any) -> None:
        import torch

        position = 0
        with torch.no_grad():
            for parameter in self._chunk.module.parameters():
                parameter.copy_(flat[position : position + parameter.numel()].view_as(parameter))
                position += parameter.numel()

    def _gradient(self, iteration: int) -> Any:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        options = self._options
        self._chunk.zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=(self._fetch(iteration, index) for index in range(options.micro_batches)),
            model=[self._chunk],
            num_microbatches=options.micro_batches,
            seq_length=options.seq_length,
            micro_batch_size=options.micro_batch_size,
        )
        return [parameter.main_grad.detach().float().reshape(-1).cpu() for parameter in self._chunk.module.parameters()]

    def _clipped(self, parts: list[Any]) -> Any:
        """As Megatron's optimizer clips: by the norm over all parameters."""
        import torch

        flat = torch.cat(parts)
        limit = self._options.clip_grad
        return flat * min(1.0, limit / (float(flat.double().norm()) + 1e-6)) if limit > 0 else flat


if __name__ == "__main__":
    main()
