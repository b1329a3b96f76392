"""Runs two controllers on one state folder: one waits as the standby; the other sees that, and steps down for it if it
is itself cut off (docs/design/standby.md)."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from unicron_ctl.controller.server.sockets import CannotListen, Ports, bind, why_not
from unicron_ctl.shared.log.store import LogLocked, NoRoom, StoreError
from unicron_ctl.shared.log.term import Claim, FolderHeld, Watch, claim, clock
from unicron_ctl.shared.protocol.controller_discovery import Hello
from unicron_ctl.shared.protocol.reach import Reach, reach
from unicron_ctl.shared.settings.config import ControllerConfig
from unicron_ctl.shared.system.addresses import Target, endpoint, is_own, join, reason_of, resolve
from unicron_ctl.shared.system.errors import UserError
from unicron_ctl.shared.system.whole_file import write_whole

STANDBY_FILE = "standby"  # in the state folder: the standby's name, and a number that it counts up
POLL_SECONDS = 0.2
MARK_SECONDS = 0.5  # between two numbers of the standby
WAITS_SECONDS = 2.0  # after its last number the standby counts as gone
DEAF_SECONDS = 2.0  # without a message from any agent
PROBE_SECONDS = 0.5  # for another controller's host to answer
LOOK_SECONDS = 10.0  # between two searches for a second leading controller, and for the other controllers' hosts
SURE_SECONDS, SURE_AFTER = 2.0, 3  # between two searches once one was seen; sightings in a row that are no chance
LEADER_ANSWER_SECONDS = 1.0  # for the second controller to answer
log = logging.getLogger("unicron.controller")


class SteppedDown(StoreError):
    """This controller hears no agent while a standby waits, or another controller leads."""


def claim_with_ports(
    folder: Path, leased: bool, bind_ports: Callable[[], Ports], watch: Watch | None = None
) -> tuple[Claim, Ports]:
    """Begin a term as :func:`claim` does, with the ports from `bind_ports`, because a leader must be reachable. Raises
    what the two raise."""
    bound = list[Ports]()
    try:
        return claim(folder, leased, watch, lambda: bound.append(bind_ports())), bound[0]
    except BaseException:
        for ports in bound:  # clients would wait at a port that nobody serves
            ports.close()
        raise


def wait_for_claim(
    folder: Path,
    section: ControllerConfig,
    alive: Callable[[str], object],
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[Claim, Ports]:
    """Begin a term as soon as the controller that has the state folder is gone; wait for that without end.

    The ports are bound only then, because clients must not take a standby for the controller. While they could not be
    bound, or the disk is full, this logs an error and does not count as a standby.

    alive: called often with a text for people that says what is waited for. Raises CannotListen if there is nothing to
    wait for, and UserError if the folder or the log cannot be used.
    """
    watch, logged, count, last, problem, full = Watch(), "", 0, float("-inf"), "", ""
    mark = folder / STANDBY_FILE
    name = f"{socket.gethostname()} process {os.getpid()}"

    def bind_ports() -> Ports:
        if problem:
            raise CannotListen(problem)
        return bind(section.listen, section.metrics, section.addresses)

    while True:
        if due := clock() - last >= MARK_SECONDS:
            last, problem = clock(), why_not(section.listen, section.metrics)
        try:
            claimed = claim_with_ports(folder, True, bind_ports, watch)
        except (FolderHeld, LogLocked) as error:
            if due and not problem:
                count, full = count + 1, _write(mark, f"{name} {count + 1}", first=not logged)
            wrong = problem or full
            text = f"standby: waits for {_holder(str(error))}" + (f", but could not lead: {wrong}" if wrong else "")
        except NoRoom as error:
            full = str(error)
            text = f"standby: nobody leads, and this one cannot: {full}"
        except CannotListen as error:
            if not logged:
                raise
            problem = str(error)
            text = f"standby: nobody leads, and this one cannot: {problem}"
        else:
            if logged:
                log.info("standby: takes over")
            if count:
                mark.unlink(missing_ok=True)
            return claimed
        if text != logged:
            log.log(logging.ERROR if problem or full else logging.INFO, "%s", text)
            logged = text
        alive(text)
        sleep(POLL_SECONDS)


def _holder(text: str) -> str:
    inner = text.partition("(")[2].partition(")")[0]
    return f"the controller on {inner}" if inner else f"the state folder ({text.partition(';')[0]})"


def _write(path: Path, text: str, first: bool) -> str:
    """Write the file; return the reason if that fails, or "". first: raise UserError unless the disk is only full."""
    try:
        write_whole(path, text)
    except OSError as error:
        why = f"{path}: {error.strerror}; the standby has to be able to write to the state folder"
        if first and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(why) from None
        return why
    return ""


class Rival:
    """Watches the standby's file to see whether one waits."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / STANDBY_FILE
        self._seen = ""
        self._since = float("-inf")
        self._logged = False

    def read_mark(self) -> None:
        """Reads the standby's file, and logs when one comes or goes. Any thread may call this."""
        text = ""
        with contextlib.suppress(OSError):
            text = self._path.read_text(errors="replace")
        if text and text != self._seen:
            self._since = clock() if self._seen else float("-inf")  # the first text may be an old one
            self._seen = text
        if self.waits and not self._logged:
            log.info("a standby waits: %s", text.rpartition(" ")[0])
        elif self._logged and not self.waits:
            log.warning("no standby waits any more: the last one was %s", self._seen.rpartition(" ")[0])
        self._logged = self.waits

    @property
    def waits(self) -> bool:
        return clock() - self._since < WAITS_SECONDS


