"""What pip installs: packages whose names begin with `unicron`, and nothing that could hide a user's own modules."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.processes import LIMIT, ROOT, SOURCES, call
from tests.support.rooms import LISTED, ROOMS

BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


COPY = "import sys, agent_folder as a; a.copy_project(a.Path(sys.argv[1]), *a.NOT_OURS)"
IMPORT_ALL = """import pkgutil, sys
sys.path.insert(0, sys.argv[1])
import unicron_ctl
for module in pkgutil.walk_packages(unicron_ctl.__path__, "unicron_ctl."):
    __import__(module.name)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the tracked tree, built in a copy, so that nothing is written into the checkout."""
    copy, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        (copy / name).write_bytes((ROOT / name).read_bytes())
    for name in (*SOURCES, "slurm_plugin"):
        subprocess.run(["cp", "-r", "--no-dereference", str(ROOT / name), str(copy / name)], check=True)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(out)], cwd=copy, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


def test_it_has_all_packages_whole_and_no_other(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    packages = {path.parent.name for path in ROOT.glob("*/unicron*/__init__.py")}
    assert len(packages) == 5 and {top for top in tops if not top.endswith((".dist-info", ".data"))} == packages
    kinds = ("*.py", "*.toml", "*.csv", "*.html", "*.css", "*.js")  # all of the page included
    roots = [ROOT / name for name in SOURCES if name != "sbatch_templates"]
    sources = {str(path.relative_to(root)) for root in roots for kind in kinds for path in root.rglob(kind)}
    assert "unicron_ctl/controller/unicrond.py" in sources and set(names) >= sources, sources - set(names)
    templates = {f"unicron/sbatch_templates/{path.name}" for path in (ROOT / "sbatch_templates").glob("*.[ps]*")}
    assert len(templates) > 12 and set(names) >= templates, templates - set(names)


def test_it_has_what_slurms_side_needs(wheel: Path) -> None:
    names = {name.partition(".data/data/share/unicron/")[2] for name in zipfile.ZipFile(wheel).namelist()}
    side, built = ROOT / "slurm_plugin", {".o", ".d", ".so", ".inc"}
    wanted = {str(path.relative_to(side)) for path in side.rglob("*") if path.is_file() and path.suffix not in built}
    left_out = {"README.md", "spank/.gitignore", "spank/unicron-launch", "spank/test_unit"}
    assert wanted - left_out <= names, wanted - left_out - names
    assert "spank/programs.toml" in names  # of the agent's folder, for the plugin's build


def test_what_is_installed_works_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "import unicron; from unicron_ctl.cli.unicronctl import main\n"
        f"assert unicron.__file__.startswith({str(tmp_path)!r}), unicron.__file__\n"
        "print(unicron.Layout(tensor=2)); sys.argv = ['unicronctl', 'template']; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Layout(") and "gpt_elastic.sbatch" in done.stdout


def test_the_agents_folder_has_the_rooms_that_nodes_need_and_no_other(tmp_path: Path) -> None:
    for code in (COPY, IMPORT_ALL):
        done = call(sys.executable, "-c", code, tmp_path, cwd=ROOT / "tools")
        assert done.returncode == 0, done.stderr
    rooms = {path.name for path in (tmp_path / "unicron_ctl").iterdir() if path.is_dir() and path.name[0] != "_"}
    assert rooms == {"agent", "doctor", "nodes", "shared"} - (LISTED.keys() - ROOMS)
