"""Ranks on the card fail, and the survivors are compared with an undisturbed run.

    python -m benchmarks.gpu.heal gloo|nccl|apart faults|layouts|sharded [CASE]...

nccl: several NCCL ranks on one card, which NCCL allows from 2.30 on. apart: each rank tells NCCL that it is on a host
of its own. The ranks are those of the rank tests (`tests.support.rank_harness`), with the controller's own decisions.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import on_card, patience, row, say
from tests.support import proof, rank_harness
from tests.support.matrix import EIGHT, lanes_of, size_of
from tests.support.moments import fault
from tests.support.rank_harness import Ranks

SCRIPT, SHARDED_SCRIPT = (Path(__file__).with_name(name) for name in ("ranks.py", "sharded_ranks.py"))
MEMORY = "/dev/shm"
RUN_SECONDS, STOP_SECONDS, LATE_SECONDS = 50.0, 20.0, 4.0
# A card adds gradients in another order each time: on the CPU tests/process has 1e-7 and 1e-5.
LOSSES, GRADIENTS = 1e-4, 1e-4  # relative
COMMIT = 2  # the number of the commit among an iteration's reduces: bucket, proof, commit


@dataclass
class Case:
    """A run of ranks."""

    faults: list[dict[str, Any]]
    survivors: list[int]
    """The slots that train to the end."""
    size: int = 4
    iterations: int = 8
    settings: dict[str, str] = field(default_factory=dict)
    keywords: dict[str, Any] = field(default_factory=dict)
    like: str = "undisturbed"
    """The case whose losses and gradients it must have."""
    memory: bool = False
    gradients: bool = True
    losses: float = LOSSES
    """The largest relative difference of a loss."""
    lanes: int = 1
    """Ranks of a replica that have micro-batches of their own."""


OVERLAP = {"TINY_OVERLAP": "1"}
SHARDED = {"TINY_DISTOPT": "1"}
SPLIT = {"TINY_LAYOUT": "2 1 1"}
CASES: dict[str, Case] = {
    "undisturbed": Case([], [0, 1, 2, 3], iterations=10),
    "kill in compute, in the reduce, at the commit": Case(
        [
            fault(3, 1, "fetch", 1),
            fault(2, 3, "reduce", 0, kind="late", delay=0.002),
            fault(1, 5, "reduce", COMMIT),
        ],
        [0],
    ),
    "kill in the step, while the state is copied": Case(
        [
            fault(3, 1, "step"),
            fault(2, 3, "step", kind="late", delay=0.004),
            fault(0, 5, "sum"),  # of two ranks of a node one keeps the state: the first
        ],
        [1],
        memory=True,
    ),
    "exception, SIGSTOP, broken connections": Case(
        [
            fault(1, 1, "fetch", 1, kind="raise"),
            fault(3, 3, "fetch", 1, kind="hang"),
            fault(0, 5, "reduced", 0, kind="error"),
        ],
        [0, 2],
        keywords={"hang_limit": 1.0},
    ),
    "a killed rank is started again and rejoins": Case(
        [fault(2, 1, "fetch", 1), fault(0, 4, "fetch", kind="wait", gate=1)],
        [0, 1, 2, 3],
        iterations=10,
        keywords={"restart": True},
    ),
    "kill in overlapped reduces": Case(
        [
            fault(3, 1, "reduce", 2, kind="late", delay=0.001),
            fault(2, 3, "reduce", 4, kind="late", delay=0.001),
        ],
        [0, 1],
        settings=OVERLAP,
    ),
    "a second kill while the groups are rebuilt": Case(
        [fault(3, 1, "fetch", 1, others=[2]), fault(2, 1, "entered")],
        [0, 1],
        iterations=5,
        settings={
            "TORCH_NCCL_NONBLOCKING_TIMEOUT": "4"
        },  # seconds: NCCL's communicators come with the first collective
    ),
    "two ranks, kill in the reduce": Case(
        [fault(1, 2, "reduce", 0, kind="late", delay=0.001)], [0], size=2, iterations=5
    ),
    "illegal address, device assert, out of memory": Case(
        [
            fault(1, 1, "fetch", 1, kind="illegal"),
            fault(2, 3, "fetch", 1, kind="assert"),
            fault(3, 5, "fetch", 1, kind="oom"),
        ],
        [0],
    ),
    "distributed optimizer, kill in compute and of copies": Case(
        [fault(3, 1, "fetch", 1), fault(2, 4, "copies")], [0, 1], settings=SHARDED, gradients=False
    ),
    "TP2, undisturbed": Case(
        [],
        [0, 1, 2, 3],
        iterations=6,
        settings=SPLIT,
        keywords={"replica": 2},
        like="TP2, undisturbed",
        gradients=False,
    ),
    "TP2 x DP2, kill in compute": Case(
        [fault(3, 2, "fetch", 1)],
        [0, 1],
        iterations=6,
        settings=SPLIT,
        keywords={"replica": 2},
        like="TP2, undisturbed",
        gradients=False,
    ),
}
NOT_GLOO = ("distributed optimizer, kill in compute and of copies", "TP2, undisturbed", "TP2 x DP2, kill in compute")

# Layout "TP PP VPP", settings, and the place in iteration 1 at which the last rank is killed.
SHAPES: dict[str, tuple[str, dict[str, str], str]] = {
    "PP2 x DP2, kill between stages": ("1 2 1", {}, "backward"),
    "interleaved PP2 x DP2, overlapped reduces, kill between stages": ("1 2 2", OVERLAP, "backward"),
    "PP2 x DP2, distributed optimizer, kill in the reduce": ("1 2 1", SHARDED, "reduce"),
    "fp16, distributed optimizer, kill in the step": ("1 1 1", SHARDED | {"TINY_FP16": str(2.0**18)}, "step"),
    "bf16, mixture of experts, kill in compute": (
        "1 1 1",
        {"TINY_EXPERTS": "aux_loss", "TINY_TOKENS": "1", "TINY_BF16": "1"},
        "backward",
    ),
    "EP2 x DP4, eight experts, overlapped reduces, kill in the all-to-all": (
        "1 1 1 2 1",
        EIGHT | OVERLAP,
        "tokens",
    ),
}
SHAPE_LOSSES = 1e-3  # bf16 and fp16: the last bit of a sum may send a token to another expert


def shapes() -> dict[str, Case]:
    """Return the cases of :data:`SHAPES`, each after an undisturbed one of its layout."""
    found = {}
    for name, (layout, settings, place) in SHAPES.items():
        replica, lanes = size_of(layout), lanes_of(layout)
        common = {"TINY_LAYOUT": layout, **settings}
        like = name.rsplit(", kill", 1)[0] + ", undisturbed"
        keywords = {"replica": replica}
        losses = SHAPE_LOSSES if {"TINY_FP16", "TINY_BF16"} & settings.keys() else LOSSES
        everyone = list(range(4 if replica > 1 else 2))
        survivors = everyone[:replica]
        for title, faults, left in (
            (like, [], everyone),
            (name, [fault(len(everyone) - 1, 1, place, 1 if place in ("backward", "tokens") else 0)], survivors),
        ):
            more = {"gradients": False, "losses": losses, "lanes": lanes}
            found[title] = Case(faults, left, len(everyone), 4, common, keywords, like, **more)
    return found


# Settings of a module that `fully_shard` has sharded, and the place in iteration 2 at which the last rank is killed.
HSDP = {"TINY_SHARD": "2"}
CONTEXT = {"TINY_SHARD": "1", "TINY_CONTEXT": "2"}
SEVERAL = {"TINY_BUCKET": "4096"}  # bytes of a bucket: the reduces between replicas begin in the backward pass
MODULES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "HSDP F2 x DP2, kill in the reduce-scatter in a replica": (HSDP, {"at": "scatter", "count": 1}),
    "HSDP F2 x DP2, kill in a gather that has begun": (
        HSDP,
        {"at": "gather", "count": 2, "kind": "late", "delay": 0.001},
    ),
    "HSDP F2 x DP2, kill in the reduce over replicas": (
        HSDP,
        {"at": "reduce", "count": 1, "kind": "late", "delay": 0.001},
    ),
    "HSDP F2 x DP2, kill in the step": (HSDP, {"at": "step"}),
    "HSDP F2 x DP2, overlapped reduces, kill in one of them": (
        HSDP | SEVERAL,
        {"at": "reduce", "count": 1, "kind": "late", "delay": 0.001},
    ),
    "context parallelism, CP2 x DP2, kill in a gather that has begun": (
        CONTEXT,
        {"at": "gather", "count": 2, "kind": "late", "delay": 0.001},
    ),
}


def modules() -> dict[str, Case]:
    """Return the cases of :data:`MODULES`, each after an undisturbed one with its settings."""
    found = {}
    for name, (settings, strikes) in MODULES.items():
        like = name.rsplit(", kill", 1)[0] + ", undisturbed"
        common = {"TINY_SCRIPT": str(SHARDED_SCRIPT), **settings}
        lanes, keywords = int(settings["TINY_SHARD"]), {"replica": 2}
        for title, faults, left in ((like, [], [0, 1, 2, 3]), (name, [fault(3, 2, **strikes)], [0, 1])):
            found[title] = Case(faults, left, 4, 5, common, keywords, like, lanes=lanes)
    return found


CASES_OF = {"faults": CASES, "layouts": shapes(), "sharded": modules()}


def environment(backend: str) -> dict[str, str]:
    found = {"GPU_BACKEND": "gloo" if backend == "gloo" else "nccl", "TINY_SCRIPT": str(SCRIPT)}
    found |= {"UNICRON_PLAN_TIMEOUT": "30"}
    return found | ({"GPU_APART": "1"} if backend == "apart" else {})


class TracedRanks(Ranks):
    """Ranks that print their stacks when they do not come to rest."""

    traced = 0  # Breaks after which they were

    def _hear(self, milliseconds: int) -> None:
        super()._hear(milliseconds)
        late = len(self.breaks) > self.traced and time.time() - self.breaks[-1][2] > LATE_SECONDS * patience()
        if late and self.broken == self.generation:
            self.traced = len(self.breaks)
            self._ask()

    def _where(self) -> dict[Any, Any]:
        self._ask()
        return super()._where()

    def _ask(self) -> None:
        """Ask all ranks for their stacks, on their standard error."""
        for rank in self.ranks.values():
            if rank.child is not None and rank.child.poll() is None:
                print(f"gpu-check: where is slot {rank.slot}? {rank.status}", file=sys.stderr, flush=True)
                rank.child.signal(signal.SIGRTMIN + 3)  # tests/support/fault_points.py
                deadline = time.monotonic() + 0.3
                while time.monotonic() < deadline:
                    super()._hear(50)


def drive(case: Case, out: Path, backend: str, shared: str, warm: bool) -> Ranks:
    """Run a case to its end. Raises AssertionError if that takes too long."""
    settings = {**environment(backend), **case.settings, "TINY_ITERATIONS": str(case.iterations)}
    if case.memory:
        settings["UNICRON_MEMORY"] = shared
    ranks = TracedRanks(out, case.size, case.faults, fork=warm, **case.keywords, **settings)
    ranks.drive()
    return ranks


def notes(out: Path, what: str) -> list[dict[str, Any]]:
    """Return the ranks' notes of a kind, with their slots."""
    found = []
    for path in sorted(out.glob("notes.*")):
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        found += [{"slot": int(path.suffix[1:]), **line} for line in lines if line["what"] == what]
    return found


