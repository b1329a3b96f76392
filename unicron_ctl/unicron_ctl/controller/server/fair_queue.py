"""Provides bounded queues that serve their users in turn: by a path of names (machine, address, connection), or by the
asker of a question. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from unicron_ctl.controller.model.asker import Asker
from unicron_ctl.shared.protocol import wire
from unicron_ctl.shared.system.addresses import origin

Item = TypeVar("Item")
KEPT, LITTLE = 1 / 4, 4  # the share of the room that is kept for users with fewer items than this
OF_ONE, OF_ALL = 20, 1000  # questions that wait


@dataclass
class _Branch(Generic[Item]):
    """A node of the tree of queues."""

    count: int = 0  # items below it
    children: OrderedDict[str, _Branch[Item]] = field(default_factory=OrderedDict)  # the next to be served comes first
    items: deque[Item] = field(default_factory=deque)


class FairQueue(Generic[Item]):
    """Items with a path of names, the widest first. At each level the names are served in turn."""

    def __init__(self, *bounds: int) -> None:
        self._bounds = bounds
        """For each level, the most items of all paths that share the names before it. No name may have more than is
        still free there, and a part is kept for names that have little."""
        self._root: _Branch[Item] = _Branch()

    def __len__(self) -> int:
        return self._root.count

    def waiting(self, *names: str) -> int:
        """Return the number of items below these names."""
        branch: _Branch[Item] | None = self._root
        for name in names:
            branch = branch.children.get(name) if branch is not None else None
        return branch.count if branch is not None else 0

    def add(self, path: Sequence[str], item: Item) -> bool:
        """Add an item; return False if there is no room for this path."""
        branch: _Branch[Item] | None = self._root
        for name, bound in zip(path, self._bounds, strict=True):
            if branch is None:  # the name is new
                break
            child = branch.children.get(name)
            free = bound - branch.count
            if (child.count if child is not None else 0) >= max(free - int(bound * KEPT), min(LITTLE, free)):
                return False
            branch = child
        self._root.count += 1
        branch = self._root
        for name in path:
            branch = branch.children.setdefault(name, _Branch())
            branch.count += 1
        branch.items.append(item)
        return True

    def next(self) -> Item:
        """Take the next item; its names then come last at their levels. Raises IndexError."""
        return self._take_from(self._root)

    def _take_from(self, branch: _Branch[Item]) -> Item:
        if not branch.children:
            item = branch.items.popleft()
        else:
            name, child = branch.children.popitem(last=False)
            item = self._take_from(child)
            if child.count:
                branch.children[name] = child
        branch.count -= 1
        return item


@dataclass(frozen=True)
class Question:
    """A question that waits for its answer."""

    route: tuple[bytes, ...]  # for the answer
    ask: wire.Ask
    asker: Asker
    address: str  # of the asker

    @property
    def whose(self) -> str:
        """The asker in whose turn it is answered: a user, or the address of an unproven one."""
        return f"address {origin(self.address)}" if self.asker.uid is None else f"user {self.asker.uid}"

    @property
    def pays(self) -> str:
        """The name of the quota that pays for the answer; empty for an unproven asker. An admin has one at each
        address, because root's checks run on all nodes at once."""
        if self.asker.uid is None:
            return ""
        return f"{self.asker.uid} {origin(self.address)}" if self.asker.admin else f"{self.asker.uid}"


def add_question(queue: FairQueue[Question], question: Question) -> bool:
    """Add a question; return False if too many wait, of this asker or of all."""
    return queue.waiting(question.whose) < OF_ONE and queue.add([question.whose], question)


class AnswerCache:
    """Keeps answers that took long to make for the same question with the same rights: `watch unicronctl status` may
    run on each node of a job. A new event or an order empties it."""

    READ_ONLY = frozenset(("status", "jobs", "nodes", "explain", "scenario"))
    LONG_SECONDS, KEPT_TIMES, KEPT_SECONDS, MOST_BYTES = 0.005, 20.0, 0.5, 16 << 20

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], tuple[float, bytes]] = {}
        self._bytes, self._event = 0, 0

    def get(self, question: Question, now: float, event: int) -> bytes | None:
        """Return an answer that is fresh enough. event: the last one in the log."""
        if event != self._event:
            self._forget()
            self._event = event
        until, data = self._kept.get(_key(question), (0.0, b""))
        return data if now < until else None

    def keep_answer(self, question: Question, data: bytes, seconds: float, now: float) -> None:
        """Keep an answer if it took long to make."""
        if question.ask.what not in self.READ_ONLY:
            self._forget()
        elif seconds >= self.LONG_SECONDS and len(data) <= self.MOST_BYTES:
            if self._bytes + len(data) > self.MOST_BYTES:
                self._forget()
            self._bytes += len(data)
            self._kept[_key(question)] = now + min(self.KEPT_SECONDS, self.KEPT_TIMES * seconds), data

    def _forget(self) -> None:
        self._kept.clear()
        self._bytes = 0


def _key(question: Question) -> tuple[Any, ...]:
    ask = question.ask
    return ask.what, repr(sorted(ask.args.items())), ask.unpacks, question.asker
