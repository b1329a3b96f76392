"""What pip installs: one package, `unicron`, and nothing that could hide a user's own modules."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.processes import LIMIT, ROOT

BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the tracked tree, built in a copy, so that nothing is written into the checkout."""
    copy, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        (copy / name).write_bytes((ROOT / name).read_bytes())
    for name in (
        "detector",
        "planner",
        "sbatch_templates",
        "slurm_plugin",
        "src",
        "transition",
        "unicron",
        "unicron_ctl",
    ):
        subprocess.run(["cp", "-r", "--no-dereference", str(ROOT / name), str(copy / name)], check=True)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(out)], cwd=copy, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


def test_it_has_one_package_with_all_parts(wheel: Path) -> None:
    names = [name.split("/") for name in zipfile.ZipFile(wheel).namelist()]
    tops = {name[0] for name in names}
    assert {top for top in tops if not top.endswith((".dist-info", ".data"))} == {"unicron"}
    parts = {name[1] for name in names if name[0] == "unicron" and len(name) > 2}
    assert parts == {"ctl", "detector", "planner", "sbatch_templates", "transition"}
    kinds = ("*.py", "*.html", "*.css", "*.js")  # all of the page included
    sources = {path.relative_to(ROOT / "unicron_ctl") for kind in kinds for path in (ROOT / "unicron_ctl").rglob(kind)}
    assert Path("cli/web/page.js") in sources
    assert {Path(*name[2:]) for name in names if name[:2] == ["unicron", "ctl"]} >= sources


def test_it_has_what_slurms_side_needs(wheel: Path) -> None:
    names = {name.partition(".data/data/share/unicron/")[2] for name in zipfile.ZipFile(wheel).namelist()}
    side, built = ROOT / "slurm_plugin", {".o", ".d", ".so"}
    wanted = {str(path.relative_to(side)) for path in side.rglob("*") if path.is_file() and path.suffix not in built}
    left_out = {"README.md", "spank/.gitignore", "spank/unicron-launch", "spank/test_unit"}
    assert wanted - left_out <= names, wanted - left_out - names


def test_what_is_installed_works_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "import unicron; from unicron.ctl.cli.unicronctl import main\n"
        f"assert unicron.__file__.startswith({str(tmp_path)!r}), unicron.__file__\n"
        "print(unicron.Layout(tensor=2)); sys.argv = ['unicronctl', 'template']; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Layout(") and "gpt_elastic.sbatch" in done.stdout
