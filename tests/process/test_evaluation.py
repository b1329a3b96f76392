"""A loss in an evaluation between two iterations: the survivors begin it anew, and training and value are those of an
undisturbed run.

Real ranks, ZeroMQ and gloo. One slot is struck before a micro-batch of the evaluation, before and after its sum, or
when it has the value and the others do not.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from tests.support import proof
from tests.support.matrix import EIGHT, LAYOUTS, SHARED_EXPERTS, lanes_of, size_of
from tests.support.moments import fault
from tests.support.processes import ROOT
from tests.support.rank_harness import Ranks

pytestmark = pytest.mark.process

ITERATIONS = 4
LOSSES = 1e-5
KINDS = {
    "plain": ("dp", {"TINY_SCRIPT": str(ROOT / "tests" / "support" / "tiny_plain.py")}),
    "gpt": ("dp", {}),
    "silent": ("dp", {"TINY_SILENT": "1"}),  # collectives of a broken generation give garbage
    "dp-sharded": ("dp", {"TINY_DISTOPT": "1", "TINY_OVERLAP": "1", "TINY_GATHER": "1"}),
    "tp": ("tp", {}),
    "pp-sharded": ("pp", {"TINY_DISTOPT": "1", "TINY_OVERLAP": "1", "TINY_GATHER": "1"}),
    "vpp": ("vpp", {}),
    "ep": ("ep", EIGHT),
}
SHAPES = LAYOUTS | SHARED_EXPERTS


def values(out: Path) -> dict[int, set[float]]:
    """iteration -> the values of the evaluation before it."""
    found = defaultdict(set)
    for path in out.glob("evaluated.*"):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            found[entry["iteration"]].add(entry["value"])
    return found


def trained(out: Path, kind: str, faults: list[dict], **keywords) -> Ranks:
    layout, settings = KINDS[kind]
    shape, replicas = SHAPES[layout]
    size = size_of(shape)
    environment = {"TINY_LAYOUT": shape, "TINY_ITERATIONS": str(ITERATIONS), "TINY_EVALUATE": "7", **settings}
    ranks = Ranks(out, min(replicas, 3) * size, faults, fork=True, replica=size, **environment, **keywords)
    ranks.drive()
    proof.exactly_once(ranks, ITERATIONS, lanes_of(shape))
    return ranks


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """kind -> the folder of a run in which nothing fails; made once."""
    made: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("reference")
            ranks = trained(made[kind], kind, [])
            assert not ranks.breaks and set(map(tuple, ranks.exits.values())) == {(0,)}
            assert sorted(values(made[kind])) == list(range(1, ITERATIONS + 1))
        return made[kind]

    return of


MOMENTS = {  # what strikes the second replica after iteration 1, beside a second loss while the evaluation begins anew
    "first": [fault(-1, 1, "evaluate", 0)],
    "middle": [fault(-1, 1, "evaluate", 1)],
    "sum": [fault(-1, 1, "evaluate", 1, kind="late", delay=0.002)],
    "valued": [fault(-1, 1, "valued")],
    "nobody": [fault(-1, 1, "evaluate", 1, kind="gloo")],
    "end": [fault(-1, ITERATIONS - 1, "evaluate", 1)],
    "twice": [fault(-1, 1, "evaluate", 1), fault(0, 1, "entered", recovery=1, kind="gloo")],
    "slow": [fault(-1, 1, "evaluate", 1), fault(0, 1, "evaluate", 0, kind="sleep", delay=0.3)],
}
SPREAD = {("plain", "middle"), ("pp-sharded", "sum")}
CASES = [
    pytest.param(*case, id=" ".join(case), marks=() if case in SPREAD else pytest.mark.wide)
    for case in ((kind, moment) for kind in KINDS for moment in MOMENTS)
    if case != ("silent", "nobody")  # where nobody says anything of it, it is a hang
]


@pytest.mark.parametrize(("kind", "moment"), CASES)
def test_a_loss_in_an_evaluation_is_healed(references, tmp_path, kind, moment):
    reference, size = references(kind), size_of(SHAPES[KINDS[kind][0]][0])
    faults = [each | {"slot": size if each["slot"] < 0 else each["slot"]} for each in MOMENTS[moment]]
    ranks = trained(tmp_path, kind, faults)
    assert ranks.breaks
    proof.same_losses(tmp_path, reference, LOSSES)
    found, wanted = values(tmp_path), values(reference)
    assert sorted(found) == sorted(wanted)
    for iteration, told in found.items():
        assert len(told) == 1, f"before iteration {iteration}: ranks have {told}"
        assert told.pop() == pytest.approx(next(iter(wanted[iteration])), rel=LOSSES)