def times(ranks: Ranks, out: Path) -> dict[str, Any]:
    """Return the seconds of each recovery: from the fault to the Break, to the plan, and to the first step."""
    struck = sorted(float(path.read_text()) for path in out.glob("fault.*"))
    steps = sorted(json.loads(line)["time"] for path in out.glob("losses.*") for line in path.read_text().splitlines())
    found: dict[str, Any] = {"to_break": [], "to_first_step": [], "to_plan": [round(each, 3) for each in ranks.rests]}
    for number, (_, _, broken) in enumerate(ranks.breaks):
        before = [at for at in struck if at <= broken]
        after = [at for at in steps if at > broken]
        found["to_break"] += [round(broken - before[-1], 3)] if before else []
        found["to_first_step"] += [round(after[0] - broken, 3)] if after else []
        found[f"break_{number}"] = ranks.breaks[number][1]
    aborts = notes(out, "abort")
    found["abort_seconds"] = [round(each["seconds"], 3) for each in aborts]
    found["torn_down"] = [round(each["seconds"], 3) for each in notes(out, "torn down")]
    found["recoveries"] = [message["seconds"] for message in ranks.timings if message["generation"] > 1]
    found["caught"] = sorted({f"{each['phase']}: {each['error'][:140]}" for each in notes(out, "caught")})
    return found


