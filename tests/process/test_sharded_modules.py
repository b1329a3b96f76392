"""Recovery of modules that `fully_shard` has sharded, at every moment, with replicas of several ranks.

Real ranks, ZeroMQ and gloo. Each run is compared with one process that trains whole parameters by a loop of torch
alone: gradients and losses. A spread of layouts, moments and kinds runs always, the others are `wide`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import proof
from tests.support.jobs import json_lines
from tests.support.moments import fault
from tests.support.processes import ROOT, outside_slurm
from tests.support.rank_harness import Ranks
from tests.support.warm import Script

pytestmark = pytest.mark.process

SCRIPT = ROOT / "tests" / "support" / "tiny_sharded.py"
ITERATIONS = 5
GRADIENTS = 1e-6  # relative to the largest, in fp32
LOSSES = 1e-6  # relative
LAYOUTS: dict[str, tuple[int, int, int]] = {  # ranks, shard (and context), tensor
    "DP2 F2": (4, 2, 1),
    "DP3 F2": (6, 2, 1),
    "DP2 F2 TP2": (8, 2, 2),
    "F4": (4, 4, 1),
    "DP4 F1": (4, 1, 1),
}


def moments(size: int) -> dict[str, list[dict]]:
    """What strikes the second replica, or the only one."""
    first, last = size, 2 * size - 1
    return {
        "compute": [fault(last, 1, "backward", 1)],
        "gather": [fault(last, 1, "gather", 2)],
        "scatter": [fault(last, 1, "scatter", 1)],
        "reduce": [fault(first, 1, "reduce", 0)],
        "commit": [fault(last, 1, "reduce", 2 if size > 1 else 1)],  # in a larger replica its ranks agree before it
        "step": [fault(first, 1, "step")],
        "copy": [fault(1 % size, 2, "half")],
        "regroup": [fault(first, 1, "fetch"), fault(0, 1, "resume", kind="gloo")],
    }


def environment(layout: str, **more: str) -> dict[str, str]:
    _, shard, tensor = LAYOUTS[layout]
    sizes = {"TINY_SHARD": str(shard), "TINY_TENSOR": str(tensor)}
    return {"TINY_SCRIPT": str(SCRIPT), "TINY_ITERATIONS": str(ITERATIONS), **sizes, **more}


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """(layout, settings) -> the folder of a loop of torch alone in one process; where the numbers of a session are its
    own, those of ranks that nothing disturbs."""
    made: dict[str, Path] = {}

    def of(layout: str, settings: dict[str, str]) -> Path:
        key = repr((layout, sorted(settings.items())))
        if key not in made:
            out = made[key] = tmp_path_factory.mktemp("reference")
            mine = environment(layout, **settings)
            if settings.keys() & {"TINY_DROPOUT"} or "mixed" in settings.get("TINY_KIND", ""):
                ranks, shard, tensor = LAYOUTS[layout]
                Ranks(out, ranks, [], fork=True, replica=shard * tensor, **mine).drive()
                return out
            alone = outside_slurm() | {"TINY_ALONE": "1"} | mine | {"TINY_OUT": str(out)}
            ended = Script(SCRIPT, environment=alone).wait()
            assert ended.returncode == 0, ended.stderr
        return made[key]

    return of


@pytest.fixture
def run(references, tmp_path):
    """Run ranks with faults, and prove what must hold of every run. out: another folder than the test's."""

    def go(
        layout: str,
        *faults: dict,
        settings: dict[str, str] | None = None,
        out: Path = tmp_path,
        lanes: int | None = None,
        **keywords,
    ) -> Ranks:
        size, shard, tensor = LAYOUTS[layout]
        mine = environment(layout, **settings or {})
        memory = out / "memory"
        memory.mkdir(parents=True)
        more = mine | {"UNICRON_MEMORY": str(memory)}
        ranks = Ranks(out, size, list(faults), fork=True, replica=shard * tensor, **keywords, **more)
        ranks.drive()
        reference = references(layout, settings or {})
        proof.exactly_once(ranks, ITERATIONS, lanes=lanes or shard)
        proof.same_losses(out, reference, LOSSES)
        found = proof.gradient_differences(out, reference, ITERATIONS, shard * tensor, relative=True)
        print(f"gradients differ by {max(found.values()):.1e} at most")
        assert max(found.values()) <= GRADIENTS, found
        return ranks

    return go


@pytest.mark.wide
@pytest.mark.parametrize("layout", LAYOUTS)
def test_undisturbed(run, layout):
    ranks = run(layout)
    assert not ranks.breaks


