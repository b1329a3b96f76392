"""Facts and checks of hosts and the controller together: the network between them, users, clocks, releases.

Functions that collect facts do not judge, and do not raise if something is missing. Functions that judge are pure.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import socket
import time
from collections.abc import Iterator, Mapping

from unicron_ctl.doctor.facts import (
    COMPUTE,
    HEAD,
    AgentFacts,
    Case,
    ControllerFacts,
    Finding,
    Inspection,
    advice,
    good,
    or_good,
    problem,
    unknown,
)
from unicron_ctl.doctor.host_checks import output_of
from unicron_ctl.shared.protocol.answer_schema import Pong
from unicron_ctl.shared.protocol.client import as_struct, ask_controller
from unicron_ctl.shared.protocol.munge import MungeError, make_credential, unmunge
from unicron_ctl.shared.settings.places import controller_address
from unicron_ctl.shared.system.addresses import endpoints, resolve_all, split_addresses
from unicron_ctl.shared.system.errors import UserError, one_line
from unicron_ctl.shared.system.release import work_together

ROOT = 0
_BELONGS = re.compile(r"belongs to (\S+) \(uid \d+\)")  # protocol.controller_discovery
ASK_SECONDS = 5.0
CONNECT_SECONDS = 2.0


def controller_facts(asked: Inspection) -> ControllerFacts:
    """Ask the controller for a sign of life, as agents and commands do."""
    address = controller_address(asked.question.controller or None, asked.config)
    facts = ControllerFacts(address=address)
    began = time.time()
    try:
        pong = as_struct(ask_controller({"kind": "ping"}, address, timeout=ASK_SECONDS), Pong)
    except UserError as error:
        facts.problem, facts.tcp = one_line(str(error)), takes_connections(address)
        return facts
    answered = time.time()
    facts.tcp, facts.release, facts.uid = True, pong.release, pong.uid
    facts.within = (answered - began) / 2
    facts.ahead = pong.time - (began + answered) / 2
    return facts


def takes_connections(address: str) -> bool | None:
    """Whether something listens at one of the addresses, tcp://HOST:PORT with commas between them; None if the name
    service knows none of the hosts."""
    try:
        targets = resolve_all(endpoints(address))
    except (UserError, OSError):
        return None
    for target in targets:
        with contextlib.suppress(OSError), socket.create_connection(target.address[:2], CONNECT_SECONDS):
            return True
    return False


def controller(case: Case) -> Iterator[Finding]:
    """The controller answers on this host."""
    found = case.host.controller
    if not found.problem:
        yield good(f"{found.address} answers")
        return
    if case.host.config.problems:
        yield unknown(f"with a mistake in {case.host.config.path} no command asks the controller")
        return
    yield problem(found.problem, _how_to_reach(case))


def _how_to_reach(case: Case) -> str:
    """Return what to do if the controller does not answer."""
    found, port = case.host.controller, case.host.controller.address.rpartition(":")[2]
    if whose := _BELONGS.search(found.problem):
        return f'controller_users = ["{whose[1]}"] in [agent] of {case.host.config.path or "unicron.toml"}'
    if "credential" in found.problem:
        return "systemctl enable --now munge, with the same /etc/munge/munge.key on all hosts"
    if found.tcp is None:
        return f"see that the name service knows the host of {found.address} (getent hosts)"
    if found.tcp:
        return f"open port {port} for UDP as well, and see `journalctl -u unicrond`"
    if case.host.role == HEAD:
        return "systemctl enable --now unicrond, and see `journalctl -u unicrond`"
    return f"start unicrond; open port {port} of its host for TCP and UDP"


def release(case: Case) -> Iterator[Finding]:
    """All hosts and the controller are of one release, or of two that work together."""
    mine = case.host.release
    found = [
        _other_release(f"Unicron {mine} is installed, and {text}", mine, other)
        for text, other in (
            (f"the controller is {case.host.controller.release}", case.host.controller.release),
            (f"{case.first.release} on {case.first.name}", case.first.release),
        )
        if other and other != mine
    ]
    yield from found or [good(f"Unicron {mine}")]


def _other_release(text: str, mine: str, other: str) -> Finding:
    """Judge a release that differs from this host's: no problem during an upgrade to the next minor version."""
    if work_together(mine, other):
        return advice(f"{text}: they work together", "finish the upgrade (docs/upgrade.md)")
    return problem(f"{text}: they do not work together", "install one release on all hosts, and restart unicrond")


