"""Facts and checks of one host: limits, memory, kernel log, programs, Python.

Functions that collect facts do not judge, and do not raise if something is missing. Functions that judge are pure.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import resource
import subprocess
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from shlex import quote  # root types the commands that contain a node's answers

from unicron_ctl.doctor.facts import (
    COMPUTE,
    HEAD,
    NO_LIMIT,
    Case,
    ContainerFacts,
    Finding,
    HealthFacts,
    Inspection,
    KernelLogFacts,
    ScriptFacts,
    ShmFacts,
    advice,
    good,
    or_good,
    problem,
    unknown,
)
from unicron_ctl.doctor.slurm_lines import CONF_LINES, HEALTH_PROGRAM, HOOK, HOOK_FOLDER
from unicron_ctl.shared.settings.places import PACKAGED_PYTHON
from unicron_ctl.shared.system.descriptors import shortage
from unicron_ctl.shared.system.errors import one_line
from unicron_detector.health.program_output import TooMuchOutput, run_program
from unicron_transition.seams.table import KNOWN_RELEASES, known

FEWEST_FILES = 4096  # for an agent or a rank: a DataLoader with workers opens hundreds
SHARE_OF_MEMORY = 0.25  # of a node's memory, for the copies of training states
HEALTH_CONF = "/etc/unicron/health.conf"
MEBIBYTE, GIBIBYTE = 1 << 20, 1 << 30
PROGRAM_SECONDS = 20.0  # for an agent or an interpreter to start, on a busy node
LIMITS = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK, "core": resource.RLIMIT_CORE}
MARK = b"nicron"  # is in each script that is ours or calls one of ours
MOST_BYTES = 1 << 20  # of a script
ADMISSION = "unicron_ctl.nodes.admission"
PROLOG_SECONDS = 4  # the prolog's own default
APPTAINER_CONF = "/etc/apptainer/apptainer.conf"
ENROOT_MOUNTS = "/etc/enroot/mounts.d"


def release_of(distribution: str) -> str:
    """Return the release of an installed distribution without importing it, "" if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def config(case: Case) -> Iterator[Finding]:
    """The host's unicron.toml is valid, and the same as on the first host."""
    mine, first = case.host.config, case.first.config
    if not mine.path:
        yield problem(
            "no unicron.toml", f"copy it from {case.first.name}: {first.path}" if first.path else "unicronctl setup"
        )
        return
    yield from or_good(_config_problems(case), mine.path)


def _config_problems(case: Case) -> Iterator[Finding]:
    mine, first = case.host.config, case.first.config
    for text in mine.problems:
        yield problem(f"{mine.path}: {text}", f"edit {quote(mine.path)}; unicronctl config check")
    if not mine.address and case.host.role != HEAD:
        yield problem(
            f"{mine.path} does not say where the controller is", 'write address = "tcp://HOST:7451" into [controller]'
        )
    if mine.digest != first.digest:
        yield problem(
            f"{mine.path} differs from that of {case.first.name}", f"copy {first.path} from {case.first.name}"
        )


def shm_facts(_: Inspection) -> ShmFacts:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return ShmFacts(memory=memory)
    return ShmFacts(size=found.f_frsize * found.f_blocks, free=found.f_frsize * found.f_bavail, memory=memory)


def shared_memory(case: Case) -> Iterator[Finding]:
    """/dev/shm has room for the copies of training states."""
    found, least = case.host.shm, case.site.config.health.shm_mb * MEBIBYTE
    if not found.size:
        yield problem("/dev/shm is not mounted", "mount -t tmpfs -o mode=1777 tmpfs /dev/shm")
    elif found.size < least:
        yield problem(
            f"/dev/shm has {found.size // MEBIBYTE} MiB, and [health] shm_mb wants {least // MEBIBYTE}",
            "mount -o remount,size=50% /dev/shm",
        )
    elif found.free < least:
        yield problem(
            f"/dev/shm has less than {least // MEBIBYTE} MiB free", "ls -la /dev/shm, and remove what nobody needs"
        )
    elif found.size < SHARE_OF_MEMORY * found.memory:
        yield advice(
            f"/dev/shm has {found.size / GIBIBYTE:.1f} GiB of the node's {found.memory / GIBIBYTE:.0f}: states that do "
            "not fit are not kept in memory",
            "mount -o remount,size=50% /dev/shm",
        )
    else:
        yield good("/dev/shm is large enough")


