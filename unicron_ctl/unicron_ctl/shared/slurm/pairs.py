"""Runs the pair test as Slurm jobs: plans pairs, starts a probe on each node, reads their output, and judges.

Each pair is an srun of its own with a time limit. If only some nodes are tested, idle nodes are paired with each other
beside them in round 1, and only those that pass can testify against a node in round 2
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

PAIRS_WANTED = 3  # fewer times are too few to call a pair slow (unicron_detector.health.pair_test)
AT_ONCE = 32
JOB_NAME = "unicron-pair-test-"
START_SECONDS = 30.0  # for Slurm to start the job, and for Python to start


@dataclass(frozen=True)
class Wish:
    """The user's request."""

    seconds: float = 2.0
    backend: str = "auto"
    slower: float = 3.0
    """A pair is slow if it takes so many times the median."""
    known: Mapping[str, float] = field(default_factory=dict)
    """Backend -> seconds for a gigabyte beyond which a pair is slow, by earlier tests. For other backends the pairs of
    this test are compared."""
    patience: float = 15.0
    """Seconds for one answer of a peer."""
    queue: int = 10
    """Seconds to wait for the nodes."""
    partition: str = ""
    python: str = field(default_factory=nodes_python)
    gpus: bool = True


class PairTest(msgspec.Struct, frozen=True):
    """The test of one group, as the JSON has it."""

    round: int
    nodes: Group
    passed: bool | None
    """None if it did not run."""
    reason: str = ""
    """Why it failed or did not run."""
    backend: str = ""
    bandwidth: float | None = None
    """Bytes a second."""
    latency: float | None = None
    """Seconds."""

    @property
    def outcome(self) -> Outcome | None:
        """The outcome to judge, with the seconds for a gigabyte; None if the test did not run."""
        seconds = 1e9 / self.bandwidth if self.bandwidth else None
        return None if self.passed is None else Outcome(self.passed, seconds if self.passed else None)


@dataclass
class Findings:
    """All tests, and the judgement."""

    tests: list[PairTest] = field(default_factory=list)
    judgement: Judgement = field(default_factory=Judgement)
    left_out: dict[str, str] = field(default_factory=dict)
    """Why nodes could not be tested."""

    def why_bad(self, node: str) -> str:
        """Return the judgement, with the last reason that a probe gave beside a good node."""
        reasons = [t.reason for t in self.tests if t.round == 2 and node in t.nodes and t.reason]
        return f"{self.judgement.bad[node]}: {reasons[-1][:120]}" if reasons else self.judgement.bad[node]


