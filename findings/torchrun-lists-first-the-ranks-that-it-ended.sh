#!/usr/bin/env bash
# torch 2.13.0, torchrun (torch.distributed.elastic); the same with 2.11.0, 2.14.1 and 2.15.0.
#
# Behaviour: a rank ends by itself, and torchrun ends the others by SIGTERM. Its report lists those under "Failures" before
# the one that failed, as "Signal 15 (SIGTERM) received by PID", or, where the rank handles SIGTERM, with the exit code of
# its own handler, so that nothing tells it from a rank that failed. torchrun's own exit status is 1, whatever the rank's was.
#
# Seen (2026-11-28), rank 1 ends with 3, rank 0 handles SIGTERM and ends with 5:
#   Failures:
#   [1]: ... rank : 0 (local_rank: 0)  exitcode : 5 (pid: 20255)
#   Root Cause (first observed failure):
#   [0]: ... rank : 1 (local_rank: 1)  exitcode : 3 (pid: 20256)
#
# Why it matters: who takes the first entry, or any exit code but that of "Root Cause", blames a rank that was healthy.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install --quiet --disable-pip-version-check --no-cache-dir torch==2.13.0 numpy
cat >train.py <<'PYTHON'
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(5))
time.sleep(1 if os.environ["RANK"] == "1" else 60)
sys.exit(3)
PYTHON
status=0
timeout 120 env/bin/torchrun --standalone --nproc-per-node 2 train.py 2>report || status=$?
sed -n '/^Failures:/,$p' report
[ "$status" = 1 ]
failures=$(sed -n '/^Failures:/,/^Root Cause/p' report)
grep -q 'rank      : 0 ' <<<"$failures" && grep -q 'exitcode  : 5 ' <<<"$failures"
sed -n '/^Root Cause/,$p' report | grep -q 'exitcode  : 3 '
