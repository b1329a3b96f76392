"""Asks accelerate itself what `accelerate launch` would start.

It turns its options and its configuration file into some hundred variables, which change with each release. So the
job's own accelerate reads them, in a process that stops before it would start the ranks.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from unicron_ctl.agent.launchers.commands import LauncherStays

SECONDS = 300.0  # for importing torch from a slow file system
FILE = "_UNICRON_ACCELERATE_TOLD"  # the path of the answer
OF_THE_AGENT = {"MASTER_ADDR", "MASTER_PORT", FILE}  # the rendezvous is the agent's

# This runs in the job's Python, in which Unicron need not be installed.
PROGRAM = """
import json, os, sys, types
from accelerate.commands import launch
from accelerate.utils import launch as environments
import torch.distributed.run as torchrun

def tell(**told):
    changed = {name: value for name, value in told.pop("environment").items() if before.get(name) != value}
    with open(os.environ["_UNICRON_ACCELERATE_TOLD"], "w") as file:
        count = dict(machines=int(args.num_machines or 1), processes=int(args.num_processes or 1))
        json.dump(dict(told, environment=changed, **count), file, default=str)
    sys.stderr.flush()
    os._exit(0)

def start_ranks(told):
    given = {name: value for name, value in vars(told).items() if value not in (None, "") and value is not False}
    plain = {name.replace("_", "-"): value is True or str(value) for name, value in given.items()}
    tell(torchrun=plain, program=told.training_script, words=told.training_script_args, environment=dict(os.environ))

def start_process(command, env=None, **_):
    tell(command=command, environment=env or dict(os.environ))

before = dict(os.environ)
torchrun.run = start_ranks
launch.subprocess = types.SimpleNamespace(Popen=start_process, CalledProcessError=OSError)
environments.is_port_in_use = lambda *_: False  # nobody uses the port
args = launch.launch_command_parser().parse_args(sys.argv[1:])
# The agent forms the rendezvous, so the options need not say where the ranks would meet.
for name, value in (("machine_rank", 0), ("main_process_ip", "127.0.0.1"), ("main_process_port", 29500)):
    if getattr(args, name) is None:
        setattr(args, name, value)
launch.launch_command(args)
"""


class Answer(msgspec.Struct):
    """Accelerate's answer: what it would start."""

    machines: int
    processes: int
    """The processes of all machines."""
    environment: dict[str, str]
    """Variables that it changes."""
    command: list[str] = []
    """The command of its only process; empty if it calls torchrun."""
    torchrun: dict[str, str | list[str] | bool] = {}
    """torchrun's options by their long names."""
    program: str = ""
    words: list[str] = []


def ask_accelerate(python: Sequence[str], words: Sequence[str]) -> Answer:
    """Return what accelerate would start. python: the job's interpreter; words: those after `accelerate launch`.
    Raises LauncherStays."""
    with tempfile.TemporaryDirectory(prefix="unicron-accelerate-") as folder:
        file = Path(folder, "answer")
        try:
            done = subprocess.run(
                [*python, "-c", PROGRAM, *words],
                env=os.environ | {FILE: str(file)},
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise _stays(f"{type(error).__name__}: {error}") from None
        try:
            answer = msgspec.json.decode(file.read_bytes(), type=Answer)
        except (OSError, msgspec.DecodeError) as error:
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            raise _stays((lines or [f"{type(error).__name__}: {error}"])[-1]) from None
    answer.environment = {name: text for name, text in answer.environment.items() if name not in OF_THE_AGENT}
    return answer


def _stays(why: str) -> LauncherStays:
    return LauncherStays(f"it does not say what it would start ({why}): write `srun python train.py`")