def step_limits(_: Inspection) -> dict[str, int]:
    """Return the limits of this process. For open files the hard limit counts, because agents raise the soft one."""
    found = {name: resource.getrlimit(number)[name == "nofile"] for name, number in LIMITS.items()}
    return {name: NO_LIMIT if value == resource.RLIM_INFINITY else value for name, value in found.items()}


def processes(name: str) -> list[Path]:
    """Return the folders in /proc of the processes that run a program of this name, in an interpreter or not."""
    found = []
    for path in Path("/proc").glob("[1-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = os.fsdecode(path.read_bytes()).split("\0")
            if any(os.path.basename(word) == name or word.endswith(f".{name}") for word in words[:3]):
                found.append(path.parent)
    return found


def unicrond_files(_: Inspection) -> int | None:
    """Return how many files this host's unicrond may open; None if none runs here or it is another user's."""
    for folder in processes("unicrond"):
        with contextlib.suppress(OSError, ValueError):
            if found := re.search(r"^Max open files +(\d+)", (folder / "limits").read_text(), re.MULTILINE):
                return int(found[1])
    return None


def limits(case: Case) -> Iterator[Finding]:
    """The limits that Slurm gives to steps, and unicrond's own."""
    return or_good(_limit_problems(case), "files, locked memory and core dumps")


def _limit_problems(case: Case) -> Iterator[Finding]:
    limits = case.host.limits if case.host.role == COMPUTE else {}  # those of a login are not a step's
    files = limits.get("nofile", NO_LIMIT)
    if files != NO_LIMIT and files < FEWEST_FILES:
        yield problem(f"a step may open {files} files only", "LimitNOFILE=65536 in slurmd.service")
    if limits.get("memlock", NO_LIMIT) != NO_LIMIT and case.host.infiniband:
        yield problem(
            "the node has RDMA devices, and a step may not lock all memory for them",
            "LimitMEMLOCK=infinity in slurmd.service, and PropagateResourceLimitsExcept=MEMLOCK in slurm.conf",
        )
    if limits.get("core", 0):
        yield advice(
            "a rank that crashes writes its memory to disk before it ends, and is found only then",
            "LimitCORE=0 in slurmd.service, or `ulimit -c 0` in jobs",
        )
    if case.host.unicrond_files is not None and (text := shortage(case.host.unicrond_files)):
        yield problem(f"unicrond: {text.partition(':')[0]}", "LimitNOFILE=65536 in unicrond.service")


def kernel_log_facts(asked: Inspection) -> KernelLogFacts:
    """Find out whether agents, which run as any user, can read the kernel log."""
    path = asked.config.agent.kmsg
    found = KernelLogFacts(watched=asked.config.agent.node_events, path=path, is_there=False, readable=False)
    with contextlib.suppress(OSError):
        found.restricted = Path("/proc/sys/kernel/dmesg_restrict").read_text().strip() == "1"
    with contextlib.suppress(OSError):
        found.readable = bool(os.stat(path).st_mode & 0o004)
        found.is_there = True
    return found


def kernel_log(case: Case) -> Iterator[Finding]:
    """Agents, which run as the jobs' users, can read the kernel log."""
    found = case.host.kernel_log
    if not found.watched:
        yield advice("[agent] node_events = false: no agent reads the kernel log", "remove that line")
    elif not found.is_there:
        yield problem(f"{found.path} is not there: hardware faults are found late", "see [agent] kmsg")
    elif found.restricted and found.path == "/dev/kmsg":
        yield problem(
            "kernel.dmesg_restrict is 1: agents cannot read the kernel log",
            "sysctl -w kernel.dmesg_restrict=0, and the same line in /etc/sysctl.d",
        )
    elif not found.readable:
        yield problem(f"{found.path} cannot be read by jobs", f"chmod o+r {quote(found.path)}")
    else:
        yield good(f"{found.path} can be read")


def scripts(patterns: Iterable[str]) -> ScriptFacts:
    """Return the programs that these paths with wildcards lead to."""
    found = [path for pattern in patterns for path in sorted(glob.glob(pattern)) if os.path.isfile(path)]
    ours = [path for path in found if _is_ours(path)]
    return ScriptFacts(found=found, ours=ours, blocked=[path for path in ours if not os.access(path, os.X_OK)])


def _is_ours(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return MARK in file.read(MOST_BYTES)
    except OSError:
        return "nicron" in os.path.basename(path)  # only root may read it


def prolog(case: Case) -> Iterator[Finding]:
    """Slurm's Prolog is ours, or calls it."""
    return _hook(case, "Prolog")


def epilog(case: Case) -> Iterator[Finding]:
    """Slurm's Epilog is ours, or calls it."""
    return _hook(case, "Epilog")


def _hook(case: Case, name: str) -> Iterator[Finding]:
    found = case.host.prolog if name == "Prolog" else case.host.epilog
    script = f"{HOOK_FOLDER[name]}/{HOOK}"
    if case.site.slurm_problem:
        yield unknown(f"Slurm did not say which {name} it starts")
    elif not case.site.settings.words(name):
        line = next(wanted.line for wanted in CONF_LINES if wanted.name == name)(case.site.settings)
        yield problem(f"Slurm has no {name}", f"{line} in slurm.conf")
    elif found.blocked:
        yield problem(f"{found.blocked[0]} cannot be executed", f"chmod 755 {quote(found.blocked[0])}")
    elif not found.ours:
        what = f"{name}={','.join(case.site.settings.words(name))}"
        yield problem(f"{what} does not lead to Unicron's script here", f"let it call {script}, or link that there")
    else:
        yield good(found.ours[0])


def _keys_of(path: str) -> dict[str, str] | None:
    """Read the lines KEY=VALUE of a file; None if it cannot be read."""
    try:
        text = Path(path).read_text(errors="replace")
    except OSError:
        return None
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))


