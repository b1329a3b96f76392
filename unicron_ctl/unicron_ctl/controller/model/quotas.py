"""Limits on what each peer may ask for, and on what is written of each job. Pure: every call takes `now`."""

from __future__ import annotations

from collections import OrderedDict

from unicron_ctl.shared.system.addresses import origin
from unicron_ctl.shared.system.throttle import NAMES, Throttle

SECONDS_OF_ONE = 5e-4  # of the controller's time: a user's questions have 15 % of it, and 1.5 s at once
BYTES_OF_ONE = 16384  # a message costs one, and one more for each of these
# Messages a second, and at once; see `cost`. An agent has 20 a second in its busiest moments.
OF_AN_AGENT = 500.0, 3000.0
OF_A_USER = 300.0, 3000.0  # at one address, and not by the connections of registered agents; questions at all of them
OF_A_STRANGER = 30.0, 300.0  # one key, of which nothing is proven
OF_AN_ADDRESS = 300.0, 3000.0  # all strangers there; in IPv6 of a whole /64
OF_A_JOB = 100.0, 5e6  # bytes a second, and at once, in the log for each of its elements
# ... for all jobs of one owner. One of 16,384 ranks writes 0.8 MB at a failure: 1,250 at once, one in 160 s for good.
OF_AN_OWNER = 5e3, 1e9
BYTES_OF_A_ROW = 150  # of the log, beside what the record says
OF_NODE_EVENTS = 0.5  # of a job's records: a noisy kernel must not cost a job its protection


class Quotas:
    """Limits on the messages of each peer.

    A registered agent is limited by its key; a user with a credential by user id and address, because one user may have
    many keys; strangers by key and by address, because keys are free. So only strangers share a limit with others at
    their address. Questions take the controller's time: a user has one bucket for them at all addresses, and an admin
    one at each address, because root asks on all nodes at once. In IPv6 the addresses of a /64 network count as one,
    because a single host may use them all."""

    def __init__(self) -> None:
        self._agents, self._users, self._askers = Throttle(*OF_AN_AGENT), Throttle(*OF_A_USER), Throttle(*OF_A_USER)
        self._strangers, self._addresses = Throttle(*OF_A_STRANGER), Throttle(*OF_AN_ADDRESS)
        self._proven: OrderedDict[str, int] = OrderedDict()

    def proven(self, key: str, uid: int) -> None:
        """Notes that a credential of this user was bound to the key."""
        self._proven[key] = uid
        self._proven.move_to_end(key)
        if len(self._proven) > NAMES:
            self._proven.popitem(last=False)

    def allows(self, key: str, address: str, registered: bool, now: float, cost: float) -> bool:
        """Whether a message of this cost is accepted. registered: the key is an agent's."""
        if registered:
            return self._agents.allows(key, now, cost)
        uid = self._proven.get(key)
        if uid is not None:
            return self._users.allows(f"{uid} {origin(address)}", now, cost)
        return self._strangers.allows(key, now, cost) and self._addresses.allows(origin(address), now, cost)

    def charge_answer(self, asker: str, address: str, now: float, cost: float) -> None:
        """Charges an answer to later questions of the asker; of all strangers at the address if he is unknown ("")."""
        if asker:
            self._askers.charge(asker, now, cost)
        else:
            self._addresses.charge(origin(address), now, cost)

    def may_ask(self, asker: str, address: str, now: float) -> bool:
        """Whether the asker may ask another question, with any key."""
        if asker:
            return self._askers.allows(asker, now)
        return self._addresses.rest(origin(address), now) > 0.0


def cost(size: int, seconds: float = 0.0) -> float:
    """The cost of a message of `size` bytes, or of an answer that took `seconds` to make."""
    return 1.0 + size // BYTES_OF_ONE + seconds / SECONDS_OF_ONE


class LogQuota:
    """A limit on the log records of one job, by its elements, and of all jobs of its owner."""

    def __init__(self) -> None:
        self._jobs, self._owners = Throttle(*OF_A_JOB), Throttle(*OF_AN_OWNER)
        self._unpaid: dict[tuple[str, str, int], int] = {}  # bytes; a large job's failures make thousands of records

    def charge(self, job: str, owner: str, size: int, elements: int) -> None:
        """Notes one more record of `size` bytes; it counts at the next question."""
        whose = job, owner, elements
        self._unpaid[whose] = self._unpaid.get(whose, 0) + BYTES_OF_A_ROW + size

    def _pay(self, now: float) -> None:
        for (job, owner, elements), size in self._unpaid.items():
            self._jobs.charge(job, now, size / max(1, elements))
            self._owners.charge(owner, now, size)
        self._unpaid.clear()

    def allows(self, job: str, owner: str, now: float, kept: float = 0.0) -> bool:
        """Whether the job may write more records. kept: the part of its limit that stays reserved."""
        self._pay(now)
        mine = self._jobs.rest(job, now) >= kept * self._jobs.burst
        return mine and self._owners.rest(owner, now) >= kept * self._owners.burst

    def owner_may(self, owner: str, now: float) -> bool:
        """Whether the owner's jobs may write more records."""
        self._pay(now)
        return self._owners.rest(owner, now) >= 0.0
