"""What whoever exports a checkpoint needs to know of the model, and its tensors do not say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def model_facts(model: Sequence[Any]) -> dict[str, Any]:
    """What an exporter needs to know of a model: the type of its parameters, where they have one, and of a Megatron
    model how its attention's heads are cut and whether its layers are gated."""
    kinds: set[str] = set()
    config = None
    for chunk in model:
        module = getattr(chunk, "module", chunk)
        kinds |= {str(each.dtype).removeprefix("torch.") for each in module.parameters()}
        config = getattr(module, "config", None) if hasattr(module, "sharded_state_dict") else None
    found: dict[str, Any] = {"dtype": kinds.pop() if len(kinds) == 1 else ""}
    if config is not None and getattr(config, "num_attention_heads", None):
        heads = int(config.num_attention_heads)
        found |= {
            "heads": heads,
            "groups": int(getattr(config, "num_query_groups", None) or heads),
            "channels": int(getattr(config, "kv_channels", None) or 0),
            "gated": bool(getattr(config, "gated_linear_unit", False)),
            "layers": int(getattr(config, "num_layers", 0)),
            "hidden": int(getattr(config, "hidden_size", 0)),
        }
    return found
