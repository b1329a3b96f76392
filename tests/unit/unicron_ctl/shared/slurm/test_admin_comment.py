"""Unicron's part of an AdminComment, beside jobstats' and others'."""

from __future__ import annotations

import base64
import gzip
import json
from types import SimpleNamespace

import pytest

from tests.support.fake_pyslurm import FakePyslurm
from unicron_ctl.shared.slurm.admin_comment import HOLD_PREFIX, MOST, OWN_MOST, own_part, with_own
from unicron_ctl.shared.slurm.command_line import CommandLineClient
from unicron_ctl.shared.slurm.pyslurm_backend import PyslurmClient
from unicron_ctl.shared.slurm.slurm_client import ElementInfo, SlurmError

OWN = "unicron: 2 failures healed, 9 s lost"


def jobstats(text: str) -> str:
    """What jobstats' epilog writes."""
    return "JS1:" + base64.b64encode(gzip.compress(json.dumps({"nodes": text}).encode(), mtime=0)).decode()


def read_by_jobstats(comment: str) -> str:
    """How jobstats reads it."""
    assert comment.startswith("JS1:")
    found: str = json.loads(gzip.decompress(base64.b64decode(comment[4:])))["nodes"]
    return found


def test_only_unicrons_part_changes() -> None:
    assert with_own("", OWN) == OWN
    assert with_own("unicron: held, the plan has no node", OWN) == OWN
    assert with_own("billed to lab 7", OWN) == f"{OWN} | billed to lab 7"
    once = with_own("a | b", OWN)
    assert once == f"{OWN} | a | b" and own_part(once) == OWN
    assert with_own(once, "unicron: 3 failures healed") == "unicron: 3 failures healed | a | b"
    assert own_part("unicronish") == own_part("see unicron: x") == ""


@pytest.mark.parametrize("text", ["a |  | b", "note | ", " | x", " | ", "  spaced  ", "a | unicronish", "|"])
def test_what_others_wrote_stays_to_the_byte(text: str) -> None:
    assert with_own(with_own(text, OWN), "") == text
    assert with_own(with_own(with_own(text, OWN), "unicron: 3 failures healed"), "") == text


@pytest.mark.parametrize("length", range(4))
def test_jobstats_reads_its_own_where_unicron_writes(length: int) -> None:
    comment = jobstats("n" * length)
    assert with_own(comment, OWN) == comment and read_by_jobstats(comment) == "n" * length
    assert with_own(f"{comment} | {OWN}", "unicron: other") == comment, "an older Unicron's part goes"


def test_jobstats_words_for_nothing_are_left_as_they_are() -> None:
    assert with_own("JS1:Short", OWN) == "JS1:Short" and with_own("JS1:None", OWN) == "JS1:None"


def test_a_comment_is_bounded() -> None:
    assert len(with_own("", "unicron: " + "x" * 9999)) == OWN_MOST
    long = "y" * MOST
    assert with_own(long, OWN) == long, "there is no room"
    assert own_part(with_own("a", "unicron: b | c")) == "unicron: b / c"


class Slurm:
    """One job's AdminComment behind Slurm's programs. others: what somebody else writes at the same moment."""

    def __init__(self, comment: str = "", others: list[str] | None = None) -> None:
        self.comment, self.others, self.commands = comment, others or [], list[list[str]]()

    def run(self, command: list[str], env: object, timeout: float) -> SimpleNamespace:
        self.commands.append(command)
        said = ""
        if command[0] == "squeue" and "-O" in command:
            width = int(command[-1].rpartition(":")[2])
            said = (self.comment or "(null)")[:width].ljust(width) + "\n"
        elif command[0] == "squeue":
            said = "N/A\n"
        else:
            self.comment = command[-1].removeprefix("AdminComment=")
            if self.others:
                self.comment = self.others.pop(0)
        return SimpleNamespace(returncode=0, stdout=said.encode(), stderr=b"")


def client(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> CommandLineClient:
    found = CommandLineClient()
    monkeypatch.setattr(found, "_programs", slurm)
    return found


@pytest.mark.parametrize("before", ["", "billed to lab 7", jobstats("nnn")])
def test_a_comment_is_written_beside_what_is_there_and_not_again(before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = Slurm(before)
    commands = client(slurm, monkeypatch)
    commands.comment("7", 0, OWN)
    assert slurm.comment == with_own(before, OWN)
    count = len(slurm.commands)
    commands.comment("7", 0, OWN)
    assert not any(command[0] == "scontrol" for command in slurm.commands[count:])


def test_what_another_writes_at_the_same_moment_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = Slurm("", ["billed to lab 7", "billed to lab 8"])
    client(slurm, monkeypatch).comment("7", 0, OWN)
    assert slurm.comment == f"{OWN} | billed to lab 8"


def test_an_element_that_has_finished_keeps_its_comment(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = Slurm("billed to lab 7")

    def refuse(job: str, element: int, text: str) -> None:
        raise SlurmError(f"scontrol update JobId={job}: Job has already finished")

    commands = client(slurm, monkeypatch)
    monkeypatch.setattr(commands, "_set_admin_comment", refuse)
    commands.comment("7", 0, OWN)
    assert slurm.comment == "billed to lab 7"


def test_a_comment_that_is_too_long_to_be_read_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = Slurm("z" * 9000)
    client(slurm, monkeypatch).comment("7", 0, OWN)
    assert slurm.comment == "z" * 9000


def test_pyslurm_keeps_what_others_wrote_too(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakePyslurm()
    there = SimpleNamespace(admin_comment="billed to lab 7")
    monkeypatch.setattr(fake.Job, "load", staticmethod(lambda number: there), raising=False)
    monkeypatch.setattr(
        fake.Job, "modify", lambda self, changes: setattr(there, "admin_comment", changes["admin_comment"])
    )
    slurm = PyslurmClient(fake)
    slurm.elements()
    slurm.comment("9", 0, OWN)
    assert there.admin_comment == f"{OWN} | billed to lab 7"


def test_a_hold_leaves_what_others_wrote_behind_a_listing_that_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    there = f"{OWN} | billed to lab 7"
    slurm = Slurm(there)
    commands = client(slurm, monkeypatch)
    commands._note(ElementInfo("7", 0, "7", "RUNNING", "n1", "", "", "", "", 0, admin_comment=f"{OWN[:48]}…"))
    commands._comment("7", 0, f"{HOLD_PREFIX}, the plan has no node for it")
    assert slurm.comment == f"{HOLD_PREFIX}, the plan has no node for it | billed to lab 7"


def test_a_hold_leaves_a_comment_that_is_too_long_to_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = Slurm("z" * 9000)
    commands = client(slurm, monkeypatch)
    commands._note(ElementInfo("7", 0, "7", "RUNNING", "n1", "", "", "", "", 0, admin_comment="z" * 48 + "…"))
    commands._comment("7", 0, f"{HOLD_PREFIX}, the plan has no node for it")
    assert slurm.comment == "z" * 9000
