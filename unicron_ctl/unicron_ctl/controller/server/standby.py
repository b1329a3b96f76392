"""Two controllers on one state folder: one waits as the standby, the other sees that it waits, and steps down for it
where it is cut off itself (docs/design/standby.md)."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
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

STANDBY_FILE = "standby"  # in the state folder: who waits, and a number that rises
POLL_SECONDS = 0.2
SAY_SECONDS = 0.5  # between two words of the standby's
WAITS_SECONDS = 2.0  # after its last word it counts as gone
DEAF_SECONDS = 2.0  # without a word of any agent
PROBE_SECONDS = 0.5  # for another controller's host to answer
LOOK_SECONDS = 10.0  # between two looks for a second controller that leads, and for the others' hosts
SURE_SECONDS, SURE_AFTER = 2.0, 3  # the same after one was seen, and how many in a row are no chance
LEADER_ANSWER_SECONDS = 1.0  # for it to answer
log = logging.getLogger("unicron.controller")


class SteppedDown(StoreError):
    """This controller hears nobody, and a standby waits; or another one leads."""


def claim_with_ports(
    folder: Path, leased: bool, bind_ports: Callable[[], Ports], watch: Watch | None = None
) -> tuple[Claim, Ports]:
    """Begins a term as :func:`claim` does, with the ports that `bind_ports` gives, since whoever leads must be heard.
    Raises what the two raise."""
    found = list[Ports]()
    try:
        return claim(folder, leased, watch, lambda: found.append(bind_ports())), found[0]
    except BaseException:
        for ports in found:  # whoever comes to a port at which nobody answers would wait there
            ports.close()
        raise


def wait_for_claim(
    folder: Path,
    section: ControllerConfig,
    alive: Callable[[str], object],
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[Claim, Ports]:
    """Begins a term as soon as the controller that has the state folder is gone; waits for that without end.

    It binds the ports only then, for clients must not take a standby for the controller. Meanwhile it looks whether it
    could: while it could not, it complains, and does not count as a standby. A full disk is such a time.

    alive: told every now and then what this waits for. Raises CannotListen where nothing is to be waited for, and
    UserError where the folder or the log cannot be used.
    """
    watch, said, count, last, problem, full = Watch(), "", 0, float("-inf"), "", ""
    mark = folder / STANDBY_FILE
    name = f"{socket.gethostname()} process {os.getpid()}"

    def bind_ports() -> Ports:
        if problem:
            raise CannotListen(problem)
        return bind(section.listen, section.metrics, section.addresses)

    while True:
        if says := clock() - last >= SAY_SECONDS:
            last, problem = clock(), why_not(section.listen, section.metrics)
        try:
            found = claim_with_ports(folder, True, bind_ports, watch)
        except (FolderHeld, LogLocked) as error:
            if says and not problem:
                count, full = count + 1, _write(mark, f"{name} {count + 1}", first=not said)
            wrong = problem or full
            text = f"standby: waits for {_holder(str(error))}" + (f", but could not lead: {wrong}" if wrong else "")
        except NoRoom as error:
            full = str(error)
            text = f"standby: nobody leads, and this one cannot: {full}"
        except CannotListen as error:
            if not said:
                raise
            problem = str(error)
            text = f"standby: nobody leads, and this one cannot: {problem}"
        else:
            if said:
                log.info("standby: takes over")
            if count:
                mark.unlink(missing_ok=True)
            return found
        if text != said:
            log.log(logging.ERROR if problem or full else logging.INFO, "%s", text)
            said = text
        alive(text)
        sleep(POLL_SECONDS)


def _holder(text: str) -> str:
    inner = text.partition("(")[2].partition(")")[0]
    return f"the controller on {inner}" if inner else f"the state folder ({text.partition(';')[0]})"


def _write(path: Path, text: str, first: bool) -> str:
    """Why it was not written, "" where it was. first: Raises UserError for what will not pass."""
    try:
        write_whole(path, text)
    except OSError as error:
        why = f"{path}: {error.strerror}; the standby has to be able to write to the state folder"
        if first and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(why) from None
        return why
    return ""


class Rival:
    """Whether a standby waits, as its file shows."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / STANDBY_FILE
        self._seen = ""
        self._since = float("-inf")
        self._said = False

    def read_mark(self) -> None:
        """Reads what the standby says, and logs whether one is there; any thread may call this."""
        text = ""
        with contextlib.suppress(OSError):
            text = self._path.read_text(errors="replace")
        if text and text != self._seen:
            self._since = clock() if self._seen else float("-inf")  # the first may be left from another time
            self._seen = text
        if self.waits and not self._said:
            log.info("a standby waits: %s", text.rpartition(" ")[0])
        elif self._said and not self.waits:
            log.warning("no standby waits any more: the last one was %s", self._seen.rpartition(" ")[0])
        self._said = self.waits

    @property
    def waits(self) -> bool:
        return clock() - self._since < WAITS_SECONDS


