"""Causes of failures, with severity and the method that detects them.

The names are those of the severity table in `detector`. `planner` does not import it; a test compares the two.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """A cause of failures (docs/design/paper.md, section 3)."""

    name: str
    severity: int  # 1, 2 or 3
    method: str  # node_health, process, exception or statistical


_TABLE = {
    ("node_health", 1): "lost_connection node_failed",
    ("process", 2): "exited_abnormally killed_from_outside",
    ("exception", 1): "ecc_error invalid_dma_mapping nvlink_error gpu_driver_error gpu_lost host_hardware_error "
    "kernel_error nic_error local_disk_error silent_corruption",
    ("exception", 2): "illegal_memory_access cuda_error other_software_error others ecc_contained cuda_out_of_memory "
    "host_out_of_memory device_assert collective_mismatch application_error numerical_error configuration_error "
    "disk_full shared_memory_full file_system_error checkpoint_corrupt worker_died service_unreachable",
    ("exception", 3): "connection_refused connection_reset other_network_error hardware_warning no_fault finished "
    "bad_micro_batch",
    ("statistical", 2): "task_hang",
    ("statistical", 3): "nccl_timeout link_flapping",
}
CAUSES = {name: Cause(name, severity, method) for (method, severity), names in _TABLE.items() for name in names.split()}
HARMLESS = ("hardware_warning", "no_fault", "finished", "bad_micro_batch")  # only reported: they disturb no job


def find(text: str) -> Cause | None:
    """The cause of that name; None if unknown. Blanks, capitals and a plural s do not matter ("ECC errors")."""
    name = re.sub(r"[^a-z0-9]+", "_", text.strip().lower()).strip("_")
    for candidate in (name, name.removesuffix("s"), f"{name}_error"):
        if candidate in CAUSES:
            return CAUSES[candidate]
    match = re.fullmatch(r"sev_?([123])", name)
    if match:
        return Cause(name, int(match[1]), "exception")
    return None
