"""Collects the facts of this host. Nothing here judges, and nothing raises for what is missing.

``python -m unicron_ctl.doctor.host_facts QUESTION`` is the step on each node (`on_nodes`).
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import platform
import pwd
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

from unicron_ctl.doctor.controller_facts import controller_facts
from unicron_ctl.doctor.facts import (
    COMPUTE,
    NO_LIMIT,
    AgentFacts,
    ConfigFacts,
    ContainerFacts,
    HealthFacts,
    HostFacts,
    KernelLogFacts,
    Question,
    ScriptFacts,
    ShmFacts,
)
from unicron_ctl.doctor.plugstack import plugin_facts
from unicron_ctl.shared.protocol.munge import MungeError, make_credential, unmunge
from unicron_ctl.shared.settings.config import Config
from unicron_ctl.shared.settings.config_file import understood
from unicron_ctl.shared.settings.places import PACKAGED_PYTHON
from unicron_ctl.shared.system.errors import UserError, one_line
from unicron_ctl.shared.system.release import release
from unicron_detector.health.program_output import TooMuchOutput, run_program

PROGRAM_SECONDS = 20.0  # for an agent or an interpreter to say which it is, on a busy node
LIMITS = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK, "core": resource.RLIMIT_CORE}
MARK = b"nicron"  # in a script that is ours, or calls one of ours
MOST_BYTES = 1 << 20  # of a script
ADMISSION = "unicron_ctl.nodes.admission"
# The scripts' own defaults
PROLOG_SECONDS = 4
APPTAINER_CONF = "/etc/apptainer/apptainer.conf"
ENROOT_MOUNTS = "/etc/enroot/mounts.d"


def collect(question: Question) -> HostFacts:
    """All facts of this host. Takes as long as the slowest of its programs, at most a minute."""
    config, config_facts = read_config(question.config)
    plugin, agent = plugin_facts(question.plugstack, question.plugin_dir)
    return HostFacts(
        name=os.environ.get("SLURMD_NODENAME", "") or socket.gethostname().split(".")[0],
        role=question.role,
        user=user_name(os.geteuid()),
        uid=os.geteuid(),
        release=release(),
        python=platform.python_version(),
        torch=release_of("torch"),
        megatron=release_of("megatron-core"),
        config=config_facts,
        controller=controller_facts(question.controller, config),
        munge=munge_problem() if config_facts.auth == "munge" else "",
        users={name: uid_of(name) for name in question.users},
        plugin=plugin,
        agent=agent_facts(agent) if question.role == COMPUTE else AgentFacts(path=agent),
        prolog=scripts(question.prolog),
        epilog=scripts(question.epilog),
        health_program=scripts([question.health_program] if question.health_program else []),
        health=health_facts() if question.role == COMPUTE else HealthFacts(),
        shm=shm_facts(),
        limits=step_limits(),
        infiniband=bool(glob.glob("/sys/class/infiniband/*")),
        kernel_log=kernel_log_facts(config),
        containers=container_facts(os.path.dirname(os.path.dirname(agent))),
        unicrond_files=unicrond_files(),
    )


def read_config(path: str) -> tuple[Config, ConfigFacts]:
    """The host's configuration as far as it has a meaning, and what there is to say of the file."""
    try:
        config, problems = understood(path or None)
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


def release_of(distribution: str) -> str:
    """The release of an installed distribution, "" without one. Nothing of it is imported."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def uid_of(name: str) -> int | None:
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return None


def user_name(uid: int) -> str:
    """The user's name on this host, or its number."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def munge_problem() -> str:
    """Why munge does not work on this host, in one line, or nothing."""
    try:
        return "" if unmunge(make_credential("doctor")).uid == os.geteuid() else "munge named another user"
    except MungeError as error:
        return one_line(str(error))


def agent_facts(path: str) -> AgentFacts:
    """The agent's release, or why it cannot be executed."""
    if not path:
        return AgentFacts()
    try:
        done = run_program([path, "--version"], PROGRAM_SECONDS)
    except OSError as error:
        return AgentFacts(path=path, problem=error.strerror or str(error))
    except subprocess.TimeoutExpired:
        return AgentFacts(path=path, problem=f"no answer within {PROGRAM_SECONDS:g} s")
    except TooMuchOutput as error:
        return AgentFacts(path=path, problem=str(error))
    said = done.stdout.decode(errors="replace").split()
    if done.returncode or said[:1] != ["unicron-agent"]:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return AgentFacts(path=path, problem=one_line("".join(last)) or f"it ended with {done.returncode}")
    return AgentFacts(path=path, release=" ".join(said[1:]))


def scripts(patterns: Iterable[str]) -> ScriptFacts:
    """The programs that these paths with wildcards lead to."""
    found = [path for pattern in patterns for path in sorted(glob.glob(pattern)) if os.path.isfile(path)]
    ours = [path for path in found if _is_ours(path)]
    return ScriptFacts(found=found, ours=ours, blocked=[path for path in ours if not os.access(path, os.X_OK)])


def _is_ours(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return MARK in file.read(MOST_BYTES)
    except OSError:
        return "nicron" in os.path.basename(path)  # it is for root's eyes only


def keys_of(path: str) -> dict[str, str] | None:
    """The lines KEY=VALUE of a file; None where it cannot be read."""
    try:
        text = Path(path).read_text(errors="replace")
    except OSError:
        return None
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))