def controller_user(case: Case) -> Iterator[Finding]:
    """Agents and commands on this host trust the controller's user."""
    found, site = case.host.controller, case.site
    _, slurms = site.settings.user()
    if case.host.config.auth != "munge":
        yield good('not used with auth = "none"')
    elif found.problem:
        yield unknown("the controller does not answer, so its user is not known")
    elif found.uid in (ROOT, slurms) or found.uid in case.host.config.believed.values():
        yield good(f"uid {found.uid} is believed")
    else:
        name = site.controller_name or str(found.uid)
        yield problem(
            f"the controller is {name}'s (uid {found.uid}), whom nobody here believes: jobs run unprotected",
            f'controller_users = ["{name}"] in [agent] of {case.host.config.path or "unicron.toml"}',
        )


def user_numbers(asked: Inspection) -> dict[str, int | None]:
    return {name: uid_of(name) for name in asked.question.users}


def uid_of(name: str) -> int | None:
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return None


def user_name(uid: int) -> str:
    """Return the user's name on this host, or the uid if it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def users(case: Case) -> Iterator[Finding]:
    """SlurmUser and the controller's user have the same number everywhere."""
    slurms_name, slurms_uid = case.site.settings.user()
    wanted = {slurms_name: slurms_uid} if slurms_name and slurms_uid is not None else {}
    name = case.site.controller_name
    if name and not name.isdecimal() and not case.first.controller.problem:
        wanted.setdefault(name, case.first.controller.uid)
    text = ", ".join(f"{name} is uid {uid}" for name, uid in wanted.items()) or "no user is known"
    return or_good(_user_problems(case.host.users, wanted), text)


def _user_problems(users: Mapping[str, int | None], wanted: Mapping[str, int]) -> Iterator[Finding]:
    for name, uid in wanted.items():
        mine = users.get(name)
        if mine is None and name in users:
            yield problem(f"this host knows no user {name}", f"useradd --system --uid {uid} {name}")
        elif mine is not None and mine != uid:
            yield problem(f"{name} is uid {mine} here, and {uid} to Slurm and Unicron", f"usermod --uid {uid} {name}")


def munge_problem(asked: Inspection) -> str:
    """Return why munge does not work on this host, in one line; "" if it works or is not used."""
    if asked.config_facts.auth != "munge":
        return ""
    try:
        return "" if unmunge(make_credential("doctor")).uid == os.geteuid() else "munge named another user"
    except MungeError as error:
        return one_line(str(error))


def munge(case: Case) -> Iterator[Finding]:
    """munge makes and reads credentials."""
    if case.host.config.auth != "munge":
        yield good('not used with auth = "none"')
    elif case.host.munge:
        also = case.site.settings.text("AuthType") == "auth/slurm"
        yield problem(
            case.host.munge + ("; Slurm has auth/slurm and works without it, Unicron does not" if also else ""),
            "systemctl enable --now munge, with the same /etc/munge/munge.key on all hosts",
        )
    else:
        yield good("munge works")


def clock(case: Case) -> Iterator[Finding]:
    """The host's clock agrees with the controller's: munge refuses old credentials, and people compare logs."""
    found, most = case.host.controller, case.site.config.health.clock_warn
    if found.problem:
        yield unknown("the controller does not answer, so the clocks were not compared")
    elif abs(found.ahead) > most + found.within:
        seconds = f"{abs(found.ahead):.{0 if abs(found.ahead) >= 10 else 1}f} s"
        yield problem(
            f"the clock is {seconds} {'behind' if found.ahead > 0 else 'ahead of'} the controller's",
            "timedatectl set-ntp true, or see `chronyc tracking`",
        )
    else:
        yield good("the clock agrees with the controller's")


def plugin(case: Case) -> Iterator[Finding]:
    """The plugin is named in plugstack.conf, is there, and fits Slurm and this release."""
    found = case.host.plugin
    if not found.line:
        where = found.plugstack or "no plugstack.conf on this host, and it"
        yield problem(
            f"{where} does not name unicron.so: --unicron is unknown, and jobs run unprotected",
            "unicronctl setup --dry-run prints the line",
        )
        return
    if not found.is_there:
        yield problem(
            f"{found.path} is not there", "install unicron-plugin there, or `make -C slurm_plugin/spank install`"
        )
        return
    yield from or_good(_plugin_problems(case), f"{found.path}, Unicron {found.release} for Slurm {found.slurm}")


