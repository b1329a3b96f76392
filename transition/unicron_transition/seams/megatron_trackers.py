"""The values that Megatron-core collects in forward passes for its log: auxiliary losses of experts, and the losses of
multi-token prediction.

They are sums over the micro-batches that a rank has computed. Megatron averages them between two iterations, as if all
ranks had computed equally many. In a session they are summed once over all ranks (:func:`add_up`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

EXPERTS = "megatron.core.transformer.moe"
PREDICTIONS = "megatron.core.transformer.multi_token_prediction"
BALANCES = ("load_balancing_loss", "seq_load_balancing_loss", "global_load_balancing_loss")
KINDS = ("aux_loss", "seq_aux_loss", "global_aux_loss")
Z_LOSS = "z_loss"
SUMS = (  # (module, name) in some release
    (f"{EXPERTS}.moe_utils", "reduce_aux_losses_tracker_across_ranks"),
    (f"{EXPERTS}.moe_logging", "MoEMetricsTracker._sync_metrics"),
    (PREDICTIONS, "MTPLossLoggingHelper.reduce_loss_in_tracker"),
    (PREDICTIONS, "MTPLossLoggingHelper.reduce_metrics_in_tracker"),
)
_MTP = "mtp "  # in front of the names of multi-token prediction's values


def _experts() -> dict[str, Any]:
    """Return name -> entry of the experts' tracker: a mapping, from 0.18 on an object."""
    logging = sys.modules.get(f"{EXPERTS}.moe_logging")
    if logging is not None:
        return dict(logging.get_moe_metrics_tracker().metrics)
    utils = sys.modules.get(f"{EXPERTS}.moe_utils")
    return dict(utils.get_moe_layer_wise_logging_tracker()) if utils is not None else {}


def _predictions() -> dict[str, Any]:
    helper = getattr(sys.modules.get(PREDICTIONS), "MTPLossLoggingHelper", None)
    return helper.tracker if helper is not None else {}


def values() -> dict[str, torch.Tensor]:
    """Return name -> this rank's sums, one for each layer."""
    found = {name: entry["values"] if isinstance(entry, dict) else entry.values for name, entry in _experts().items()}
    predicted = {
        f"{_MTP}{key}": value
        for key, value in _predictions().items()
        if key.endswith("values") and not key.startswith("cumulative") and isinstance(value, torch.Tensor)
    }
    return found | predicted


def copies() -> dict[str, torch.Tensor]:
    """Return a copy of the sums."""
    return {name: tensor.clone() for name, tensor in values().items()}


def put_back(sums: Mapping[str, torch.Tensor]) -> None:
    """Set the sums to these copies; those that were not there yet to zero."""
    for name, tensor in values().items():
        if name in sums:
            tensor.copy_(sums[name])
        else:
            tensor.zero_()


def spoil() -> None:
    """Make all sums NaN: there are none over all ranks."""
    for tensor in values().values():
        tensor.fill_(float("nan"))


def complete(args: Any, device: torch.device) -> None:
    """Make the entries that Megatron-LM logs with these arguments, also in a rank that has computed no such layer."""
    further = args.mtp_num_layers or 0
    if args.num_experts is not None:
        for name in _logged_names(args):
            _make(name, args.num_layers + further, device)
    if further:
        helper = sys.modules[PREDICTIONS].MTPLossLoggingHelper
        whats = ("",) if hasattr(helper, "save_loss_to_tracker") else ("loss_", "correct_", "total_")
        for what in whats:
            helper.tracker.setdefault(f"{what}values", torch.zeros(further, device=device))


def _logged_names(args: Any) -> list[str]:
    kinds = args.moe_router_load_balancing_type
    names = [name for name, kind in zip(BALANCES, KINDS, strict=True) if kind in kinds]  # as Megatron-LM asks
    return [*names, *([Z_LOSS] if args.moe_z_loss_coeff is not None else [])]


def _make(name: str, layers: int, device: torch.device) -> None:
    logging = sys.modules.get(f"{EXPERTS}.moe_logging")
    if logging is not None:
        logging.get_moe_metrics_tracker().ensure_initialized(name, layers, device)
        return
    utils = sys.modules[f"{EXPERTS}.moe_utils"]
    empty = {"values": torch.zeros(layers, device=device), "reduce_group": None, "avg_group": None}
    utils.get_moe_layer_wise_logging_tracker().setdefault(name, empty)


def add_up(total: Any, tensor_ranks: int, lanes: int) -> None:
    """Replace the sums by those over all ranks. total(tensor): sums it over them in place.

    Of `tensor_ranks` ranks each has a part of a loss that balances experts, but the whole of any other value.
    Megatron-LM will divide by the micro-batches of each of the `lanes`.
    """
    found = sorted(values().items())
    if not found:
        return
    parts = [value.double() / lanes / (1 if name in BALANCES else tensor_ranks) for name, value in found]
    both = torch.cat(parts)
    total(both)
    for (_, value), part in zip(found, both.split([len(part) for part in parts]), strict=True):
        value.copy_(part)


def leave_sums_to_the_session() -> None:
    """Make Megatron's own sums do nothing, since :func:`add_up` has made them. To be called once `megatron.training` is
    imported."""
    for module, name in SUMS:
        *path, last = name.split(".")
        owner = sys.modules.get(module)
        for part in path:
            owner = getattr(owner, part, None)
        if hasattr(owner, last):
            setattr(owner, last, staticmethod(_nothing) if path else _nothing)


def _nothing(*_: Any, **__: Any) -> None:
    pass
