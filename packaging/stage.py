"""Lays out the files of all four packages below a folder, for the Debian packages and the RPMs alike.

python packaging/stage.py DESTDIR

The Python that runs this file is the one that the client and the controller will run with, and the one that the agent's
folder gets. It must have the packages of packaging/requirements.txt.

    usr/bin, usr/lib/unicron/python, usr/lib/unicron/packages   unicronctl and unicrond, the project, what it needs
    usr/lib/unicron                                             the plugin, prolog, epilog, health check
    usr/lib/systemd, usr/lib/sysusers.d, usr/lib/tmpfiles.d     units, users, folders
    opt/unicron                                                 the agent's folder (tools/agent_folder.py)
    usr/share                                                   manual pages, completion, the plugin's line, alerts
"""

from __future__ import annotations

import compileall
import configparser
import json
import os
import py_compile
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from installed_packages import copy_package, copy_project, write_release  # noqa: E402  (a neighbour, not a package)

SIDE = ROOT / "slurm_plugin"
PROGRAMS = {"unicronctl": "unicron_ctl.cli.unicronctl", "unicrond": "unicron_ctl.controller.unicrond"}
# Isolated (-I): what a user's modules and PYTHONPATH bring is not for a program of the system's.
PROGRAM = """#!/usr/bin/{python} -I
import sys

sys.path[:0] = ["/usr/lib/unicron/python", "/usr/lib/unicron/packages"]
from {module} import main

sys.exit(main())
"""
# (what is copied, where to, its mode)
FILES = (
    ("prolog.d/50-unicron", "usr/lib/unicron/prolog.d", 0o755),
    ("epilog.d/50-unicron", "usr/lib/unicron/epilog.d", 0o755),
    ("health/unicron-health", "usr/lib/unicron", 0o755),
    ("plugstack.conf.d/zz-unicron.conf", "usr/share/unicron/plugstack.conf", 0o644),
    ("containers/mounts.d/50-unicron.fstab", "usr/share/unicron/containers", 0o644),
    ("containers/unicron-apptainer.conf", "usr/share/unicron/containers", 0o644),
    ("systemd/*.service", "usr/lib/systemd/system", 0o644),
    ("systemd/*.timer", "usr/lib/systemd/system", 0o644),
    ("systemd/unicron.sysusers", "usr/lib/sysusers.d/unicron.conf", 0o644),
    ("systemd/unicron-agent.tmpfiles", "usr/lib/tmpfiles.d/unicron-agent.conf", 0o644),
    ("monitoring/*", "usr/share/unicron/monitoring", 0o644),
)


def main() -> int:
    """Entry point."""
    destination = Path(sys.argv[1]).resolve()
    stage_project(destination)
    for pattern, target, mode in FILES:
        stage_files(pattern, destination / target, mode)
    project = destination / "usr/lib/unicron/python"
    run_tool("agent_folder.py", destination / "opt/unicron", project)
    stage_plugin(destination / "usr/lib/unicron")
    stage_documents(destination / "usr/share", project)
    return 0


def run(*command: str | os.PathLike[str], **options: object) -> None:
    """Runs a command, and ends this program if it fails."""
    subprocess.run([os.fspath(word) for word in command], check=True, **options)  # type: ignore[call-overload]


def run_tool(name: str, target: Path, project: Path) -> None:
    """Runs one of the project's tools, which import the project and ask for its release."""
    run(sys.executable, ROOT / "tools" / name, target, env=os.environ | {"PYTHONPATH": str(project)})


def version() -> str:
    """The release, as setup.cfg says it."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser["metadata"]["version"]


def requirements() -> list[tuple[str, str]]:
    """The packages that are brought along, each with its release."""
    lines = (ROOT / "packaging/requirements.txt").read_text().splitlines()
    return [(name, release) for name, equals, release in (line.partition("==") for line in lines) if equals]


def stage_files(pattern: str, target: Path, mode: int) -> None:
    """Copies the files. `target` is a folder, except for one file that gets another name."""
    found = [path for path in sorted(SIDE.glob(pattern)) if path.is_file()]
    renamed = target.suffix == ".conf"
    for path in found:
        there = target if renamed else target / path.name
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, there)
        there.chmod(mode)


def stage_project(destination: Path) -> None:
    """The project with its packages, compiled, and the programs."""
    project, packages = destination / "usr/lib/unicron/python", destination / "usr/lib/unicron/packages"
    copy_project(project)
    for name, _ in requirements():
        copy_package(name, packages)
    write_release(project, "unicron-slurm", version())
    for folder in (project, packages):
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH  # times of files change with each unpacking
        if not compileall.compile_dir(
            folder, quiet=1, invalidation_mode=mode, stripdir=str(destination), prependdir="/"
        ):
            sys.exit(f"unicron: not all of {folder} can be compiled")
    for name, module in PROGRAMS.items():
        program = destination / "usr/bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        python = f"python{sys.version_info.major}.{sys.version_info.minor}"
        program.write_text(PROGRAM.format(python=python, module=module))
        program.chmod(0o755)


def stage_plugin(folder: Path) -> None:
    """The plugin for the Slurm whose headers are installed, and what it puts in front of a command."""
    out = ROOT / "build/spank"
    run("make", "-s", "-C", SIDE / "spank", f"O={out}", f"VERSION={version()}")
    for name, mode in (("unicron.so", 0o644), ("unicron-launch", 0o755)):
        shutil.copyfile(out / name, folder / name)
        (folder / name).chmod(mode)


def stage_documents(share: Path, project: Path) -> None:
    """Manual pages and completion, made from the programs' own definitions, and what the packages hold."""
    run_tool("manpages.py", share, project)
    (share / "unicron").mkdir(parents=True, exist_ok=True)
    (share / "unicron/sbom.cdx.json").write_text(bill_of_materials())


def bill_of_materials() -> str:
    """What the packages hold of others, as CycloneDX 1.5 in JSON: name, release, licence."""
    components = []
    for name, release in requirements():
        about = metadata.metadata(name)
        licence = about.get("License-Expression") or about.get("License") or ""
        licence = licence.splitlines()[0] if licence else "see the package"
        url = f"pkg:pypi/{name.lower()}@{release}"
        component = {"type": "library", "bom-ref": url, "name": name, "version": release, "purl": url}
        components.append(component | {"licenses": [{"license": {"name": licence}}]})
    python = ".".join(map(str, sys.version_info[:3]))
    components.append({"type": "platform", "bom-ref": "python", "name": "python", "version": python})
    main = {"type": "application", "bom-ref": "unicron", "name": "unicron", "version": version()}
    text = {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "metadata": {"component": main}}
    return json.dumps(text | {"components": components}, indent=1) + "\n"


if __name__ == "__main__":
    sys.exit(main())
