"""The progress of a run, for `--resume`. Written at once or not at all, after every fault."""

from __future__ import annotations

from pathlib import Path

import msgspec

from unicron_ctl.shared.system.errors import WRONG_USE, UserError

FILE = "torture.json"
FORMAT = 1


class Done(msgspec.Struct, frozen=True):
    """A fault that was inflicted. iteration: the job's then. sound_after: seconds, None where the job was struck again
    before, or the leg ended. refused: the agent could not do it, so it was no failure."""

    index: int
    kind: str
    job: str
    slot: int
    node: str
    at: float
    iteration: int
    leg: int
    sound_after: float | None = None
    refused: bool = False


class Leg(msgspec.Struct):
    """An uninterrupted part of the run. began: iteration that each job trained first. ended: why; empty where the
    machine went down. reads: lines by which ranks had told, when both jobs trained, that they had read a
    checkpoint. read: the same when the leg ended."""

    started: float
    began: dict[str, int] = {}
    reads: dict[str, int] = {}
    read: dict[str, int] = {}
    ended: str = ""
    seconds: float = 0.0


class Progress(msgspec.Struct):
    """All of a run. position: index of the next fault. wrong: what was asked and not seen. moves: how often a node went
    from one job to the other. formed_anew: how often no rank of a job was left, and it went on from memory. lives: by
    kind of process, how many were judged for growth."""

    seed: int
    failures: int
    every: float
    kinds: list[str]
    position: int = 0
    formed_anew: int = 0
    moves: int = 0
    format: int = FORMAT
    done: list[Done] = []
    legs: list[Leg] = []
    wrong: list[str] = []
    causes: dict[str, int] = {}
    lives: dict[str, int] = {}

    @property
    def over(self) -> bool:
        return self.position >= self.failures

    @property
    def inflicted(self) -> list[Done]:
        """The faults that count as failures."""
        return [one for one in self.done if not one.refused]

    def refuse(self, job: str, kind: str) -> bool:
        """The job's last fault of that kind was none. Returns whether it was the job's last one of all."""
        for place in range(len(self.done) - 1, -1, -1):
            done = self.done[place]
            if (done.job, done.kind.partition(":")[0]) == (job, kind.partition(":")[0]) and not done.refused:
                self.done[place] = msgspec.structs.replace(done, refused=True, sound_after=None)
                return all(later.job != job for later in self.done[place + 1 :])
        return False

    def save(self, folder: Path, now: float = 0.0) -> None:
        """At once or not at all. now: the last leg goes on, and has come so far."""
        if now and self.legs:
            self.legs[-1].seconds = now - self.legs[-1].started
        draft = folder / f"{FILE}.new"
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")
        draft.replace(folder / FILE)

    def settle(self, job: str, now: float) -> float | None:
        """The job is sound again: noted with its last fault, if that is news. Returns after how many seconds."""
        for place in range(len(self.done) - 1, -1, -1):
            done = self.done[place]
            if done.job == job:
                if done.refused or done.sound_after is not None or done.leg != len(self.legs) - 1:
                    return None
                self.done[place] = msgspec.structs.replace(done, sound_after=now - done.at)
                return now - done.at
        return None


def load(folder: Path) -> Progress:
    """The run in that folder. Raises UserError, one line."""
    path = folder / FILE
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Progress)
    except FileNotFoundError:
        raise UserError(f"no run to go on with in {folder}: name its folder with --folder", WRONG_USE) from None
    except (OSError, msgspec.MsgspecError) as error:
        raise UserError(f"{path} cannot be read ({error}): begin a new run in another folder", WRONG_USE) from None
    if found.format != FORMAT:
        raise UserError(f"{path} is of another release: begin a new run in another folder", WRONG_USE)
    return found
