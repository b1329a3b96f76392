"""How each cause of a failure looks to the agent of the node that it strikes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Look:
    """kernel: a line of the node's kernel log. error: the last line of a rank whose process ends, or, with `stops`,
    what ranks of two nodes say that stop in a collective. Neither: the node falls silent, with all that is on it."""

    kernel: str = ""
    error: str = ""
    stops: bool = False

    @property
    def silent(self) -> bool:
        return not (self.kernel or self.error)


# The causes of unicron_planner.simulate.generate.LLAMA3_COUNTS; lines from public threads (tests/data/errors.jsonl).
LOOKS = {
    "gpu_lost": Look("NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus", "RuntimeError: CUDA error: unknown"),
    "ecc_error": Look(
        "NVRM: Xid (PCI:0000:07:00): 48, pid='<unknown>', name=<unknown>, An uncorrectable double bit error (DBE)",
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    ),
    "nic_error": Look("mlx5_core 0000:5e:00.0: device's health compromised - reached miss count"),
    "host_hardware_error": Look(
        "EDAC MC3: 1 UE memory read error on CPU_SrcID#1_MC#1_Chan#2_DIMM#0 (channel:2 slot:0)"
    ),
    "local_disk_error": Look("Buffer I/O error on device nvme0n1p1, logical block 1066386"),
    "node_failed": Look(),
    "other_software_error": Look(error="RuntimeError: NCCL communicator was aborted on rank 1."),
    "numerical_error": Look(error="AssertionError: Rank 3: found NaN in local grad norm in backward pass. Device: 3"),
    "nccl_timeout": Look(
        error="[Rank 7] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)", stops=True
    ),
    "other_network_error": Look(
        error="NET/IB : Got completion from peer 10.0.0.1<48598> with error 12, opcode 0, len 0, vendor err 129",
        stops=True,
    ),
}
