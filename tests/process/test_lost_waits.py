"""A wait for a message whose peer died in the middle of it, and what gloo itself makes of that."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.processes import of_a_world

pytestmark = pytest.mark.process

LIMIT = 12  # seconds that gloo's group waits
ON_ITS_WAY = 1 << 25  # bytes, of 1 << 28
RANK = """
import datetime, json, os, sys, time
import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=LIMIT))
if os.environ["HOW"] == "given up":
    from unicron_transition.seams import gloo

    gloo.abandon_lost_messages(lambda: True)
    gloo.GRACE_SECONDS = 3.0  # before which the other is dead
other, big, small = 1 - dist.get_rank(), torch.zeros(1 << 26), torch.ones(4)
for _ in range(3):  # what goes well is as ever
    for move in (dist.isend, dist.irecv) if dist.get_rank() else (dist.irecv, dist.isend):
        move(small, other).wait()
assert small.tolist() == [1.0] * 4
print("ready", flush=True)
work = (dist.isend if dist.get_rank() == 0 else dist.irecv)(big, other)
began = time.monotonic()
try:
    work.wait()
except RuntimeError as error:
    print(json.dumps([type(error).__name__, time.monotonic() - began, str(error)]), flush=True)
os._exit(0)
""".replace("LIMIT", str(LIMIT))


def written(rank: subprocess.Popen) -> int:
    """Bytes; a message to another rank is sent by writev(2)."""
    return int(Path(f"/proc/{rank.pid}/io").read_text().split()[3])


@pytest.mark.parametrize("survivor", ["sender", pytest.param("receiver", marks=pytest.mark.wide)])
@pytest.mark.parametrize("how", [pytest.param("gloo", marks=pytest.mark.long), "given up"])
def test_a_peer_dies_while_its_message_is_on_its_way(how, survivor):
    """gloo's own wait goes on until its time-out; when this fails, `abandon_lost_messages` is not needed any more."""
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK], env=each | {"HOW": how}, stdout=subprocess.PIPE, text=True)
        for each in of_a_world(2)
    ]
    try:
        staying, dying = ranks if survivor == "sender" else ranks[::-1]
        for rank in (dying, staying):
            assert rank.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 60
        while written(ranks[0]) < ON_ITS_WAY:  # without a pause: all of it takes a tenth of a second
            assert time.monotonic() < deadline, "the message is not sent"
        os.kill(dying.pid, signal.SIGKILL)
        kind, seconds, text = json.loads(staying.communicate(timeout=LIMIT + 60)[0])
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    if how == "gloo":
        assert kind != "LostWait" and seconds > LIMIT - 1, text
    else:
        assert kind == "LostWait" and seconds < LIMIT - 1, text
