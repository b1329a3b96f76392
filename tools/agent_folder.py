"""Makes the agent's folder: the agent and unicron-launch with a Python, a C library and packages of their own. They run
in any container that mounts it, wherever it lies there, and need nothing of the container's (docs/containers.md).

python tools/agent_folder.py [FOLDER]    (build/unicron-agent)

The interpreter, its libraries and the packages are copied from the Python that runs this file.

    bin/unicron-agent, bin/unicron-launch   what plugstack.conf names, and what the plugin puts in front of a command
    bin/python                              the agent's own Python
    lib/                                    the interpreter, its loader and libraries, its standard library
    lib/packages/                           the agent's wheels
    ranks/                                  the project, which ranks in session mode import, too
"""

from __future__ import annotations

import compileall
import importlib.metadata
import os
import platform
import py_compile
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from installed_packages import copy_package, copy_project, write_release

from unicron_ctl.shared.system.release import DISTRIBUTION, release

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build/unicron-agent"
SPANK, CONTAINERS = ROOT / "slurm_plugin/spank", ROOT / "slurm_plugin/containers"
WHEELS = ("cffi", "click", "msgpack", "msgspec", "pynacl", "pyzmq", "xxhash")
# Parts of the project that no agent and no rank imports
NOT_OURS = ("cli", "controller", "lab", "reports", "tools", "web", "unicron_planner", "sbatch_templates")
# Parts of the standard library that it has no use for, some of which would bring large libraries with them
NOT_STANDARD = (
    "__pycache__ config-* curses dbm dist-packages distutils ensurepip idlelib lib2to3 pydoc_data site-packages "
)
NOT_STANDARD += "sitecustomize.py sqlite3 test tests tkinter turtle.py turtledemo usercustomize.py venv "
NOT_STANDARD += "_bz2.* _crypt.* _curses* _dbm.* _gdbm.* _lzma.* _sqlite3.* _test* _tkinter.* _xx* nis.* readline.* xx*"
# What the C library and the agent load by name, so that no file says that it is needed
BY_NAME = ("libnss_dns.so.2", "libnss_files.so.2", "libmunge.so.2", "libgcc_s.so.1")
LEAST_GLIBC = (2, 33)  # whose loader knows --argv0
LOADER = re.compile(r"^\s*(/\S*/ld[\w.-]*\.so\S*) \(", re.MULTILINE)
NEEDED = re.compile(r"^\s*(\S+) => (/\S+) \(", re.MULTILINE)
# Where Python finds the packages. It has no site-packages, whose place distributions change.
SITE = """import os, sys

_folder = os.path.dirname(sys.base_prefix + os.sep)
sys.path += [os.path.join(_folder, "lib", "packages"), os.path.join(_folder, "ranks")]
"""


class Failed(Exception):
    """The folder cannot be made; the text says why and what to do."""


def make_folder(folder: Path) -> None:
    """Makes the folder, in place of one that was there. Raises Failed."""
    check_loader()
    new = folder.with_name(folder.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    for part in ("bin", "lib/packages"):
        (new / part).mkdir(parents=True)
    copy_python(new)
    copy_packages(new)
    build_programs(new / "bin")
    copy_libraries(new)
    for part in (new / f"lib/{version()}", new / "lib/packages", new / "ranks"):
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH  # the folder's times change with each copy
        if not compileall.compile_dir(part, quiet=2, invalidation_mode=mode, stripdir=str(new)):
            raise Failed(f"not all of {part} can be compiled")
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)


def version() -> str:
    """The name of the standard library's folder."""
    return f"python{sys.version_info.major}.{sys.version_info.minor}"


def check_loader() -> None:
    """Raise Failed where the C library is not glibc, or its loader is too old."""
    name, number = platform.libc_ver()
    found = tuple(int(part) for part in number.split(".")[:2]) if name == "glibc" else ()
    if found < LEAST_GLIBC:
        least = ".".join(map(str, LEAST_GLIBC))
        raise Failed(
            f"this system has {name or 'no glibc'} {number}, and the folder needs glibc {least}: use a newer system"
        )


def copy_python(new: Path) -> None:
    """The interpreter and its standard library."""
    shutil.copy2(os.path.realpath(sys.executable), new / "lib/interpreter")
    standard = new / f"lib/{version()}"
    shutil.copytree(sysconfig.get_path("stdlib"), standard, ignore=shutil.ignore_patterns(*NOT_STANDARD.split()))
    (standard / "sitecustomize.py").write_text(SITE)


def copy_packages(new: Path) -> None:
    """The agent's wheels, and the project."""
    for name in WHEELS:
        copy_package(name, new / "lib/packages")
    copy_project(new / "ranks", *NOT_OURS)
    write_release(new / "ranks", DISTRIBUTION, release())


def build_programs(folder: Path) -> None:
    """unicron-agent and unicron-launch, linked statically: they run first in containers of any system."""
    flags = "-D_GNU_SOURCE -std=gnu11 -Wall -Wextra -Werror -O2 -static".split()
    compiler = os.environ.get("CC", "cc")
    for name, source in (("unicron-agent", CONTAINERS / "start.c"), ("unicron-launch", SPANK / "launch.c")):
        command = [compiler, *flags, "-o", folder / name, source, SPANK / "wait.c"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise Failed(
                f"{name} cannot be linked statically ({said}): install the C library's static part (glibc-static)"
            )
    (folder / "python").symlink_to("unicron-agent")


def copy_libraries(new: Path) -> None:
    """The loader, and all libraries that lie outside the folder."""
    programs = [new / "lib/interpreter", *new.rglob("*.so*")]
    named = [path for name in BY_NAME if (path := find_library(name))]
    loaders, libraries = set[str](), dict[str, str]()
    for program in (*programs, *map(Path, named)):
        text = subprocess.run(["ldd", program], capture_output=True, text=True).stdout
        loaders.update(LOADER.findall(text))
        libraries.update(NEEDED.findall(text))
    if len(loaders) != 1:
        raise Failed(f"the interpreter names {len(loaders)} loaders, and the folder needs one")
    libraries.update({Path(path).name: path for path in named})
    for name, path in libraries.items():
        if not Path(path).resolve().is_relative_to(new.resolve()):
            shutil.copy2(os.path.realpath(path), new / "lib" / name)
    shutil.copy2(os.path.realpath(loaders.pop()), new / "lib/loader")


def find_library(name: str) -> str:
    """The path of an installed library; empty where there is none."""
    for line in subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True).stdout.splitlines():
        if line.split()[:1] == [name] and os.uname().machine.replace("_", "-") in line.lower():
            return line.split()[-1]
    return ""


def size(paths: Iterable[Path]) -> int:
    """Bytes of these files."""
    return sum(path.lstat().st_size for path in paths)


def main() -> int:
    """Entry point."""
    folder = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else FOLDER
    try:
        make_folder(folder)
    except (Failed, OSError, importlib.metadata.PackageNotFoundError) as error:
        print(f"unicron: couldn't make the agent's folder: {error}", file=sys.stderr)
        return 1
    megabytes = size(folder.rglob("*")) / 1e6
    print(f"{folder}: {megabytes:.0f} MB; put it on all nodes, and mount it into containers (docs/containers.md)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
