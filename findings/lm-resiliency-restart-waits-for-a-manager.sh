#!/usr/bin/env bash
# lm-resiliency 0.2.0 with torch 2.13.0, its rendezvous backend registered by hand
# (lm-resiliency-backend-cannot-be-registered.sh), --max-restarts=4.
#
# Seen (2026-11-29): a rank ends by itself. torchrun says that it restarts the workers, and waits. After
#   lm_resiliency_join_timeout_ms (default 300 s, here 10 s) it ends with "timed out waiting for a manager-owned successor
#   generation". No rank was started a second time.
# Expected: a restart on the same node, as its README says ("trigger automatic restart or standby replacement through torchrun"),
#   or as `--rdzv-backend=c10d` does with the same options.
# Why it matters: the package has no program that publishes the next generation. Its API guide's "managers" are the reader's to
#   write, with TorchrunRecoveryCoordinator: what detects the death, which checkpoint, which nodes. Until then a job with this
#   backend survives less than one without.
#
# Needs python3 (3.10 to 3.12) with venv, and PyPI. Fails if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install --quiet --disable-pip-version-check --no-cache-dir torch==2.13.0 numpy lm-resiliency==0.2.0
cat >launch.py <<'PYTHON'
from lm_resiliency.integrations.torchrun import get_rendezvous_handler_creator
from torch.distributed import run
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
rendezvous_handler_registry.register("lm_resiliency", get_rendezvous_handler_creator())
run.main()
PYTHON
cat >train.py <<'PYTHON'
import sys
with open("starts", "a") as starts:
    starts.write("started\n")
sys.exit(3 if len(open("starts").readlines()) == 1 else 0)
PYTHON
echo 0123456789abcdef0123456789abcdef >machine-id
export LM_RESILIENCY_MACHINE_ID_PATH=$folder/machine-id
common=(--nnodes=1:1 --nproc-per-node=1 --max-restarts=4 --rdzv-id=run)

echo "c10d:"
timeout 300 env/bin/torchrun "${common[@]}" --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 train.py 2>/dev/null
[ "$(wc -l <starts)" = 2 ] && echo "the rank was started again, and the job is complete"
rm starts

echo "lm_resiliency:"
status=0
conf=store_type=file,lm_resiliency_restart_context_path=$folder/context/context.json,lm_resiliency_join_timeout_ms=10000
timeout 300 env/bin/python launch.py "${common[@]}" --rdzv-backend=lm_resiliency "--rdzv-endpoint=$folder/store" "--rdzv-conf=$conf" train.py \
    2>out || status=$?
grep -o "timed out waiting for a manager-owned successor generation" out | head -1
[ "$status" = 1 ] && [ "$(wc -l <starts)" = 1 ]