def _plugin_problems(case: Case) -> Iterator[Finding]:
    found, host, slurm = case.host.plugin, case.host, case.site.settings.release
    if found.slurm and slurm and _major(found.slurm) != _major(slurm):
        yield problem(
            f"{found.path} was built for Slurm {found.slurm}, and this is {slurm}: Slurm does not load it",
            "install the unicron-plugin for this Slurm, or build it with its headers",
        )
    if found.release != host.release:
        text = f"{found.path} is of Unicron {found.release or 'an unknown release'}, and {host.release} is installed"
        yield _other_release(text, host.release, found.release)
    mine = host.config
    if found.required:
        text = "the plugin is required: if it is missing on a node, no job runs there"
        yield problem(text, f"optional in {found.plugstack}")
    if found.late:
        yield problem(
            f"{found.late[0]} comes after the plugin: steps in containers do not run",
            "call the link in plugstack.conf.d zz-unicron.conf",
        )
    if not found.controller:
        yield problem("the plugin's line has no controller=", f"controller={mine.address or 'tcp://HOST:7451'}")
    elif mine.address and split_addresses(found.controller) != split_addresses(mine.address):
        yield problem(
            f"jobs report to {found.controller}, and commands ask {mine.address}",
            f"the same in {found.plugstack} and {mine.path}",
        )
    if found.config and mine.path and found.config != mine.path:
        text = f"jobs read {found.config}, and commands {mine.path}"
        yield problem(text, f"config={mine.path} in {found.plugstack}")


def agent_facts(asked: Inspection) -> AgentFacts:
    """Return the agent's release on a node, or why it cannot be executed."""
    path = asked.agent
    if not path or asked.question.role != COMPUTE:
        return AgentFacts(path=path)
    output, why = output_of([path, "--version"])
    program, _, number = output.strip().partition(" ")
    if not why and program != "unicron-agent":
        why = "it is not unicron-agent"
    return AgentFacts(path=path, problem=why, release="" if why else number)


def agent(case: Case) -> Iterator[Finding]:
    """The program in the plugin's line is there, starts, and is of this release."""
    found = case.host.agent
    if not case.host.plugin.line:
        yield unknown("without the plugin's line no agent is known")
    elif not found.path:
        yield problem("the plugin's line has no agent=", "agent=/path/to/unicron-agent")
    elif found.problem:
        yield problem(
            f"{found.path} does not start ({found.problem}): jobs run unprotected",
            "install Unicron at the same path on all nodes, or name its unicron-agent in agent=",
        )
    elif found.release != case.host.release:
        text = f"{found.path} is of Unicron {found.release}, and {case.host.release} is installed"
        yield _other_release(text, case.host.release, found.release)
    else:
        yield good(f"{found.path}, Unicron {found.release}")


def agent_ports(case: Case) -> Iterator[Finding]:
    """The controller's host reaches a port that a process on the node has opened, as agents do."""
    return _port(
        case,
        case.ports.agents if case.ports else {},
        "the node opened no port in time",
        ("the agents' ports", "a silent node is not checked"),
        "open the nodes' TCP ports 32768 to 60999 (sysctl net.ipv4.ip_local_port_range) to the controller's host",
    )


def slurmd_port(case: Case) -> Iterator[Finding]:
    """The controller's host reaches slurmd, and so can tell a dead node from a dead agent."""
    return _port(
        case,
        case.ports.slurmds if case.ports else {},
        "Slurm knows no such node",
        ("slurmd", "no dead node is set down"),
        "open SlurmdPort from the controller's host to the nodes",
    )


def _port(case: Case, tried: Mapping[str, str], untried: str, texts: tuple[str, str], do: str) -> Iterator[Finding]:
    """Judge one kind of port.

    tried: by node, why the port cannot be reached, or "". untried: why a node is not in `tried`. texts: the port, and
    the consequence if it cannot be reached.
    """
    if case.ports is None or case.host.role != COMPUTE:
        return
    port, consequence = texts
    why = tried.get(case.host.name)
    if case.ports.why_not or why is None:
        yield unknown(case.ports.why_not or untried)
    elif why:
        yield problem(f"the controller's host does not reach {port} ({why}): {consequence}", do)
    else:
        yield good(f"the controller's host reaches {port}")


def _major(text: str) -> str:
    """Return the part of Slurm's release that a plugin is built for: 22.05."""
    return ".".join(re.findall(r"\d+", text)[:2])
