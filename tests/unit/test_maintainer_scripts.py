"""What the Debian packages' maintainer scripts do, with folders of the test's own in place of the system's."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGING = Path(__file__).parents[2] / "packaging"
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act for other users")
FAKER, OTHER = 100000 + os.getpid(), 200000 + os.getpid()  # users that nobody else has


def script(name: str, folder: Path, argument: str) -> str:
    """Runs a script as build-deb.sh makes it. Returns what it says."""
    parts = PACKAGING / "debian-parts"
    text = (PACKAGING / "debian" / name).read_text()
    text = re.sub(r"^#PART (\S+)$", lambda part: (parts / part[1]).read_text(), text, flags=re.MULTILINE)
    text = re.sub(r"(?<=[ '\"])/(?=(?:dev/shm|tmp|etc|var/lib|usr/lib|usr/share)\b)", f"{folder}/", text)
    text = text.replace("#DEBHELPER#", "")
    environment = {"PATH": f"{folder}/bin:/usr/bin:/bin", "DPKG_MAINTSCRIPT_PACKAGE": "unicron-agent"}
    done = subprocess.run(
        ["sh", "-c", text, name, argument], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Some state that jobs of two users, and root for them, have left."""
    for place in ("dev/shm", "tmp", "etc/unicron", "var/lib/unicron"):
        (tmp_path / place).mkdir(parents=True)
    for name, uid in (("unicron-7-a", FAKER), ("unicron-8-a", OTHER), ("unicron-9-no-step", 0), ("others", OTHER)):
        (tmp_path / "dev/shm" / name).mkdir()
        os.chown(tmp_path / "dev/shm" / name, uid, uid)
    return tmp_path


@pytest.fixture
def called_so() -> Iterator[None]:
    """A process of a user's, which calls itself as the agents are called."""
    process = subprocess.Popen(["/opt/unicron/lib/interpreter", "60"], executable="/bin/sleep", user=FAKER)
    yield
    process.kill()
    process.wait()


def left(folder: Path) -> set[str]:
    return {path.name for path in (folder / "dev/shm").iterdir()}


def test_a_user_keeps_no_others_state_on_a_node_that_is_purged(folder: Path, called_so: None) -> None:
    """Defect: whoever called a process as the agents are called kept all that jobs had left."""
    script("unicron-agent.postrm", folder, "purge")
    assert left(folder) == {"unicron-7-a", "unicron-9-no-step", "others"}


def test_a_purge_leaves_nothing_where_no_agent_runs(folder: Path) -> None:
    script("unicron-agent.postrm", folder, "upgrade")
    assert len(left(folder)) == 4
    script("unicron-agent.postrm", folder, "purge")
    assert left(folder) == {"others"} and not (folder / "etc/unicron").exists()


def test_the_removal_names_those_whose_agents_run(folder: Path, called_so: None) -> None:
    assert f"agents of {FAKER} run" in script("unicron-agent.prerm", folder, "remove")
    assert script("unicron-agent.prerm", folder, "upgrade") == ""
