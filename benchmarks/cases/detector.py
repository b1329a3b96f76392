"""The pure parts of detection: causes of error texts, false alarms, slowdowns, and their times.

docs/measurements.md has the figures of each blind part of the corpus before it improved the rules.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import msgspec

from benchmarks.report import Report
from unicron_detector.failures.classify import Classifier, default_classifier
from unicron_detector.failures.severity import Severity, load_table
from unicron_detector.health.checks import Settings
from unicron_detector.health.runner import run
from unicron_detector.iterations.culprit import OWN_PHASES, slowest
from unicron_detector.iterations.iteration_monitor import Health, IterationMonitor
from unicron_detector.iterations.peer_metrics import PeerWatch


class Sizes(msgspec.Struct, frozen=True):
    """Sizes of a run."""

    iterations: int = 200_000
    """Healthy iterations of each distribution."""
    rounds: int = 2000
    """Rounds of healthy peers."""
    seconds: float = 5.0
    """Time for the classifier's speed."""


SMALLEST = Sizes(2000, 20, 0.1)
DATA = Path(__file__).parents[2] / "tests" / "data"


class Entry(msgspec.Struct, frozen=True):
    """A text of the corpus, with its labels."""

    text: str
    channel: str
    split: str
    cause: str
    severity: int


def measure(sizes: Sizes, report: Report) -> None:
    """Measure all parts."""
    lines = (DATA / "errors.jsonl").read_bytes().splitlines()
    entries = [msgspec.json.decode(line, type=Entry) for line in lines]
    classification(entries, report)
    throughput(entries, sizes.seconds, report)
    false_alarms(sizes.iterations, report)
    slowdowns(report)
    peers(sizes.rounds, report)
    report.figure("admission checks of this machine", run(Settings()).seconds, "s")


def classification(entries: list[Entry], report: Report) -> None:
    """Print the share of right causes and severities, by part of the corpus."""
    classifier = default_classifier()
    parts: dict[str, list[tuple[bool, bool]]] = defaultdict(list)
    isolated = 0
    for entry in entries:
        verdict = classifier.text(entry.text, entry.channel)
        parts[entry.split].append((verdict.cause == entry.cause, int(verdict.severity) == entry.severity))
        hardware = classifier.table.causes[entry.cause].scope == "hardware"
        isolated += verdict.severity is Severity.SEV1 and not hardware
    report.row("part", "texts", "cause", "severity")
    for name, pairs in parts.items():
        causes, severities = (statistics.mean(each) for each in zip(*pairs, strict=True))
        report.row(name, len(pairs), f"{causes:.1%}", f"{severities:.1%}")
    report.figure("texts that wrongly blame the hardware", isolated, most=0)


def throughput(entries: list[Entry], seconds: float, report: Report) -> None:
    """Print the time to load the table, and the best time of each text with a classifier that has no memory."""
    began = time.perf_counter()
    classifier = Classifier(load_table(tested=True))
    report.figure("loading the table", 1e3 * (time.perf_counter() - began), "ms")
    line = "the quick brown fox jumps over lazy tensor 12"
    texts = [(entry.text, entry.channel) for entry in entries]
    texts += [(f"{line} " * 360, "stderr"), (f"{line}\n" * 360, "stderr")]
    best = [math.inf] * len(texts)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or math.inf in best:
        for number, (text, channel) in enumerate(texts):
            fresh = Classifier(classifier.table)  # without remembered texts
            began = time.perf_counter()
            fresh.text(text, channel)
            best[number] = min(best[number], time.perf_counter() - began)
    *corpus, unknown_line, unknown_lines = best
    report.figure("a text, median", 1e6 * statistics.median(corpus), "us")
    report.figure("a text, 99th percentile", 1e6 * statistics.quantiles(corpus, n=100)[98], "us")
    report.figure("16 KB without a match, as one line", 1e3 * unknown_line, "ms")
    report.figure("16 KB without a match, as 360 lines", 1e3 * unknown_lines, "ms")


