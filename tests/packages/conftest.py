"""The packages of this checkout, and a clean Debian with a cluster, in which they are tested: `make test-packages`."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.booted_root import BootedRoot, booted, bring_names, debootstrap
from tests.support.processes import ROOT

SUITE = os.environ.get("SUITE", "trixie")
ROOTS = Path(os.environ.get("DEBIAN_ROOTS", ROOT / ".roots")).absolute()
HERE = Path(__file__).parent


def build(folder: str) -> dict[str, Path]:
    """Builds the packages in a root of the suite's: name -> the package's file."""
    script = f"make deb && rm -rf /var/cache/{folder} && mv build/deb /var/cache/{folder}"
    subprocess.run(
        [str(ROOT / "tools/debian-root.sh"), SUITE, "bash", "-c", script], cwd=ROOT, check=True, timeout=1500
    )
    return {path.name.partition("_")[0]: path for path in (ROOTS / SUITE / "var/cache" / folder).glob("*.deb")}


@pytest.fixture(scope="session")
def packages() -> dict[str, Path]:
    """name -> the package's file."""
    return build("unicron-packages")


@pytest.fixture(scope="session")
def base(packages: dict[str, Path]) -> Path:
    """A root with a cluster in it and without Unicron, made once for all runs. Who builds packages has debootstrap."""
    folder = ROOTS / f"{SUITE}-site"
    debootstrap(SUITE, folder)
    if not (folder / ".site").exists():
        shutil.copy(HERE / "site.sh", folder / "root/site.sh")
        with booted(folder) as root:
            root.run(f"PIP_ARGS='{os.environ.get('PIP_ARGS', '')}' bash site.sh", seconds=1500)
        (folder / ".site").touch()
    return folder


@pytest.fixture(scope="module")
def site(base: Path, packages: dict[str, Path]) -> Iterator[BootedRoot]:
    """That cluster, running, in a copy of its own. The packages lie in root's folder `packages`."""
    folder = ROOTS / f"{SUITE}-run"
    subprocess.run(["rm", "-rf", "--one-file-system", str(folder)], check=True)
    folder.mkdir()
    parts = [path for path in base.iterdir() if path.name != "opt"]
    subprocess.run(["cp", "-a", "--reflink=auto", *map(str, parts), str(folder)], check=True)
    # pip replaces files and changes none, so torch need not be copied.
    subprocess.run(["cp", "-al", str(base / "opt"), str(folder)], check=True)
    (folder / "root/packages").mkdir()
    for path in packages.values():
        shutil.copy(path, folder / "root/packages")
    bring_names(folder)
    with booted(folder) as root:
        root.run("bash site.sh start")
        yield root
    subprocess.run(["rm", "-rf", "--one-file-system", str(folder)], check=True)
