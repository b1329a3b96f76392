#!/usr/bin/env bash
# lm-resiliency 0.2.0 with torch 2.13.0, the newest release that it allows: the command of its documents ("Running the
# Integrated Path", and the smoke test of its torchrun examples).
#
# Seen (2026-11-29): torchrun warns "Exception while registering out of tree plugin lm_resiliency: TypeError:
#   create_rendezvous_handler() missing 1 required positional argument: 'params'", and ends with "The rendezvous backend
#   'lm_resiliency' is not registered". torch calls the function that the entry point names without an argument, and takes
#   what it returns for the creator of handlers. The package has such a function, get_rendezvous_handler_creator, but its
#   entry point names another.
# Expected: the backend is there, as its documents say.
# Why it matters: neither standby nodes nor recovery plans work as installed. A launcher must register the creator itself.
#
# Needs python3 (3.10 to 3.12) with venv, and PyPI. Fails if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install --quiet --disable-pip-version-check --no-cache-dir torch==2.13.0 numpy lm-resiliency==0.2.0
echo 'print("trained")' >train.py
options=(--nnodes=1:1 --nproc-per-node=1 --max-restarts=0 --rdzv-backend=lm_resiliency "--rdzv-endpoint=$folder/store"
    --rdzv-id=run "--rdzv-conf=store_type=file,lm_resiliency_restart_context_path=$folder/context/context.json")
echo 0123456789abcdef0123456789abcdef >machine-id
export LM_RESILIENCY_MACHINE_ID_PATH=$folder/machine-id

status=0
timeout 300 env/bin/torchrun "${options[@]}" train.py >out 2>&1 || status=$?
grep -E "missing 1 required|not registered" out
[ "$status" = 1 ]
grep -q "create_rendezvous_handler() missing 1 required positional argument: 'params'" out
grep -q "rendezvous backend 'lm_resiliency' is not registered" out

echo "the same, with the creator registered by hand:"
cat >launch.py <<'PYTHON'
from lm_resiliency.integrations.torchrun import get_rendezvous_handler_creator
from torch.distributed import run
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
rendezvous_handler_registry.register("lm_resiliency", get_rendezvous_handler_creator())
run.main()
PYTHON
timeout 300 env/bin/python launch.py "${options[@]}" train.py 2>/dev/null | grep trained
