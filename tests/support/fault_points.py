"""Faults at exact points of a rank's training: what the scripts of the rank tests have in common.

Environment: TINY_OUT a folder; TINY_FAULT a JSON list of {"slot", "incarnation", "iteration", "at", "count", "kind",
"delay"}; TINY_SLOW seconds per micro-batch; TINY_QUICK=1: the process ends as soon as it has trained;
TINY_EVALUATE micro-batches of an evaluation after each iteration, whose values are in "evaluated.SLOT".

`at`, always before the count-th time in the iteration: "fetch" a micro-batch; "backward" of one; "reduce" an all-
reduce (the ledger's, one per bucket, the commit); "reduced" the same, after it; "step" the optimizer; "outside"
between it and the next iteration; "enter" a generation's groups are built; "world" its world is there, the other
groups are not; "entered" the groups are there; "transfer" of the state to newcomers; "resume": the ranks of a replica
compare what they have after a recovery; "save" a checkpoint's file is written; "import"; "evaluate" a micro-batch of
the evaluation that follows the iteration is fetched, "valued" its loss is known; "gather" and "scatter", collectives of
`fully_shard`; of a distributed optimizer's
shards "export", "filled" (before they are copied into a room, which is torn by then), "copies" (before they are sent),
"confirm"; of the copy to memory of the state with which `iteration` begins: "copy", "half" (of it is copied), "sum",
"finish", "copied" (it is whole). With `recovery` n in place of `count`: the first time after n recoveries. `iteration`
"any" is any but the time before the first. With `file` only once that file is in TINY_OUT. With `others`: when these
slots have begun the iteration, too.

`kind`: "kill"; "late" (killed `delay` seconds later, whatever it does then); "hang" (SIGSTOP); "sleep" (`delay`
seconds); "gloo" (the peers' connections break, nobody dies); "error" (they break, and the operation at hand fails
here); "raise" (a fault of the script); "loss" (for `delay` seconds nothing arrives here that peers
send); "flip" (`delay` seconds later a bit flips in each image of what this rank holds now, and it is killed); "lost"
(wait until the generation is over, then fail); "stop" (ask for the end); "wait" for gate number `gate`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

OUT = Path(os.environ["TINY_OUT"])
SLOT = int(os.environ.get("UNICRON_SLOT", "0"))
INCARNATION = int(os.environ.get("UNICRON_INCARNATION", "0"))
WANTED = json.loads(os.environ.get("TINY_FAULT", "[]"))
FAULTS = [f for f in WANTED if f["slot"] == SLOT and f.get("incarnation", 0) == INCARNATION]
ITERATIONS = int(os.environ.get("TINY_ITERATIONS", "5"))
MICRO_BATCHES = int(os.environ.get("TINY_MICRO_BATCHES", "8"))
CHECKPOINTS, EVERY = os.environ.get("TINY_CHECKPOINTS", ""), int(os.environ.get("TINY_CHECKPOINT_EVERY", "2"))
SAVE = int(os.environ.get("TINY_SAVE", "8"))
EVALUATE = int(os.environ.get("TINY_EVALUATE", "0"))
SLOW = float(os.environ.get("TINY_SLOW", "0"))
SESSIONS: list = []
COUNTED = ("fetch", "backward", "reduce", "reduced", "step", "outside", "enter", "world", "entered", "transfer")
COUNTED += ("evaluate", "valued", "norm", "save", "import", "resume", "export", "filled", "copies", "confirm")
COUNTED += ("gather", "scatter", "tokens")
COPIES = ("copy", "half", "sum", "finish", "copied")
BEGUN: list = []
now = {"iteration": -1, **dict.fromkeys(COUNTED, 0)}


def point(name: str) -> None:
    """A place where a fault may be wanted."""
    for fault in FAULTS:
        due = fault["recovery"] == now["entered"] if "recovery" in fault else fault.get("count", 0) == now[name]
        due = due and ("file" not in fault or (OUT / fault["file"]).exists())
        if due and fault["at"] == name and fault["iteration"] in (now["iteration"], "any" if BEGUN else None):
            FAULTS.remove(fault)
            strike(fault)
            break
    now[name] += 1


def strike(fault: dict) -> None:
    """Fail in the wanted way."""
    for slot in fault.get("others", ()):
        wait(lambda slot=slot: f" {now['iteration']} " in (OUT / f"fetched.{slot}").read_text())
    (OUT / f"fault.{SLOT}.{INCARNATION}.{now['iteration']}").write_text(repr(time.time() + fault.get("delay", 0)))
    kind = fault["kind"]
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "late":
        signal.setitimer(signal.ITIMER_REAL, fault["delay"])  # nobody handles SIGALRM: it ends the process
    elif kind == "flip":
        time.sleep(fault["delay"])
        flip_images()
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "hang":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "sleep":
        time.sleep(fault["delay"])
    elif kind == "wait":
        wait(lambda: (OUT / f"gate.{fault['gate']}").exists())
    elif kind == "loss":
        lose_packets(fault["delay"])
    elif kind == "raise":
        raise ValueError("an error of the training script")
    else:
        time.sleep(fault.get("delay", 0))  # for an error that comes when the peers have stepped
        strike_session(kind)


def flip_images() -> None:
    """In the memory of its node, of the newest state that it has."""
    from unicron_transition.snapshot.image_format import inventory

    for found in inventory(Path(os.environ["UNICRON_MEMORY"])):
        if (found.key.slot, found.key.iteration) == (SLOT, now["iteration"]):
            with found.path.open("r+b") as file:
                file.seek(found.offset + found.data_bytes // 2)
                byte = file.read(1)[0]
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte ^ 1]))


def lose_packets(seconds: float) -> None:
    """For so long nothing that peers send arrives here; the program goes on."""
    from unicron_detector.chaos import blackhole

    hole = blackhole.dig(pace=False)
    threading.Timer(seconds, blackhole.fill, [hole]).start()


def strike_session(kind: str) -> None:
    """What needs the session."""
    from unicron_transition.iteration import rank_process

    if kind == "stop":
        SESSIONS[0].request_stop()
    elif kind == "lost":
        wait(rank_process.current().watch.lost)
        raise RuntimeError("an error of the training script")
    else:
        rank_process.current().unblocker.unblock()
        if kind == "error":
            raise RuntimeError("Connection closed by peer")


def wait(condition) -> None:
    """Until it holds, 60 s at most."""
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)


# ------------------------------------------------------------ where they strike
def note_iteration(iteration: int) -> None:
    """The iteration at hand begins with its first fetch, or with its reduce where this rank has no micro-batch."""
    if iteration != now["iteration"]:
        BEGUN.append(iteration)
        now.update({"iteration": iteration, **dict.fromkeys(COUNTED, 0)})


def fetching(iteration: int, index: int) -> None:
    """At the beginning of every fetch."""
    note_iteration(iteration)
    point("fetch")
    with (OUT / f"fetched.{SLOT}").open("a") as file:
        file.write(f"{INCARNATION} {iteration} {index}\n")
    if SLOW:
        time.sleep(SLOW)


def around(owner, name: str, before: str, after: str = "", reached=point) -> None:
    """Points before and after a function of `owner`."""
    original = getattr(owner, name)

    def wrapped(*arguments, **keywords):
        reached(before)
        outcome = original(*arguments, **keywords)
        if after:
            reached(after)
        return outcome

    setattr(owner, name, wrapped)


def around_generations() -> None:
    """Points in what every session does."""
    from unicron_transition.generations import groups
    from unicron_transition.session import session
    from unicron_transition.sharded import shards
    from unicron_transition.snapshot import checkpoint, migrate

    around(groups.Groups, "build", "enter", "entered")
    around(groups.Groups, "_connect_roles", "world")
    around(migrate, "transfer", "transfer")
    around(session.Session, "_keep_or_drop", "resume")
    around(checkpoint.Checkpoints, "_write", "save")
    around(shards.Shards, "export", "export")
    around(shards, "copy_all", "filled")
    around(shards.Shards, "send_copies", "copies")
    around(shards.Shards, "confirm", "confirm")
    note_reduces(session.Session)
    if any(fault["at"] in COPIES for fault in FAULTS):
        around_copies()


def note_reduces(session_type: type) -> None:
    """What a rank brings into the sum is in "reduced.SLOT" before anybody can have it: its part stays there when it is
    killed, and it says nothing afterwards."""
    original = session_type._reduce

    def noted(self):
        ledger = self._at.ledger
        note_iteration(ledger.iteration)
        with (OUT / f"reduced.{SLOT}").open("a") as file:
            said = {"iteration": ledger.iteration, "generation": self.generation, "micro_batches": ledger.done}
            file.write(json.dumps(said) + "\n")
        return original(self)

    session_type._reduce = noted


def around_copies() -> None:
    """Points in the thread that copies the state to memory; the iteration is that of the copy."""
    import torch

    from unicron_transition.snapshot import contents, image_format, keeper

    of = {"iteration": -1}
    fill, copy = contents.Copier.copy, keeper.Keeper._copy

    def reached(name: str) -> None:
        for fault in [each for each in FAULTS if (each["at"], each["iteration"]) == (name, of["iteration"])]:
            strike(fault)

    def copied(self, task) -> None:
        of["iteration"] = task.key.iteration
        copy(self, task)
        reached("copied")

    def filled(self, tensors, *more) -> None:
        reached("copy")
        offsets = self._offsets
        half = len(offsets) // 2
        for tensor, begin in zip(tensors[:half], offsets[:half], strict=True):
            self.into[begin : begin + tensor.nbytes].copy_(tensor.contiguous().view(torch.uint8))
        reached("half")
        fill(self, tensors, *more)

    keeper.Keeper._copy, contents.Copier.copy = copied, filled
    around(image_format.Image, "mark_whole", "sum", reached=reached)
    around(image_format, "_page", "finish", reached=reached)


def silent(original, result):
    """A collective whose peers are gone ends as NCCL's do: not before it is aborted, without an error, and with
    garbage where the result should be. result: of its arguments, the tensors."""

    def call(*arguments, **keywords):
        import torch

        from unicron_transition.iteration import rank_process

        def or_garbage(call):
            try:
                return call()
            except RuntimeError:
                wait(rank_process.current().watch.lost)
                for tensor in result(*arguments):
                    tensor.copy_(torch.randint(0, 99, tensor.shape).to(tensor.dtype))

        outcome = or_garbage(lambda: original(*arguments, **keywords))
        return Waited(outcome, or_garbage) if goes_on(outcome) else outcome

    return call


def goes_on(outcome) -> bool:
    """A collective has begun that can be waited for, which one of several together cannot."""
    from torch.distributed import distributed_c10d

    if isinstance(outcome, Waited):
        return True
    return isinstance(outcome, distributed_c10d.Work) and not isinstance(outcome, distributed_c10d._IllegalWork)


class Waited:
    """A collective that goes on beside the program: `around(wait)` is called in place of its wait."""

    def __init__(self, work, around):
        self._work, self._around = work, around

    def wait(self):
        return self._around(self._work.wait)

    def __getattr__(self, name: str):
        return getattr(self._work, name)


def silent_reduces() -> None:
    """So end torch's own reduces, and what members tell each other."""
    import torch.distributed as dist

    from unicron_transition.iteration import exchange

    dist.all_reduce = silent(dist.all_reduce, lambda tensor, *rest: [tensor])
    told = silent(exchange.largest_of_all, lambda tensor, *rest: [tensor])
    exchange.largest_of_all = lambda tensor, *rest: told(tensor, *rest) or (tensor, [])


