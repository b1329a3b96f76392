"""Session mode with what docs/containers.md asks of an image: torch and numpy, three wheels, and the project without
what it depends on."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support.jobs import FOREVER, World
from tests.support.processes import ROOT, SOURCES, call

pytestmark = pytest.mark.wide
IMAGE, WHEELS = ("torch", "numpy"), ("msgpack", "pyzmq", "xxhash")
REQUIREMENT = re.compile(r"[\w.-]+")
PIP = [sys.executable, "-m", "pip", "--no-cache-dir", "--disable-pip-version-check", "--quiet"]


def with_requirements(names: Iterable[str]) -> set[str]:
    """These distributions and, of what they require, all that is installed here."""
    found, open_ = set[str](), list(names)
    while open_:
        name = open_.pop()
        try:
            requires = importlib.metadata.requires(name) or ()
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform
        if name not in found:
            found.add(name)
            open_ += [REQUIREMENT.match(line)[0] for line in requires if "extra ==" not in line]
    return found


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Of a virtual environment like that of an image, in which the project has then been installed."""
    venv = tmp_path / "image"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=60)
    (packages,) = venv.glob("lib/python*/site-packages")
    for name in with_requirements([*IMAGE, *WHEELS]):
        for top in {file.parts[0] for file in importlib.metadata.files(name) or ()} - {"..", "__pycache__"}:
            source = Path(str(importlib.metadata.distribution(name).locate_file(top)))
            if source.exists() and not (packages / top).exists():
                (packages / top).symlink_to(source)
    sources = tmp_path / "sources"  # pip builds in the folder of the sources
    for name in (*SOURCES, "tools"):
        shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.cfg", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    install = [*PIP, "--python", venv, "install", "--no-deps", "--no-index", "--no-build-isolation", sources]
    done = call(*map(str, install), environment=dict(os.environ))
    assert done.returncode == 0, done.stderr
    return venv / "bin/python"


def test_a_session_needs_torch_three_wheels_and_the_project(tmp_path: Path, python: Path) -> None:
    """Its ranks ignore PYTHONPATH (-E), by which an agent beside them lends the project."""
    ask = [str(python), "-E", "-c", "import unicron; print(unicron.__path__[0])"]
    said = call(*ask, cwd=tmp_path, environment=dict(os.environ))
    assert said.stdout.startswith(str(python.parent.parent)), said
    templates = ROOT / "sbatch_templates"
    command = [str(python), "-E", str(templates / "train_plain.py"), "--text", str(templates)]
    command += ["--iterations", FOREVER, "--save", str(tmp_path / "saves")]
    with World(tmp_path, 2, command=command) as world:
        world.trains_on([0, 1])
        assert world.job()["mode"] == "session"
        os.kill(world.rank(1, "7")["pid"], signal.SIGKILL)
        world.wait(lambda: world.rank(1, "7")["incarnation"] == 1 and world.trains([0, 1]), "it is back")
        world.trains_on([0, 1])
        assert not world.events("reform")  # the other one has kept its work
