"""What must hold after any run of the rank harness, by the ledgers (`step` messages), the reports and the fetches."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

from tests.support.rank_harness import Ranks

MICRO_BATCHES = 8


def fetched(out: Path) -> dict[int, dict[tuple[int, int], list[int]]]:
    """iteration -> (slot, incarnation) -> micro-batches in the order in which they were fetched."""
    found: dict[int, dict[tuple[int, int], list[int]]] = defaultdict(lambda: defaultdict(list))
    for path in out.glob("fetched.*"):
        for line in path.read_text().splitlines():
            incarnation, iteration, index = map(int, line.split())
            found[iteration][int(path.suffix[1:]), incarnation].append(index)
    return found


def exactly_once(ranks: Ranks, iterations: int, lanes: int = 1, total: int = MICRO_BATCHES) -> None:
    """Each micro-batch is in exactly one gradient per iteration, and none is computed twice by anyone who goes on.
    lanes: of a replica, each of which fetches its own. total: micro-batches of an iteration.

    Whoever is gone without a word after the reduce has its part in the sum all the same; then what the others lack is
    exactly what it had fetched.
    """
    work = fetched(ranks.out)
    for iteration in range(iterations):
        steps = [step for step in ranks.steps if step["iteration"] == iteration]
        assert steps, f"nobody reported iteration {iteration}"
        slots = [step["slot"] for step in steps]
        assert len(slots) == len(set(slots)), f"iteration {iteration} was stepped twice by one of {slots}"
        counts = Counter(index for step in steps for index in step["micro_batches"])
        dumb = {slot for slot, _ in work[iteration] if slot not in slots}
        if lanes > 1:  # the head says what its replica has
            dumb = {slot for slot, _ in work[iteration] if slot - slot % ranks.replica not in slots}
        silent = {index for (slot, _), has in work[iteration].items() if slot in dumb for index in has}
        missing = set(range(total)) - set(counts)
        assert set(counts.values()) <= {1}, f"iteration {iteration} counts twice: {counts}"
        assert missing <= silent, f"iteration {iteration} lacks {missing}, which nobody had"
        for step in steps:
            own = work[iteration][step["slot"], step["incarnation"]]
            if lanes > 1:
                own = [index for has in work[iteration].values() for index in has]
            if ranks.environment.get("UNICRON_SNAPSHOT") == "none":  # what was reduced in part is computed again
                assert set(step["micro_batches"]) <= set(step["computed"]) <= set(own), (step, own)
            elif ranks.replica == 1 and ranks.environment.get("TINY_GATHER") == "1":
                # a gather that fails in the forward pass comes after the fetch
                assert sorted(step["computed"]) == sorted(step["micro_batches"]), step
                assert set(step["computed"]) <= set(own), (step, own)
            elif ranks.replica == 1:
                assert sorted(step["computed"]) == sorted(step["micro_batches"]) == sorted(own), (step, own)
            elif step["slot"] % ranks.replica == 0:  # one rank speaks for its replica
                assert set(step["micro_batches"]) <= set(step["computed"]) <= set(own), (step, own)


def nothing_thrown_away(ranks: Ranks) -> None:
    """What a survivor had finished when a generation broke is in its own gradient when it steps."""
    for reports in ranks.reports:
        for slot, status in reports.items():
            if status.phase == "stepped":
                continue
            steps = [s for s in ranks.steps if s["slot"] == slot and s["iteration"] == status.iteration]
            for step in steps:
                assert set(status.done) <= set(step["micro_batches"]), (slot, status, step)
                others = [s for s in ranks.steps if s["iteration"] == status.iteration and s["slot"] != slot]
                assert not any(set(status.done) & set(other["computed"]) for other in others), (slot, status, others)


def losses(out: Path, what: str = "loss") -> dict[int, set[float]]:
    """iteration -> the losses that ranks reported, or what else is written beside them: "scale", of fp16;
    "biases", of experts."""
    found = defaultdict(set)
    for path in out.glob("losses.*"):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            found[entry["iteration"]].add(entry[what])
    return found


def same_losses(out: Path, reference: Path, most: float) -> None:
    """All members report one loss for each iteration, and it differs by `most` of it from the reference's."""
    found, wanted = losses(out), losses(reference)
    assert all(len(values) == 1 for values in found.values()), f"members report several: {found}"
    close(*({iteration: next(iter(told[iteration])) for iteration in found} for told in (found, wanted)), most)


def close(found: Mapping[int, float], wanted: Mapping[int, float], most: float) -> None:
    """iteration -> loss: the same iterations, and no loss differs by more than `most` of the one wanted. The largest
    difference is printed: `pytest -rP` shows it."""
    assert found.keys() == wanted.keys()
    differences = {iteration: abs(found[iteration] - loss) / abs(loss) for iteration, loss in wanted.items()}
    print(f"losses differ by {max(differences.values()):.1e} at most")
    assert all(difference <= most for difference in differences.values()), (differences, found, wanted)


def gradient_differences(
    out: Path, reference: Path, iterations: int, size: int = 1, relative: bool = False
) -> dict[int, float]:
    """iteration -> the largest difference of any rank's reduced gradient to the reference's at its place; relative:
    over the largest there. What overflows must do so in both. size: ranks of a replica."""
    import torch

    found = {}
    for iteration in range(iterations):
        wanted = {int(path.suffix[1:]) % size: path for path in sorted(reference.glob(f"step.{iteration}.*"))}
        found[iteration] = 0.0
        for path in out.glob(f"step.{iteration}.*"):
            mine = torch.load(path)["gradient"]
            theirs = torch.load(wanted[int(path.suffix[1:]) % size])["gradient"]
            sound = theirs.isfinite()
            assert torch.equal(mine.isfinite(), sound), f"iteration {iteration}: other elements overflow in {path}"
            mine, theirs = mine.where(sound, 0), theirs.where(sound, 0)
            largest = float(theirs.abs().max()) if relative else 1.0
            found[iteration] = max(found[iteration], float((mine - theirs).abs().max()) / largest)
    return found
