#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.TCPStore (default libuv backend): a store's process dies, and another one listens at the same
# port at once, as a supervisor does it.
#
# Seen: the first `set` of a client that was connected to the old store returns without an error, and its value is in neither
#   store. Only the second call raises DistNetworkError ("Broken pipe"), and so does every later call: a client never
#   connects again.
# Expected: the first call raises, or the value arrives.
# Why it matters: whoever publishes one key after a fail-over (an address, a "ready") believes that it is there. Read it back, or
#   make a new client.
#
# Needs python3 with venv, and PyPI. Fails if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy

cat >store.py <<'PYTHON'
import sys, time
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
print("listens", flush=True)
time.sleep(120)
PYTHON

cat >client.py <<'PYTHON'
import signal, socket, subprocess, sys, time
from datetime import timedelta
import torch
from torch.distributed import DistNetworkError, TCPStore

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]


def begin():
    for _ in range(50):
        process = subprocess.Popen([sys.executable, "store.py", str(port)], stdout=subprocess.PIPE, text=True)
        if process.stdout.readline().strip() == "listens":
            return process
        process.wait()
        time.sleep(0.2)
    raise SystemExit("no store began")


first = begin()
client = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
client.set("before", "1")
first.send_signal(signal.SIGKILL)
first.wait()
second = begin()
said = []
for key in ("first", "second", "third"):
    try:
        said.append(repr(client.set(key, "x")))
    except DistNetworkError as error:
        said.append("DistNetworkError")
fresh = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
there = [key for key in ("first", "second", "third") if fresh.check([key])]
second.kill()
print("torch", torch.__version__, "| set returned:", said, "| in the new store:", there)
if said != ["None", "DistNetworkError", "DistNetworkError"] or there:
    raise SystemExit("the behaviour has changed")
PYTHON
timeout 300 venv/bin/python client.py
