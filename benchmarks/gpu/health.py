"""The admission checks of a node, with the card's own."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.gpu.rows import on_card, row
from unicron_detector.health.checks import Settings
from unicron_detector.health.runner import run


def main() -> int:
    for expected in (1, 2) if on_card() else (None,):
        with row(f"health checks, {expected or 'no'} GPU{'s' if expected == 2 else ''} expected") as saw:
            report = run(Settings(gpus=expected, kernel_state="/tmp/unicron-gpu-health"))
            gpu = next(each for each in report.results if each.name == "gpu")
            wanted = {1: ("good", "warning"), 2: ("bad",), None: ("good", "unknown")}[expected]
            text = f"gpu {gpu.verdict} ({gpu.reason}) in {gpu.seconds:.2f} s; all {report.verdict}: {report.reason}"
            saw(text, ok=gpu.verdict in wanted, report=report.as_dict())
    if on_card():
        with row("nvidia-smi, memory of rows") as saw:
            fields = "ecc.errors.uncorrected.volatile.total,remapped_rows.failure,remapped_rows.pending,temperature.gpu"
            command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
            saw((done.stdout + done.stderr).strip()[:300], ok=done.returncode == 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
