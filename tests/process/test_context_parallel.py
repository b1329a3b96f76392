"""Context parallelism of plain modules on gloo: what torch's own `context_parallel` does on CPUs
(docs/behaviour/context-parallel.md), and recovery of a replica whose ranks share each sequence.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import proof
from tests.support.moments import fault
from tests.support.processes import ROOT, of_a_world, outside_slurm
from tests.support.rank_harness import Ranks
from tests.support.warm import Script

pytestmark = pytest.mark.process

SUPPORT = ROOT / "tests" / "support"
SCRIPT = SUPPORT / "tiny_context.py"
ITERATIONS = 4
LOSSES = 1e-6  # relative
EQUAL, WRONG = 1e-5, 0.1  # of a gradient's largest number
# words of the script -> what torch says: an error, or how far gradients are from those of one rank
SEEN: dict[str, str | bool] = {
    "flash causal": "does not have a sharding strategy registered",
    "math causal": "got mixed torch.Tensor and DTensor",
    "math full": True,
    "math causal implicit plain": True,
    "math causal implicit": False,  # the default balance of the load: wrong, without an error
}


@pytest.fixture(scope="module")
def torchs_own() -> dict[str, dict]:
    """What two ranks have seen of torch's `context_parallel`, for each of the words."""
    script = SUPPORT / "context_ranks.py"
    ended = [Script(script, *SEEN, environment=each) for each in of_a_world(2)]
    first, second = (each.wait() for each in ended)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr[-3000:]
    return json.loads(first.stdout.splitlines()[-1])


@pytest.mark.parametrize("words", SEEN)
def test_torchs_context_parallel_on_cpus(torchs_own: dict[str, dict], words: str) -> None:
    seen, wanted = torchs_own[words], SEEN[words]
    if isinstance(wanted, str):
        assert wanted in seen["error"]
    elif wanted:
        assert seen["difference"] < EQUAL
    else:
        assert seen["difference"] > WRONG


def environment(context: int, shard: int) -> dict[str, str]:
    sizes = {"TINY_CONTEXT": str(context), "TINY_SHARD": str(shard)}
    return {"TINY_SCRIPT": str(SCRIPT), "TINY_ITERATIONS": str(ITERATIONS), **sizes}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one rank that computes whole sequences."""
    out = tmp_path_factory.mktemp("reference")
    [world] = of_a_world(1)
    ended = Script(SCRIPT, environment=outside_slurm() | world | environment(1, 1) | {"TINY_OUT": str(out)}).wait()
    assert ended.returncode == 0, ended.stderr
    return out


@pytest.mark.parametrize(
    ("context", "shard", "moment"), [(2, 1, "reduce"), pytest.param(2, 2, "backward", marks=pytest.mark.wide)]
)
def test_a_replica_whose_ranks_share_sequences_is_healed(
    tmp_path: Path, reference: Path, context: int, shard: int, moment: str
) -> None:
    """A rank of the second replica is killed; losses are those of one rank with whole sequences."""
    memory = tmp_path / "memory"
    memory.mkdir()
    size = context * shard
    more = environment(context, shard) | {"UNICRON_MEMORY": str(memory)}
    ranks = Ranks(tmp_path, 2 * size, [fault(size, 1, moment)], fork=True, replica=size, **more)
    ranks.drive()
    assert any(lost for _, lost, _ in ranks.breaks)
    proof.same_losses(tmp_path, reference, LOSSES)
