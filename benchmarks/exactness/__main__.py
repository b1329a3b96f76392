"""The largest differences of healed runs to undisturbed ones, layout by layout and kind by kind.

    python -m benchmarks.exactness [--json FILE] [--only KIND]...

Real ranks of a small GPT with gloo, each run against one of the same layout in which nothing fails. A rank is killed
in the middle of its micro-batches, another time after its reduce has begun. "struck" is the reduced gradient of the
iteration that was struck, relative to its largest element; "later" that of the iterations after it, whose parameters
differ already; and the loss, relative. 0 is: the same to the last bit.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.losses import relative_difference
from benchmarks.marks import print_figure
from tests.support import proof
from tests.support.matrix import ITERATIONS, KINDS, LAYOUTS, size_of, train
from tests.support.moments import moments

CASES = (  # layout, kind
    ("dp", "plain"),
    ("dp", "dropout"),
    ("dp", "bf16"),
    ("dp", "sharded"),
    ("tp", "plain"),
    ("tp", "sharded-bf16"),
    ("pp", "fp16"),
    ("pp", "tokens"),
    ("vpp", "sharded-overlap"),
    ("dp", "experts"),
    ("tp-pp", "sharded"),
)
MOMENTS = ("data", "reduce")  # of tests.support.moments; both strike iteration 1
STRUCK, MOST = 1, 1e-6


def apart(out: Path, reference: Path) -> float:
    """The largest relative difference of a loss; infinity where one is no number."""
    wanted, found = proof.losses(reference), proof.losses(out)
    return max(
        relative_difference(one, other)
        for iteration, values in found.items()
        for one in values
        for other in wanted[iteration]
    )


def measure(layout: str, kind: str, folder: Path) -> dict[str, dict[str, float]]:
    """moment -> its differences."""
    reference, rows = folder / "reference", {}
    reference.mkdir(parents=True)
    train(reference, layout, KINDS[kind], [])
    size = size_of(LAYOUTS[layout][0])
    for moment in MOMENTS:
        out = folder / moment
        out.mkdir()
        train(out, layout, KINDS[kind], moments(size)[moment])
        found = proof.gradient_differences(out, reference, ITERATIONS, size, relative=True)
        later = max(value for iteration, value in found.items() if iteration > STRUCK)
        rows[moment] = {"struck": found[STRUCK], "later": later, "loss": apart(out, reference)}
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=sorted({kind for _, kind in CASES}), help="repeatable")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    options = parser.parse_args()
    rows = []
    print(f"{'layout':<8}{'kind':<18}{'killed in':<12}{'struck':>10}{'later':>10}{'loss':>10}", flush=True)
    for layout, kind in CASES:
        if options.only and kind not in options.only:
            continue
        with tempfile.TemporaryDirectory(prefix="unicron-exactness-") as folder:
            for moment, found in measure(layout, kind, Path(folder)).items():
                rows.append({"layout": layout, "kind": kind, "moment": moment, **found})
                values = "".join(f"{found[name]:>10.1e}" for name in ("struck", "later", "loss"))
                print(f"{layout:<8}{kind:<18}{moment:<12}{values}", flush=True)
    worst = max(row["struck"] for row in rows)
    met = print_figure("gradient of the struck iteration, healed beside undisturbed", worst, "", MOST)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(not met)


if __name__ == "__main__":
    sys.exit(main())
