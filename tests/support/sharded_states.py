"""What the ranks of `sharded_gpt.py` wrote, put together."""

from __future__ import annotations

from pathlib import Path

import torch


def merged(folder: Path, name: str, ranks: list[int]) -> dict[int, tuple[dict, dict, float]]:
    """Place -> (name -> state of the whole parameter, the model's parameters, Adam's step), from the ranks' files.

    All ranks of a place must have the same parameters, and every element of the state must be there exactly once.
    """
    found: dict[int, tuple[dict, dict, float]] = {}
    covered: dict[tuple[int, str], int] = {}
    for rank in ranks:
        saved = torch.load(folder / f"state.{name}.{rank}")
        full, parameters, _ = found.get(saved["place"], ({}, saved["parameters"], 0.0))
        steps = {step for *_, step in saved["pieces"]}
        for parameter, start, end, tensors, _ in saved["pieces"]:
            whole = full.setdefault(
                parameter, {key: torch.full((parameters[parameter].numel(),), torch.nan) for key in tensors}
            )
            for key, tensor in tensors.items():
                assert whole[key][start:end].isnan().all()
                whole[key][start:end] = tensor.view(-1)
            covered[saved["place"], parameter] = covered.get((saved["place"], parameter), 0) + end - start
        assert len(steps) <= 1
        for key, tensor in saved["parameters"].items():
            assert torch.equal(tensor, parameters[key]), f"rank {rank} has another {key}"
        found[saved["place"]] = full, parameters, max([found.get(saved["place"], (0, 0, 0.0))[2], *steps])
    for (place, parameter), elements in covered.items():
        assert elements == found[place][1][parameter].numel()
    for place, (full, parameters, _) in found.items():
        assert set(full) == set(parameters), place
        for parameter, whole in full.items():
            model = parameters[parameter].view(-1)
            assert torch.equal(whole["param"].to(model.dtype), model), f"{parameter} is not that of its main parameters"
    return found
