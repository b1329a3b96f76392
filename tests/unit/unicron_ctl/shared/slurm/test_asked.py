"""What a pending element asks of one node, from squeue's columns as 22.05, 24.11 and 26.05 print them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_ctl.shared.slurm import asked
from unicron_ctl.shared.slurm.slurm_client import Needs

PLAIN = {"NumNodes": "1", "NumCPUs": "1", "MinCpus": "1", "NumTasks": "1", "MinMemory": "0", "MinTmpDisk": "0"}


def _read(**texts: str) -> tuple[Needs, str]:
    return asked.parse(PLAIN | {name.replace("_", "-"): text for name, text in texts.items()})


@pytest.mark.parametrize(
    ("texts", "gres"),
    [
        ({"tres_per_node": "gres:gpu:2"}, "gpu:2"),  # --gres, --gpus-per-node; 22.05
        ({"tres_per_node": "gres/gpu:a100:2"}, "gpu:a100:2"),  # 24.11, 26.05
        ({"tres_per_job": "gres:gpu:2"}, "gpu:2"),  # --gpus
        ({"tres_per_job": "gres/gpu:2", "NumNodes": "2"}, "gpu:1"),
        ({"tres_per_task": "gres:gpu:1", "NumTasks": "2"}, "gpu:2"),  # --gpus-per-task; 22.05
        ({"tres_per_task": "gres/gpu=1", "NumTasks": "2"}, "gpu:2"),  # 24.11, 26.05
        ({"tres_per_task": "gres/gpu:a100=1", "NumTasks": "2"}, "gpu:a100:2"),
        ({"tres_per_task": "gres/gpu:a100:1", "NumTasks": "2"}, "gpu:a100:2"),  # --tres-per-task
        ({"tres_per_task": "cpu=2,gres/gpu=1", "NumTasks": "4"}, "gpu:4"),
        ({"tres_per_task": "cpu=4"}, ""),
        ({"tres_per_task": "gres/gpu=1", "NumTasks": "8", "NumNodes": "2", "NTPerNode": "4"}, "gpu:4"),
        ({"tres_per_task": "gres/gpu=1", "NumTasks": "8", "NumNodes": "2", "NTPerNode": "0"}, "gpu:1"),
        ({"tres_per_socket": "gres:gpu:1", "Sockets": "2"}, "gpu:1"),  # --gpus-per-socket: not of each, seen in all
        ({"tres_per_socket": "gres:gpu:1", "Sockets": "2", "tres_per_job": "gres:gpu:2"}, "gpu:2"),
        ({"tres_per_node": "gres:gpu:1", "tres_per_job": "gres:gpu:2"}, "gpu:2"),
        ({"tres_per_node": "gres:gpu:a100:2", "tres_per_job": "gres:gpu:2"}, "gpu:a100:2"),
        ({"tres_per_node": "gres/gpu:a100:1,gres/nic:2"}, "gpu:a100:1,nic:2"),
        ({"tres_per_node": "gres/gpu"}, "gpu:1"),
    ],
)
def test_each_way_to_ask_for_gpus(texts: dict[str, str], gres: str) -> None:
    assert _read(**texts)[1] == gres


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        ({"MinMemory": "1500M", "tres_alloc": "cpu=1,mem=1500M,node=1"}, (1500, 1500, 0)),
        ({"MinMemory": "1500M", "NumCPUs": "4", "tres_alloc": "cpu=4,mem=1500M,node=1"}, (1500, 1500, 0)),
        ({"MinMemory": "700M", "NumCPUs": "4", "tres_alloc": "cpu=4,mem=2800M,node=1"}, (700, 2800, 700)),
        ({"MinMemory": "2G", "tres_alloc": "cpu=1,mem=2G,node=1,billing=1"}, (2048, 2048, 0)),
        ({"tres_alloc": "cpu=1,mem=2000M,node=1"}, (0, 0, 0)),  # --mem=0, or nothing asked for: the sum is a node's
        ({"mem_per_tres": "gres:gpu:700", "tres_alloc": "cpu=1,mem=1400M,node=1"}, (0, 1400, 0)),
        ({"MinMemory": "700M", "mem_per_tres": "gres/gpu:700", "tres_alloc": "cpu=1,mem=1400M"}, (700, 1400, 0)),
        ({"MinMemory": "700M", "NumCPUs": "4", "tres_alloc": "cpu=4,node=1,billing=4"}, (700, 0, 0)),
        (
            {"MinMemory": "9M", "NumCPUs": "8", "NumNodes": "2", "MinCpus": "4", "tres_alloc": "cpu=8,mem=72M"},
            (9, 36, 9),
        ),
        ({"MinMemory": "9M", "NumCPUs": "8", "NumNodes": "2", "tres_alloc": "cpu=8,mem=18M,node=2"}, (9, 9, 0)),
        ({"MinMemory": "700M", "NumCPUs": "4", "tres_alloc": "cpu=4,mem=28…"}, (700, 0, 0)),  # it was cut off
    ],
)
def test_memory_for_a_node_a_cpu_or_a_gpu(texts: dict[str, str], found: tuple[int, int, int]) -> None:
    size, _ = _read(**texts)
    assert (size.memory, size.in_all, size.per_cpu) == found


def test_cpus_tasks_disk_and_cores() -> None:
    size, _ = _read(NumCPUs="8", MinCpus="2", NumTasks="4", MinTmpDisk="1G", Sockets="2", Cores="*", Threads="1")
    assert (size.cpus, size.tasks, size.tmp, size.sockets, size.cores, size.threads) == (8, 4, 1024, 2, 0, 1)
    size, _ = _read(NumCPUs="8", MinCpus="3", NumNodes="2", NTPerNode="3", NTPerSocket="N/A", NTPerCore="1")
    assert (size.nodes, size.cpus, size.tasks, size.tasks_per_socket, size.tasks_per_core) == (2, 3, 3, 0, 1)
    assert _read(NumCPUs="6", NumNodes="2", MaxNodes="1")[0].cpus == 6  # of --nodes=1, where no node has six
    assert _read(cpus_per_tres="gres:gpu:4", tres_per_job="gres:gpu:a100:2")[0].cpus == 8  # 22.05 says NumCPUs=1


@pytest.mark.parametrize(
    ("texts", "for_each", "room"),
    [
        ({"NumCPUs": "6", "NumTasks": "2", "NTPerSocket": "3", "NTPerCore": "1"}, 3, 3),
        ({"NumCPUs": "6", "NumTasks": "4", "NTPerNode": "1", "NTPerCore": "4"}, 1, 1),  # seen: the 4 do not count then
        ({"NumCPUs": "1", "NumTasks": "1", "NTPerNode": "0", "NTPerSocket": "N/A", "NTPerCore": "8"}, 1, 8),
        ({"NumCPUs": "1", "NumTasks": "2"}, 1, 0),
        ({"NumTasks": "N/A"}, 1, 0),
    ],
)
def test_cpus_of_a_task_and_tasks_that_must_find_room(texts: dict[str, str], for_each: int, room: int) -> None:
    size, _ = _read(**texts)
    assert (size.cpus_per_task, size.room) == (for_each, room)


@given(
    st.dictionaries(
        st.sampled_from([name for name, _ in asked.COLUMNS]), st.text("gres:/=,0128KMGcpumnodet*…-.", max_size=20)
    )
)
def test_nothing_that_squeue_prints_is_an_error(texts: dict[str, str]) -> None:
    size, _ = asked.parse(texts)
    assert size.nodes >= 1 and min(size.cpus, size.memory, size.in_all, size.tmp) >= 0
