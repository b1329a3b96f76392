"""Reads from squeue's columns what a pending element asks of one node. Pure.

Slurm distinguishes requests per node, task, socket, GPU and job. An element is usually one node, so all of them become
what the node must have at least. For an element of several nodes, only what each of them must have is known.
docs/behaviour/squeue-formats.md has what each release prints.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from unicron_ctl.shared.slurm.slurm_client import Needs

COLUMNS = (
    ("ReqNodes", 64),
    ("NumNodes", 6),
    ("MaxNodes", 6),
    ("NumCPUs", 7),
    ("MinCpus", 7),
    ("NumTasks", 7),
    ("MinMemory", 9),
    ("MinTmpDisk", 9),
    ("Sockets", 4),
    ("Cores", 4),
    ("Threads", 4),
    ("NTPerNode", 6),
    ("NTPerSocket", 6),
    ("NTPerCore", 6),
    ("tres-alloc", 64),  # of a pending job: what it asks for in all
    ("cpus-per-tres", 32),
    ("mem-per-tres", 32),
    ("tres-per-node", 64),
    ("tres-per-job", 48),
    ("tres-per-socket", 32),
    ("tres-per-task", 48),
)
_UNITS = {"": 1.0, "K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}
_NO_LIMIT = 65534  # Slurm's 16 bits for "nothing was asked for"; 65535 means no limit
Gres = dict[tuple[str, str], int]


def megabytes(text: str) -> int:
    """Convert "1500M" or "1.5G" to MB; 0 for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGTP]?)", text)
    return round(float(found[1]) * _UNITS[found[2]]) if found else 0


def _number(text: str) -> int:
    """Return 0 for "N/A", "*" and whatever else is no number. Large numbers may be shortened: "131.25K"."""
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)K", text):
        return round(float(found[1]) * 1024)
    number = int(text) if text.isdecimal() else 0
    return number if number < _NO_LIMIT else 0


def parse(texts: Mapping[str, str]) -> tuple[Needs, str]:
    """Return what is asked of one node: its size, and its GRES as "gpu:a100:8". texts: squeue's COLUMNS; a text that
    was cut off counts for nothing."""
    return _parse(tuple(texts.get(name, "") for name, _ in COLUMNS))


@lru_cache(maxsize=4096)  # the elements of a job ask for the same
def _parse(values: tuple[str, ...]) -> tuple[Needs, str]:
    texts = {name: text for (name, _), text in zip(COLUMNS, values, strict=True)}

    def number(name: str) -> int:
        return _number(texts.get(name, ""))

    nodes, tasks = max(1, number("NumNodes")), number("NTPerNode")
    if most := number("MaxNodes"):
        nodes = min(nodes, most)  # NumNodes is what the CPUs need, where that is more
    alone = nodes == 1
    if alone:
        tasks = max(tasks, number("NumTasks"))
    gres = _combine(
        read_gres(texts.get("tres-per-node", "")),
        {key: count if alone else 1 for key, count in read_gres(texts.get("tres-per-job", "")).items()},
        {key: count * max(1, tasks) for key, count in read_gres(texts.get("tres-per-task", "")).items()},
        read_gres(texts.get("tres-per-socket", "")),  # Slurm starts it where one socket's are
    )
    cpus = max(number("MinCpus"), number("NumCPUs") if alone else 0)
    for_gpus = [count * _of(gres, key) for key, count in read_gres(texts.get("cpus-per-tres", "")).items()]
    memory = megabytes(texts.get("MinMemory", ""))
    total, per_cpu = _memory(texts, memory, number("MinCpus"), nodes)
    asked = Needs(
        nodes=nodes,
        cpus=max([cpus, *for_gpus]),
        cpus_in_all=number("NumCPUs"),
        tasks=tasks,
        memory=memory,
        in_all=total,
        per_cpu=per_cpu,
        tmp=megabytes(texts.get("MinTmpDisk", "")),
        sockets=number("Sockets"),
        cores=number("Cores"),
        threads=number("Threads"),
        tasks_per_socket=number("NTPerSocket"),
        tasks_per_core=number("NTPerCore"),
        cpus_per_task=max(1, number("NumCPUs") // max(1, number("NumTasks"))),
        room=number("NTPerNode") or number("NTPerSocket") or number("NTPerCore"),
    )
    return asked, ",".join(":".join(filter(None, (*key, str(count)))) for key, count in gres.items())


def _memory(texts: Mapping[str, str], memory: int, cpus: int, nodes: int) -> tuple[int, int]:
    """Return MB asked of one node in all, and MB for each CPU if they are asked for like that. squeue prints memory per
    CPU like memory per node: the sum tells them apart."""
    total = texts.get("tres-alloc", "")
    mem, count = re.search(r"(?:^|,)mem=([^,…]+)(?:,|$)", total), re.search(r"(?:^|,)cpu=(\d+)(?:,|$)", total)
    in_all, all_cpus = megabytes(mem[1]) if mem else 0, int(count[1]) if count else 0
    per_cpu = memory if all_cpus > nodes and in_all == memory * all_cpus else 0
    if nodes > 1:
        return memory * max(1, cpus) if per_cpu else memory, per_cpu
    # If neither memory nor memory for each GPU is asked for, the sum is that of some node.
    return (in_all if memory or read_gres(texts.get("mem-per-tres", "")) else 0), per_cpu


def read_gres(text: str) -> Gres:
    """Read {("gpu", "a100"): 4} from "gres:gpu:a100:4" (22.05), "gres/gpu:a100:4", "cpu=2,gres/gpu:a100=4" (23.11)."""
    found: Gres = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        words = re.split(r"[:=]", re.sub(r"^gres[:/]", "", item))
        if words[0] in ("cpu", "mem", "node", "billing", "bb", "license", "energy") and not item.startswith("gres"):
            continue
        last = re.fullmatch(r"(\d+)([KMGTkmgt]?)", words[-1])
        count = int(last[1]) * 1024 ** " kmgt".index(last[2].lower() or " ") if last else 1
        kinds = words[1:-1] if last else words[1:]
        key = words[0].lower(), kinds[0].lower() if kinds else ""
        found[key] = found.get(key, 0) + count
    return found


def _combine(*ways: Gres) -> Gres:
    """Return the most that is asked for of each, since all ways ask for the same GPUs."""
    found: Gres = {}
    for way in ways:
        for key, count in way.items():
            found[key] = max(count, found.get(key, 0))
    typed = {name for name, kind in found if kind}
    of_all = {name: sum(count for (one, kind), count in found.items() if one == name and kind) for name in typed}
    return {key: count for key, count in found.items() if key[1] or count > of_all.get(key[0], 0)}


def _of(gres: Gres, key: tuple[str, str]) -> int:
    """Return how many there are, of any type if none is named."""
    return sum(count for (name, kind), count in gres.items() if name == key[0] and key[1] in ("", kind))
