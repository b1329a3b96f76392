"""The progress of a run for `--resume`, which is saved after every fault."""

from __future__ import annotations

from pathlib import Path

import msgspec

from unicron_ctl.shared.system.errors import WRONG_USE, UserError

FILE = "torture.json"


class Done(msgspec.Struct, frozen=True):
    """A fault that was inflicted."""

    index: int
    kind: str
    job: str
    slot: int
    node: str
    at: float
    iteration: int
    """The job's iteration at that time."""
    leg: int
    sound_after: float | None = None
    """Seconds until the job was sound; None if it was struck again before, or the leg ended."""
    refused: bool = False
    """Whether the agent could not do it, so that it does not count."""


class Leg(msgspec.Struct):
    """An uninterrupted part of the run."""

    started: float
    began: dict[str, int] = {}
    """The first iteration of each job."""
    reads: dict[str, int] = {}
    """Checkpoints that each job had read when both jobs trained."""
    read: dict[str, int] = {}
    """Checkpoints that each job had read at the end of the leg."""
    ended: str = ""
    """How it ended; empty if the machine went down."""
    seconds: float = 0.0


class Progress(msgspec.Struct):
    """The progress of a run."""

    seed: int
    failures: int
    every: float
    kinds: list[str]
    position: int = 0
    """The index of the next fault."""
    formed_anew: int = 0
    """Times that a job had lost all ranks and went on from memory."""
    moves: int = 0
    """Times that a node went from one job to the other."""
    done: list[Done] = []
    legs: list[Leg] = []
    wrong: list[str] = []
    """A line for each proof that failed."""
    lives: dict[str, int] = {}
    """Processes of each kind that were judged for growth."""

    @property
    def over(self) -> bool:
        return self.position >= self.failures

    @property
    def inflicted(self) -> list[Done]:
        """The faults that count as failures."""
        return [one for one in self.done if not one.refused]

    def refuse(self, job: str, kind: str) -> bool:
        """Note that the job's last fault of that kind does not count. Return whether it was the job's last fault."""
        for place in range(len(self.done) - 1, -1, -1):
            done = self.done[place]
            if (done.job, done.kind.partition(":")[0]) == (job, kind.partition(":")[0]) and not done.refused:
                self.done[place] = msgspec.structs.replace(done, refused=True, sound_after=None)
                return all(later.job != job for later in self.done[place + 1 :])
        return False

    def save(self, folder: Path, now: float = 0.0) -> None:
        """Save all or nothing; `now` is the time of the last leg if that goes on."""
        if now and self.legs:
            self.legs[-1].seconds = now - self.legs[-1].started
        draft = folder / f"{FILE}.new"
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")
        draft.replace(folder / FILE)

    def settle(self, job: str, now: float) -> float | None:
        """Note with a job's last fault that it is sound again. Return the seconds since the fault, or None."""
        for place in range(len(self.done) - 1, -1, -1):
            done = self.done[place]
            if done.job == job:
                if done.refused or done.sound_after is not None or done.leg != len(self.legs) - 1:
                    return None
                self.done[place] = msgspec.structs.replace(done, sound_after=now - done.at)
                return now - done.at
        return None


def load(folder: Path) -> Progress:
    """Return the run in that folder. Raises UserError."""
    path = folder / FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Progress)
    except FileNotFoundError:
        raise UserError(f"no run to go on with in {folder}: name its folder with --folder", WRONG_USE) from None
    except (OSError, msgspec.MsgspecError) as error:
        raise UserError(f"{path} cannot be read ({error}): begin a new run in another folder", WRONG_USE) from None
