"""How files of a checkpoint are read: what root does not read for another user."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from unicron_transition.snapshot import reading
from unicron_transition.snapshot.formats import opening

ALICE, BOB = 65533, 65534
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root reads for another user")


@pytest.fixture
def homes() -> Iterator[tuple[Path, Path]]:
    """(a folder of Alice's with a checkpoint that is nobody else's, one of Bob's), where everybody may enter."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        alice, bob = Path(place) / "alice", Path(place) / "bob"
        for folder, owner in ((alice, ALICE), (bob, BOB)):
            folder.mkdir(mode=0o700)
            save_file({"w": torch.full((4,), float(owner))}, folder / "model.safetensors")
            os.chown(folder, owner, owner)
            os.chown(folder / "model.safetensors", owner, owner)
        yield alice, bob


def link(place: Path, to: Path, owner: int) -> Path:
    """A link of this user's in the place of what is there."""
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    place.symlink_to(to)
    os.chown(place, owner, owner, follow_symlinks=False)
    return place


def refusal(folder: Path) -> str:
    """Why root does not read a checkpoint: empty where it is read."""
    try:
        with reading.files_of(folder):
            _, wrong = opening.verify(folder)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return "".join(wrong)


@only_root
def test_root_reads_what_is_the_users_own(homes):
    for folder in homes:
        assert not refusal(folder)
    assert not refusal(link(homes[1].parent / "roots", homes[0], 0)), "root may name it as it likes"
    assert not refusal(link(homes[1].parent / "hers", homes[0], ALICE))


@only_root
def test_root_follows_no_link_into_a_folder_of_others(homes):
    alice, bob = homes
    link(bob / "model.safetensors", alice / "model.safetensors", BOB)
    assert "model.safetensors: not of" in refusal(bob)
    link(bob / "model.safetensors", Path("/etc/hostname"), BOB)
    assert "the owner of" in refusal(bob), "what is root's neither"


@only_root
def test_root_goes_by_no_link_of_somebody_else(homes):
    alice, bob = homes
    link(bob, alice, BOB)
    assert "bob: a link" in refusal(bob)
    inside = alice / "inside"
    shutil.copytree(alice, inside)
    for path in (inside, *inside.iterdir()):
        os.chown(path, ALICE, ALICE)
    assert "bob: a link" in refusal(bob / "inside")


@only_root
def test_a_folder_of_megatrons_below_a_link_is_not_read(homes):
    alice, bob = homes
    (bob / "latest_checkpointed_iteration.txt").write_text("1")
    os.chown(bob / "latest_checkpointed_iteration.txt", BOB, BOB)
    (alice / ".metadata").write_bytes(b"\x80\x02N.")
    os.chown(alice / ".metadata", ALICE, ALICE)
    link(bob / "iter_0000001", alice, BOB)
    assert "the owner of" in refusal(bob)


def test_whoever_is_not_root_reads_what_he_may(tmp_path, monkeypatch):
    save_file({"w": torch.ones(4)}, tmp_path / "there")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "there")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with reading.files_of(tmp_path), reading.open_plain(tmp_path / "model.safetensors") as file:
        assert file.read(1)
    assert load_file(tmp_path / "model.safetensors")["w"].sum() == 4.0