def around_reduces(counts=lambda group: True) -> None:
    """Points before and after each all-reduce, the commit's too, of the groups that count."""
    import torch.distributed as dist

    from unicron_transition.iteration import exchange

    def after(wait):
        wait()
        point("reduced")

    def pointed(original, group_of):
        def call(*arguments, **keywords):
            if not counts(group_of(arguments, keywords)):
                return original(*arguments, **keywords)
            point("reduce")
            outcome = original(*arguments, **keywords)
            if goes_on(outcome):
                return Waited(outcome, after)
            point("reduced")
            return outcome

        return call

    dist.all_reduce = pointed(dist.all_reduce, lambda arguments, keywords: keywords.get("group"))
    exchange.largest_of_all = pointed(exchange.largest_of_all, lambda arguments, keywords: arguments[1])


def save(saved: dict, path: Path) -> None:
    """All of it or nothing: a rank may be killed at any moment."""
    import torch

    new = path.with_name(f"new-{path.name}")
    torch.save(saved, new)
    new.replace(path)


def evaluate(session, data) -> None:
    """The loss on other data, noted with the iteration that comes next."""

    def fetch(iteration: int, index: int):
        point("evaluate")
        return data(1000 + iteration, index)

    boundary, value = session.iteration, session.evaluate(fetch, EVALUATE)
    with (OUT / f"evaluated.{SLOT}").open("a") as file:
        file.write(json.dumps({"iteration": boundary, "value": value}) + "\n")
    point("valued")


def train(session, more=dict, data=None) -> None:
    """The loop: the losses come into a file, with what `more()` says beside them."""
    signal.signal(signal.SIGUSR1, lambda *_: session.request_stop())
    SESSIONS.append(session)
    if EVALUATE:
        session.evaluations.make_up = lambda part: evaluate(session, data)
    for result in session:
        point("outside")
        with (OUT / f"losses.{SLOT}").open("a") as file:
            step = {"iteration": result.iteration, "loss": result.loss, "generation": result.generation, **more()}
            step |= {"time": time.time(), "world_size": result.world_size}
            file.write(json.dumps(step | {"micro_batches": session._at.ledger.done}) + "\n")
        if EVALUATE:
            evaluate(session, data)
    if os.environ.get("TINY_QUICK") == "1":  # to tear an interpreter full of Megatron down takes 0.2 s of CPU
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


faulthandler.register(signal.SIGRTMIN + 3, all_threads=True)
