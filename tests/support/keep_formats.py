"""Keeps a copy of what this release writes, which later ones are tested to read: tests/unit/test_formats.py.

python -m tests.support.keep_formats 0.2

A release's copy is made once, before it is tagged, and never again: what changes it changes a format
(unicron_detector/formats.py says how that is done).
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from tests.support.hostile import alternatives
from tests.support.processes import ROOT
from unicron_ctl.shared.log import records
from unicron_ctl.shared.protocol import datagrams, peer_messages, shared_plans, wire
from unicron_detector.formats import HINT, IMAGE, LOG, PROTOCOL, RANKS
from unicron_detector.processes import rank_messages

KEPT = ROOT / "tests/data/formats"
NUMBERS = {"protocol": PROTOCOL, "hint": HINT, "ranks": RANKS, "log": LOG, "image": IMAGE}
# By who reads them: what a decoder of this release takes
READERS: dict[str, Any] = {
    "controller": wire.ToController,
    "agent": wire.ToAgent,
    "unicronctl": wire.Answer,
    "another agent": peer_messages.AnyPeer,
    "agent, of a plan": shared_plans.PlanCommon,
    "controller, by UDP": datagrams.Hello,
    "agent, by UDP": datagrams.Introduction,
    "controller, of the plugin": datagrams.Hint,
}
WORDS = ("n1", "7", "session", "running", "computing", "kernel", "0123abcd", "x")
SEED, ITERATION = 5, 7  # of the training whose state is kept


class Message(NamedTuple):
    """A message, and what it says as plain data. data: as hexadecimal digits."""

    reader: str
    kind: str
    data: str
    says: Any


# ---------------------------------------------------------------- values for every field
def sample(kind: Any) -> Any:
    """Plain data that the type takes, with every field that it may have, and no default where that can be told."""
    for one in alternatives(kind):
        if not isinstance(one, inspect.NoneType):
            kind = one
            break
    match kind:
        case inspect.StructType() | inspect.DataclassType():
            return _struct(kind)
        case inspect.IntType():
            low, high = kind.ge if kind.ge is not None else -(2**60), kind.le if kind.le is not None else 2**60
            return max(low, min(high, 3))
        case inspect.FloatType():
            return 2.5 if kind.le is None or kind.le >= 2.5 else kind.le
        case inspect.BoolType():
            return True
        case inspect.StrType():
            fits = (word for word in WORDS if kind.pattern is None or re.search(kind.pattern, word))
            return next(word for word in fits if len(word) <= (kind.max_length or 99))
        case inspect.LiteralType():
            return sorted(kind.values)[-1]
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType() | inspect.FrozenSetType():
            return [sample(kind.item_type)]
        case inspect.TupleType():
            return [sample(item) for item in kind.item_types]
        case inspect.DictType():
            return {sample(kind.key_type): sample(kind.value_type)}
        case inspect.AnyType():
            return {"a": [1, "x"]}
        case inspect.RawType():
            return sample(inspect.type_info(shared_plans.PlanCommon))
    raise TypeError(f"no sample of {kind}")


def _struct(kind: Any) -> Any:
    values: dict[str, Any] = {field.encode_name: sample(field.type) for field in kind.fields}
    if getattr(kind, "array_like", False):
        return list(values.values())
    if getattr(kind, "tag_field", None):
        values = {kind.tag_field: kind.tag, **values}
    if "slots" in values and "settings" in values:  # of an agent: the element's
        values["settings"]["ranks_per_node"], values["slots"] = 1, [values["element"]]
    return values


# ---------------------------------------------------------------- what is kept
def messages() -> Iterator[Message]:
    """One of each kind, between all programs."""
    for reader, union in READERS.items():
        for kind in alternatives(inspect.type_info(union)):
            values = sample(kind)
            if "v" in values:
                values["v"] = HINT.number if kind.cls is datagrams.Hint else PROTOCOL.number
            yield Message(reader, str(kind.tag or kind.cls.__name__), msgspec.msgpack.encode(values).hex(), values)
    rank = {"v": RANKS.number, "slot": 1, "incarnation": 2, "pid": 9}
    known = {("agent, of a rank", tag): kind for tag, kind in rank_messages.FROM_RANK.items()}
    known |= {("rank", tag): kind for tag, kind in rank_messages.TO_RANK.items()}
    for (reader, tag), kind in known.items():
        values = (rank if reader != "rank" else {"v": RANKS.number}) | {"kind": tag} | sample(inspect.type_info(kind))
        yield Message(reader, tag, msgspec.msgpack.encode(values).hex(), values)


def log_records() -> Iterator[Message]:
    """One record of each kind that the event log may have."""
    for tag, kind in records.KINDS.items():
        values = sample(inspect.type_info(kind))
        payload = records.encode(msgspec.convert(values, kind))
        yield Message("log", tag, payload.hex(), values)


def write_log(folder: Path) -> dict[str, Any]:
    """An event log of two jobs, one of which was disturbed, with two saved states. Returns what is in it."""
    from tests.support.world import World
    from unicron_ctl.controller.core.state_snapshot import freeze, read_state
    from unicron_ctl.controller.model.fold import replay
    from unicron_ctl.shared.log.store import Store

    world = World()
    disturbed, _ = world.start_job("1", nodes=3), world.start_job("2", nodes=2)
    for iteration in range(3):
        world.iterate("1", iteration)
    disturbed[1].die(1)
    world.run(2.0)
    store = Store(folder / "events.sqlite")
    store.append(world.log)
    for number in (len(world.log) // 2, len(world.log) - 3):
        half = replay(world.log[:number])
        store.save_state(half.last_event, freeze(half))
    state = read_state(store)
    store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    store._db.execute("PRAGMA journal_mode=DELETE")
    store.close()
    return {"events": len(world.log), "jobs": {job: seen.phase for job, seen in state.jobs.items()}}


def write_checkpoint(folder: Path) -> list[list[float]]:
    """A checkpoint of a small training. Returns its tensors."""
    from tests.support.kept import everything, training
    from unicron_transition.snapshot.checkpoint import Checkpoints, Writer

    state = training(seed=SEED)
    Checkpoints(folder / "checkpoint").save_last(state, ITERATION, Writer())
    return [tensor.double().flatten().tolist() for tensor in everything(state)]


def keep(folder: Path) -> None:
    """Writes everything into a new folder."""
    folder.mkdir(parents=True)
    for name, found in (("messages", messages()), ("records", log_records())):
        lines = [json.dumps(message._asdict(), sort_keys=True) for message in found]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    about = {
        "numbers": {name: form.number for name, form in NUMBERS.items()},
        "log": write_log(folder),
        "tensors": write_checkpoint(folder),
    }
    (folder / "about.json").write_text(json.dumps(about, indent=1) + "\n")


def main() -> int:
    """Entry point."""
    if len(sys.argv) != 2 or not re.fullmatch(r"\d+\.\d+", sys.argv[1]):
        print("usage: python -m tests.support.keep_formats 0.2", file=sys.stderr)
        return 2
    folder = KEPT / sys.argv[1]
    if folder.exists():
        print(f"{folder}: a release's copy is made once; remove it only if there was no release", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as made:
        keep(Path(made, "new"))
        shutil.copytree(Path(made, "new"), folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