def distributions(rng: random.Random, count: int) -> dict[str, Callable[[int], float]]:
    """Return functions from an iteration's number to its seconds."""
    recorded = json.loads((DATA / "iteration_times.json").read_text())["seconds"]

    def replay(number: int) -> float:
        # Spans of 50 recorded iterations in random order keep the machine's bursts.
        run_start = random.Random(number // 50).randrange(0, len(recorded) // 50) * 50
        return float(recorded[run_start + number % 50])

    return {
        "normal, 2 %": lambda i: rng.gauss(1.0, 0.02),
        "normal, 10 %": lambda i: max(0.2, rng.gauss(1.0, 0.1)),
        "lognormal, 20 %": lambda i: rng.lognormvariate(0.0, 0.2),
        "bimodal 1 and 1.8 s": lambda i: (1.8 if rng.random() < 0.3 else 1.0) * rng.gauss(1.0, 0.02),
        "drift +50 %": lambda i: (1.0 + 0.5 * i / count) * rng.gauss(1.0, 0.03),
        "spikes": lambda i: rng.gauss(1.0, 0.02) + (rng.expovariate(4.0) if rng.random() < 0.002 else 0.0),
        "slow wave": lambda i: (1.0 + 0.05 * math.sin(i / 500.0)) * rng.gauss(1.0, 0.02),
        "recorded on a busy machine": replay,
    }


def false_alarms(count: int, report: Report) -> None:
    """Count alarms over healthy iterations of each distribution."""
    drawn = distributions(random.Random(1), count)
    elapsed = 0.0
    for name, draw in drawn.items():
        values = [draw(number) for number in range(count)]
        monitor, alarms, before = IterationMonitor(), 0, Health.LEARNING
        began = time.perf_counter()
        for value in values:
            health = monitor.observe(value).health
            alarms += health is Health.FAILED or (health is Health.DEGRADED and before is not Health.DEGRADED)
            before = health
        elapsed += time.perf_counter() - began
        report.figure(f"false alarms in {count:,} iterations, {name}", alarms, most=0)
    report.figure("an iteration is observed", 1e6 * elapsed / (count * len(drawn)), "us")


def slowdowns(report: Report) -> None:
    """Count iterations until a slowdown of the whole job is reported, and the stragglers found, with 2 % noise."""
    for factor in (1.12, 1.2, 1.5):
        rng, seen = random.Random(2), []
        for _ in range(20):
            monitor = IterationMonitor()
            for _ in range(500):
                monitor.observe(rng.gauss(1.0, 0.02))
            observed = (monitor.observe(factor * rng.gauss(1.0, 0.02)).health for _ in range(200))
            seen += [next((number for number, health in enumerate(observed, 1) if health is Health.DEGRADED), 200)]
        report.figure(f"a slowdown by {factor} is reported, median", statistics.median(seen), "iterations")
    report.figure("stragglers named, of 100", sum(finds_straggler(seed) for seed in range(100)), least=100)


def finds_straggler(seed: int) -> bool:
    """Return whether the straggler of 64 ranks is found, whose backward pass takes 1.3 times as long."""
    rng = random.Random(seed)
    usual = {"data": 0.02, "forward": 0.3, "backward": 0.6, "step": 0.03}
    slow = rng.randrange(64)
    phases = {slot: {name: usual[name] * rng.gauss(1.0, 0.02) for name in OWN_PHASES} for slot in range(64)}
    phases[slow]["backward"] *= 1.3
    last = max(sum(times.values()) for times in phases.values())
    for times in phases.values():
        times["reduce"] = 0.05 + last - sum(times.values())
    found = slowest(phases)
    return found is not None and (found.slot, found.phase) == (slow, "backward")


def peers(rounds: int, report: Report) -> None:
    """Count false alarms over healthy rounds of 64 peers with 8 metrics."""
    rng, watch, alarms = random.Random(3), PeerWatch(), 0
    began = time.perf_counter()
    for _ in range(rounds):
        values = {f"n{i}": {f"m{j}": rng.gauss(100.0, 3.0) for j in range(8)} for i in range(64)}
        alarms += bool(watch.judge(values))
    report.figure(f"false alarms in {rounds} rounds of 64 peers", alarms, most=0)
    report.figure("a round", 1e3 * (time.perf_counter() - began) / rounds, "ms")