class Isolation:
    """Steps a controller down that reaches nobody while a standby waits: its host may have lost its network, but not
    the state folder. It does so only if it has heard an agent before, so two that hear nobody do not take turns.

    call: runs work in a thread and its result in the loop. heard: when an agent was heard last, on the clock of `now`.
    look: finds the other hosts, as :func:`other_hosts` does. It is asked now and then, for a name may not be known at
    the start, or lead elsewhere later, and only while agents are heard: who is cut off reaches no name service.
    """

    def __init__(
        self,
        rival: Rival,
        call: Callable[..., object],
        heard: Callable[[], float],
        look: Callable[[], Mapping[str, Sequence[Target] | str]],
    ) -> None:
        self._rival, self._call, self._heard, self._look = rival, call, heard, look
        self._looked, self._looks = float("-inf"), False
        self._known: dict[str, Sequence[Target]] = {}  # by address
        self._unknown: dict[str, str] = {}
        self._others: list[Target] = []  # without any it never steps down
        self._probed = float("-inf")
        self._answers: dict[Target, Reach | None] = {}

    def _learn_others(self, found: Mapping[str, Sequence[Target] | str] | None) -> None:
        """Takes in what `look` has found; a name that is not known now keeps what it was known for."""
        self._looks = False
        unknown = {address: said for address, said in (found or {}).items() if isinstance(said, str)}
        for address in unknown.keys() - self._unknown.keys():
            log.warning("[controller] address: %s: %s", address, unknown[address])
        self._unknown = unknown
        self._known |= {address: said for address, said in (found or {}).items() if not isinstance(said, str)}
        others = list(dict.fromkeys(target for known in self._known.values() for target in known))
        if others != self._others:  # two names may lead to one
            self._others = others
            self._answers.clear()

    def check_isolation(self, now: float) -> None:
        """Looks whether this controller is cut off, in its loop. Raises SteppedDown."""
        heard = self._heard()
        deaf = heard != float("-inf") and now - heard >= DEAF_SECONDS
        if not deaf and not self._looks and now - self._looked >= LOOK_SECONDS:
            self._looked, self._looks = now, True
            self._call(self._look, self._learn_others)
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
                self._call(lambda target=target: _try(target), lambda word, target=target: self._note(target, word))

    def _note(self, target: Target, word: Reach | None) -> None:
        self._answers[target] = word


def _try(target: Target) -> Reach:
    return reach(join(target.host, target.port), PROBE_SECONDS)


def other_hosts(addresses: Sequence[str]) -> dict[str, list[Target] | str]:
    """By address of a controller, what it leads to beside this host, or why nobody knows now. Asks the name service."""
    found = dict[str, list[Target] | str]()
    for address in addresses:
        try:
            found[address] = [target for target in resolve(*endpoint(address)) if not is_own(target)]
        except OSError as error:
            found[address] = reason_of(error)
    return found


class SecondLeader:
    """Ends a controller while another one leads at one of the other addresses. A standby answers nobody, so each of the
    two has a state folder of its own: a shared one that is not mounted, or a copy.

    look: says where another controller answers, "" where none does; it may take its time. call: runs it in a thread.
    """

    def __init__(self, look: Callable[[], str], call: Callable[..., object]) -> None:
        self._look, self._call = look, call
        self._seen: list[str] = []  # in a row
        self._asked = float("-inf")
        self._asks = False

    def check_others(self, now: float) -> None:
        """Looks whether another one leads, in its loop. Raises SteppedDown."""
        if len(self._seen) >= SURE_AFTER:
            raise SteppedDown(
                f"another unicrond leads at {self._seen[-1]}, so its state folder is another one: both need the same "
                "folder, on storage that both hosts have mounted (docs/head-node.md); this one ends"
            )
        if not self._asks and now - self._asked >= (SURE_SECONDS if self._seen else LOOK_SECONDS):
            self._asked, self._asks = now, True
            self._call(self._look, self._note)

    def _note(self, where: str | None) -> None:
        self._asks = False
        self._seen = [*self._seen, where] if where else []


def another_leader(addresses: Sequence[str], port: int, believed: Sequence[str]) -> str:
    """Return where else a controller answers, or "". port: of this one. believed: users besides root, SlurmUser
    and this one's."""
    found = list[Target]()
    for address in addresses:
        with contextlib.suppress(OSError):
            found += [target for target in resolve(*endpoint(address)) if target.port != port or not is_own(target)]
    if not found:
        return ""
    hello = Hello(",".join(f"tcp://{join(target.host, target.port)}" for target in found), believed)
    try:
        answered = hello.wait_for_key(LEADER_ANSWER_SECONDS) is not None
        return join(hello.reached.host, hello.reached.port) if answered and hello.reached is not None else ""
    finally:
        hello.close()
