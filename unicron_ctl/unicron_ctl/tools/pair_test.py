"""`unicronctl pair-test`: finds out which nodes are bad, by real tests between pairs of them."""

from __future__ import annotations

import dataclasses
import shlex
import time

import click
import msgspec

from unicron_ctl.shared.commands.options import Number, controller_option, print_json
from unicron_ctl.shared.protocol.client import ask_controller
from unicron_ctl.shared.slurm import CommandLineClient, drains, pairs
from unicron_ctl.shared.slurm.pairs import Findings, PairTest
from unicron_ctl.shared.slurm.steps import search_path
from unicron_ctl.shared.system.columns import Listing, show
from unicron_ctl.shared.system.errors import PROBLEM_FOUND, UserError
from unicron_ctl.shared.system.printable import print_text
from unicron_detector.health.pair_probe import BACKENDS

REPORT_SECONDS = 2.0  # for the controller's answer to a verdict


class PairReport(msgspec.Struct, kw_only=True):
    """The JSON of `unicronctl pair-test`: the tests, nodes with the reason, and what was done to drained ones."""

    tests: list[PairTest]
    bad: dict[str, str]
    slow: dict[str, str]
    good: list[str]
    unknown: dict[str, str]
    not_tested: dict[str, str]
    drained: dict[str, str]


@click.command(name="pair-test")
@click.option("--nodes", metavar="N1,N[2-8],...", default="", help="Nodes to test [default: all idle ones].")
@click.option("--helpers", is_flag=True, help="Let idle nodes help that are not named, as for a single one.")
@click.option("--seconds", type=Number(0.1, 600), default=2.0, show_default=True, help="Seconds of measuring per pair.")
@click.option(
    "--backend", type=click.Choice(BACKENDS), default="auto", show_default=True, help="auto: the best of both nodes."
)
@click.option(
    "--slower",
    type=Number(1.1),
    default=3.0,
    show_default=True,
    help="A pair is slow below the median divided by this.",
)
@click.option(
    "--patience", type=Number(1, 600), default=15.0, show_default=True, help="Seconds to wait for one answer."
)
@click.option(
    "--queue", type=click.IntRange(1, 3600), default=10, show_default=True, help="Seconds to wait for the nodes."
)
@click.option("--partition", default="", metavar="P", help="Slurm's partition.")
@click.option("--python", default="", metavar="FILE", help="The nodes' Python [default: this, or the packaged one].")
@click.option("--drain", is_flag=True, help="Drain nodes that are proven bad.")
@click.option("--dry-run", is_flag=True, help="Print the commands of round 1 and run nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@controller_option()
def command(
    nodes: str,
    helpers: bool,
    seconds: float,
    backend: str,
    slower: float,
    patience: float,
    queue: int,
    partition: str,
    python: str,
    drain: bool,
    dry_run: bool,
    as_json: bool,
    controller: str | None,
) -> int:
    """Test idle nodes in pairs, those that failed once more beside good ones, and say which is bad.

    The exit status is 3 if a node is bad.
    """
    environment = search_path()
    client = CommandLineClient(env={"PATH": environment["PATH"]})
    known = client.nodes()
    tested, others, left_out = pairs.choose(known, client.hostnames(nodes), helpers)
    wish = pairs.Wish(seconds, backend, slower, {}, patience, queue, partition)
    wish = dataclasses.replace(wish, python=python) if python else wish
    if dry_run:
        by_name = {node.name: node for node in known}
        for group in pairs.pairs(tested, others):
            print_text(shlex.join(pairs.command(group, by_name, wish, "TOKEN")))
        for name, why in left_out.items():
            print_text(f"{name} is not tested: {why}", err=True)
        return 0
    if not tested:
        why = "; ".join(f"{name}: {reason}" for name, reason in left_out.items()) or "no node is idle"
        raise UserError(f"nothing to test: {why}")
    runner = pairs.Runner(known, wish, environment, lambda text: None if as_json else print_text(text, err=True))
    found = runner.play(tested, others)
    found.left_out = {**left_out, **found.left_out}
    drained = _drain(client, found) if drain else {}
    problem = _report_verdicts(found, controller)
    if as_json:
        print_json(report_of(found, drained), indent=2)
    else:
        _print(found, drained, problem)
    return PROBLEM_FOUND if found.judgement.bad else 0


def _drain(client: CommandLineClient, found: Findings) -> dict[str, str]:
    """Drain the bad nodes. Return for each what was done."""
    done = {}
    for name in found.judgement.bad:
        reason = drains.drain_reason(drains.HEALTH, f"{drains.PAIR_TEST}{found.why_bad(name)}")
        try:
            done[name] = drains.drain_node(client, name, reason)
        except UserError as error:
            done[name] = f"{name} could not be drained: {error}"
    return done


def _report_verdicts(found: Findings, controller: str | None) -> str:
    """Report the verdicts to the controller. Return why that failed, or ""."""
    verdicts = {name: ("bad", found.why_bad(name)) for name in found.judgement.bad}
    verdicts |= {name: ("warning", why) for name, why in found.judgement.slow.items()}
    verdicts |= {name: ("good", "passed") for name in found.judgement.good}
    for name, (verdict, reason) in verdicts.items():
        question = {"kind": "health", "node": name, "source": "pair-test", "verdict": verdict, "reason": reason[:300]}
        try:
            ask_controller({**question, "at": time.time()}, controller, timeout=REPORT_SECONDS)
        except UserError as error:
            return str(error)
    return ""


def report_of(found: Findings, drained: dict[str, str]) -> PairReport:
    """Return the findings as --json prints them."""
    judgement = found.judgement
    return PairReport(
        tests=found.tests,
        bad={name: found.why_bad(name) for name in judgement.bad},
        slow=dict(judgement.slow),
        good=list(judgement.good),
        unknown=dict(judgement.unknown),
        not_tested=found.left_out,
        drained=drained,
    )


def table(found: Findings) -> Listing:
    """Return a table with a line for each test."""
    tests = Listing("round", "nodes", "result", "backend", "GB/s", "us", "what", optional=["us"])
    for test in found.tests:
        tests.add_row(
            str(test.round),
            ",".join(test.nodes),
            {None: "not-run", True: "passed", False: "failed"}[test.passed],
            test.backend or "-",
            f"{test.bandwidth / 1e9:.3g}" if test.bandwidth else "-",
            f"{test.latency * 1e6:.0f}" if test.latency else "-",
            test.reason or "-",
        )
    return tests


def _print(found: Findings, drained: dict[str, str], problem: str) -> None:
    """Print the findings for people. problem: why the controller did not get the verdicts, or ""."""
    judgement = found.judgement
    show([table(found)])
    for name in judgement.bad:
        print_text(f"{name} is bad: {found.why_bad(name)}")
        if name not in drained:
            print_text(f"  to take it out of service: unicronctl pair-test --nodes {name} --drain")
    for text in drained.values():
        print_text(f"  {text}")
    for word, nodes in (("is slow (for 1 GB)", judgement.slow), ("is not cleared", judgement.unknown)):
        for name, why in nodes.items():
            print_text(f"{name} {word}: {why}")
    for name, why in found.left_out.items():
        print_text(f"{name} was not tested: {why}")
    if sum(test.round == 1 and test.bandwidth is not None for test in found.tests) < pairs.PAIRS_WANTED:
        print_text(f"fewer than {pairs.PAIRS_WANTED} pairs passed round 1: no speeds were compared")
    if judgement.good:
        print_text(f"good: {' '.join(judgement.good)}")
    if problem:
        print_text(f"the controller was not told: {problem}", err=True)
