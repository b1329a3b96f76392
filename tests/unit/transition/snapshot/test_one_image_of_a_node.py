"""Several ranks of a node load one image: they map the same pages, and no second copy of it is made."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.kept import beginnings, everything, kept, same, training
from unicron_transition.snapshot import image_format
from unicron_transition.snapshot.image_format import inventory


def mappings(path: Path) -> list[tuple[int, int, int]]:
    """(inode, KiB that are there, KiB of copies of its pages) of each mapping of a file in this process."""
    found = []
    for text in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        if text.partition("\n")[0].endswith(f" {path}"):
            sizes = dict(re.findall(r"(?m)^(\w+): +(\d+) kB$", text))
            found.append((int(text.split()[4]), int(sizes["Rss"]), int(sizes["Anonymous"])))
    return found


def test_two_ranks_that_load_it_at_once_share_its_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, ranks = training(), [training(1), training(2)]
    kept(tmp_path, state, 4)
    (image,) = inventory(tmp_path)
    monkeypatch.setattr(image_format, "is_in_memory", lambda descriptor: True)
    real, seen = image_format._run_in, []

    def while_it_is_mapped(threads: int, work: Callable[[], None]) -> None:
        real(threads, work)
        seen.append(mappings(image.path))
        if len(seen) < len(ranks):
            assert beginnings(tmp_path).take_up(ranks[1], 4) == 4

    monkeypatch.setattr(image_format, "_run_in", while_it_is_mapped)
    assert beginnings(tmp_path).take_up(ranks[0], 4) == 4
    assert [len(each) for each in seen] == [1, 2], "the second has mapped it while the first one had"
    for inode, there, copied in seen[1]:
        assert inode == image.path.stat().st_ino and there > 0 and copied == 0
    assert all(same(everything(rank), everything(state)) for rank in ranks)
    assert len(list(tmp_path.iterdir())) == 1, "and no other file"
