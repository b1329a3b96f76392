"""When ranks fail: faults for `fault_points`, by name."""

from __future__ import annotations


def fault(slot: int, iteration: int | str, at: str, count: int = 0, kind: str = "kill", **more) -> dict:
    """One of them."""
    return {"slot": slot, "iteration": iteration, "at": at, "count": count, "kind": kind, **more}


def moments(size: int, normed: int = 1, proof: int = 1) -> dict[str, list[dict]]:
    """What strikes the second replica, or both. size: ranks of one. normed: an iteration whose gradients have a norm,
    which those that overflow fp16 have not. proof: the number of the reduce that the ledger's proof goes with."""
    first, last = size, 2 * size - 1
    return {
        "data": [fault(first, 1, "fetch", 1)],
        "backward": [fault(last, 1, "backward", 1)],
        "tokens": [fault(last, 1, "tokens", 3)],
        "reduce": [fault(first, 1, "reduce", 0)],
        "in-reduce": [fault(last, 1, "reduce", 0, kind="late", delay=0.001)],
        "proof": [fault(last, 1, "reduce", proof)],
        "commit": [fault(first, 1, "reduce", proof + 1)],
        "step": [fault(first, 1, "step", kind="late", delay=0.004)],
        "norm": [fault(first, normed, "norm"), fault(0, normed, "norm", kind="sleep", delay=0.5)],
        "after": [fault(last, 1, "outside")],
        "recovery": [fault(first, 1, "fetch", 1), fault(0, 1, "entered", recovery=1, kind="gloo")],
        "resume": [fault(first, 1, "fetch", 1), fault(0, 1, "resume", kind="gloo")],
        "twice": [
            fault(first, 1, "fetch", 1),
            fault(0, 2, "fetch", kind="wait", gate=1),  # until the process that was started again is offered
            fault(first, 3, "fetch", incarnation=1),
        ],
        "both": [fault(0, 1, "fetch", 1), fault(last, 1, "fetch", 0)],
        "error": [fault(first, 1, "reduced", proof, kind="error")],
    }
