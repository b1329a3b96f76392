"""A process group of one rank."""

from __future__ import annotations

import pytest
import torch.distributed as dist


@pytest.fixture
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
