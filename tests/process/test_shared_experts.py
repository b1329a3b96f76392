"""Recovery of Megatron's models whose experts are shared by data-parallel ranks: the smallest block of ranks that is
closed under all groups is a replica, in which each lane has micro-batches of its own.

Real ranks, ZeroMQ and gloo; Megatron-core training on CPU, 8 experts. Each run is compared, place by place, with one of
the same layout in which nothing fails.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.support import proof
from tests.support.matrix import ITERATIONS, KINDS, SHARED_EXPERTS, size_of, train
from tests.support.moments import moments
from tests.support.rank_harness import Ranks

pytestmark = pytest.mark.process

GRADIENTS = 1e-6  # of the struck iteration, relative to the largest, in fp32; 7.4e-8 is seen
LATER = 1e-5  # after it Adam carries last bits on; 2.9e-7 is seen
LOSSES = 1e-6  # relative; 2.4e-8 is seen
HALF = ("eight-bias", "eight-fp16")  # a last bit of these may send a token to another expert
HALF_GRADIENTS, HALF_LOSSES = 5e-3, 1e-4
STRUCK = ("data", "backward", "tokens", "reduce", "in-reduce", "proof", "commit", "step", "after", "recovery", "twice")

CASES = [
    ("ep", "eight", "tokens"),
    ("ep", "eight-sharded", "reduce"),
]
WIDE = [
    ("ep", "eight-sharded-overlap", "twice"),
    ("ep-tp", "eight-sharded", "tokens"),
    ("ep-tp", "eight", "commit"),
    ("ep", "eight", "step"),
    ("ep", "eight-allgather", "data"),
    ("ep", "eight-bias", "proof"),
    ("ep", "eight-overlap", "in-reduce"),
    ("ep-etp", "eight-allgather", "reduce"),  # gloo gathers no uneven numbers of tokens, which all-to-all needs there
    ("ep-pp", "eight", "twice"),
]
LONG = [
    *(("ep", "eight-sharded", moment) for moment in STRUCK),
    ("ep-pp", "eight-sharded-overlap", "proof"),
    *(("ep", "eight", moment) for moment in STRUCK),
    *(("ep-tp", "eight", moment) for moment in STRUCK),
    ("ep", "eight-fp16", "reduce"),
    ("ep-etp", "eight-allgather", "commit"),
    ("ep-vpp", "eight-overlap", "data"),
    ("ep-half", "eight", "reduce"),
    ("ep-across", "six", "tokens"),
]
ALL = [
    *CASES,
    *(pytest.param(*case, marks=pytest.mark.wide) for case in WIDE),
    *(pytest.param(*case, marks=pytest.mark.long) for case in LONG if case not in CASES and case not in WIDE),
]


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """(layout, kind) -> the folder of a run in which nothing fails; made once."""
    made: dict[tuple[str, str], Path] = {}

    def of(layout: str, kind: str) -> Path:
        if (layout, kind) not in made:
            out = made[layout, kind] = tmp_path_factory.mktemp("reference")
            ranks = train(out, layout, KINDS[kind], [])
            assert not ranks.breaks and set(map(tuple, ranks.exits.values())) == {(0,)}
        return made[layout, kind]

    return of


@pytest.mark.parametrize(("layout", "kind", "moment"), ALL)
def test_shared_experts_at_any_moment(references, tmp_path, layout, kind, moment):
    reference, size = references(layout, kind), size_of(SHARED_EXPERTS[layout][0])
    # The reduces of an iteration: of the dense layers, of the experts, and of the proof.
    struck = moments(size, proof=1 if layout == "ep-tp" else 2)[moment]
    ranks = train(tmp_path, layout, KINDS[kind], struck, restart=moment == "twice")
    assert any(lost for _, lost, _ in ranks.breaks)
    half = kind in HALF
    proof.same_losses(tmp_path, reference, HALF_LOSSES if half else LOSSES)
    for what in ("scale", "biases"):
        assert proof.losses(tmp_path, what) == proof.losses(reference, what)
    differences = proof.gradient_differences(tmp_path, reference, ITERATIONS, size, relative=True)
    print(f"gradients differ by {max(differences.values()):.1e} at most")
    first = min((iteration for iteration, found in differences.items() if found), default=0)
    limits = {at: HALF_GRADIENTS if half else GRADIENTS if at == first else LATER for at in differences}
    assert all(found <= limits[at] for at, found in differences.items()), differences


PADDED = {  # settings with which something may count twice: auxiliary losses, tokens, and the experts' biases
    "losses": {"TINY_EXPERTS": "seq_aux_loss", "TINY_TOKENS": "1", "TINY_MTP": "1"},
    "biases": {"TINY_EXPERTS": "bias"},
}


@pytest.mark.parametrize("name", ["losses", pytest.param("biases", marks=pytest.mark.wide)])
def test_what_a_lane_computes_to_fill_up_a_schedule_counts_nowhere(tmp_path, name):
    """Five micro-batches over two lanes, of which one computes the last one as well: the gradient is that of one rank
    with all experts, which goes on from the same checkpoint."""
    settings = KINDS["eight"] | PADDED[name] | {"TINY_MICRO_BATCHES": "5", "TINY_CHECKPOINTS": str(tmp_path / "saves")}
    found: dict[str, list[torch.Tensor]] = {}
    for run, layout, iterations in (("begin", "1 1 1 2 1", 2), ("two", "1 1 1 2 1", 3), ("one", "1 1 1", 3)):
        settings |= {"TINY_LAYOUT": layout, "TINY_ITERATIONS": str(iterations)}
        size = size_of(layout)
        saves = shutil.copytree(tmp_path / "saves", tmp_path / run / "saves") if run != "begin" else tmp_path / "saves"
        (tmp_path / run).mkdir(exist_ok=True)
        ranks = Ranks(tmp_path / run, size, [], fork=True, replica=size, **settings | {"TINY_CHECKPOINTS": str(saves)})
        ranks.drive()
        found[run] = [torch.load(path)["gradient"] for path in sorted((tmp_path / run).glob("step.2.*"))]
    (one,), (two, other) = found["one"], found["two"]
    # The experts of the second rank are where the first one has its own; all else is the same.
    both = torch.cat([two, other[two != other]])
    unused = torch.zeros(len(one) - len(both))  # of experts without a token both are zero, and look the same
    same, largest = torch.cat([both, unused]).sort().values - one.sort().values, one.abs().max()
    assert float(same.abs().max() / largest) <= GRADIENTS
    biases = [proof.losses(tmp_path / run, "biases")[2] for run in ("one", "two")]
    assert biases[0] == biases[1]