INSIDE = ("gather", "scatter")  # a replica of one rank has no such collectives
SPREAD = [("DP2 F2", moment) for moment in ("compute", "scatter", "commit", "regroup")]
CASES = [
    pytest.param(layout, moment, marks=() if (layout, moment) in SPREAD else pytest.mark.wide)
    for layout, (ranks, shard, tensor) in LAYOUTS.items()
    for moment in moments(1)
    if ranks > shard * tensor and (shard > 1 or moment not in INSIDE)
]


@pytest.mark.parametrize(("layout", "moment"), CASES)
def test_any_moment(run, layout, moment):
    _, shard, tensor = LAYOUTS[layout]
    ranks = run(layout, *moments(shard * tensor)[moment])
    assert any(lost for _, lost, _ in ranks.breaks)


KINDS = {
    "tokens": {"TINY_TOKENS": "1", "TINY_CLIP": "0.5"},
    "dropout": {"TINY_DROPOUT": "0.1"},
    "mixed": {"TINY_KIND": "mixed", "TINY_CLIP": "0.5"},
    "checkpoint": {"TINY_KIND": "checkpoint"},
    "compile": {"TINY_KIND": "compile"},
    "frozen": {"TINY_KIND": "frozen"},
    "keep": {"TINY_KIND": "keep"},
    "grouped": {"TINY_KIND": "grouped"},
    "buckets": {"TINY_BUCKET": "4500"},
    "fused": {"TINY_KIND": "fused"},
    "no copies": {"UNICRON_SNAPSHOT": "none"},
    "settings": {"TINY_KIND": "after unreduced"},
    "ahead": {"TINY_KIND": "ahead checkpoint"},
}


ALWAYS = ("tokens", "settings")


@pytest.mark.parametrize("kind", [pytest.param(one, marks=() if one in ALWAYS else pytest.mark.wide) for one in KINDS])
def test_kinds_of_modules(run, kind):
    faults = [fault(3, 1, "backward", 1), fault(0, 1, "resume", kind="sleep", delay=0.01)]
    ranks = run("DP2 F2", *faults, settings=KINDS[kind])
    assert any(lost for _, lost, _ in ranks.breaks)


@pytest.mark.wide
def test_an_evaluation_has_one_value_in_all_ranks_whatever_their_number(run, tmp_path):
    """Its micro-batches are dealt in rounds, too, and a rank is lost in the middle of one."""
    values = {}
    for name, faults in (("undisturbed", []), ("disturbed", [fault(3, 1, "evaluate")])):
        run("DP2 F2", *faults, settings={"TINY_EVALUATE": "5"}, out=(out := tmp_path / name))
        told = [one for path in out.glob("evaluated.*") for one in json_lines(path)]
        values[name] = {at: {one["value"] for one in told if one["iteration"] == at} for at in range(1, ITERATIONS)}
    alone, after = ({at: told for at, (told,) in values[name].items()} for name in ("undisturbed", "disturbed"))
    assert after == pytest.approx(alone, rel=1e-6)


def test_the_norm_counts_what_tensor_ranks_share_once(run):
    run("DP2 F2 TP2", fault(7, 1, "scatter", 1), settings={"TINY_CLIP": "0.5"})


@pytest.mark.wide
def test_ranks_that_start_again_complete_a_replica(run):
    gate = fault(1, 3, "fetch", kind="wait", gate=1)  # until the newcomer is offered
    ranks = run("DP3 F2", fault(4, 1, "fetch"), gate, restart=True)
    assert next(plan for plan in ranks.plans if plan.boundary).joiners


@pytest.mark.wide
@pytest.mark.parametrize("tokens", ["0", "1"])
def test_ranks_that_share_each_sequence(run, tokens):
    """Two context ranks hold the shards, and each of them computes half of the loss."""
    settings = {"TINY_SHARD": "1", "TINY_CONTEXT": "2", "TINY_TOKENS": tokens}
    ranks = run("DP2 F2", fault(3, 1, "scatter", 1), settings=settings, lanes=1)
    assert any(lost for _, lost, _ in ranks.breaks)


def test_what_is_left_of_two_replicas_is_one(run):
    ranks = run("DP2 F2", fault(0, 1, "scatter", 0), fault(3, 1, "scatter", 1))
    assert ranks.plans[-1].members == [2, 1]


@pytest.mark.wide
def test_an_optimizer_whose_step_communicates_is_refused_before_it_does(tmp_path):
    mine = environment("DP2 F2", TINY_KIND="adafactor")
    ranks = Ranks(tmp_path, 4, [], fork=True, replica=2, **mine)
    ranks.drive()
    assert not ranks.steps and {told for _, kind, told in ranks.faults if kind == "UnsupportedLayout"}