def compare(case: Case, ranks: Ranks, out: Path, reference: Path) -> dict[str, float]:
    """Return the largest relative differences of losses and gradients. Raises AssertionError if one is too large."""
    proof.exactly_once(ranks, case.iterations, case.lanes)
    if ranks.replica == 1:
        proof.nothing_thrown_away(ranks)
    found, wanted = proof.losses(out), proof.losses(reference)
    assert all(len(values) == 1 for values in found.values()), f"members report several losses: {found}"
    assert set(found) == set(range(case.iterations)), f"iterations {sorted(found)}"
    losses = max(abs(min(found[each]) / min(wanted[each]) - 1) for each in found)
    gradients = 0.0
    if case.gradients:
        size = case.keywords.get("replica", 1)
        gradients = max(proof.gradient_differences(out, reference, case.iterations, size, relative=True).values())
    assert losses <= case.losses, f"losses differ by {losses:.1e}"
    assert gradients <= GRADIENTS, f"gradients differ by {gradients:.1e}"
    return {"losses_differ": losses, "gradients_differ": gradients}


def ended(case: Case, ranks: Ranks) -> None:
    """Raises AssertionError unless exactly the expected survivors have trained to the end."""
    survived = {slot for slot, codes in ranks.exits.items() if codes[-1] == 0}
    assert survived == set(case.survivors), f"survivors {sorted(survived)}, exits {ranks.exits}, faults {ranks.faults}"