def health(asked: Inspection) -> HealthFacts:
    """Return the settings of a node's health checks, as the prolog and HealthCheckProgram find them."""
    if asked.question.role != COMPUTE:
        return HealthFacts()
    prolog = _keys_of(os.environ.get("UNICRON_PROLOG_CONF") or "/etc/unicron/prolog.conf") or {}
    conf = os.environ.get("UNICRON_HEALTH_CONF") or prolog.get("UNICRON_HEALTH_CONF") or "/etc/unicron/health.conf"
    keys = _keys_of(conf)
    python = (keys or {}).get("UNICRON_PYTHON") or PACKAGED_PYTHON
    limit = prolog.get("UNICRON_HEALTH_SECONDS", "")
    seconds = int(limit) if limit.isdecimal() and 1 <= int(limit) <= 49 else PROLOG_SECONDS
    runs = keys is not None and prolog.get("UNICRON_CHECK_HEALTH") != "off"
    found = "" if keys is None else conf
    return HealthFacts(conf=found, python=python, problem=_cannot_check(python), seconds=seconds if runs else 0)


def _cannot_check(python: str) -> str:
    """Return why this interpreter cannot run the admission checks, in one line; "" if it can."""
    _, why = output_of([python, "-P", "-c", f"import {ADMISSION}"])
    return why


def output_of(command: list[str]) -> tuple[str, str]:
    """Return what a program prints, and in one line why it could not be run or failed; "" if it succeeded."""
    try:
        done = run_program(command, PROGRAM_SECONDS)
    except subprocess.TimeoutExpired:
        return "", f"no answer within {PROGRAM_SECONDS:g} s"
    except (OSError, TooMuchOutput) as error:
        return "", one_line(getattr(error, "strerror", None) or str(error))
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
    why = one_line("".join(last)) or f"it ended with {done.returncode}" if done.returncode else ""
    return done.stdout.decode(errors="replace"), why


def health_check(case: Case) -> Iterator[Finding]:
    """HealthCheckProgram is ours, is started, and can run the checks."""
    settings, found, checks = case.site.settings, case.host.health_program, case.host.health
    lines = [line for wanted in CONF_LINES if wanted.check == "health-check" and (line := wanted.line(settings))]
    program = settings.text("HealthCheckProgram")
    if case.site.slurm_problem:
        yield unknown("Slurm did not say which HealthCheckProgram it starts")
    elif not program:
        yield problem("Slurm starts no HealthCheckProgram", f"{'; '.join(lines)} in slurm.conf")
    else:
        yield from or_good(_health_problems(program, lines, found, checks), program)