def health_facts() -> HealthFacts:
    """The settings of the health checks, as prolog and HealthCheckProgram find them."""
    prolog = keys_of(os.environ.get("UNICRON_PROLOG_CONF") or "/etc/unicron/prolog.conf") or {}
    conf = os.environ.get("UNICRON_HEALTH_CONF") or prolog.get("UNICRON_HEALTH_CONF") or "/etc/unicron/health.conf"
    keys = keys_of(conf)
    python = (keys or {}).get("UNICRON_PYTHON") or PACKAGED_PYTHON
    said = prolog.get("UNICRON_HEALTH_SECONDS", "")
    seconds = int(said) if said.isdecimal() and 1 <= int(said) <= 49 else PROLOG_SECONDS
    runs = keys is not None and prolog.get("UNICRON_CHECK_HEALTH") != "off"
    found = "" if keys is None else conf
    return HealthFacts(conf=found, python=python, problem=_cannot_check(python), seconds=seconds if runs else 0)


def _cannot_check(python: str) -> str:
    """Why this interpreter cannot run the admission checks, in one line, or nothing."""
    try:
        done = run_program([python, "-P", "-c", f"import {ADMISSION}"], PROGRAM_SECONDS)
    except (OSError, subprocess.TimeoutExpired, TooMuchOutput) as error:
        return one_line(getattr(error, "strerror", None) or str(error))
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
    return one_line("".join(last)) or f"it ended with {done.returncode}" if done.returncode else ""


def shm_facts(folder: str = "/dev/shm") -> ShmFacts:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        found = os.statvfs(folder)
    except OSError:
        return ShmFacts(memory=memory)
    return ShmFacts(size=found.f_frsize * found.f_blocks, free=found.f_frsize * found.f_bavail, memory=memory)


def step_limits() -> dict[str, int]:
    """The limits of this process. Agents raise that of open files as far as they may, so there the hard one counts."""
    found = {name: resource.getrlimit(number)[name == "nofile"] for name, number in LIMITS.items()}
    return {name: NO_LIMIT if value == resource.RLIM_INFINITY else value for name, value in found.items()}


def kernel_log_facts(config: Config) -> KernelLogFacts:
    """Whether agents, which run as any user, can read the kernel log."""
    path = config.agent.kmsg
    try:
        restricted = Path("/proc/sys/kernel/dmesg_restrict").read_text().strip() == "1"
    except OSError:
        restricted = False
    try:
        mode: int | None = os.stat(path).st_mode
    except OSError:
        mode = None
    return KernelLogFacts(
        watched=config.agent.node_events,
        path=path,
        restricted=restricted,
        is_there=mode is not None,
        readable=mode is not None and bool(mode & 0o004),
    )


def container_facts(agent_folder: str) -> ContainerFacts:
    """The container runtimes of this host and what they mount of Unicron's. agent_folder: "" where none is known."""
    mounts = [path for path in sorted(glob.glob(f"{ENROOT_MOUNTS}/*.fstab")) if _is_ours(path)]
    sources = [line.split()[0] for path in mounts for line in _lines(path)]
    binds = any(
        words[:2] == ["bind", "path"] and agent_folder and "".join(words[3:]).split(":")[0].rstrip("/") == agent_folder
        for words in (line.replace("=", " = ").split() for line in _lines(APPTAINER_CONF))
    )
    return ContainerFacts(
        enroot=os.path.isdir(os.path.dirname(ENROOT_MOUNTS)),
        enroot_mounts=bool(mounts),
        enroot_missing=[path for path in sources if not os.path.exists(path)],
        apptainer=os.path.isfile(APPTAINER_CONF),
        apptainer_binds=binds,
    )


def _lines(path: str) -> list[str]:
    """The lines of a configuration file that are no comments."""
    try:
        text = Path(path).read_text(errors="replace")
    except OSError:
        return []
    return [line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")]


def processes(name: str) -> list[Path]:
    """The folders in /proc of the processes that run a program of this name, in an interpreter or not."""
    found = []
    for path in Path("/proc").glob("[1-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = os.fsdecode(path.read_bytes()).split("\0")
            if any(os.path.basename(word) == name or word.endswith(f".{name}") for word in words[:3]):
                found.append(path.parent)
    return found


def unicrond_files() -> int | None:
    """How many files the unicrond of this host may open; None where none runs here, or it is another user's."""
    for folder in processes("unicrond"):
        with contextlib.suppress(OSError, ValueError, StopIteration):
            line = next(one for one in (folder / "limits").read_text().splitlines() if one.startswith("Max open files"))
            return int(line.split()[3])
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """The step on a node: opens a port if it is asked to, collects, prints, and waits for the port's caller."""
    from unicron_ctl.doctor.on_nodes import DOOR, FACTS, Door, decode_question, encode, pieces

    question = decode_question((arguments or sys.argv[1:])[0])
    if question.config:
        os.environ["UNICRON_CONFIG"] = question.config
    name = os.environ.get("SLURMD_NODENAME", "") or socket.gethostname().split(".")[0]
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