def check(name: str, case: Case, backend: str, made: dict[str, Path], folder: Path, warm: bool) -> bool:
    """Run one case. Return whether it passes."""
    out = folder / str(len(made))
    out.mkdir()
    fine = False
    with row(f"{backend}, {name}") as saw, tempfile.TemporaryDirectory(dir=MEMORY, prefix="unicron-gpu-") as shared:
        made[name] = out
        ranks = drive(case, out, backend, shared, warm)
        figures = times(ranks, out)
        figures |= {
            "exits": ranks.exits,
            "faults": [f"{slot} {kind}: {text[:300]}" for slot, kind, text in ranks.faults],
        }
        figures["stuck"] = sorted(ranks.stuck)
        try:
            ended(case, ranks)
            differ = compare(case, ranks, out, made.get(case.like, out))
        except AssertionError as error:
            saw(str(error)[:800], ok=False, **figures)
            return False
        text = f"losses within {differ['losses_differ']:.0e}, gradients {differ['gradients_differ']:.0e}"
        if ranks.breaks:
            text += f"; {len(ranks.breaks)} recoveries"
        parts = (
            ("abort_seconds", "abort"),
            ("torn_down", "groups torn down"),
            ("to_first_step", "Break to first step"),
        )
        for key, words in parts:
            text += f"; {words} {span(figures[key])} s" if figures[key] else ""
        text += f"; stuck and killed: {figures['stuck']}" if figures["stuck"] else ""
        fine = not ranks.stuck
        saw(text, ok=fine, **figures, **differ)
    return fine


def span(values: list[float]) -> str:
    """Return the least and the largest value."""
    return f"{min(values):.3g}" if min(values) == max(values) else f"{min(values):.3g} to {max(values):.3g}"


def is_warm(backend: str, folder: Path) -> bool:
    """Return whether ranks on a card can be forks of the template, as an agent's are; else each starts cold."""
    out = folder / "warm"
    out.mkdir()
    fine = False
    with row(f"{backend}, ranks start as forks of the template") as saw:
        case = Case([], [0, 1], size=2, iterations=2)
        ranks = drive(case, out, backend, "", True)
        ended(case, ranks)
        fine = True
        saw(f"yes; model and session made within {max(each['seconds'] for each in notes(out, 'made')):.1f} s")
    return fine


def main() -> int:
    backend, kind, wanted = sys.argv[1], sys.argv[2], sys.argv[3:]
    cases = CASES_OF[kind]
    rank_harness.LIMIT, rank_harness.STOP_LIMIT = RUN_SECONDS * patience(), STOP_SECONDS * patience()
    names = [name for name in cases if not (backend == "gloo" and on_card() and name in NOT_GLOO)]
    if wanted:
        names = [name for name in names if any(word in name for word in wanted)]
        names = list(dict.fromkeys([*(cases[name].like for name in names), *names]))
    with tempfile.TemporaryDirectory(prefix="unicron-gpu-") as text:
        folder, made = Path(text), dict[str, Path]()
        warm = is_warm(backend, folder)
        for name in names:
            if not check(name, cases[name], backend, made, folder, warm) and name == "undisturbed":
                say(f"{backend}, all other cases", "not made: ranks do not train undisturbed", ok=False)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
