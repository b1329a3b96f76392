"""How many ranks one task stands for: who has said it, and what its script shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from unicron_ctl.agent.connections.job_environment import read_place
from unicron_ctl.agent.start.agent_main import describe_ranks, why_one_rank
from unicron_ctl.agent.start.command_mode import scripts_of

DDP = "import torch.distributed as dist\ndist.init_process_group()\n"


@pytest.mark.parametrize(
    "text",
    [
        DDP,
        "local = int(os.environ['LOCAL_RANK'])",
        "from torch import nn, distributed",
        "import lightning as L",
        "from accelerate import Accelerator",
        "import deepspeed",
        "from megatron.core import parallel_state",
        "import unicron",
        "trainer = Trainer(model, args)",
        "torch.distributed.launch()\nif isinstance(model, (nn.DataParallel, DistributedDataParallel)): pass",
        "mp.set_start_method('spawn'); rank = os.environ['RANK']; DistributedDataParallel(model)",
    ],
)
def test_a_program_of_several_processes_has_a_rank_for_each_gpu(text: str) -> None:
    assert why_one_rank({}, True, text) == ""


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (f"{DDP}mp.spawn(main_worker, nprocs=ngpus)", "mp.spawn"),
        (f"{DDP}from torch.multiprocessing import spawn\nspawn(work)", "spawn"),
        (f"{DDP}start_processes(work)", "start_processes"),
        (f"{DDP}model = nn.DataParallel(model)", "DataParallel"),
        ("trainer = Trainer(AutoModel.from_pretrained(path, device_map='auto'))", "device_map"),
        ("from accelerate import notebook_launcher", "notebook_launcher"),
        ("import torch\nmodel.cuda()", "neither torch.distributed nor RANK"),
        ("PRANK = LOWRANK = 1", "neither torch.distributed nor RANK"),
        ("", "no script"),
    ],
)
def test_another_program_is_one_rank(text: str, name: str) -> None:
    """Defect: PyTorch's ImageNet example, which spawns a worker for each GPU, was started once for each GPU."""
    assert name in why_one_rank({}, True, text)


def test_a_number_of_tasks_counts_more_than_the_script() -> None:
    assert why_one_rank({"_UNICRON_SAID_TASKS": "--ntasks-per-node=1"}, True, DDP) == "--ntasks-per-node=1 says so"
    assert why_one_rank({}, False, DDP)


@pytest.mark.parametrize(
    ("more", "why", "says"),
    [
        ({}, "", "8 ranks"),
        ({}, "-n says so", "one rank"),
        ({"UNICRON_RANKS_PER_NODE": "8"}, "", ""),
        ({"SLURM_GPUS_ON_NODE": "1"}, "", ""),
        ({"SLURM_GPUS_ON_NODE": ""}, "x", ""),
    ],
)
def test_the_log_says_what_counts(more: dict[str, str], why: str, says: str) -> None:
    environment = {"SLURM_JOB_ID": "1", "UNICRON_NODE_ADDRESS": "a", "SLURM_GPUS_ON_NODE": "8"} | more
    said = describe_ranks(read_place(environment, by_gpus=not why), why, environment)
    assert says in said and bool(said) is bool(says) and ("UNICRON_RANKS_PER_NODE=8" in said) is bool(why and says)
    assert why in said or not says


def test_the_scripts_that_a_shells_text_names_are_read(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DDP)
    found = scripts_of(f"cd {tmp_path} && python ./train.py --lr 1 && python gone.py", tmp_path)
    assert why_one_rank({}, True, found) == ""
