"""``python -m benchmarks.detector [--quick] [--json FILE]``: what the pure parts of detection reach on this machine."""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

from unicron_detector.failures.classify import Classifier, default_classifier
from unicron_detector.failures.severity import Severity, load_table
from unicron_detector.health.checks import Settings
from unicron_detector.health.runner import run
from unicron_detector.iterations.culprit import OWN_PHASES, slowest
from unicron_detector.iterations.iteration_monitor import Health, IterationMonitor
from unicron_detector.iterations.peer_metrics import PeerWatch

DATA = Path(__file__).parents[2] / "tests" / "data"


def classification() -> dict[str, object]:
    """Accuracy per part of the corpus by exact cause and by severity, and of the blind parts per family; SEV1 given to
    what is no hardware fault. What the blind parts had at first sight is in docs/measurements.md."""
    classifier = default_classifier()
    parts: dict[str, list[tuple[bool, bool]]] = defaultdict(list)
    families: dict[str, list[bool]] = defaultdict(list)
    isolated = 0
    entries = [json.loads(line) for line in (DATA / "errors.jsonl").read_text().splitlines()]
    for entry in entries:
        verdict = classifier.text(entry["text"], entry["channel"])
        parts[entry["split"]].append((verdict.cause == entry["cause"], int(verdict.severity) == entry["severity"]))
        if entry["split"].startswith("blind") and "family" in entry:
            families[entry["family"]].append(verdict.cause == entry["cause"])
        hardware = classifier.table.causes[entry["cause"]].scope == "hardware"
        isolated += verdict.severity is Severity.SEV1 and not hardware
    parts["all"] = [pair for name in list(parts) for pair in parts[name]]
    return {
        "texts": {name: len(pairs) for name, pairs in parts.items()},
        "cause": {name: round(sum(pair[0] for pair in pairs) / len(pairs), 4) for name, pairs in parts.items()},
        "severity": {name: round(sum(pair[1] for pair in pairs) / len(pairs), 4) for name, pairs in parts.items()},
        "blind_cause_by_family": {name: f"{sum(right)} of {len(right)}" for name, right in sorted(families.items())},
        "application_errors_isolated": isolated,
    }


def throughput(seconds: float) -> dict[str, float]:
    """Milliseconds to load the table and for 16 KB that no rule knows, as one line and as many; microseconds of each
    corpus text, the best of several runs, none of which finds the text in the classifier's memory."""
    start = time.perf_counter()
    classifier = Classifier(load_table(tested=True))
    load = time.perf_counter() - start
    entries = [json.loads(line) for line in (DATA / "errors.jsonl").read_text().splitlines()]
    line = "the quick brown fox jumps over lazy tensor 12"
    texts = [(entry["text"], entry["channel"]) for entry in entries]
    texts += [(f"{line} " * 360, "stderr"), (f"{line}\n" * 360, "stderr")]
    best = [math.inf] * len(texts)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or math.inf in best:
        for number, (text, channel) in enumerate(texts):
            fresh = Classifier(classifier.table)  # it remembers no text
            start = time.perf_counter()
            fresh.text(text, channel)
            best[number] = min(best[number], time.perf_counter() - start)
    *corpus, unknown_line, unknown_lines = best
    return {
        "load_ms": round(1e3 * load, 2),
        "text_us_median": round(1e6 * statistics.median(corpus), 1),
        "text_us_p99": round(1e6 * statistics.quantiles(corpus, n=100)[98], 1),
        "text_us_max": round(1e6 * max(corpus), 1),
        "unknown_16KB_line_ms": round(1e3 * unknown_line, 2),
        "unknown_16KB_lines_ms": round(1e3 * unknown_lines, 2),
    }


def _distributions(rng: random.Random, count: int) -> dict[str, object]:
    recorded = json.loads((DATA / "iteration_times.json").read_text())["seconds"]

    def replay(number: int) -> float:
        # Runs of 50 recorded iterations in random order keep the machine's own bursts.
        run_start = random.Random(number // 50).randrange(0, len(recorded) // 50) * 50
        return recorded[run_start + number % 50]

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


def false_alarms(count: int) -> dict[str, object]:
    """Alarms over ``count`` healthy iterations of each distribution, and the cost of one observation."""
    result: dict[str, object] = {"iterations_each": count}
    elapsed = 0.0
    for name, draw in _distributions(random.Random(1), count).items():
        values = [draw(number) for number in range(count)]
        monitor, failed, degraded, before = IterationMonitor(), 0, 0, Health.LEARNING
        start = time.perf_counter()
        for value in values:
            health = monitor.observe(value).health
            failed += health is Health.FAILED
            degraded += health is Health.DEGRADED and before is not Health.DEGRADED
            before = health
        elapsed += time.perf_counter() - start
        result[name] = {"failed": failed, "degraded": degraded}
    result["observe_us"] = round(1e6 * elapsed / (count * (len(result) - 1)), 1)
    return result


def slowdowns() -> dict[str, object]:
    """Iterations until a slowdown of the whole job is reported (2 % noise), and stragglers named among 64 ranks."""
    found = {}
    for factor in (1.12, 1.2, 1.5):
        rng, seen = random.Random(2), []
        for _ in range(20):
            monitor = IterationMonitor()
            for _ in range(500):
                monitor.observe(rng.gauss(1.0, 0.02))
            for number in range(200):
                if monitor.observe(factor * rng.gauss(1.0, 0.02)).health is Health.DEGRADED:
                    seen.append(number + 1)
                    break
        found[f"{factor}x"] = {
            "seen": len(seen),
            "of": 20,
            "iterations_median": statistics.median(seen) if seen else None,
        }
    named = sum(_straggler(seed) for seed in range(100))
    return {"degraded": found, "stragglers_named_of_100": named}


def _straggler(seed: int) -> bool:
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


def peers(rounds: int) -> dict[str, object]:
    """TEE: false alarms over healthy rounds of 64 peers with 8 metrics, and the cost of a round."""
    rng, watch, alarms = random.Random(3), PeerWatch(), 0
    start = time.perf_counter()
    for _ in range(rounds):
        values = {f"n{i}": {f"m{j}": rng.gauss(100.0, 3.0) for j in range(8)} for i in range(64)}
        alarms += bool(watch.judge(values))
    return {
        "rounds": rounds,
        "false_alarms": alarms,
        "round_ms": round(1e3 * (time.perf_counter() - start) / rounds, 2),
    }


def health() -> dict[str, object]:
    """Seconds of the admission checks on this machine, each and together."""
    report = run(Settings())
    return {"total": round(report.seconds, 3), **{result.name: round(result.seconds, 4) for result in report.results}}


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.detector", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the iterations")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    options = parser.parse_args()
    count = 20_000 if options.quick else 200_000
    figures = {
        "classification": classification(),
        "classify_throughput": throughput(1.0 if options.quick else 5.0),
        "false_alarms": false_alarms(count),
        "slowdowns": slowdowns(),
        "peers": peers(200 if options.quick else 2000),
        "health_seconds": health(),
    }
    text = json.dumps(figures, indent=2)
    print(text)
    if options.json:
        Path(options.json).write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
