"""What `accelerate launch` would start, by accelerate itself.

It turns its options and its configuration file into some hundred variables, which change with each release. So the
job's own accelerate reads them, in a process that stops where the ranks would be started. That takes as long as the
launcher takes without Unicron.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any

from unicron_ctl.agent.launchers.commands import LauncherStays

SECONDS = 300.0  # for importing torch from a slow file system
# What the launcher says of the rendezvous is the agent's to say.
OF_THE_AGENT = {"MASTER_ADDR", "MASTER_PORT", "_UNICRON_ACCELERATE_TOLD"}

# Runs in the job's Python, which need not have Unicron.
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
    plain = {name.replace("_", "-"): value for name, value in vars(told).items()}
    tell(torchrun=plain, program=told.training_script, words=told.training_script_args, environment=dict(os.environ))

def start_process(command, env=None, **_):
    tell(command=command, environment=env or dict(os.environ))

before = dict(os.environ)
torchrun.run = start_ranks
launch.subprocess = types.SimpleNamespace(Popen=start_process, CalledProcessError=OSError)
environments.is_port_in_use = lambda *_: False  # nobody uses the port
args = launch.launch_command_parser().parse_args(sys.argv[1:])
# The rendezvous is the agent's, so nobody need have said where the ranks would meet.
for name, value in (("machine_rank", 0), ("main_process_ip", "127.0.0.1"), ("main_process_port", 29500)):
    if getattr(args, name) is None:
        setattr(args, name, value)
launch.launch_command(args)
"""


def ask_accelerate(python: Sequence[str], words: Sequence[str]) -> dict[str, Any]:
    """What it would start: `command` of its only process, or torchrun's options (`torchrun`, by their long names, as
    texts) with `program` and `words`; `environment`: the variables that it changes; `machines` and `processes`.

    python: the job's interpreter; words: behind `accelerate launch`. Raises LauncherStays.
    """
    with tempfile.TemporaryDirectory(prefix="unicron-accelerate-") as folder:
        told = os.path.join(folder, "told")
        environment = os.environ | {"_UNICRON_ACCELERATE_TOLD": told}
        try:
            done = subprocess.run(
                [*python, "-c", PROGRAM, *words],
                env=environment,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=SECONDS,
                check=False,
            )
            with open(told, encoding="utf-8") as file:
                found = json.load(file)
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            why = f"{type(error).__name__}: {error}"
            if not isinstance(error, subprocess.TimeoutExpired) and "done" in locals():
                why = (done.stderr.decode(errors="replace").strip().splitlines() or [why])[-1]
            raise LauncherStays(f"it does not say what it would start ({why}): write `srun python train.py`") from None
    found["environment"] = {name: text for name, text in found["environment"].items() if name not in OF_THE_AGENT}
    if "torchrun" in found:
        found["torchrun"] = {
            name: value if isinstance(value, bool) else str(value)
            for name, value in found["torchrun"].items()
            if value is not None
        }
    return dict(found)
