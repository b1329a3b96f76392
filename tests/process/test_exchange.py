"""What the members tell each other over a real gloo, when one of them is slower than the others."""

from __future__ import annotations

import pytest

from tests.support.processes import outside_slurm
from tests.support.warm import Script

pytestmark = pytest.mark.process
# Rank 1 asks for its last message a second after the two others know the outcome, and end.
RANK = """
import os, sys, time
import torch, torch.distributed as dist
from types import SimpleNamespace
from unicron_transition.iteration import exchange as module

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=3)

class Slow:
    def __getattr__(self, name):
        return getattr(dist.group.WORLD, name)
    def recv(self, tensors, source, tag):
        if rank == 1 and tag == module.FIRST_TAG + 2:
            time.sleep(1.0)
        return dist.group.WORLD.recv(tensors, source, tag)

of_all = module.largest_of_all
module.largest_of_all = lambda tensor, group: of_all(tensor, Slow())
watch = SimpleNamespace(disturbed=lambda inside: False)
exchange = module.Exchange(SimpleNamespace(backend="gloo", channel=object(), watch=watch))
print(exchange.largest(rank), flush=True)
exchange.wait_until_sent()
os._exit(0)
"""


def test_a_member_that_is_done_ends_when_the_others_have_its_word(tmp_path):
    """Defect: a rank that ended right after the last commit took its word with it, and the one that still waited for it
    stopped its training as for a lost peer."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    ranks = [Script(script, rank, tmp_path / "store", environment=outside_slurm()) for rank in range(3)]
    ends = [rank.wait() for rank in ranks]
    assert [end.stdout for end in ends] == ["2\n"] * 3, ends
