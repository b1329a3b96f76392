"""A bounded queue that serves its users by turns, at each level of who they are: machine, address, connection. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item")
KEPT, LITTLE = 1 / 4, 4  # of the room, for those that have fewer items than so many


@dataclass
class _Branch(Generic[Item]):
    """A node of the tree of queues.

    count: items below it. The child whose turn is next comes first.
    """

    count: int = 0
    children: OrderedDict[str, _Branch[Item]] = field(default_factory=OrderedDict)
    items: deque[Item] = field(default_factory=deque)


class FairQueue(Generic[Item]):
    """Items of whoever a path names, the widest name first: at each level all have turns of the same length.

    bounds: one for each level, and how many items all paths that share the names before it may have. Nobody may have
    more than what is still free there, and a part of it is kept for those that have little.
    """

    def __init__(self, *bounds: int) -> None:
        self._bounds = bounds
        self._root: _Branch[Item] = _Branch()

    def __len__(self) -> int:
        return self._root.count

    def waiting(self, *names: str) -> int:
        """How many items there are below these names."""
        branch: _Branch[Item] | None = self._root
        for name in names:
            branch = branch.children.get(name) if branch is not None else None
        return branch.count if branch is not None else 0

    def add(self, path: Sequence[str], item: Item) -> bool:
        """False when there is no room for this path."""
        branch: _Branch[Item] | None = self._root
        for name, bound in zip(path, self._bounds, strict=True):
            if branch is None:  # nobody of that name is here yet
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
        """The next item. Whoever it was of comes after all others of the same level. Raises IndexError."""
        return self._taken(self._root)

    def _taken(self, branch: _Branch[Item]) -> Item:
        if not branch.children:
            item = branch.items.popleft()
        else:
            name, child = branch.children.popitem(last=False)
            item = self._taken(child)
            if child.count:
                branch.children[name] = child
        branch.count -= 1
        return item
