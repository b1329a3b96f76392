"""Our simulator beside figures that others have published, from their parameters.

    python -m benchmarks.crosschecks [--days 256] [--runs 5]

AIReSim (karthikp-ubc/airesim, arXiv 2603.07041): its report of 2026-04-02, from its parameters [S]: a
job of 4,096 servers, effective training ratio and number of failures. The closed form 1 / (1 + N r d), which is
1 - N r d while that is small, for published failure rates: N nodes, r failures a node and second, d seconds lost by
each.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import statistics
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.marks import print_figure
from unicron_ctl.shared.system.errors import WRONG_USE
from unicron_planner.problem.objective import Job, Scenario
from unicron_planner.simulate import POLICIES, Policy, Trace, simulate
from unicron_planner.simulate.causes import CAUSES
from unicron_planner.simulate.generate import LLAMA3_PER_NODE_DAY, RSC1_PER_NODE_DAY, poisson
from unicron_planner.simulate.policies import detection_seconds
from unicron_planner.simulate.trace import DAY, TraceEvent, make

REPORTED_RATIO, REPORTED_FAILURES, REPORTED_DAYS = 0.6228, 11145.6, 256.0
MINUTE = 60.0


# ------------------------------------------------------------ AIReSim
@dataclass(frozen=True)
class Config:
    """Its config.yaml: servers, failures a server and day, minutes, probabilities."""

    job: int = 4096
    servers: int = 4160 + 200
    warm: int = 16
    per_day: float = 0.01
    bad_share: float = 0.15
    bad_more: float = 5.0
    recovery: float = 20.0
    automatic: float = 120.0
    manual: float = 2880.0
    to_manual: float = 0.80
    automatic_fails: float = 0.40
    manual_fails: float = 0.20


class Servers:
    """Which of them work, stand by warm, wait and are repaired. What is repaired stands by; when nobody does, as many
    as at the beginning come from the rest of the pool, and from the spare pool after it."""

    def __init__(self, config: Config, draw: random.Random):
        self.config, self.draw = config, draw
        self.bad = set(draw.sample(range(config.servers), int(config.servers * config.bad_share)))
        self.working = set(range(config.job))
        self.rest = deque(range(config.job, config.servers))
        self.warm = deque[int]()
        self.repairs: list[tuple[float, int, bool]] = []
        self._refill()

    def rate(self) -> float:
        """Failures a second of those at work."""
        config = self.config
        return (len(self.working) + config.bad_more * len(self.working & self.bad)) * config.per_day / DAY

    def fail(self, now: float) -> tuple[int, int]:
        """(one of those at work, which goes into repair; that which takes its place)."""
        while self.repairs and self.repairs[0][0] <= now:
            _, server, mended = heapq.heappop(self.repairs)
            if mended:
                self.bad.discard(server)
            self.warm.append(server)
        more = sorted(self.working & self.bad)
        weight = self.config.bad_more * len(more)
        by_its_fault = self.draw.random() * (len(self.working) + weight) < weight
        lost = self.draw.choice(more if by_its_fault else sorted(self.working))
        heapq.heappush(self.repairs, self._repair(now, lost))
        if not self.warm:
            self._refill()
        taken = self.warm.popleft()
        self.working.remove(lost)
        self.working.add(taken)
        return lost, taken

    def _refill(self) -> None:
        for _ in range(min(self.config.warm, len(self.rest))):
            self.warm.append(self.rest.popleft())

    def _repair(self, now: float, server: int) -> tuple[float, int, bool]:
        config, draw = self.config, self.draw
        minutes, fails = draw.expovariate(1 / config.automatic), config.automatic_fails
        if draw.random() < config.to_manual:
            minutes, fails = minutes + draw.expovariate(1 / config.manual), config.manual_fails
        return now + minutes * MINUTE, server, draw.random() >= fails


def airesim_trace(config: Config, days: float, seed: int) -> tuple[Trace, int]:
    """(the trace until `days` of work are done, failures). A server fails while the job computes, not while it
    recovers."""
    draw = random.Random(seed)
    servers = Servers(config, draw)
    events: list[TraceEvent] = []
    now, left, failures = 0.0, days * DAY, 0
    while True:
        span = draw.expovariate(servers.rate())
        if span >= left:
            now += left
            break
        now, left = now + span, left - span
        lost, taken = servers.fail(now)
        # Only who is to take the place is there, so that the simulator takes the same one.
        events += [TraceEvent(now, "join", f"s{taken}"), TraceEvent(now, "fail", f"s{lost}", CAUSES["node_failed"])]
        failures += 1
        now += config.recovery * MINUTE
    first = [TraceEvent(0.0, "join", f"s{server}") for server in range(config.job)]
    return make([*first, *events], now, "airesim"), failures


def airesim(days: float, runs: int) -> bool:
    """True: on average within one point of the report, in the ratio and in the number of failures."""
    config, ratios, counts = Config(), [], []
    job = Job("training", {config.job: 1e18}, min_nodes=config.job)
    none = dict.fromkeys(("node_health", "process", "exception", "statistical"), 0.0)
    policy = Policy("reload", "fixed", none, dict.fromkeys((1, 2, 3), config.recovery * MINUTE))
    for seed in range(runs):
        trace, failures = airesim_trace(config, days, seed)
        ratios.append(simulate(Scenario(config.servers, (job,)), trace, policy).efficiency)
        counts.append(failures / days)
    print(f"AIReSim, {config.job} servers, {days:g} days of work, mean of {runs} runs (least to most):")
    print(f"{'':<30}{'reported [S]':>14}{'ours':>10}")
    ratio, count = statistics.mean(ratios), statistics.mean(counts)
    reported = REPORTED_FAILURES / REPORTED_DAYS
    for what, theirs, ours, all_of_ours in (
        ("effective training ratio", REPORTED_RATIO, ratio, ratios),
        ("failures a day of work", reported, count, counts),
    ):
        print(f"  {what:<28}{theirs:>14.4f}{ours:>10.4f}   ({min(all_of_ours):.4f} to {max(all_of_ours):.4f})")
    points, more = 100 * abs(ratio - REPORTED_RATIO), 100 * abs(count / reported - 1)
    good = print_figure("effective training ratio, ours - AIReSim's", points, "points", 1)
    return print_figure("failures, ours beside AIReSim's", more, "%", 1) and good


# ------------------------------------------------------------ the closed form
RATES: dict[str, tuple[str, float, int]] = {
    "Llama 3": ("arXiv 2407.21783 [S]", LLAMA3_PER_NODE_DAY, 2048),
    "Meta RSC-1": ("arXiv 2410.21680 [S]", RSC1_PER_NODE_DAY, 128),
    "Ant, 0.27 % a card and day": ("[S]", 0.0027 * 8, 128),
}


def closed_form(days: float = 20.0) -> bool:
    """One job on all nodes, a spare for each that is lost, one kind of failure: the simulator beside the formula."""
    print(f"\nOne job on N nodes, {days:g} days; each failure costs d seconds: 1 / (1 + N r d), and the simulator")
    print(f"{'rate':<30}{'N':>6}{'d':>8}{'1 - N r d':>12}{'formula':>10}{'simulated':>11}   source")
    worst = 0.0
    for name, (source, per_node_day, nodes) in RATES.items():
        trace = poisson(nodes, days * DAY, per_node_day, {"exited_abnormally": 1.0}, 0, name)
        for of in ("unicron", "torchelastic"):
            policy = POLICIES[of]
            scenario = Scenario(nodes, (Job("training", {nodes: 1e18}, min_nodes=nodes),), transition_seconds=60.0)
            lost = _seconds_lost(policy, scenario)
            found = simulate(scenario, trace, policy).efficiency / policy.healthy
            rate = sum(event.event == "fail" for event in trace.events) / trace.until
            formula = 1.0 / (1.0 + rate * lost)
            worst = max(worst, 100 * abs(found - formula))
            print(
                f"{name:<30}{nodes:>6}{lost:>8.0f}{1 - rate * lost:>12.4f}{formula:>10.4f}{found:>11.4f}   {source}, "
                f"as {of}"
            )
    return print_figure("simulator beside the closed form, largest difference", worst, "points", 1)


def _seconds_lost(policy: Policy, scenario: Scenario) -> float:
    cause = CAUSES["exited_abnormally"]
    transition = policy.transition[cause.severity]
    again = policy.checkpoint / 2 if policy.checkpoint else policy.redo * 30.0
    return (
        detection_seconds(policy, cause) + (scenario.transition_seconds if transition is None else transition) + again
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=float, default=REPORTED_DAYS, help="of work, for AIReSim's job")
    parser.add_argument("--runs", type=int, default=5, help="of AIReSim's job")
    options = parser.parse_args()
    if options.runs < 1 or not 0 < options.days < math.inf:
        parser.exit(WRONG_USE, "--runs is at least 1, and --days above 0\n")
    checks: list[Callable[[], bool]] = [lambda: airesim(options.days, options.runs), closed_form]
    return 0 if all([check() for check in checks]) else 1


if __name__ == "__main__":
    sys.exit(main())