def _health_problems(program: str, lines: list[str], found: ScriptFacts, checks: HealthFacts) -> Iterator[Finding]:
    """Yield what is wrong with HealthCheckProgram. lines: those that slurm.conf lacks."""
    if lines:
        yield problem("HealthCheckProgram is not started on all nodes", f"{'; '.join(lines)} in slurm.conf")
    if not found.found:
        yield problem(f"HealthCheckProgram={program} is not on this host", f"install it there, or set {HEALTH_PROGRAM}")
    elif found.blocked:
        yield problem(f"{program} cannot be executed", f"chmod 755 {program}")
    elif not found.ours:
        yield problem(f"{program} does not call unicron-health", f"let it call {HEALTH_PROGRAM}")
    if checks.problem:
        yield problem(
            f"UNICRON_PYTHON={checks.python} cannot run the checks: {checks.problem}",
            f"install unicron-agent there, or name the Python that has Unicron in {checks.conf or HEALTH_CONF}",
        )
    elif not checks.conf:
        yield advice(f"no {HEALTH_CONF}: the prolog does not run these checks", f"touch {HEALTH_CONF}")


def python(case: Case) -> Iterator[Finding]:
    """The releases of Python, torch and Megatron-core in this environment are known, and the same everywhere."""
    host = case.host
    return or_good(_python_problems(case), f"Python {host.python} with {_packages(host.torch, host.megatron)}")


def _python_problems(case: Case) -> Iterator[Finding]:
    host, first = case.host, case.first
    for package, release in (("torch", host.torch), ("megatron-core", host.megatron)):
        if release and not known(package, release):
            yield problem(
                f"{package} {release} is not known: training with it is refused in session mode",
                f"install {' or '.join(KNOWN_RELEASES[package])}, or submit with --unicron-mode=restart",
            )
    mine = (host.python.rpartition(".")[0], host.torch, host.megatron)
    firsts = (first.python.rpartition(".")[0], first.torch, first.megatron)
    clash = any(a != b for a, b in zip(mine, firsts, strict=True) if a and b)  # a login node may have no torch
    if clash or (host.role == first.role and mine != firsts):
        yield problem(
            f"Python {host.python} with {_packages(host.torch, host.megatron)} differs from {first.name}'s Python "
            f"{first.python} with {_packages(first.torch, first.megatron)}",
            "install the same environment on all nodes",
        )


def _packages(torch: str, megatron: str) -> str:
    return f"torch {torch or '-'}, megatron-core {megatron or '-'}"


def container_facts(asked: Inspection) -> ContainerFacts:
    """Return the container runtimes of this host and what they mount of Unicron's."""
    agent_folder = os.path.dirname(os.path.dirname(asked.agent))
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
    """Read the lines of a configuration file that are no comments."""
    try:
        text = Path(path).read_text(errors="replace")
    except OSError:
        return []
    return [line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")]


def containers(case: Case) -> Iterator[Finding]:
    """Containers get what the agent needs (docs/containers.md)."""
    found = case.host.containers
    text = "containers" if found.enroot or found.apptainer else "no enroot and no Apptainer here"
    return or_good(_container_problems(found), text)


def _container_problems(found: ContainerFacts) -> Iterator[Finding]:
    if found.enroot and not found.enroot_mounts:
        yield problem(
            "enroot is here, and its containers get no agent: steps in them run unprotected",
            "cp /usr/share/unicron/containers/50-unicron.fstab /etc/enroot/mounts.d/",
        )
    elif found.enroot_missing:
        yield problem(
            f"enroot is to mount {', '.join(found.enroot_missing)}, which this host does not have",
            "install unicron-agent there, or copy the agent's folder to that place",
        )
    if found.apptainer and not found.apptainer_binds:
        yield advice(
            "Apptainer's containers have no agent's folder: session mode takes an image with the project in it",
            "cat /usr/share/unicron/containers/unicron-apptainer.conf >> /etc/apptainer/apptainer.conf",
        )
