"""Real errors of CUDA: their texts, their classification, and whether the process can go on."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from benchmarks.gpu import cuda_errors
from benchmarks.gpu.rows import on_card, patience, row
from tests.support.processes import UNICRONCTL, outside_slurm

LIMIT = 60.0


def call(*command: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        input=text,
        env=outside_slurm(),
        capture_output=True,
        text=True,
        timeout=LIMIT * patience(),
        check=False,
    )


def classified(text: str, source: str) -> dict[str, object]:
    """Return the answer of `unicronctl classify` for a text."""
    done = call(*UNICRONCTL, "classify", "--json", "--source", source, "-", text=text)
    try:
        return json.loads(done.stdout.splitlines()[0])
    except (ValueError, IndexError):
        return {"cause": "?", "output": (done.stdout + done.stderr)[-300:]}


def kernel_lines() -> list[str]:
    """Return the driver's lines in the kernel log."""
    done = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=10, check=False)
    return [line for line in done.stdout.splitlines() if "NVRM" in line or "Xid" in line]


def check(kind: str) -> None:
    """Raise an error of a kind, caught and uncaught."""
    program = [sys.executable, "-m", "benchmarks.gpu.cuda_errors", kind]
    with row(f"real error: {cuda_errors.KINDS[kind].__name__.replace('_', ' ')}") as saw:
        caught, uncaught = call(*program, "catch"), call(*program)
        lines = [line for line in caught.stdout.splitlines() if line.startswith("{")]
        error = json.loads(lines[0]) if lines else {"type": "", "text": "it ended", "then": "it ended"}
        text = f"{error['type']}: {error['text']}"
        by_exception, by_stderr = classified(text, "exception"), classified(uncaught.stderr, "stderr")
        exits = caught.returncode, uncaught.returncode
        shown = f"{text.splitlines()[0][:160]}; classified {by_exception.get('cause')}, {by_exception.get('severity')}"
        shown += f" (standard error: {by_stderr.get('cause')}, {by_stderr.get('severity')}); the process goes on: "
        shown += f"{error['then'][:120]}; exit {exits[0]} when caught, {exits[1]} when not"
        saw(shown, text=text, exception=by_exception, stderr=by_stderr, wrote=uncaught.stderr[-1500:], exits=exits)


def main() -> int:
    before = kernel_lines()
    with ThreadPoolExecutor(3 if on_card() else 1) as pool:
        list(pool.map(check, cuda_errors.KINDS))
    with row("the driver's lines in the kernel log") as saw:
        new = [line for line in kernel_lines() if line not in before]
        found = [(line[-160:], classified(line, "kernel")) for line in new[:6]]
        shown = "; ".join(f"{line}: {verdict.get('cause')}, {verdict.get('severity')}" for line, verdict in found)
        saw(shown or f"none ({len(before)} before)", before=before[-5:], new=new[:20])
    return 0


if __name__ == "__main__":
    sys.exit(main())
