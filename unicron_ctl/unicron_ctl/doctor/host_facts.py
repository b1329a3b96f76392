"""Collects the facts about this host.

``python -m unicron_ctl.doctor.host_facts QUESTION`` is the step on each node (`on_nodes`).
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import platform
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from unicron_ctl.doctor.examination import CHECKS
from unicron_ctl.doctor.facts import ConfigFacts, HostFacts, Inspection, Question
from unicron_ctl.doctor.on_nodes import DOOR, FACTS, Door, decode_question, encode, pieces
from unicron_ctl.doctor.plugstack import plugin_facts
from unicron_ctl.doctor.reach_checks import uid_of, user_name
from unicron_ctl.shared.settings.config import Config
from unicron_ctl.shared.settings.config_file import load_valid_part
from unicron_ctl.shared.system.errors import UserError
from unicron_ctl.shared.system.release import release


def host_name() -> str:
    """Return Slurm's name for this node, else the host's own."""
    return os.environ.get("SLURMD_NODENAME", "") or socket.gethostname().split(".")[0]


def collect(question: Question) -> HostFacts:
    """Collect all facts about this host. That takes at most a minute."""
    asked = Inspection(question, *read_config(question.config), *plugin_facts(question.plugstack, question.plugin_dir))
    return HostFacts(
        name=host_name(),
        role=question.role,
        user=user_name(os.geteuid()),
        uid=os.geteuid(),
        release=release(),
        python=platform.python_version(),
        infiniband=bool(glob.glob("/sys/class/infiniband/*")),
        **{field: make(asked) for check in CHECKS for field, make in check.collect.items()},
    )


def read_config(path: str) -> tuple[Config, ConfigFacts]:
    """Read the valid part of the host's configuration, and the facts about its file."""
    try:
        config, problems = load_valid_part(path or None)
    except UserError as error:
        return Config(), ConfigFacts(path=path, problems=[str(error)])
    digest = ""
    with contextlib.suppress(OSError):
        digest = hashlib.sha256(Path(config.path).read_bytes()).hexdigest() if config.path else ""
    return config, ConfigFacts(
        path=config.path,
        digest=digest,
        problems=problems,
        address=",".join(config.controller.addresses),
        auth=config.controller.auth,
        believed={name: uid_of(name) for name in config.agent.controller_users},
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the step on a node: open a port if the question wants one, collect, print, and wait for the port's caller."""
    question = decode_question((arguments or sys.argv[1:])[0])
    if question.config:
        os.environ["UNICRON_CONFIG"] = question.config
    name = host_name()
    door = Door.open_if(question.door)
    if door is not None:
        serving = threading.Thread(target=door.serve, args=(question.door,), daemon=True)
        serving.start()
        print("\n".join(pieces(name, DOOR, str(door.port).encode())), flush=True)
    print("\n".join(pieces(name, FACTS, encode(collect(question)))), flush=True)
    if door is not None:
        serving.join(question.door)
    return 0


if __name__ == "__main__":
    sys.exit(main())
