"""Runs the two-round paired test as Slurm jobs: it plans pairs, starts a probe on each node, reads their output, and
judges.

Each pair is an srun of its own with a time limit. Witnesses are proven: where only some nodes are to be tested, idle
ones are paired with each other beside them in round 1, and only those that pass can testify against a node in round 2
(:mod:`unicron_detector.health.pair_test`).
"""

from __future__ import annotations

import contextlib
import secrets
import subprocess
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from unicron_ctl.shared.settings.places import nodes_python
from unicron_ctl.shared.slurm.drains import OURS
from unicron_ctl.shared.slurm.slurm_client import NodeInfo
from unicron_ctl.shared.slurm.steps import END_SECONDS, Steps, why_not_idle
from unicron_ctl.shared.system.errors import WRONG_USE, UserError, one_line
from unicron_detector.health.pair_probe import CONNECT_SECONDS, MARK
from unicron_detector.health.pair_test import Group, Judgement, Outcome, first_round, judge, second_round
from unicron_detector.health.program_output import MOST_BYTES, Output, TooMuchOutput

PAIRS_WANTED = 3  # with fewer times than three nothing can be called slow (unicron_detector.health.pair_test)
AT_ONCE = 32
JOB_NAME = "unicron-pair-test-"
START_SECONDS = 30.0  # for Slurm to start the job and Python to come up


@dataclass(frozen=True)
class Wish:
    """The user's request. `slower`: a pair is slow from so many times the median. `patience`: seconds for one answer of
    a peer. `queue`: seconds to wait for the nodes."""

    seconds: float = 2.0
    backend: str = "auto"
    slower: float = 3.0
    patience: float = 15.0
    queue: int = 10
    partition: str = ""
    python: str = field(default_factory=nodes_python)
    gpus: bool = True


@dataclass(frozen=True)
class Test:
    """One group's test. outcome: None when it did not run; `reason` says why."""

    round: int
    group: Group
    outcome: Outcome | None
    reason: str = ""
    backend: str = ""
    bandwidth: float | None = None
    latency: float | None = None


@dataclass
class Findings:
    """All tests and what they prove. `left_out`: nodes that could not be tested, with the reason."""

    tests: list[Test] = field(default_factory=list)
    judgement: Judgement = field(default_factory=Judgement)
    left_out: dict[str, str] = field(default_factory=dict)

    def why_bad(self, node: str) -> str:
        """The judgement, with the probes' own words beside good nodes."""
        said = [t.reason for t in self.tests if t.round == 2 and node in t.group and t.reason]
        return f"{self.judgement.bad[node]}: {said[-1][:120]}" if said else self.judgement.bad[node]


def choose(
    nodes: Sequence[NodeInfo], wanted: Sequence[str], with_others: bool = False
) -> tuple[list[str], list[str], dict[str, str]]:
    """(nodes to test, idle helpers to prove witnesses with, nodes that cannot be tested: why). No wish: all idle ones.
    with_others: idle nodes that were not named may help; a single one has no other partner.

    Raises UserError for a node that Slurm does not know or that is named twice.
    """
    known = {node.name: node for node in nodes}
    _check_names(wanted, known)
    idle = [node.name for node in nodes if node.heard and "IDLE" in node.states]
    tested = [name for name in wanted if name in idle] if wanted else idle
    left_out = {name: _why_not(known[name]) for name in wanted if name not in idle}
    helpers = [name for name in idle if name not in tested] if tested and (with_others or len(wanted) == 1) else []
    if len(tested) == 1 and not helpers:
        left_out[tested.pop()] = "it has no partner: no other idle node was named, and --helpers takes others"
    need = max(0, 2 * PAIRS_WANTED - len(tested))
    need += (len(tested) + need) % 2
    return tested, helpers[:need], left_out


def _check_names(wanted: Sequence[str], known: Collection[str]) -> None:
    """Raise UserError for a node that Slurm does not know or that is named twice."""
    if unknown := next((name for name in wanted if name not in known), ""):
        raise UserError(f"Slurm knows no node {unknown!r}; `sinfo -N` lists them", WRONG_USE)
    if len(set(wanted)) != len(wanted):
        raise UserError("a node is named twice; name each node once", WRONG_USE)


def _why_not(node: NodeInfo) -> str:
    """Return why a node cannot be tested, and how to make it fit where a test may be what it waits for."""
    why = why_not_idle(node)
    ours = node.reason.startswith(OURS) and "RESUME" not in why
    return f"{why}; for a test `scontrol update NodeName={node.name} State=RESUME` first" if ours else why


def pairs(tested: Sequence[str], helpers: Sequence[str]) -> list[Group]:
    """The pairs of round 1: the nodes to be tested and then the helpers, in turn, so that helpers also meet each
    other."""
    order = list(tested)
    spare = list(helpers)
    if len(order) < len(spare):  # each suspect beside a helper, and the other helpers among themselves
        mixed = [name for pair in zip(order, spare, strict=False) for name in pair]
        return first_round([*mixed, *spare[len(order) :]])
    return first_round([*order, *spare])


def command(group: Group, nodes: Mapping[str, NodeInfo], wish: Wish, token: str) -> list[str]:
    """The srun of one group."""
    count = len(group)
    total = limit(wish, count)
    gpus = min(nodes[name].gpus for name in group) if wish.gpus else 0
    options = [
        "srun",
        f"--job-name={JOB_NAME}{token}",
        f"--nodes={count}",
        f"--nodelist={','.join(group)}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        "--exclusive",
        f"--immediate={wish.queue}",
        f"--time={int(total // 60) + 1}",
        "--kill-on-bad-exit=1",
        "--input=none",
        "--export=ALL",
        *([f"--partition={wish.partition}"] if wish.partition else []),
        *([f"--gres=gpu:{gpus}"] if gpus else []),
    ]
    probe = [
        wish.python,
        "-P",  # the user's folder must not hide our modules
        "-m",
        "unicron_detector.health.pair_probe",
        f"--nodes={','.join(group)}",
        f"--address={nodes[group[0]].address}",
        f"--token={token}",
        f"--backend={wish.backend}",
        f"--seconds={wish.seconds:g}",
        f"--patience={wish.patience:g}",
    ]
    return [*options, *probe]