def choose(
    nodes: Sequence[NodeInfo], wanted: Sequence[str], with_others: bool = False
) -> tuple[list[str], list[str], dict[str, str]]:
    """Return the nodes to test, idle helpers, and why some nodes cannot be tested.

    wanted: all idle nodes if it is empty. with_others: idle nodes that were not named may help, as they always do for
    a single node. Raises UserError for a node that Slurm does not know or that is named twice.
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
    """Return why a node cannot be tested, and how to resume it if it may be waiting for a test."""
    why = why_not_idle(node)
    ours = node.reason.startswith(OURS) and "RESUME" not in why
    return f"{why}; for a test `scontrol update NodeName={node.name} State=RESUME` first" if ours else why


def pairs(tested: Sequence[str], helpers: Sequence[str]) -> list[Group]:
    """Return the pairs of round 1. With more helpers than suspects, each suspect meets a helper, and the others meet
    each other."""
    if len(tested) < len(helpers):
        mixed = [name for pair in zip(tested, helpers, strict=False) for name in pair]
        return first_round([*mixed, *helpers[len(tested) :]])
    return first_round([*tested, *helpers])


def command(group: Group, nodes: Mapping[str, NodeInfo], wish: Wish, token: str) -> list[str]:
    """Return the srun command of one group."""
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
    """Return the seconds after which a test that has started is given up."""
    return START_SECONDS + CONNECT_SECONDS + 2 * wish.patience + wish.seconds * count


class Runner:
    """Starts tests, and ends those that still run."""

    def __init__(
        self,
        nodes: Iterable[NodeInfo],
        wish: Wish,
        environment: Mapping[str, str],  # for srun
        tell: Callable[[str], None],
    ) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._wish, self._tell = wish, tell
        self._steps = Steps(JOB_NAME, environment)

    def stop(self) -> None:
        """End all running tests, and start no others."""
        self._steps.stop()

    def play(self, tested: Sequence[str], helpers: Sequence[str]) -> Findings:
        """Run both rounds."""
        groups = pairs(tested, helpers)
        if not groups:
            return Findings(left_out={name: "no second idle node to test it with" for name in tested})
        first = self._play_wave(1, groups)
        outcomes = _outcomes(first)
        second: list[PairTest] = []
        backend = next((test.backend for test in first if test.backend), "")
        criteria = self._wish.slower, self._wish.known.get(backend)
        for wave in second_round(outcomes, *criteria):
            second += self._play_wave(2, wave)
        found = Findings([*first, *second], judge(outcomes, _outcomes(second), *criteria))
        met = {name for test in found.tests if test.passed is not None for name in test.nodes}
        for test in found.tests:
            if test.passed is None:
                found.left_out |= {name: test.reason for name in test.nodes if name not in met}
        return found

    def _play_wave(self, number: int, groups: Sequence[Group]) -> list[PairTest]:
        self._tell(f"round {number}: {', '.join('+'.join(group) for group in groups)}")
        return self.wave(number, groups)

    def wave(self, number: int, groups: Sequence[Group]) -> list[PairTest]:
        """Run the tests of groups that share no node side by side."""
        return self._steps.side_by_side(lambda group: self._test(number, group), groups, AT_ONCE)

    def _test(self, number: int, group: Group) -> PairTest:
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


def _outcomes(tests: Iterable[PairTest]) -> dict[Group, Outcome]:
    return {test.nodes: outcome for test in tests if (outcome := test.outcome)}


class Answer(msgspec.Struct):
    """A line of a probe (unicron_detector.health.pair_probe)."""

    node: str
    started: bool = False
    ok: bool | None = None
    error: str = ""
    backend: str = ""
    bandwidth: float | None = None
    latency: float | None = None


def read(number: int, group: Group, out: str, err: str, status: int, late: bool) -> PairTest:
    """Read the outcome from the output of srun. Pure."""
    answers = list(_answers(out))
    started = {one.node for one in answers if one.started}
    results = {one.node: one for one in answers if one.ok is not None and one.node in group}
    if not started and not late and any(words in err for words in _NOT_GRANTED):
        return PairTest(number, group, None, f"Slurm gave no nodes to test on: {_last_line(err)}"[:300])
    if len(results) == len(group) and all(one.ok for one in results.values()) and status == 0:
        lead = results[group[0]]
        return PairTest(number, group, True, "", lead.backend, lead.bandwidth, lead.latency)
    errors = [*_errors(group, started, results), *(["the test did not end in time"] if late else [])]
    reason = "; ".join(errors) or _last_line(err) or f"srun ended with {status}"
    backend = next((one.backend for one in results.values() if one.backend), "")
    return PairTest(number, group, False, reason[:300], backend)


def _errors(group: Group, started: Collection[str], results: Mapping[str, Answer]) -> list[str]:
    """Return the errors. Those about a peer that vanished come last: another error explains more."""
    errors = [f"{name}: {one.error}" for name, one in results.items() if not one.ok]
    errors.sort(key=lambda text: "closed the connection" in text or "Connection" in text)
    missing = [name for name in group if name not in started]
    if missing and len(missing) < len(group):
        errors.insert(0, f"the probe did not start on {', '.join(missing)}")
    return errors


def _last_line(err: str) -> str:
    return one_line(err.strip().splitlines()[-1]) if err.strip() else ""


# Errors of srun if the job did not start: they say nothing about the nodes' hardware.
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
