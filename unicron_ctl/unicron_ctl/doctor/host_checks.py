"""Checks of one host's own things: limits, memory, kernel log, programs, Python. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote  # what a node says is typed by root

from unicron_ctl.doctor.facts import COMPUTE, HEAD, NO_LIMIT
from unicron_ctl.doctor.slurm_lines import HEALTH_PROGRAM, HOOK, HOOK_FOLDER, WANTED
from unicron_ctl.doctor.verdicts import Case, Finding, advice, good, problem, unknown
from unicron_ctl.shared.system.descriptors import shortage
from unicron_transition.seams.table import KNOWN_RELEASES, known

FEWEST_FILES = 4096  # of an agent or a rank: a DataLoader with workers has hundreds
SHARE_OF_MEMORY = 0.25  # of a node for the copies of training states
HEALTH_CONF = "/etc/unicron/health.conf"
MEBIBYTE, GIBIBYTE = 1 << 20, 1 << 30


def config(case: Case) -> Iterator[Finding]:
    """The host's unicron.toml is valid, and the same as on the first host."""
    mine, first = case.host.config, case.first.config
    if not mine.path:
        yield problem(
            "no unicron.toml", f"copy it from {case.first.name}: {first.path}" if first.path else "unicronctl setup"
        )
        return
    sound = not mine.problems
    for text in mine.problems:
        yield problem(f"{mine.path}: {text}", f"edit {quote(mine.path)}; unicronctl config check")
    if not mine.address and case.host.role != HEAD:
        sound = False
        yield problem(
            f"{mine.path} does not say where the controller is",
            'write address = "tcp://HOST:7451" into [controller]',
        )
    if mine.digest != first.digest:
        yield problem(
            f"{mine.path} differs from that of {case.first.name}", f"copy {first.path} from {case.first.name}"
        )
    elif sound:
        yield good(mine.path)


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


def limits(case: Case) -> Iterator[Finding]:
    """The limits that Slurm gives to steps, and unicrond's own."""
    found = [*_step_limits(case), *_unicrond_limits(case)]
    yield from found or [good("files, locked memory and core dumps")]


def _step_limits(case: Case) -> Iterator[Finding]:
    """What is wrong with the limits of steps on a node. A login's limits are other ones."""
    if case.host.role != COMPUTE:
        return
    found = case.host.limits
    files, locked = found.get("nofile", NO_LIMIT), found.get("memlock", NO_LIMIT)
    if files != NO_LIMIT and files < FEWEST_FILES:
        yield problem(f"a step may open {files} files only", "LimitNOFILE=65536 in slurmd.service")
    if locked != NO_LIMIT and case.host.infiniband:
        yield problem(
            "the node has RDMA devices, and a step may not lock all memory for them",
            "LimitMEMLOCK=infinity in slurmd.service, and PropagateResourceLimitsExcept=MEMLOCK in slurm.conf",
        )
    if found.get("core", 0):
        yield advice(
            "a rank that crashes writes its memory to disk before it ends, and is found only then",
            "LimitCORE=0 in slurmd.service, or `ulimit -c 0` in jobs",
        )


def _unicrond_limits(case: Case) -> Iterator[Finding]:
    if case.host.unicrond_files is not None and (text := shortage(case.host.unicrond_files)):
        yield problem(f"unicrond: {text.partition(':')[0]}", "LimitNOFILE=65536 in unicrond.service")


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
        line = next(wanted.line for wanted in WANTED if wanted.name == name)(case.site.settings)
        yield problem(f"Slurm has no {name}", f"{line} in slurm.conf")
    elif found.blocked:
        yield problem(f"{found.blocked[0]} cannot be executed", f"chmod 755 {quote(found.blocked[0])}")
    elif not found.ours:
        what = f"{name}={','.join(case.site.settings.words(name))}"
        yield problem(f"{what} does not lead to Unicron's script here", f"let it call {script}, or link that there")
    else:
        yield good(f"{found.ours[0]}")


def health_check(case: Case) -> Iterator[Finding]:
    """HealthCheckProgram is ours, is started, and can run the checks."""
    settings, found, health = case.site.settings, case.host.health_program, case.host.health
    if case.site.slurm_problem:
        yield unknown("Slurm did not say which HealthCheckProgram it starts")
        return
    lines = [line for wanted in WANTED if wanted.check == "health-check" and (line := wanted.line(settings))]
    program = settings.text("HealthCheckProgram")
    sound = not lines
    if not program:
        yield problem("Slurm starts no HealthCheckProgram", f"{'; '.join(lines)} in slurm.conf")
        return
    if lines:
        yield problem("HealthCheckProgram is not started on all nodes", f"{'; '.join(lines)} in slurm.conf")
    if not found.found:
        sound = False
        yield problem(f"HealthCheckProgram={program} is not on this host", f"install it there, or set {HEALTH_PROGRAM}")
    elif found.blocked:
        sound = False
        yield problem(f"{program} cannot be executed", f"chmod 755 {program}")
    elif not found.ours:
        sound = False
        yield problem(f"{program} does not call unicron-health", f"let it call {HEALTH_PROGRAM}")
    if health.problem:
        sound = False
        yield problem(
            f"UNICRON_PYTHON={health.python} cannot run the checks: {health.problem}",
            f"install unicron-agent there, or name the Python that has Unicron in {health.conf or HEALTH_CONF}",
        )
    elif not health.conf:
        sound = False
        yield advice(f"no {HEALTH_CONF}: the prolog does not run these checks", f"touch {HEALTH_CONF}")
    if sound:
        yield good(program)


def python(case: Case) -> Iterator[Finding]:
    """The releases of Python, torch and Megatron-core in this environment are known, and the same everywhere."""
    host, first = case.host, case.first
    sound = True
    for package, release in (("torch", host.torch), ("megatron-core", host.megatron)):
        if release and not known(package, release):
            sound = False
            yield problem(
                f"{package} {release} is not known: training with it is refused in session mode",
                f"install {' or '.join(KNOWN_RELEASES[package])}, or submit with --unicron-mode=restart",
            )
    mine = (host.python.rpartition(".")[0], host.torch, host.megatron)
    firsts = (first.python.rpartition(".")[0], first.torch, first.megatron)
    if (host.role == first.role and mine != firsts) or _clash(mine, firsts):
        sound = False
        yield problem(
            f"Python {host.python} with {_packages(host.torch, host.megatron)} differs from {first.name}'s Python "
            f"{first.python} with {_packages(first.torch, first.megatron)}",
            "install the same environment on all nodes",
        )
    if sound:
        yield good(f"Python {host.python} with {_packages(host.torch, host.megatron)}")


def _clash(mine: tuple[str, str, str], firsts: tuple[str, str, str]) -> bool:
    """Whether two hosts have different releases of the same thing. One of them need not have torch at all."""
    return any(a != b for a, b in zip(mine, firsts, strict=True) if a and b)


def _packages(torch: str, megatron: str) -> str:
    return f"torch {torch or '-'}, megatron-core {megatron or '-'}"


def containers(case: Case) -> Iterator[Finding]:
    """Containers get what the agent needs (docs/containers.md)."""
    found = case.host.containers
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
    if not ((found.enroot and not found.enroot_mounts) or found.enroot_missing) and (
        not found.apptainer or found.apptainer_binds
    ):
        yield good("containers" if found.enroot or found.apptainer else "no enroot and no Apptainer here")