class Isolation:
    """Makes a controller step down if it reaches nobody while a standby waits: its host may have lost its network, but
    not the state folder. It must have heard an agent before, so that two that hear nobody do not take turns.

    It looks for the other hosts now and then, because a name may become known or change, but only while agents are
    heard, because a host that is cut off reaches no name service.
    """

    def __init__(
        self,
        rival: Rival,
        call: Callable[..., object],  # runs work in a thread, and its result in the loop
        heard: Callable[[], float],  # returns the time of the last agent's message
        find_hosts: Callable[[], Mapping[str, Sequence[Target] | str]],  # as `other_hosts` does
    ) -> None:
        self._rival, self._call, self._heard, self._find_hosts = rival, call, heard, find_hosts
        self._searched_at, self._searching = float("-inf"), False
        self._hosts: dict[str, Sequence[Target]] = {}  # by address
        self._unknown: dict[str, str] = {}  # address -> reason
        self._others: list[Target] = []  # without any it never steps down
        self._probed = float("-inf")
        self._answers: dict[Target, Reach | None] = {}

    def _learn_others(self, result: Mapping[str, Sequence[Target] | str] | None) -> None:
        """Takes in the other hosts; a name that is not known now keeps its last targets."""
        self._searching = False
        unknown = {address: reason for address, reason in (result or {}).items() if isinstance(reason, str)}
        for address in unknown.keys() - self._unknown.keys():
            log.warning("[controller] address: %s: %s", address, unknown[address])
        self._unknown = unknown
        self._hosts |= {address: hosts for address, hosts in (result or {}).items() if not isinstance(hosts, str)}
        others = list(dict.fromkeys(target for hosts in self._hosts.values() for target in hosts))
        if others != self._others:
            self._others = others
            self._answers.clear()

    def check_isolation(self, now: float) -> None:
        """Checks whether this controller is cut off. The loop calls this. Raises SteppedDown."""
        heard = self._heard()
        deaf = heard != float("-inf") and now - heard >= DEAF_SECONDS
        if not deaf and not self._searching and now - self._searched_at >= LOOK_SECONDS:
            self._searched_at, self._searching = now, True
            self._call(self._find_hosts, self._learn_others)
        if not deaf or not self._others or not self._rival.waits:
            self._answers.clear()
            return
        if len(self._answers) == len(self._others) and set(self._answers.values()) == {Reach.SILENT}:
            raise SteppedDown(
                "no agent is heard, no other controller's host is reached, and a standby waits: steps down"
            )
        if now - self._probed >= PROBE_SECONDS:
            self._probed = now
            self._answers.clear()
            for target in self._others:
                self._call(partial(_probe, target), partial(self._answers.__setitem__, target))


def _probe(target: Target) -> Reach:
    return reach(join(target.host, target.port), PROBE_SECONDS)


def other_hosts(addresses: Sequence[str]) -> dict[str, list[Target] | str]:
    """Return by a controller's address: its targets besides this host, or why they are not known. Asks the name
    service."""
    others = dict[str, list[Target] | str]()
    for address in addresses:
        try:
            others[address] = [target for target in resolve(*endpoint(address)) if not is_own(target)]
        except OSError as error:
            others[address] = reason_of(error)
    return others


class SecondLeader:
    """Ends a controller while another one leads at one of the other addresses. A standby does not answer, so each of
    the two has a state folder of its own: a shared one that is not mounted, or a copy."""

    def __init__(self, find_leader: Callable[[], str], call: Callable[..., object]) -> None:
        self._find_leader = find_leader  # returns the address at which another controller answers, or ""; may be slow
        self._call = call  # runs it in a thread
        self._seen: list[str] = []  # in a row
        self._asked, self._asking = float("-inf"), False

    def check_others(self, now: float) -> None:
        """Checks whether another one leads. The loop calls this. Raises SteppedDown."""
        if len(self._seen) >= SURE_AFTER:
            raise SteppedDown(
                f"another unicrond leads at {self._seen[-1]}, so its state folder is another one: both need the same "
                "folder, on storage that both hosts have mounted (docs/head-node.md); this one ends"
            )
        if not self._asking and now - self._asked >= (SURE_SECONDS if self._seen else LOOK_SECONDS):
            self._asked, self._asking = now, True
            self._call(self._find_leader, self._note_leader)

    def _note_leader(self, address: str | None) -> None:
        self._asking = False
        self._seen = [*self._seen, address] if address else []


def another_leader(addresses: Sequence[str], port: int, believed: Sequence[str]) -> str:
    """Return the address at which another controller answers, or "". port: this one's. believed: users besides root,
    SlurmUser and this process's."""
    others = list[Target]()
    for address in addresses:
        with contextlib.suppress(OSError):
            others += [target for target in resolve(*endpoint(address)) if target.port != port or not is_own(target)]
    if not others:
        return ""
    hello = Hello(",".join(f"tcp://{join(target.host, target.port)}" for target in others), believed)
    try:
        answered = hello.wait_for_key(LEADER_ANSWER_SECONDS) is not None
        return join(hello.reached.host, hello.reached.port) if answered and hello.reached is not None else ""
    finally:
        hello.close()
