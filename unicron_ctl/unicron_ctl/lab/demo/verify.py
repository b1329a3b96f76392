"""Checks that the gradient of a recovered iteration was right: `python verify.py TEMPLATES FOLDER TRAIN_GPT_OPTIONS...`

For each iteration for which `train_gpt.py --save-gradients FOLDER` wrote files, one process with the whole model
computes the gradient from the same parameters, over all micro-batches, by Megatron's own schedule and without a
Session. It prints {"ITERATION": largest absolute difference of any element, ...} as JSON. It is a script because the
Python that trains has torch, but not `unicron_ctl`.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def main() -> None:
    """See the module's text."""
    templates, saved, *words = sys.argv[1:]
    sys.path.insert(0, templates)  # Python does the same for train_gpt.py
    import gpt_options
    import train_gpt

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder, options = Path(saved), gpt_options.parse(words)
    device, backend = train_gpt.prepare(options)
    undisturbed = ReferenceRun(options, device, backend)
    files: dict[int, list[Path]] = defaultdict(list)
    for path in folder.glob("*.slot*.pt"):
        files[int(path.name.split(".")[0])].append(path)
    print(json.dumps({iteration: undisturbed.difference(iteration, files[iteration]) for iteration in sorted(files)}))


class ReferenceRun:
    """One process with the whole model, which computes the gradient of any iteration from given parameters."""

    def __init__(self, options: Any, device: Any, backend: str):
        import gpt_model
        import torch
        import torch.distributed as dist
        import train_gpt
        from megatron.core import parallel_state

        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        options.tensor_model_parallel_size = options.pipeline_model_parallel_size = 1
        options.num_layers_per_virtual_pipeline_stage = options.num_virtual_stages_per_pipeline_rank = None
        options.decoder_first_pipeline_num_layers = options.decoder_last_pipeline_num_layers = None
        self._options = options
        self._chunks = gpt_model.build_model(options, device)
        self._whole = torch.optim.SGD(self._chunks[0].parameters())  # only lists the parameters, and makes no step
        self._fetch = train_gpt.make_fetch(train_gpt.build_dataset(options), options)
        self._forward_step = gpt_model.make_forward_step(options, device)

    def difference(self, iteration: int, paths: Iterable[Path]) -> float:
        """Return the largest absolute difference between the gradients in an iteration's files and the one computed
        here."""
        import torch

        from unicron_transition.snapshot import parts

        files = [torch.load(path, weights_only=True) for path in paths]
        self._put([source for file in files for source in _sources(file, "parameters")])
        gradient = self._clip(self._gradient(iteration))
        worst = 0.0
        for file in files:
            for source in _sources(file, "gradient"):
                mine = parts.assemble(source.box, parts.PARAMETER, gradient[source.box.name])
                found = (
                    source.read(parts.PARAMETER, 0, source.end - source.begin)
                    - mine.reshape(-1)[source.begin : source.end]
                )
                worst = max(worst, float(found.abs().max()))
        return worst

    def _put(self, sources: list[Any]) -> None:
        from unicron_transition.snapshot import parts

        by_name = defaultdict(list)
        for source in sources:
            by_name[source.box.name].append(source)
        parts.restore(self._chunks, self._whole, parts.AssembledBlocks(by_name, {}))

    def _gradient(self, iteration: int) -> list[tuple[Any, Any]]:
        """Return (part, flat gradient) for each part of the whole model."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from unicron_transition.iteration import randomness
        from unicron_transition.snapshot import parts

        options, index = self._options, iter(range(self._options.micro_batches))

        def forward_step(*arguments: Any) -> Any:
            randomness.seed(options.seed, iteration, next(index))
            return self._forward_step(*arguments)

        self._chunks[0].zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=(self._fetch(iteration, index) for index in range(options.micro_batches)),
            model=self._chunks,
            num_microbatches=options.micro_batches,
            seq_length=options.seq_length,
            micro_batch_size=options.micro_batch_size,
        )
        held = parts.parts(self._chunks, self._whole)
        return [(part, part.parameter.main_grad.detach().float().reshape(-1).cpu()) for part in held]

    def _clip(self, gradient: list[tuple[Any, Any]]) -> dict[str, list[Any]]:
        """Clip as Megatron's optimizer does: by the norm over all parameters. Return the parts by name."""
        from unicron_transition.snapshot.parts import Source

        limit = self._options.clip_grad
        norm = sum(float(flat.double().square().sum()) for _, flat in gradient) ** 0.5
        scale = min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
        by_name = defaultdict(list)
        for part, flat in gradient:
            scaled = flat[part.first : part.first + part.end - part.begin] * scale
            by_name[part.box.name].append(Source.of(part.box, part.begin, part.end, scaled))
        return by_name


def _sources(file: dict[str, Any], what: str) -> list[Any]:
    from unicron_transition.snapshot.parts import Box, Source

    return [
        Source.of(Box(name, tuple(whole), tuple(offset), tuple(extent)), begin, end, flat)
        for (name, whole, offset, extent, begin, end), flat in zip(file["index"], file[what], strict=True)
    ]


if __name__ == "__main__":
    main()