def limit(wish: Wish, count: int = 2) -> float:
    """Seconds after which a test that has started is given up."""
    return START_SECONDS + CONNECT_SECONDS + 2 * wish.patience + wish.seconds * count


class Runner:
    """Starts tests and ends those that are left. `environment`: for srun (SLURM_CONF of a private cluster)."""

    def __init__(
        self, nodes: Iterable[NodeInfo], wish: Wish, environment: Mapping[str, str], tell: Callable[[str], None]
    ) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._wish, self._tell = wish, tell
        self._steps = Steps(JOB_NAME, environment)

    def play(self, tested: Sequence[str], helpers: Sequence[str]) -> Findings:
        """Runs both rounds."""
        found = Findings()
        groups = pairs(tested, helpers)
        if not groups:
            found.left_out = {name: "no second idle node to test it with" for name in tested}
            return found
        self._tell(f"round 1: {_words(groups)}")
        first = self.wave(1, groups)
        outcomes = {test.group: test.outcome for test in first if test.outcome is not None}
        second: list[Test] = []
        for wave in second_round(outcomes, slower=self._wish.slower):
            self._tell(f"round 2: {_words(wave)}")
            second += self.wave(2, wave)
        found.tests = [*first, *second]
        again = {test.group: test.outcome for test in second if test.outcome is not None}
        found.judgement = judge(outcomes, again, slower=self._wish.slower)
        met = {name for test in found.tests if test.outcome is not None for name in test.group}
        for test in found.tests:
            if test.outcome is None:
                found.left_out |= {name: test.reason for name in test.group if name not in met}
        return found

    def wave(self, number: int, groups: Sequence[Group]) -> list[Test]:
        """Runs the groups' tests side by side; they share no node."""
        return self._steps.side_by_side(lambda group: self._test(number, group), groups, AT_ONCE)

    def _test(self, number: int, group: Group) -> Test:
        token = secrets.token_hex(6)
        late = False
        with self._steps.running(token, command(group, self._nodes, self._wish, token)) as process:
            output = Output(process, MOST_BYTES)
            try:
                output.read(limit(self._wish, len(group)) + self._wish.queue)
            except (subprocess.TimeoutExpired, TooMuchOutput):
                late = True
                self._steps.end(token, process)
                with contextlib.suppress(subprocess.TimeoutExpired, TooMuchOutput):
                    output.read(END_SECONDS)
        out, err = (text.decode(errors="replace") for text in output.texts())
        return read(number, group, out, err, process.returncode, late)


class Answer(msgspec.Struct):
    """A line of a probe (unicron_detector.health.pair_probe)."""

    node: str
    started: bool = False
    ok: bool | None = None
    error: str = ""
    backend: str = ""
    bandwidth: float | None = None
    latency: float | None = None


def read(number: int, group: Group, out: str, err: str, status: int, late: bool) -> Test:
    """Read the outcome in one srun's output. Pure."""
    answers = list(_answers(out))
    started = {one.node for one in answers if one.started}
    results = {one.node: one for one in answers if one.ok is not None and one.node in group}
    if not started and not late and _not_granted(err):
        return Test(number, group, None, f"Slurm gave no nodes to test on: {_last_line(err)}"[:300])
    if len(results) == len(group) and all(one.ok for one in results.values()) and status == 0:
        lead = results[group[0]]
        seconds = 1e9 / lead.bandwidth if lead.bandwidth else None  # for a gigabyte: what judge() compares
        return Test(number, group, Outcome(True, seconds), "", lead.backend, lead.bandwidth, lead.latency)
    errors = [*_errors(group, started, results), *(["the test did not end in time"] if late else [])]
    reason = "; ".join(errors) or _last_line(err) or f"srun ended with {status}"
    backend = next((one.backend for one in results.values() if one.backend), "")
    return Test(number, group, Outcome(False), reason[:300], backend)


def _errors(group: Group, started: Collection[str], results: Mapping[str, Answer]) -> list[str]:
    """Return what went wrong. A peer that vanished is what the others saw; what failed by itself says more."""
    errors = [f"{name}: {one.error}" for name, one in results.items() if not one.ok]
    errors.sort(key=lambda text: "closed the connection" in text or "Connection" in text)
    missing = [name for name in group if name not in started]
    if missing and len(missing) < len(group):
        errors.insert(0, f"the probe did not start on {', '.join(missing)}")
    return errors


def _not_granted(err: str) -> bool:
    """Whether srun says that the job did not start, which says nothing of the nodes' hardware."""
    return any(words in err for words in _NOT_GRANTED)


def _last_line(err: str) -> str:
    return one_line(err.strip().splitlines()[-1]) if err.strip() else ""


_NOT_GRANTED = (
    "Unable to allocate resources",
    "Unable to contact slurm controller",
    "Immediate execution",
    "allocation revoked",
    "Job allocation",
    "Invalid partition",
)


def _answers(out: str) -> Iterable[Answer]:
    for line in out.splitlines():
        _, mark, text = line.partition(MARK)
        if mark:
            with contextlib.suppress(msgspec.DecodeError):
                yield msgspec.json.decode(text, type=Answer)


def _words(groups: Sequence[Group]) -> str:
    return ", ".join("+".join(group) for group in groups)
